//! One transfer and the requests (siblings) that share it, on D's scheduler side.

use std::collections::BTreeSet;

use crate::failure::Failure;
use crate::ids::{BlockId, LeaseRef, TransferId};
use crate::step::{PeerId, SourceChoice};
use crate::time::Time;
use crate::wire::params::RemotePrefill;

/// A claim or a renewal on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// Its number, which the answer carries.
    pub(super) number: u64,
    pub(super) sent_at: Time,
}

/// How far the claim is.
#[derive(Clone, Debug)]
pub(super) enum Claiming {
    /// The peer is not ready yet.
    Waiting,
    /// Sent.
    Asked { question: Question },
    /// Alive until `deadline`, in this side's time.
    Granted {
        fence: LeaseRef,
        block_ids: Vec<Vec<BlockId>>,
        num_tokens: u32,
        deadline: Time,
        renew_at: Time,
        /// A renewal that has no answer yet.
        renewal: Option<Question>,
    },
    /// Over.
    Failed(Failure),
}

#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) peer: PeerId,
    pub(super) params: RemotePrefill,
    pub(super) created_at: Time,
    pub(super) claiming: Claiming,
    /// Requests that read or may still read under it.
    pub(super) siblings: BTreeSet<String>,
    /// Whether a sibling has read everything it needed.
    pub(super) read: bool,
    /// Decided with the first load, and the same for all siblings.
    pub(super) choice: Option<SourceChoice>,
    /// With no sibling left: when to settle with the holder.
    pub(super) linger_until: Option<Time>,
}

impl Transfer {
    pub(super) fn new(peer: PeerId, params: RemotePrefill, now: Time) -> Self {
        Self {
            peer,
            params,
            created_at: now,
            claiming: Claiming::Waiting,
            siblings: BTreeSet::new(),
            read: false,
            choice: None,
            linger_until: None,
        }
    }
}

/// One request of this engine whose prompt was prefilled elsewhere.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The transfer it reads under; `None` when its params are of no use.
    pub(super) transfer: Option<TransferId>,
    pub(super) prompt_tokens: u32,
    /// Tokens already cached here, as of the last question for matched tokens.
    pub(super) computed_tokens: u32,
    pub(super) phase: Phase,
    /// vLLM has finished it while its blocks could still be written.
    pub(super) finished: bool,
}

/// ```text
/// Waiting --alloc(n>0)--> Pending --claim--> Loading --finished_recving--> Settled
///    |  \--alloc(0)-----------------------------------------------------------^
///    v (bad params, failed claim)                                             |
/// Broken --alloc(n>0)--> Reporting --finished_recving-------------------------+
/// ```
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// In vLLM's queue.
    Waiting,
    /// In vLLM's queue; will fail as soon as it has blocks to fail with.
    Broken(Failure),
    /// Has blocks, waits for the claim.
    Pending {
        first_block: usize,
        /// One past the last token to load.
        past_token: u32,
        dest_blocks: Vec<BlockId>,
    },
    /// The workers read.
    Loading { until: Time, cancelled: bool },
    /// The workers were told to report it as failed.
    Reporting,
    /// Nothing of it is left to do.
    Settled,
}
