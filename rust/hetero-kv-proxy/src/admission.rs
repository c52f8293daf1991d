//! Who may run, and who waits for room: requests in all, and slots that have a limit of legs.
//!
//! What finds no room waits in one bounded queue, first come, first served. A request takes all the
//! slots that it needs at once and holds none while it waits for another, so that no two requests
//! can wait for each other.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};

use crate::app::App;
use crate::config::Config;
use crate::metrics::{Metrics, ReasonLabels};
use crate::openai::error::ApiError;
use crate::pairs;
use crate::routing::{Bound, Lane, Line, NoSlot, Role, Turn, Wants};
use crate::seats::{Seat, Seats};
use crate::slots::{Choice, Slots, Want};
use crate::sync::lock;

/// Time alone may make room, as when an engine that was kept out is tried again: how often the first
/// in the line looks.
const LOOK: Duration = Duration::from_millis(250);

/// The limits of one proxy, and the queue in front of them.
#[derive(Debug)]
pub struct Admission {
    /// One for each request that may run.
    running: Arc<Seats>,
    /// Requests that wait for one.
    outside: AtomicUsize,
    /// Requests that wait for slots; as long as the line, to be read without its lock.
    inside: AtomicUsize,
    line: Mutex<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    line: Line,
    bells: HashMap<u64, Arc<Notify>>,
}

/// A request's number in the line, once it has one.
#[derive(Debug, Default)]
pub struct Ticket(AtomicU64);

/// Where a request is when it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// No leg of it was sent: a proxy that ends sends it away, and another can serve it.
    No,
    /// A leg was sent: it is finished.
    Yes,
}

/// Why there are no slots.
#[derive(Debug)]
pub enum Refused {
    /// No instance of this role takes legs.
    NoEngine(Role),
    /// What the client is told.
    Told(ApiError),
}

impl Admission {
    /// The limits of `config`, with nobody waiting.
    pub fn new(config: &Config) -> Self {
        Self {
            running: Arc::new(Seats::new(config.requests_max)),
            outside: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            line: Mutex::new(Waiting {
                line: Line::new(config.queue_max),
                bells: HashMap::new(),
            }),
        }
    }

    /// How many run.
    pub fn running(&self) -> usize {
        self.running.taken_count()
    }

    /// Has these limits from here on. Who runs, runs on, and who waits, waits.
    pub fn set_limits(&self, config: &Config) {
        self.running.set(config.requests_max);
        lock(&self.line).line.set_max(config.queue_max);
    }

    /// How many wait to run, and how many run and wait for slots.
    pub fn waiting(&self) -> (usize, usize) {
        let outside = self.outside.load(Ordering::Relaxed);
        (outside, self.inside.load(Ordering::Relaxed))
    }

    /// Waits until one more request may run.
    ///
    /// # Errors
    /// 429 when the queue is full, 503 when it took too long or the proxy ends.
    pub(crate) async fn enter(&self, app: &App) -> Result<Seat, ApiError> {
        if let Some(seat) = self.running.try_take() {
            return Ok(seat);
        }
        let config = app.config();
        let counted = Counted::new(&self.outside);
        if self.outside.load(Ordering::Relaxed) + self.inside.load(Ordering::Relaxed)
            > config.queue_max
        {
            return Err(reject(&app.metrics, Reject::Full));
        }
        let begun = Instant::now();
        let mut stop = app.stop.subscribe();
        let seat = tokio::select! {
            seat = self.running.take() => seat,
            () = sleep_until(begun + config.queue_timeout) => None,
            () = stopped(&mut stop) => return Err(reject(&app.metrics, Reject::Drain)),
        };
        drop(counted);
        match seat {
            Some(seat) => {
                served(&app.metrics, begun);
                Ok(seat)
            }
            None => Err(reject(&app.metrics, Reject::Timeout)),
        }
    }

    /// Takes all slots that `want` asks for, waiting for room where there is none.
    ///
    /// # Errors
    /// [`Refused`]; 429 when the queue is full, 503 when it took too long, or the proxy ends before
    /// the request has begun.
    pub async fn slots(
        &self,
        app: &Arc<App>,
        want: &Want<'_>,
        ticket: &Ticket,
        begun: Begun,
    ) -> Result<Slots, Refused> {
        let told = |why| Refused::Told(reject(&app.metrics, why));
        if !app.has_limits() {
            // Without a limit there is always room.
            let full = || told(Reject::Full);
            return app
                .try_slots(want)
                .map_err(|none| refusal(none, want).unwrap_or_else(full));
        }
        let wants = Wants {
            lane: lane(app, want),
            ..want.wants()
        };
        let place = {
            let mut waiting = lock(&self.line);
            let number = ticket.number(&mut waiting.line);
            match try_in_turn(app, want, &waiting.line.turn(number, wants)) {
                Ok(slots) => return Ok(slots),
                Err(none) => refusal(none, want).map_or(Ok(()), Err)?,
            }
            let outside = self.outside.load(Ordering::Relaxed);
            if waiting.line.enter(number, wants, outside).is_err() {
                return Err(told(Reject::Full));
            }
            let bell = Arc::new(Notify::new());
            waiting.bells.insert(number, Arc::clone(&bell));
            self.inside.fetch_add(1, Ordering::SeqCst);
            Place {
                admission: self,
                number,
                bell,
            }
        };
        let since = Instant::now();
        let mut stop = app.stop.subscribe();
        let over = sleep_until(since + app.config().queue_timeout);
        tokio::pin!(over);
        loop {
            // Room may have come between the look above and the place in the line.
            {
                let waiting = lock(&self.line);
                match try_in_turn(app, want, &waiting.line.turn(place.number, wants)) {
                    Ok(slots) => {
                        served(&app.metrics, since);
                        return Ok(slots);
                    }
                    Err(none) => refusal(none, want).map_or(Ok(()), Err)?,
                }
            }
            tokio::select! {
                _ = timeout(LOOK, place.bell.notified()) => {}
                () = &mut over => return Err(told(Reject::Timeout)),
                () = stopped(&mut stop), if begun == Begun::No => {
                    return Err(told(Reject::Drain));
                }
            }
        }
    }

