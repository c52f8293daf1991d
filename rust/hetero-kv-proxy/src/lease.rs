//! What a request holds of an instance: a slot while a leg runs, and blocks until decode has them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::app::App;
use crate::instance::Instance;
use crate::routing::{LegFault, Picked, Role};
use crate::upstream::Upstream;

/// A chosen slot, in flight until dropped; the leg is then counted by how it ended. It holds its
/// instance, which may be removed meanwhile.
#[derive(Debug)]
pub struct SlotLease {
    app: Arc<App>,
    instance: Arc<Instance>,
    /// What was chosen.
    pub picked: Picked,
    /// When its leg went out, by the clock of routing.
    began_ms: AtomicU64,
    outcome: &'static str,
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        self.app.count_leg(&self.instance, self.outcome);
        self.app.release(&self.instance, self.picked.slot);
    }
}

impl SlotLease {
    pub(crate) fn new(app: Arc<App>, instance: Arc<Instance>, picked: Picked) -> Self {
        Self {
            began_ms: AtomicU64::new(app.now_ms()),
            app,
            instance,
            picked,
            outcome: "cancelled",
        }
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

    /// Its leg goes out now.
    pub(crate) fn begin(&self) {
        self.began_ms.store(self.app.now_ms(), Ordering::Relaxed);
    }

    /// When its leg went out, by the clock of routing.
    pub(crate) fn began_ms(&self) -> u64 {
        self.began_ms.load(Ordering::Relaxed)
    }

    /// The engine did what the leg asked of it.
    pub(crate) fn note_served(&self) {
        self.app.note_served(&self.instance, self.began_ms());
    }

    /// The leg failed by the engine's fault.
    pub(crate) fn note_failed(&self, fault: LegFault) {
        self.app.note_failed(&self.instance, fault, self.began_ms());
    }

    /// The engine gave a response head with a status below 500.
    pub fn note_answer(&self) {
        self.app.note_answer(&self.instance);
    }

    /// Ends the leg with an outcome other than `cancelled`, the word for one that was dropped.
    pub fn end(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

/// Blocks of one transfer on a prefill instance, from its answer until decode has spoken or the
/// decode leg has ended. An engine that is drained must not be stopped before.
#[derive(Debug)]
pub struct KeptBlocks {
    app: Arc<App>,
    instance: Arc<Instance>,
}

impl KeptBlocks {
    pub(crate) fn new(app: Arc<App>, instance: Arc<Instance>) -> Self {
        Self { app, instance }
    }
}

impl Drop for KeptBlocks {
    fn drop(&mut self) {
        self.app.blocks_read(&self.instance);
    }
}
