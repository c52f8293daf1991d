//! One peer engine as D's scheduler side sees it: dialled, greeted, paired, or refused with a
//! reason that is kept for a while.
//!
//! ```text
//! Idle -> Dialing -> Greeting -> Asking -> Ready
//!            |          |          |         |
//!            +----------+----+-----+---------+--> Down(why, until) -> Dialing
//! ```

use super::ConsumerOptions;
use super::health::Health;
use crate::failure::{Failure, FailureReason};
use crate::ids::{EngineId, Incarnation};
use crate::layout::CompatFields;
use crate::layout::KvHeads;
use crate::plan::Pairing;
use crate::time::Time;
use crate::wire::message::{EngineIdentity, Layout, Reject, RejectCode, bounded_reason};

/// Where a peer engine is and which start of it is meant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerAddress {
    /// Control listener's host.
    pub host: String,
    /// Control listener's port.
    pub port: u16,
    /// The engine expected there.
    pub engine: EngineId,
    /// The start of it expected there.
    pub incarnation: Incarnation,
}

#[derive(Clone, Debug)]
pub(super) enum PeerState {
    Idle,
    Dialing,
    Greeting,
    Asking(Box<EngineIdentity>),
    Ready(Box<Layout>),
    Down { why: Failure, until: Time },
}

#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) address: PeerAddress,
    pub(super) state: PeerState,
    /// When the present state was entered.
    pub(super) since: Time,
    /// Last frame from it.
    pub(super) heard_at: Time,
    /// Last heartbeat sent to it.
    pub(super) pinged_at: Time,
    /// First heartbeat sent since it was last heard.
    pub(super) doubted_at: Option<Time>,
    /// Failures in a row, for back-off.
    pub(super) failures: u32,
    /// Whether the workers have its card.
    pub(super) announced: bool,
    /// Last use by a request, for eviction.
    pub(super) used_at: Time,
    /// Transfers that were ordered from it.
    pub(super) transfers: u64,
    /// Of its ranks as sources.
    pub(super) health: Health,
}

impl Peer {
    pub(super) fn new(address: PeerAddress, now: Time) -> Self {
        Self {
            address,
            state: PeerState::Idle,
            since: now,
            heard_at: now,
            pinged_at: now,
            doubted_at: None,
            failures: 0,
            announced: false,
            used_at: now,
            transfers: 0,
            health: Health::default(),
        }
    }

    pub(super) fn enter(&mut self, now: Time, state: PeerState) {
        self.state = state;
        self.since = now;
    }

    pub(super) fn hear(&mut self, now: Time) {
        self.heard_at = now;
        self.doubted_at = None;
    }

    /// When the next heartbeat is due.
    pub(super) fn ping_due(&self, options: &ConsumerOptions) -> Time {
        self.heard_at.max(self.pinged_at) + options.heartbeat
    }

    /// When silence means that it is lost: only after heartbeats of ours went unanswered, so that
    /// a pause of this process (a stop signal, a suspended machine) is not taken for its silence.
    pub(super) fn lost_due(&self, options: &ConsumerOptions) -> Option<Time> {
        let asked_at = self.doubted_at?;
        let silence = options.peer_silence.max(options.heartbeat * 3);
        Some((self.heard_at + silence).max(asked_at + options.heartbeat * 2))
    }

    pub(super) fn is_connected(&self) -> bool {
        match self.state {
            PeerState::Greeting | PeerState::Asking(_) | PeerState::Ready(_) => true,
            PeerState::Idle | PeerState::Dialing | PeerState::Down { .. } => false,
        }
    }
}

/// The failure that a refusal means, naming the field that differs and both values.
pub(super) fn refusal(ours: &CompatFields, reject: &Reject) -> Failure {
    if let (RejectCode::Incompatible, Some(theirs)) = (reject.code, &reject.fields) {
        let differences = ours.difference(theirs);
        let field = differences
            .first()
            .map_or("", |d| d.field.as_str())
            .to_owned();
        let list: Vec<String> = differences
            .iter()
            .map(|d| {
                format!(
                    "{}: prefill has {}, decode has {}",
                    d.field,
                    d.theirs.as_deref().unwrap_or("nothing"),
                    d.ours.as_deref().unwrap_or("nothing"),
                )
            })
            .collect();
        return Failure::of_field(
            FailureReason::PairRefused,
            field,
            bounded_reason(&format!("the pair is incompatible: {}", list.join("; "))),
        );
    }
    let field = match reject.code {
        RejectCode::Version => "wire_version",
        RejectCode::WrongEngine => "remote_engine_id",
        RejectCode::WrongIncarnation => "remote_incarnation",
        RejectCode::NotProducer => "kv_role",
        RejectCode::Incompatible
        | RejectCode::TooManyPeers
        | RejectCode::Protocol
        | RejectCode::Unknown => "",
    };
    Failure::of_field(
        FailureReason::PairRefused,
        field,
        bounded_reason(&format!("prefill refused: {}", reject.reason)),
    )
}

/// Whether the two engines can be paired as they describe themselves.
pub(super) fn check_layout(
    us: &EngineIdentity,
    heads: KvHeads,
    expected: &EngineIdentity,
    layout: &Layout,
) -> Result<(), Failure> {
    let refuse =
        |field: &str, text: String| Err(Failure::of_field(FailureReason::PairRefused, field, text));
    let them = &layout.from;
    if them != expected {
        return refuse(
            "identity",
            "prefill changed its identity in the handshake".into(),
        );
    }
    if them.pp_size != 1 || us.pp_size != 1 {
        return refuse(
            "pp_size",
            format!(
                "pipeline stages are not available: prefill has pp_size {}, decode has {}",
                them.pp_size, us.pp_size
            ),
        );
    }
    if let Err(error) = Pairing::new(them.tp_size, us.tp_size, heads) {
        return refuse("tp_size", error.to_string());
    }
    let mut ranks: Vec<_> = layout
        .workers
        .iter()
        .map(|w| (w.pp_rank, w.tp_rank))
        .collect();
    ranks.sort_unstable();
    let complete = ranks.len() as u64 == u64::from(them.tp_size) * u64::from(them.pp_size)
        && ranks
            .iter()
            .enumerate()
            .all(|(i, (pp, tp))| pp.0 == 0 && tp.0 as usize == i);
    if !complete {
        return refuse(
            "workers",
            format!(
                "prefill says tp_size {} but announces {} ranks",
                them.tp_size,
                layout.workers.len()
            ),
        );
    }
    Ok(())
}
