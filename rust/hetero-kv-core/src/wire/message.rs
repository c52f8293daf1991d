//! Control plane messages: handshake, claims, leases, acknowledgements.
//!
//! D's scheduler process dials P's control listener, once per engine pair:
//!
//! ```text
//! D: Hello ->            <- P: Accept | Reject | Challenge, where keys are set
//! D: Proof ->            <- P: Accept | Reject
//! D: Layout ->           <- P: Layout
//! D: Claim ->            <- P: Granted | Gone
//! D: Renew ->            <- P: Granted | Gone
//! D: Ack, Release ->
//! either: Ping           <- other: Pong
//! either: Bye, then close
//! ```

use serde::{Deserialize, Serialize};

use super::card::WorkerCard;
use super::frame::FrameError;
use super::{Kind, decode, encode};
use crate::ids::{
    BlockId, DpRank, EngineId, Incarnation, LeaseRef, PpRank, PromptDigest, TpRank, TransferId,
};
use crate::layout::CompatFields;

/// Reasons are for people and cut to this many bytes before they are sent.
pub const REASON_BYTES_MAX: usize = 2048;

/// Who an engine is and how many ranks it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineIdentity {
    /// vLLM's id, with its `_dpN` suffix.
    pub engine: EngineId,
    /// Drawn at this start.
    pub incarnation: Incarnation,
    /// vLLM's `data_parallel_index`.
    pub dp_rank: DpRank,
    /// Ranks in the tensor parallel group.
    pub tp_size: u32,
    /// Stages in the pipeline.
    pub pp_size: u32,
    /// Data parallel ranks of its instance, for the RFC's round robin alone.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub dp_size: u32,
}

// The form that serde asks for.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(flag: &bool) -> bool {
    !*flag
}

fn one() -> u32 {
    1
}

// The form that serde asks for.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_one(number: &u32) -> bool {
    *number == 1
}

/// First frame of the dialer. Decoded before anything else is, so it keeps its shape over wire
/// versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Wire versions the dialer speaks, lowest and highest.
    pub versions: (u8, u8),
    /// The dialer.
    pub from: EngineIdentity,
    /// The engine the dialer was sent to; another one there is refused by name.
    pub expect_engine: EngineId,
    /// The start of it that the dialer was sent to.
    pub expect_incarnation: Incarnation,
    /// The dialer was sent to an address and takes whichever engine lives there: the two fields above
    /// are its own. A listener that does not know this field refuses by them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub any_engine: bool,
    /// Digest of the dialer's [`CompatFields`].
    #[serde(with = "serde_bytes")]
    pub compat_digest: Vec<u8>,
    /// Of a dialer with a key: it asks for a challenge and for the listener's proof. Bytes as
    /// [`crate::auth::NONCE_BYTES`] says.
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub nonce: Option<Vec<u8>>,
}

/// The listener has keys as well, and asks for a proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// The listener's, as in [`Hello`].
    #[serde(with = "serde_bytes")]
    pub nonce: Vec<u8>,
}

/// The dialer's proof, see [`crate::auth`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// [`crate::auth::PROOF_BYTES`] bytes.
    #[serde(with = "serde_bytes")]
    pub proof: Vec<u8>,
}

/// The listener takes the pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accept {
    /// Wire version both will use.
    pub version: u8,
    /// The listener.
    pub from: EngineIdentity,
    /// The listener's proof, after that of the dialer; see [`crate::auth`].
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub proof: Option<Vec<u8>>,
}

/// Why a pair or a connection is refused; branched on, so it is a closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectCode {
    /// No wire version in common.
    Version,
    /// Another engine lives at this address.
    WrongEngine,
    /// The same engine id, but it was restarted.
    WrongIncarnation,
    /// Caches differ in a field that must be equal; the fields are in the message.
    Incompatible,
    /// The engine hands no KV off (its `kv_role` is not a producer).
    NotProducer,
    /// Too many peers are connected.
    TooManyPeers,
    /// The dialer takes any engine here, and is connected to this one already.
    AlreadyConnected,
    /// One side has keys and the other none, or the proof is by no key of the other side.
    Unauthenticated,
    /// A frame that does not belong here.
    Protocol,
    /// A code of a later version.
    #[serde(other)]
    Unknown,
}

