//! What a request holds of an instance: a slot while a leg runs, and blocks until decode has them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::StatusCode;
use tokio::time::Instant;

use crate::app::App;
use crate::instance::Instance;
use crate::routing::{LegFault, Picked, Role};
use crate::timeline::{self, Timeline};
use crate::upstream::Upstream;

/// A chosen slot, in flight until dropped; the leg is then counted by how it ended. It holds its
/// instance, which may be removed meanwhile.
#[derive(Debug)]
pub struct SlotLease {
    app: Arc<App>,
    instance: Arc<Instance>,
    /// What was chosen.
    pub picked: Picked,
    times: LegTimes,
    /// Where its blocks come from, once it names a transfer.
    from: OnceLock<Source>,
    /// Where its end is noted.
    timeline: Option<Arc<Timeline>>,
    outcome: &'static str,
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        let now_us = self.app.now_us();
        self.tell(now_us);
        let meters = &self.instance.meters;
        meters.count_leg(self.outcome);
        if self.outcome == "ok"
            && let Some(took) = since(&self.times.sent_us, now_us)
        {
            meters.leg.observe(took);
        }
        self.app.release(&self.instance, self.picked.slot);
    }
}

impl SlotLease {
    /// On the heap: it goes from hand to hand with what its leg has come to.
    pub(crate) fn new(app: Arc<App>, instance: Arc<Instance>, picked: Picked) -> Box<Self> {
        Box::new(Self {
            times: LegTimes {
                taken_us: app.now_us(),
                ..LegTimes::default()
            },
            from: OnceLock::new(),
            timeline: None,
            app,
            instance,
            picked,
            outcome: "cancelled",
        })
    }

    /// The instance of the slot.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// The engine to send the leg to.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.instance.upstream
    }

    /// The role of the leg.
    pub fn role(&self) -> Role {
        self.instance.role
    }

    /// Its end is noted in `timeline`.
    pub(crate) fn follow(&mut self, timeline: &Arc<Timeline>) {
        self.timeline = Some(Arc::clone(timeline));
    }

    /// Its leg has this parent id in the request's trace.
    pub(crate) fn note_parent(&self, parent_id: u64) {
        self.times.parent_id.store(parent_id, Ordering::Relaxed);
    }

    /// So many chunks of its answer came, from the first to the last.
    pub(crate) fn note_chunks(&self, first: Instant, last: Instant, chunks: u64) {
        let LegTimes {
            first_us, last_us, ..
        } = &self.times;
        first_us.store(self.app.us_at(first), Ordering::Relaxed);
        last_us.store(self.app.us_at(last), Ordering::Relaxed);
        self.times.chunks.store(chunks, Ordering::Relaxed);
    }

    fn tell(&self, now_us: u64) {
        let Some(timeline) = &self.timeline else {
            return;
        };
        let times = &self.times;
        let get = |noted: &AtomicU64| noted.load(Ordering::Relaxed);
        timeline.leg(timeline::LegTimes {
            role: self.role().name(),
            instance: Arc::clone(&self.instance.label),
            rank: self.picked.rank,
            outcome: self.outcome,
            parent_id: get(&times.parent_id),
            taken_us: times.taken_us,
            sent_us: get(&times.sent_us),
            head_us: get(&times.head_us),
            first_us: get(&times.first_us),
            last_us: get(&times.last_us),
            chunks: get(&times.chunks),
            ended_us: now_us,
        });
    }

    /// Its leg goes out now.
    pub(crate) fn begin(&self) {
        let now_us = self.app.now_us();
        self.times.sent_us.store(now_us, Ordering::Relaxed);
    }

    /// When its leg went out, or else its slot was taken, by the clock of routing.
    pub(crate) fn began_ms(&self) -> u64 {
        let sent_us = self.times.sent_us.load(Ordering::Relaxed);
        sent_us.max(self.times.taken_us) / 1_000
    }

    /// It was the first slot of its role for a request whose head came at `head_us`.
    pub(crate) fn note_queue(&self, head_us: u64) {
        let waited_us = self.times.taken_us.saturating_sub(head_us);
        let queue = &self.instance.meters.queue;
        queue.observe(Duration::from_micros(waited_us));
    }

    /// Its leg is to read what `prefill` keeps, whose answer was whole at `answered_us`; `None`
    /// where both legs go out at once.
    pub(crate) fn reads_from(&self, prefill: &Arc<Instance>, answered_us: Option<u64>) {
        // The first transfer is the only one: a leg that is sent again has another lease.
        let _ = self.from.set(Source {
            prefill: Arc::clone(prefill),
            answered_us,
        });
    }

    /// The head of an answer came.
    pub(crate) fn note_head(&self, status: StatusCode) {
        let now_us = self.app.now_us();
        self.times.head_us.store(now_us, Ordering::Relaxed);
        if !status.is_success() {
            return;
        }
        if let Some(meters) = &self.instance.meters.decode
            && let Some(took) = since(&self.times.sent_us, now_us)
        {
            meters.head.observe(took);
        }
        if let Some(from) = self.from.get()
            && let Some(answered_us) = from.answered_us
        {
            let took = Duration::from_micros(now_us.saturating_sub(answered_us));
            let pairs = &self.app.metrics.pairs;
            pairs.took(&from.prefill, &self.instance, took);
        }
    }

    /// The engine did what the leg asked of it.
    pub(crate) fn note_served(&self) {
        self.app.note_served(&self.instance, self.began_ms());
    }

    /// The leg failed by the engine's fault.
    pub(crate) fn note_failed(&self, fault: LegFault) {
        self.app.note_failed(&self.instance, fault, self.began_ms());
        if let Some(from) = self.from.get() {
            self.app.metrics.pairs.failed(&from.prefill, &self.instance);
        }
    }

    /// The engine gave a response head with a status below 500.
    pub fn note_answer(&self) {
        self.app.note_answer(&self.instance);
    }

    /// Ends the leg with an outcome other than `cancelled`, the word for one that was dropped.
    #[expect(
        clippy::boxed_local,
        reason = "taken out of its box it would be copied once more"
    )]
    pub fn end(mut self: Box<Self>, outcome: &'static str) {
        self.outcome = outcome;
    }
}

