//! D's workers as far as the scheduler side can tell: they take orders and owe one report each.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::failure::Failure;
use crate::ids::{BlockId, Incarnation, LeaseRef, TransferId};
use crate::step::{LoadOrder, StepOrders};
use crate::time::Time;
use crate::wire::message::Message;

/// What one request was ordered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Job {
    pub(crate) load: Option<LoadOrder>,
    pub(crate) fail: Option<(Vec<BlockId>, Failure)>,
    pub(crate) cancel: Option<Failure>,
    pub(crate) deadline: Option<Time>,
    pub(crate) extensions: usize,
    pub(crate) reported: bool,
}

/// All ranks of one decode engine.
pub(crate) struct Workers {
    pub(crate) jobs: BTreeMap<String, Job>,
    margin: Duration,
    questions: BTreeMap<u64, Time>,
    /// How long each transfer may be read, by what was asked and answered.
    allowed: BTreeMap<TransferId, (Time, Incarnation)>,
    peers: BTreeSet<u64>,
    pub(crate) pending: u32,
}

impl Workers {
    pub(crate) fn new(margin: Duration) -> Self {
        Self {
            jobs: BTreeMap::new(),
            margin,
            questions: BTreeMap::new(),
            allowed: BTreeMap::new(),
            peers: BTreeSet::new(),
            pending: 0,
        }
    }

    /// One step's orders, with everything that has to hold for them.
    pub(crate) fn take(&mut self, now: Time, orders: StepOrders) {
        self.pending = orders.pending;
        for peer in orders.peers {
            assert!(self.peers.insert(peer.peer.0), "{:?} told twice", peer.peer);
        }
        for load in orders.loads {
            assert!(
                self.peers.contains(&load.peer.0),
                "a load names a peer not told before"
            );
            assert_eq!(load.source_blocks.len(), load.dest_blocks.len());
            assert!(!load.dest_blocks.is_empty(), "a load of nothing");
            let deadline = now + Duration::from_millis(load.deadline_ms);
            self.check_deadline(now, &load, deadline);
            let job = self.jobs.entry(load.request_id.clone()).or_default();
            assert!(
                job.load.is_none() && job.fail.is_none(),
                "{load:?}: ordered twice"
            );
            job.deadline = Some(deadline);
            job.load = Some(load);
        }
        for fail in orders.fails {
            let job = self.jobs.entry(fail.request_id.clone()).or_default();
            assert!(
                job.load.is_none() && job.fail.is_none(),
                "{fail:?}: ordered twice"
            );
            job.fail = Some((fail.dest_blocks, fail.failure));
        }
        for extension in orders.extensions {
            let deadline = now + Duration::from_millis(extension.deadline_ms);
            let job = self
                .jobs
                .get_mut(&extension.request_id)
                .expect("an extension of nothing");
            let load = job.load.clone().expect("an extension of no load");
            assert!(!job.reported, "{extension:?} of a load that is over");
            job.extensions += 1;
            job.deadline = job.deadline.max(Some(deadline));
            self.check_deadline(now, &load, deadline);
        }
        for cancel in orders.cancels {
            let job = self
                .jobs
                .get_mut(&cancel.request_id)
                .expect("a cancel of nothing");
            assert!(job.load.is_some(), "{cancel:?} of no load");
            assert!(job.cancel.is_none(), "{cancel:?} twice");
            job.cancel = Some(cancel.failure);
        }
    }

    /// Deadlines run from the question, not from the answer, and end a margin early.
    fn check_deadline(&self, now: Time, load: &LoadOrder, deadline: Time) {
        let (allowed, _) = self
            .allowed
            .get(&load.transfer_id)
            .expect("a read without a grant");
        assert!(
            deadline == now || deadline <= *allowed,
            "{load:?} at {now:?} may read until {deadline:?}, granted until {allowed:?}"
        );
    }

    pub(crate) fn note_sent(&mut self, now: Time, message: &Message) {
        if let Message::Claim(claim) = message {
            self.questions.insert(claim.question, now);
        } else if let Message::Renew(renew) = message {
            self.questions.insert(renew.question, now);
        }
    }

    pub(crate) fn note_received(&mut self, incarnation: Incarnation, message: &Message) {
        if let Message::Granted(granted) = message {
            let sent_at = self.questions[&granted.question];
            let time = Duration::from_millis(granted.granted_ms).saturating_sub(self.margin);
            let until = sent_at + time;
            let entry = self
                .allowed
                .entry(granted.transfer_id)
                .or_insert_with(|| (until, incarnation));
            entry.0 = entry.0.max(until);
        }
    }

    pub(crate) fn job(&self, request_id: &str) -> &Job {
        self.jobs
            .get(request_id)
            .unwrap_or_else(|| panic!("nothing was ordered for {request_id}"))
    }

    pub(crate) fn has(&self, request_id: &str) -> bool {
        self.jobs.contains_key(request_id)
    }

    /// Requests whose report is owed.
    pub(crate) fn unreported(&self) -> impl Iterator<Item = (&String, &Job)> {
        self.jobs.iter().filter(|(_, job)| !job.reported)
    }

    /// Leases under which a rank may be reading.
    pub(crate) fn reading(&self, now: Time) -> Vec<(LeaseRef, Incarnation)> {
        self.unreported()
            .filter(|(_, job)| job.deadline.is_some_and(|deadline| now < deadline))
            .filter_map(|(_, job)| job.load.as_ref())
            .map(|load| (load.lease, self.allowed[&load.transfer_id].1))
            .collect()
    }

    pub(crate) fn report(&mut self, request_id: &str) {
        let job = self.jobs.get_mut(request_id).expect("a report of nothing");
        assert!(!job.reported, "{request_id} reported twice");
        job.reported = true;
    }
}
