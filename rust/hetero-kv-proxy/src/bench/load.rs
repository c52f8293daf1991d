//! Rounds of load: closed loops keep so many requests in flight, open loops send when they are due.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Uri;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::cli::{Arrivals, BenchArgs};
use super::client::{Client, Expect, Sample};
use super::failure::{Failure, FailureKind};
use super::prompt::{Bodies, Random};
use super::tally::Tally;
use crate::sync::lock;

/// Requests of a closed loop for each connection, where no flag says so.
const PER_CONCURRENCY: u32 = 10;
/// How often progress is told.
const PROGRESS: Duration = Duration::from_secs(5);

/// One round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Load {
    /// So many at once.
    Closed {
        /// Requests in flight.
        concurrency: u32,
        /// When it ends.
        end: End,
    },
    /// As they are due.
    Open {
        /// Requests a second.
        rate: f64,
        /// In which requests are due.
        duration: Duration,
        /// How they arrive.
        arrivals: Arrivals,
    },
}

/// When a closed loop ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum End {
    /// After so many requests.
    Requests(u64),
    /// With the last request that began within this time.
    After(Duration),
}

impl Load {
    /// The rounds that the flags ask for.
    pub fn plan(args: &BenchArgs) -> Vec<Self> {
        let duration = args.duration.map(Duration::from_secs_f64);
        if let Some(duration) = duration
            && !args.rate.is_empty()
        {
            let open = |rate: &f64| Self::Open {
                rate: *rate,
                duration,
                arrivals: args.arrivals,
            };
            return args.rate.iter().map(open).collect();
        }
        let concurrency: &[u32] = match args.concurrency.as_slice() {
            [] => &[1],
            given => given,
        };
        let per = args.per_concurrency.unwrap_or(PER_CONCURRENCY);
        concurrency
            .iter()
            .map(|concurrency| Self::Closed {
                concurrency: *concurrency,
                end: match duration {
                    Some(duration) => End::After(duration),
                    None => End::Requests(u64::from(*concurrency) * u64::from(per)),
                },
            })
            .collect()
    }

    /// What runs in front of the round, where the flags ask for it.
    pub fn warmup(self, args: &BenchArgs) -> Option<Self> {
        let at_once = self.warmup_concurrency();
        let requests = args.warmup?.unwrap_or(at_once);
        (requests > 0).then(|| Self::Closed {
            concurrency: at_once.min(requests),
            end: End::Requests(u64::from(requests)),
        })
    }

    fn warmup_concurrency(self) -> u32 {
        match self {
            Self::Closed { concurrency, .. } => concurrency,
            Self::Open { .. } => 32,
        }
    }
}

/// All that requests of a run share.
#[derive(Debug)]
pub struct Run {
    /// Where they go.
    pub client: Client,
    /// The path.
    pub uri: Uri,
    /// What they carry.
    pub bodies: Bodies,
    /// What is expected of answers.
    pub expect: Expect,
    /// Deadline of each.
    pub request_timeout: Duration,
    /// Open loop: at most so many at once.
    pub in_flight_max: usize,
    /// Of arrivals.
    pub seed: u64,
    /// Number of the next request.
    pub next: AtomicU64,
    /// Turns true to end the run early.
    pub stop: watch::Receiver<bool>,
    /// Progress on stderr.
    pub progress: bool,
}

/// A round in the making.
#[derive(Debug)]
struct Round {
    run: Arc<Run>,
    sent: AtomicU64,
    tally: Mutex<Tally>,
}

impl Round {
    /// One request, from when it was due.
    async fn one(&self, due: Instant) {
        let run = &self.run;
        self.sent.fetch_add(1, Ordering::Relaxed);
        let body = run.bodies.make(run.next.fetch_add(1, Ordering::Relaxed));
        let deadline = Instant::now() + run.request_timeout;
        let gap = |gap| lock(&self.tally).gap(gap);
        let mut stop = run.stop.clone();
        let outcome: Result<Sample, Failure> = tokio::select! {
            outcome = run.client.post(&run.uri, body, run.expect, deadline, gap) => outcome,
            () = stopped(&mut stop) => Err(Failure::new(FailureKind::Interrupted, "")),
        };
        let mut tally = lock(&self.tally);
        match outcome {
            Ok(sample) => tally.complete(due, &sample),
            Err(failure) => tally.fail(&failure),
        }
    }

