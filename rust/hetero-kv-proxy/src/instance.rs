//! One engine instance as the proxy knows it, from its registration to the end of its last leg.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::bootstrap::Bootstrap;
use crate::config::Worker;
use crate::connectors::PeerSpec;
use crate::lines::Lines;
use crate::meters::Meters;
use crate::routing::{InstanceIndex, Role, Trust};
use crate::sync::lock;
use crate::upstream::{PoolLimits, Upstream};
use crate::workers::Facts;

/// Why an instance takes no leg any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// It was not heard of for its time to live.
    Expired,
    /// Another start of the engine, or other sizes, registered at its address.
    Replaced,
    /// An operator removes it.
    Removed,
    /// It is to serve the other role.
    RoleChange,
}

impl Leave {
    /// The word in logs and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Replaced => "replaced",
            Self::Removed => "removed",
            Self::RoleChange => "role change",
        }
    }
}

/// What lines of the log about an instance are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Subject {
    /// Its state, which legs and probes of an engine that serves every other one change at any rate.
    State,
    /// Its bootstrap server, which each leg may find away.
    Bootstrap,
}

/// Lines in a minute about each subject of an instance.
const LINES_MAX: u32 = 20;

/// Where an instance comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registration {
    /// The role that the worker names in its heartbeats, whatever an operator made of it.
    pub told_role: Role,
    /// Given by a flag: it never expires.
    pub by_flag: bool,
}

/// How much an instance gets beside others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WorkerWeights {
    /// By its flag, its file or its registration.
    pub(crate) told: Option<u32>,
    /// By an administrator, which counts.
    pub(crate) set: Option<u32>,
}

impl WorkerWeights {
    /// The one that counts.
    pub(crate) fn counts(self) -> u32 {
        self.set.or(self.told).unwrap_or(1)
    }
}

/// One instance. Legs hold it, so that it outlives its removal for as long as one runs.
#[derive(Debug)]
pub struct Instance {
    /// Its role.
    pub role: Role,
    /// Its number among those of its role.
    pub index: InstanceIndex,
    /// As it was given, to make another instance of it in the other role.
    pub worker: Worker,
    /// Its label in metrics.
    pub label: Arc<str>,
    /// Where its legs go.
    pub upstream: Arc<Upstream>,
    /// Where it comes from.
    pub registration: Registration,
    /// Its bootstrap server, where the connector has one.
    pub(crate) bootstrap: Option<Bootstrap>,
    /// Its metrics.
    pub(crate) meters: Meters,
    /// One start of the engine, once the worker has told it.
    engine_id: Mutex<Option<String>>,
    /// What its connector says of itself.
    facts: Mutex<Facts>,
    weight: Mutex<WorkerWeights>,
    lines: Mutex<Lines<Subject>>,
    ttl_ms: AtomicU64,
    heard_ms: AtomicU64,
    leave: Mutex<Option<Leave>>,
    /// Cancelled when it is removed.
    pub(crate) gone: CancellationToken,
    /// Told when its last leg ended while it takes no others.
    pub(crate) idle: Notify,
}

impl Instance {
    /// An instance that is not in a pool yet: its index is not its own, and its metrics are not shown.
    ///
    /// # Errors
    /// A URL that cannot be a `Host` header.
    pub(crate) fn new(
        role: Role,
        worker: Worker,
        registration: Registration,
        limits: PoolLimits,
        with_bootstrap: bool,
    ) -> Result<Self, http::Error> {
        let bootstrap = (with_bootstrap && role == Role::Prefill)
            .then(|| Bootstrap::new(&worker.peer.bootstrap, limits))
            .transpose()?;
        Ok(Self {
            role,
            index: InstanceIndex(usize::MAX),
            label: Arc::from(worker.spec.url.as_str()),
            upstream: Upstream::new(worker.base.clone(), limits)?,
            weight: Mutex::new(WorkerWeights {
                told: worker.weight,
                set: None,
            }),
            lines: Mutex::new(Lines::new(LINES_MAX)),
            worker,
            bootstrap,
            meters: Meters::default(),
            registration,
            engine_id: Mutex::new(None),
            facts: Mutex::default(),
            ttl_ms: AtomicU64::new(0),
            heard_ms: AtomicU64::new(0),
            leave: Mutex::new(None),
            gone: CancellationToken::new(),
            idle: Notify::new(),
        })
    }

