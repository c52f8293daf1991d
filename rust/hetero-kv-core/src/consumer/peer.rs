//! One peer engine as D's scheduler side sees it: dialled, greeted, paired, or refused with a
//! reason that is kept for a while.
//!
//! ```text
//! Idle -> Dialing -> Greeting -> Asking -> Ready
//!            |          |          |         |
//!            +----------+----+-----+---------+--> Down(why, until) -> Dialing
//! ```
//!
//! A paired peer whose connection breaks while transfers need it is dialled again at once, and only
//! if that fails does it go down. One that no transfer needs is idle again.

use std::collections::{BTreeMap, BTreeSet};

use super::ConsumerOptions;
use super::greeting::Greeting;
use super::health::Health;
use crate::auth::SETTING;
use crate::failure::{Failure, FailureReason};
use crate::ids::{EngineId, Incarnation, PpRank, TpRank};
use crate::layout::{CompatFields, KvHeads, LayerCache, TP_SIZE_MAX, one_divides_other};
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
    /// Of a scout: engine and incarnation are this side's own, until the peer has said its.
    pub(super) address: PeerAddress,
    /// Dialled without a request that names it, to find out who lives there.
    pub(super) scout: bool,
    /// Whether the present connection was greeted by a scout, which takes any engine.
    pub(super) greeted_as_scout: bool,
    /// Of the present connection, where this side has keys: what the peer has to prove.
    pub(super) greeting: Option<Greeting>,
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
    /// The break that it is being dialled again for.
    pub(super) resuming: Option<Resuming>,
    /// Whether the workers have its card.
    pub(super) announced: bool,
    /// Last use by a request, for eviction.
    pub(super) used_at: Time,
    /// Transfers that were ordered from it.
    pub(super) transfers: u64,
    /// Of its ranks as sources.
    pub(super) health: Health,
}

/// A second try for a connection that broke.
#[derive(Clone, Debug)]
pub(super) struct Resuming {
    /// How it broke.
    pub(super) why: Failure,
    /// When whatever waits for it fails.
    pub(super) until: Time,
}