/// When what happened to a leg, by the clock of routing; 0 for what has not.
#[derive(Debug, Default)]
struct LegTimes {
    taken_us: u64,
    sent_us: AtomicU64,
    head_us: AtomicU64,
    first_us: AtomicU64,
    last_us: AtomicU64,
    chunks: AtomicU64,
    /// No time: the leg's parent id in its trace.
    parent_id: AtomicU64,
}

/// From a time until `now_us`; `None` where it has not come.
fn since(at_us: &AtomicU64, now_us: u64) -> Option<Duration> {
    let at_us = at_us.load(Ordering::Relaxed);
    (at_us > 0).then(|| Duration::from_micros(now_us.saturating_sub(at_us)))
}

/// Where a decode leg's blocks are.
#[derive(Debug)]
struct Source {
    prefill: Arc<Instance>,
    answered_us: Option<u64>,
}

/// Blocks of one transfer on a prefill instance, from its answer until decode has spoken. Where the
/// decode leg ends before, nobody may read them, and they count until their lease can be over. An
/// engine that is drained must not be stopped before.
#[derive(Debug)]
pub struct KeptBlocks {
    app: Arc<App>,
    instance: Arc<Instance>,
    /// They are there, and nothing says that decode took them.
    owed: bool,
}

impl KeptBlocks {
    pub(crate) fn new(app: Arc<App>, instance: Arc<Instance>) -> Self {
        Self {
            app,
            instance,
            owed: false,
        }
    }

    /// The prefill answer has a handle: there are such blocks.
    pub(crate) fn owe(&mut self) {
        self.owed = true;
    }

    /// Decode has taken them.
    pub(crate) fn taken(mut self) {
        self.owed = false;
    }
}

impl Drop for KeptBlocks {
    fn drop(&mut self) {
        if let Some(left) = self.instance.meters.left.as_ref().filter(|_| self.owed) {
            left.inc();
            self.app.blocks_left(&self.instance);
            return;
        }
        self.app.blocks_read(&self.instance);
    }
}

/// The label of a leg that was answered.
pub fn outcome_of(status: StatusCode) -> &'static str {
    match status.as_u16() {
        200..=299 => "ok",
        300..=399 => "status_3xx",
        400..=499 => "status_4xx",
        _ => "status_5xx",
    }
}