/// The listener refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reject {
    /// For branching.
    pub code: RejectCode,
    /// For people.
    pub reason: String,
    /// The listener's fields when the code is [`RejectCode::Incompatible`], so that the dialer can
    /// name each difference with both values.
    #[serde(default)]
    pub fields: Option<CompatFields>,
}

/// The ranks of the sender. D sends its identity again with no cards; P answers with all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The sender.
    pub from: EngineIdentity,
    /// One card per worker.
    pub workers: Vec<WorkerCard>,
}

/// Is this lease alive? D's first act for a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// From the params.
    pub transfer_id: TransferId,
    /// From the params; a lease of another epoch is another lease.
    pub epoch: u64,
    /// From the params; a lease belongs to one prompt.
    pub prompt_digest: PromptDigest,
    /// The dialer's number of this question, higher than all before it; the answer carries it, so
    /// that an answer to an earlier question about the same transfer is never taken for a later
    /// grant.
    pub question: u64,
}

/// The lease is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granted {
    /// Which.
    pub transfer_id: TransferId,
    /// Milliseconds it stays alive from the moment the holder answered.
    pub granted_ms: u64,
    /// Where it is fenced.
    pub lease: LeaseRef,
    /// Blocks of the prompt, one list per KV cache group. What the holder says here is read;
    /// nothing that travelled through a router is.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Prompt tokens whose KV these blocks hold.
    pub num_tokens: u32,
    /// The question this answers.
    pub question: u64,
}

/// Why a lease is not alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoneReason {
    /// Never heard of, or forgotten long ago.
    Unknown,
    /// Its time ran out.
    Expired,
    /// Read out or released.
    Released,
    /// The id belongs to another prompt or another epoch.
    Foreign,
}

/// The lease is not alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gone {
    /// Which.
    pub transfer_id: TransferId,
    /// Why.
    pub reason: GoneReason,
    /// The question this answers.
    pub question: u64,
}

/// More time, please.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renew {
    /// Which.
    pub transfer_id: TransferId,
    /// The dialer's number of this question.
    pub question: u64,
}

/// These ranks of the sender have read what they need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ack {
    /// Which.
    pub transfer_id: TransferId,
    /// Ranks of the sending engine. A set: a rank named twice counts once.
    pub ranks: Vec<(TpRank, PpRank)>,
    /// The dialer's number of this message, counted with its questions: what it said of a transfer
    /// before it claimed it again is told from what it says since, whichever connection it comes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
}

/// The sender will not read, or not any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Which.
    pub transfer_id: TransferId,
    /// As in [`Ack`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
}

/// Payload of [`Message::Ping`], [`Message::Pong`] and [`Message::Bye`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

/// Everything the control plane says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// See [`Hello`].
    Hello(Box<Hello>),
    /// See [`Accept`].
    Accept(Accept),
    /// See [`Reject`].
    Reject(Box<Reject>),
    /// See [`Layout`].
    Layout(Box<Layout>),
    /// See [`Claim`].
    Claim(Claim),
    /// See [`Granted`].
    Granted(Box<Granted>),
    /// See [`Gone`].
    Gone(Gone),
    /// See [`Renew`].
    Renew(Renew),
    /// See [`Ack`].
    Ack(Ack),
    /// See [`Release`].
    Release(Release),
    /// Are you there?
    Ping,
    /// I am here.
    Pong,
    /// This connection is closed on purpose.
    Bye,
    /// See [`Challenge`].
    Challenge(Challenge),
    /// See [`Proof`].
    Proof(Proof),
}