    fn is_stopped(&self) -> bool {
        *self.run.stop.borrow()
    }
}

/// Turns ready when the run is to end; never, when nobody can end it.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Runs one round to its end.
pub async fn round(run: &Arc<Run>, load: Load) -> Tally {
    let begun = Instant::now();
    let round = Arc::new(Round {
        run: Arc::clone(run),
        sent: AtomicU64::new(0),
        tally: Mutex::new(Tally::default()),
    });
    let progress = run
        .progress
        .then(|| tokio::spawn(tell(Arc::clone(&round), begun)));
    match load {
        Load::Closed { concurrency, end } => closed(&round, concurrency, end).await,
        Load::Open {
            rate,
            duration,
            arrivals,
        } => open(&round, rate, duration, arrivals).await,
    }
    if let Some(progress) = progress {
        progress.abort();
    }
    let mut tally = std::mem::take(&mut *lock(&round.tally));
    tally.duration = begun.elapsed();
    tally.sent = round.sent.load(Ordering::Relaxed);
    tally
}

async fn closed(round: &Arc<Round>, concurrency: u32, end: End) {
    let begun = Instant::now();
    let taken = Arc::new(AtomicU64::new(0));
    let mut loops = JoinSet::new();
    for _ in 0..concurrency {
        let (round, taken) = (Arc::clone(round), Arc::clone(&taken));
        loops.spawn(async move {
            while !round.is_stopped() {
                let more = match end {
                    End::Requests(count) => taken.fetch_add(1, Ordering::Relaxed) < count,
                    End::After(time) => begun.elapsed() < time,
                };
                if !more {
                    return;
                }
                round.one(Instant::now()).await;
            }
        });
    }
    while loops.join_next().await.is_some() {}
}

async fn open(round: &Arc<Round>, rate: f64, duration: Duration, arrivals: Arrivals) {
    let begun = Instant::now();
    let places = Arc::new(Semaphore::new(round.run.in_flight_max));
    let mut random = Random::new(round.run.seed);
    let mut requests = JoinSet::new();
    let mut at_s = 0.0;
    let mut stop = round.run.stop.clone();
    loop {
        at_s += match arrivals {
            Arrivals::Uniform => 1.0 / rate,
            Arrivals::Poisson => -random.unit().ln() / rate,
        };
        if at_s >= duration.as_secs_f64() {
            break;
        }
        let due = begun + Duration::from_secs_f64(at_s);
        tokio::select! {
            () = sleep_until(due) => {}
            () = stopped(&mut stop) => break,
        }
        while requests.try_join_next().is_some() {}
        match Arc::clone(&places).try_acquire_owned() {
            Ok(place) => {
                let round = Arc::clone(round);
                requests.spawn(async move {
                    round.one(due).await;
                    drop(place);
                });
            }
            Err(_) => {
                round.sent.fetch_add(1, Ordering::Relaxed);
                let seen = format!("{} in flight", round.run.in_flight_max);
                lock(&round.tally).fail(&Failure::new(FailureKind::NotSent, seen));
            }
        }
    }
    while requests.join_next().await.is_some() {}
}

async fn tell(round: Arc<Round>, begun: Instant) {
    let mut ticks = interval(PROGRESS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let sent = round.sent.load(Ordering::Relaxed);
        let (completed, failed) = {
            let tally = lock(&round.tally);
            (tally.completed, tally.failures.count())
        };
        crate::tell::line(format_args!(
            "  {:.0} s: sent {sent}, completed {completed}, failed {failed}, in flight {}",
            begun.elapsed().as_secs_f64(),
            sent.saturating_sub(completed + failed),
        ));
    }
}