    /// Tells those who may be served that there may be room.
    pub fn ring(&self) {
        if self.inside.load(Ordering::SeqCst) > 0 {
            lock(&self.line).ring();
        }
    }
}

/// The lane of a request: of its model, or else of the worker that it has or names.
fn lane(app: &App, want: &Want<'_>) -> Option<Lane> {
    if let Some(model) = want.bound.model {
        return lock(&app.kinds).lane(model);
    }
    let (role, instance) = match (want.prefill, want.decode, want.partner) {
        (Some(Choice::At(instance)), _, _) => (Role::Prefill, instance),
        (_, Some(Choice::At(instance)), _) => (Role::Decode, instance),
        (Some(Choice::Any { .. }), _, Some(partner)) => (Role::Decode, partner),
        (None, _, Some(partner)) => (Role::Prefill, partner),
        (_, _, None) => return None,
    };
    let kind = app.with_pool(role, |pool| pool.kind(instance))?;
    lock(&app.kinds).lane_of(kind)
}

/// Takes slots as far as it is the request's turn.
fn try_in_turn(app: &Arc<App>, want: &Want<'_>, turn: &Turn) -> Result<Slots, NoSlot> {
    let lanes = match turn {
        Turn::Waits => return Err(NoSlot::Full),
        Turn::Next => return app.try_slots(want),
        Turn::Beside(lanes) => lanes,
    };
    let barred = lock(&app.kinds).of_lanes(lanes);
    let barred = Some(&barred);
    let bound = Bound {
        barred,
        ..want.bound
    };
    app.try_slots(&Want { bound, ..*want })
}

impl Waiting {
    fn ring(&self) {
        for number in self.line.heads() {
            if let Some(bell) = self.bells.get(&number) {
                bell.notify_one();
            }
        }
    }
}

impl Ticket {
    /// The number; the first call draws it.
    fn number(&self, line: &mut Line) -> u64 {
        let known = self.0.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        let drawn = line.number();
        self.0.store(drawn, Ordering::Relaxed);
        drawn
    }
}

/// A place in the line, given up when dropped: served, refused, or the client left.
struct Place<'a> {
    admission: &'a Admission,
    number: u64,
    bell: Arc<Notify>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.admission.line);
        waiting.line.leave(self.number);
        waiting.bells.remove(&self.number);
        self.admission.inside.fetch_sub(1, Ordering::SeqCst);
        // The next may be first now, and a bell that rang for this one is not lost.
        waiting.ring();
    }
}

/// Counts while it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Why a request is not served whatever it waits for; `None` where it may wait for room.
fn refusal(none: NoSlot, want: &Want<'_>) -> Option<Refused> {
    match none {
        NoSlot::NoEngine(role) => Some(Refused::NoEngine(role)),
        NoSlot::NoModel => {
            let model = want.bound.model.unwrap_or_default();
            Some(Refused::Told(pairs::no_model(model)))
        }
        NoSlot::NoPair(unlike) => Some(Refused::Told(pairs::no_pair(&unlike))),
        NoSlot::NoRevision => Some(Refused::Told(pairs::no_revision())),
        NoSlot::Full => None,
    }
}

/// Why the queue sends a request away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reject {
    Full,
    Timeout,
    Drain,
}

fn reject(metrics: &Metrics, why: Reject) -> ApiError {
    let (reason, error) = match why {
        Reject::Full => (
            "full",
            ApiError::new(
                429,
                "too_many_requests",
                "the proxy is serving as many requests as it may, and as many wait; try again \
                 shortly",
            ),
        ),
        Reject::Timeout => (
            "timeout",
            ApiError::new(
                503,
                "queue_timeout",
                "no engine had room for the request while it waited; try again shortly",
            ),
        ),
        Reject::Drain => (
            "drain",
            ApiError::new(
                503,
                "draining",
                "the proxy is ending, and the request has not begun; send it again",
            ),
        ),
    };
    let labels = ReasonLabels { reason };
    metrics.queue_rejects.get_or_create(&labels).inc();
    error
}

fn served(metrics: &Metrics, since: Instant) {
    metrics.queue_wait_seconds.observe(since.elapsed());
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // The sender lives as long as the app.
    let _stopped = stop.wait_for(|stop| *stop).await;
}
