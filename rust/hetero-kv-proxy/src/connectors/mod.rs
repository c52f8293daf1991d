//! What ties the two legs of a request together, for each kind of KV connector that engines run.
//!
//! Pure: a connector is told which transfer and which slots, and says what each leg carries. It
//! sends nothing and knows no time. One file for each kind.

mod hetero;
mod mooncake;
mod moriio;
mod moriio_read;
mod moriio_write;
mod nixl;
mod none;
mod peer;
mod told;

#[cfg(test)]
mod tests;

use std::fmt;

use crate::openai::response::PrefillAnswer;
use crate::routing::Role;

pub(crate) use told::{other_connector, other_mode};

pub use peer::{PeerSpec, Slot, WORKER_KEYS, ZmqAddress};

/// In which order the legs go out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// No prefill leg.
    DecodeAlone,
    /// Decode is sent what prefill answered: decode reads.
    PrefillFirst,
    /// Both at once: prefill writes into blocks that decode names to it.
    Together,
}

/// One transfer of KV between two slots.
#[derive(Debug, Clone, Copy)]
pub struct Transfer<'a> {
    /// 32 hex digits, new for each try of a leg.
    pub id: &'a str,
    /// The slot of the prefill leg.
    pub prefill: Slot<'a>,
    /// The slot of the decode leg, where the connector needs it before the prefill leg.
    pub decode: Option<Slot<'a>>,
}

/// What one leg carries beyond the client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leg {
    /// `kv_transfer_params`, one JSON object.
    pub params: String,
    /// `X-Request-Id` in place of the request's own.
    pub request_id: Option<String>,
}

/// One kind of KV connector.
pub trait Connector: fmt::Debug + Send + Sync {
    /// The name on the command line.
    fn name(&self) -> &'static str;

    /// In which order the legs go out.
    fn order(&self) -> Order;

    /// Whether several sequences of one request (`n` > 1, a list of prompts) may carry one transfer.
    ///
    /// Where they may not, each would read, and acknowledge, blocks that belong to one of them:
    /// such requests run on decode alone.
    fn shares_transfer(&self) -> bool {
        false
    }

    /// Whether a decode engine refuses a handle whose blocks another has read and freed. Where it does
    /// not, it reads whatever is in them by then, and nobody notices.
    fn refuses_second_read(&self) -> bool {
        false
    }

    /// Whether the prefill leg must name the decode slot, which is then chosen first.
    fn needs_pair(&self) -> bool {
        false
    }

    /// Whether the decode leg must name the engine id of the prefill rank, asked of the instance's
    /// bootstrap server.
    fn needs_engine_id(&self) -> bool {
        false
    }

    /// The `transfer_mode` that its workers name where they register as MoRI-IO's do.
    fn moriio_mode(&self) -> Option<&'static str> {
        None
    }

    /// The names in engines' `kv_connector` that are served; none where any engine is.
    fn engine_names(&self) -> &'static [&'static str];

    /// Which of [`WORKER_KEYS`] a worker of this connector may state.
    fn worker_keys(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether a worker can be served.
    ///
    /// # Errors
    /// The reason, as the end of a sentence that begins with the worker.
    fn check(&self, role: Role, worker: &PeerSpec) -> Result<(), String> {
        let (_, _) = (role, worker);
        Ok(())
    }

    /// What the prefill leg carries.
    ///
    /// Not called for [`Order::DecodeAlone`].
    fn prefill_leg(&self, transfer: &Transfer<'_>) -> Leg;

    /// What the decode leg carries; `None` when the prefill answer does not say that blocks are
    /// kept. `answer` is `None` for [`Order::Together`].
    fn decode_leg(
        &self,
        transfer: &Transfer<'_>,
        answer: Option<&PrefillAnswer<'_>>,
    ) -> Option<Leg>;
}

/// Every kind, in the order of the help text; the first is the default.
pub const ALL: [&dyn Connector; 6] = [
    &hetero::Hetero,
    &none::NoConnector,
    &nixl::Nixl,
    &mooncake::Mooncake,
    &moriio_read::MoriioRead,
    &moriio_write::MoriioWrite,
];

/// The kind of this name.
pub fn by_name(name: &str) -> Option<&'static dyn Connector> {
    ALL.into_iter().find(|connector| connector.name() == name)
}

/// The names of [`ALL`], separated by commas.
pub fn names() -> String {
    ALL.map(Connector::name).join(", ")
}

/// A string as JSON.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