impl Peer {
    pub(super) fn new(address: PeerAddress, now: Time) -> Self {
        Self {
            address,
            scout: false,
            greeted_as_scout: false,
            greeting: None,
            state: PeerState::Idle,
            since: now,
            heard_at: now,
            pinged_at: now,
            doubted_at: None,
            failures: 0,
            resuming: None,
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

    /// When a handshake under way has taken too long.
    pub(super) fn handshake_due(&self, options: &ConsumerOptions) -> Time {
        let due = self.since + options.claim_timeout;
        self.resuming
            .as_ref()
            .map_or(due, |resuming| due.min(resuming.until))
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, PeerState::Ready(_))
    }

    /// What to call it in messages.
    pub(super) fn place(&self) -> String {
        let PeerAddress {
            host, port, engine, ..
        } = &self.address;
        if self.scout {
            format!("the prefill engine at {host}:{port}")
        } else {
            format!("prefill engine {engine} at {host}:{port}")
        }
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
                let (theirs, ours) = (d.theirs.as_deref(), d.ours.as_deref());
                let [theirs, ours] = match (theirs, ours) {
                    (Some(theirs), Some(ours)) => only_unlike(theirs, ours),
                    (theirs, ours) => [theirs, ours].map(|value| value.unwrap_or("nothing").into()),
                };
                format!("{}: prefill has {theirs}, decode has {ours}", d.field)
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
        RejectCode::Unauthenticated => SETTING,
        RejectCode::Incompatible
        | RejectCode::AlreadyConnected
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

/// Two unlike values; of lists (`a=1;b=2`) that are equal in some items only the others, so that what
/// differs is seen and not cut off.
fn only_unlike(theirs: &str, ours: &str) -> [String; 2] {
    let items = |text: &str| -> BTreeSet<String> { text.split(';').map(str::to_owned).collect() };
    let (left, right) = (items(theirs), items(ours));
    let rest = |of: &BTreeSet<String>, but: &BTreeSet<String>| {
        of.difference(but).cloned().collect::<Vec<_>>().join(";")
    };
    let unlike = [rest(&left, &right), rest(&right, &left)];
    if unlike.iter().any(String::is_empty) {
        // One is the other and more, or the same in another order.
        return [theirs.to_owned(), ours.to_owned()];
    }
    unlike
}

/// Tokens of a block of prefill, in a layout that [`check_layout`] has taken. Pages that cannot be
/// cut by token do not tell; they are of one size on both sides, which their format names.
pub(super) fn source_block_tokens(layout: &Layout, ours: u32) -> u32 {
    layout
        .workers
        .first()
        .and_then(|worker| worker.cache.layers().first())
        .and_then(LayerCache::block_tokens)
        .unwrap_or(ours)
}

/// Whether the two engines can be paired as they describe themselves. `block_size`: tokens of a
/// block of ours.
pub(super) fn check_layout(
    us: &EngineIdentity,
    (heads, block_size): (KvHeads, u32),
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
    if let Err(error) = Pairing::new(them.tp_size, us.tp_size, heads) {
        return refuse("tp_size", error.to_string());
    }
    if !(1..=TP_SIZE_MAX).contains(&them.pp_size) {
        return refuse(
            "pp_size",
            format!(
                "prefill says {}, it has to be in 1..={TP_SIZE_MAX}",
                them.pp_size
            ),
        );
    }
    check_ranks(them, layout).or_else(|text| refuse("workers", text))?;
    check_stages(layout).or_else(|text| refuse("layers", text))?;
    check_blocks(layout, block_size).or_else(|(field, text)| refuse(field, text))
}

/// Each place of the group and the pipeline is announced once.
fn check_ranks(them: &EngineIdentity, layout: &Layout) -> Result<(), String> {
    let mut ranks: Vec<_> = layout
        .workers
        .iter()
        .map(|w| (w.pp_rank, w.tp_rank))
        .collect();
    ranks.sort_unstable();
    let wanted = u64::from(them.tp_size) * u64::from(them.pp_size);
    let complete = ranks.len() as u64 == wanted
        && ranks.iter().enumerate().all(|(i, (pp, tp))| {
            u64::from(pp.0) * u64::from(them.tp_size) + u64::from(tp.0) == i as u64
                && tp.0 < them.tp_size
        });
    if complete {
        return Ok(());
    }
    Err(format!(
        "prefill says tp_size {} and pp_size {}, and announces {} ranks: {}",
        them.tp_size,
        them.pp_size,
        ranks.len(),
        shown_ranks(&ranks),
    ))
}

/// Each layer lies in one stage, and all ranks of a stage have its layers: whichever of them is
/// chosen as a source then has what the plan asks it for.
fn check_stages(layout: &Layout) -> Result<(), String> {
    let mut stages: BTreeMap<PpRank, (TpRank, BTreeSet<&str>)> = BTreeMap::new();
    let mut stage_of: BTreeMap<&str, PpRank> = BTreeMap::new();
    for worker in &layout.workers {
        let names: BTreeSet<&str> = worker
            .cache
            .layers()
            .iter()
            .map(|l| l.name.as_str())
            .collect();
        if let Some((first, known)) = stages.get(&worker.pp_rank) {
            if let Some(layer) = known.symmetric_difference(&names).next() {
                return Err(format!(
                    "layer {layer:?} is on one of the prefill ranks (pp {pp}, tp {first}) and (pp {pp}, tp {}) and not on the other",
                    worker.tp_rank,
                    pp = worker.pp_rank,
                ));
            }
            continue;
        }
        for name in &names {
            if let Some(other) = stage_of.insert(name, worker.pp_rank) {
                return Err(format!(
                    "layer {name:?} is in two pipeline stages of prefill, {other} and {}",
                    worker.pp_rank
                ));
            }
        }
        stages.insert(worker.pp_rank, (worker.tp_rank, names));
    }
    Ok(())
}

/// All layers are of one group and of one block size, and that size and ours fit into one another.
fn check_blocks(layout: &Layout, ours: u32) -> Result<(), (&'static str, String)> {
    let theirs = source_block_tokens(layout, ours);
    for worker in &layout.workers {
        for layer in worker.cache.layers() {
            if layer.group != 0 {
                return Err((
                    "group_kinds",
                    format!(
                        "layer {:?} of prefill is in KV cache group {}; one group is available",
                        layer.name, layer.group
                    ),
                ));
            }
            let tokens = layer.block_tokens().unwrap_or(ours);
            if tokens != theirs {
                return Err((
                    "block_size",
                    format!(
                        "layer {:?} of prefill has blocks of {tokens} tokens, others of {theirs}",
                        layer.name
                    ),
                ));
            }
        }
    }
    if one_divides_other(theirs, ours) {
        return Ok(());
    }
    Err((
        "block_size",
        format!("prefill has {theirs} tokens, decode has {ours}; one must divide the other"),
    ))
}

/// Some of the announced places, as (pp, tp).
fn shown_ranks(ranks: &[(PpRank, TpRank)]) -> String {
    const SHOWN_MAX: usize = 16;
    let mut shown: Vec<String> = ranks
        .iter()
        .take(SHOWN_MAX)
        .map(|(pp, tp)| format!("(pp {pp}, tp {tp})"))
        .collect();
    if ranks.len() > SHOWN_MAX {
        shown.push("...".into());
    }
    shown.join(", ")
}