    /// The name of one registration of one instance in answers and logs; never given twice.
    pub fn id(&self) -> String {
        format!("{}-{}", self.role.name(), self.index.0)
    }

    /// What connectors know of it.
    pub fn peer(&self) -> &PeerSpec {
        &self.worker.peer
    }

    /// Which evidence it needs before it takes a leg.
    pub(crate) fn trust(&self) -> Trust {
        match self.registration.by_flag {
            true => Trust::Given,
            false => Trust::Probed,
        }
    }

    /// Which start of the engine this is, where the worker has told it.
    pub(crate) fn engine_id(&self) -> Option<String> {
        lock(&self.engine_id).clone()
    }

    /// Whether a worker that tells this engine id, or none, is the start of the engine known here.
    /// The first id that is told is believed.
    pub(crate) fn is_start(&self, told: Option<&str>) -> bool {
        let Some(told) = told else {
            return true;
        };
        let mut known = lock(&self.engine_id);
        known.get_or_insert_with(|| told.to_owned()) == told
    }

    /// Its weights as they are.
    pub(crate) fn weights(&self) -> WorkerWeights {
        *lock(&self.weight)
    }

    /// The caller has the pool go by them: [`crate::app::App::set_weight`].
    pub(crate) fn set_weights(&self, weights: WorkerWeights) {
        *lock(&self.weight) = weights;
    }

    /// What its connector has said of itself.
    pub(crate) fn facts(&self) -> Facts {
        lock(&self.facts).clone()
    }

    /// The connector says so from here on.
    pub(crate) fn set_facts(&self, facts: Facts) {
        *lock(&self.facts) = facts;
    }

    /// A heartbeat came at `now_ms`; it is good for `ttl_ms`.
    pub(crate) fn heard(&self, now_ms: u64, ttl_ms: u64) {
        self.ttl_ms.store(ttl_ms, Ordering::Relaxed);
        self.heard_ms.store(now_ms, Ordering::Relaxed);
    }

    /// When the last heartbeat came, and for how long it is good, in milliseconds.
    pub(crate) fn last_heard(&self) -> (u64, u64) {
        let heard = self.heard_ms.load(Ordering::Relaxed);
        (heard, self.ttl_ms.load(Ordering::Relaxed))
    }

    /// Milliseconds until it expires; `None` for one that never does.
    pub(crate) fn expires_in_ms(&self, now_ms: u64) -> Option<u64> {
        let (heard, ttl) = self.last_heard();
        let left = heard.saturating_add(ttl).saturating_sub(now_ms);
        (!self.registration.by_flag).then_some(left)
    }

    /// Why it takes no leg any more, if so.
    pub fn leave(&self) -> Option<Leave> {
        *lock(&self.leave)
    }

    /// Whether the engine that it was is taken to be gone, and its blocks with it.
    pub(crate) fn is_lost(&self) -> bool {
        match self.leave() {
            Some(Leave::Expired | Leave::Replaced) => true,
            Some(Leave::Removed | Leave::RoleChange) | None => false,
        }
    }

    pub(crate) fn set_leave(&self, leave: Option<Leave>) {
        *lock(&self.leave) = leave;
    }

    /// How many lines about `subject` were left out since its last one, where one is due; `None`
    /// where this one is left out too.
    pub(crate) fn line_about(&self, subject: Subject) -> Option<u64> {
        lock(&self.lines).due(subject, Instant::now())
    }
}
