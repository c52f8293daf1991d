//! Which transport reaches a source, and why that one.

use std::sync::Arc;

use hetero_kv_core::time::Time;

use crate::error::{ReadFailureKind, TransportError};
use crate::memory::LocalMemory;
use crate::process::ProcessTransport;
use crate::tcp::TcpTransport;
use crate::transport::{Capabilities, Connection, Interrupt, Source, Transport};

/// Transports a reader may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// The best one that the source offers and that reaches it: `process`, else `tcp`.
    #[default]
    Auto,
    /// Only `process`.
    Process,
    /// Only `tcp`.
    Tcp,
}

impl TransportChoice {
    /// Best first.
    fn candidates(self) -> &'static [&'static dyn Transport] {
        match self {
            Self::Auto => &[&ProcessTransport, &TcpTransport],
            Self::Process => &[&ProcessTransport],
            Self::Tcp => &[&TcpTransport],
        }
    }
}

/// A connection, what it can do, and why it is of this transport.
pub(super) struct Chosen {
    pub(super) connection: Box<dyn Connection>,
    pub(super) capabilities: Capabilities,
    pub(super) why: String,
}

/// Reaches a source by the first transport that does.
pub(super) fn connect(
    choice: TransportChoice,
    source: &Source,
    memory: &Arc<LocalMemory>,
    deadline: Time,
    interrupt: &Interrupt<'_>,
) -> Result<Chosen, TransportError> {
    let mut failed: Vec<TransportError> = Vec::new();
    let mut reasons = Vec::new();
    for transport in choice.candidates() {
        let name = transport.name();
        if !transport.offered(&source.endpoints) {
            reasons.push(format!("{name} is not offered"));
            continue;
        }
        match transport.connect(source, Arc::clone(memory), deadline, interrupt) {
            Ok(connection) => {
                let why = match (choice, reasons.is_empty()) {
                    (TransportChoice::Auto, true) => "best offered, probe passed".into(),
                    (TransportChoice::Auto, false) => reasons.join("; "),
                    (TransportChoice::Process | TransportChoice::Tcp, _) => "set by choice".into(),
                };
                return Ok(Chosen {
                    connection,
                    capabilities: transport.capabilities(),
                    why,
                });
            }
            Err(error) if error.kind == ReadFailureKind::Cancelled => return Err(error),
            Err(error) => {
                reasons.push(format!("{name}: {error}"));
                failed.push(error);
            }
        }
    }
    // That the process has ended says more than that its port refuses.
    let telling = failed
        .iter()
        .find(|error| error.kind == ReadFailureKind::PeerLost)
        .or(failed.last());
    Err(TransportError::new(
        telling.map_or(ReadFailureKind::Unreachable, |error| error.kind),
        telling.map_or("connect", |error| error.call),
        reasons.join("; "),
    ))
}