/// Why a frame is no control message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Undecodable.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// Push mode is reserved in wire version 1 and not built.
    #[error("push mode is not available: {0:?} refused")]
    PushMode(Kind),
    /// A data plane frame on the control port.
    #[error("{0:?} belongs on a data port, this is a control port")]
    DataPlane(Kind),
}

impl Message {
    /// The frame's kind.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Accept(_) => Kind::Accept,
            Self::Reject(_) => Kind::Reject,
            Self::Layout(_) => Kind::Layout,
            Self::Claim(_) => Kind::Claim,
            Self::Granted(_) => Kind::Granted,
            Self::Gone(_) => Kind::Gone,
            Self::Renew(_) => Kind::Renew,
            Self::Ack(_) => Kind::Ack,
            Self::Release(_) => Kind::Release,
            Self::Ping => Kind::Ping,
            Self::Pong => Kind::Pong,
            Self::Bye => Kind::Bye,
            Self::Challenge(_) => Kind::Challenge,
            Self::Proof(_) => Kind::Proof,
        }
    }

    /// The whole frame.
    pub fn to_frame(&self) -> Result<Vec<u8>, FrameError> {
        let kind = self.kind();
        match self {
            Self::Hello(m) => encode(kind, m),
            Self::Accept(m) => encode(kind, m),
            Self::Reject(m) => encode(kind, m),
            Self::Layout(m) => encode(kind, m),
            Self::Claim(m) => encode(kind, m),
            Self::Granted(m) => encode(kind, m),
            Self::Gone(m) => encode(kind, m),
            Self::Renew(m) => encode(kind, m),
            Self::Ack(m) => encode(kind, m),
            Self::Release(m) => encode(kind, m),
            Self::Ping | Self::Pong | Self::Bye => encode(kind, &Empty {}),
            Self::Challenge(m) => encode(kind, m),
            Self::Proof(m) => encode(kind, m),
        }
    }

    /// Decodes a frame's payload.
    pub fn from_frame(kind: Kind, payload: &[u8]) -> Result<Self, MessageError> {
        Ok(match kind {
            Kind::Hello => Self::Hello(decode(kind, payload)?),
            Kind::Accept => Self::Accept(decode(kind, payload)?),
            Kind::Reject => Self::Reject(decode(kind, payload)?),
            Kind::Layout => Self::Layout(decode(kind, payload)?),
            Kind::Claim => Self::Claim(decode(kind, payload)?),
            Kind::Granted => Self::Granted(decode(kind, payload)?),
            Kind::Gone => Self::Gone(decode(kind, payload)?),
            Kind::Renew => Self::Renew(decode(kind, payload)?),
            Kind::Ack => Self::Ack(decode(kind, payload)?),
            Kind::Release => Self::Release(decode(kind, payload)?),
            Kind::Ping => decode(kind, payload).map(|Empty {}| Self::Ping)?,
            Kind::Pong => decode(kind, payload).map(|Empty {}| Self::Pong)?,
            Kind::Bye => decode(kind, payload).map(|Empty {}| Self::Bye)?,
            Kind::Challenge => Self::Challenge(decode(kind, payload)?),
            Kind::Proof => Self::Proof(decode(kind, payload)?),
            Kind::Attach
            | Kind::Attached
            | Kind::Fetch
            | Kind::FetchData
            | Kind::FetchEnd
            | Kind::AttachRefused
            | Kind::VerbsConnect
            | Kind::VerbsConnected
            | Kind::VerbsRefused
            | Kind::AttachChallenge
            | Kind::AttachProof => return Err(MessageError::DataPlane(kind)),
            Kind::Offer | Kind::Destinations | Kind::Piece | Kind::PieceFailed | Kind::Quiesced => {
                return Err(MessageError::PushMode(kind));
            }
        })
    }
}

/// Cuts a text for people to [`REASON_BYTES_MAX`] at a character boundary.
pub fn bounded_reason(text: &str) -> String {
    let mut end = text.len().min(REASON_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
