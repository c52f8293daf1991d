//! Which transport reaches a source, and why that one.

use std::sync::Arc;

use hetero_kv_core::time::Time;

use crate::error::{ReadFailureKind, TransportError};
use crate::memory::LocalMemory;
use crate::mori::MoriTransport;
use crate::process::ProcessTransport;
use crate::reader::ReaderOptions;
use crate::tcp::TcpTransport;
use crate::transport::{Capabilities, Connection, Interrupt, Source, Transport, TransportName};
use crate::verbs::VerbsTransport;

/// Transports a reader may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// The best one that the source offers and that reaches it: `process`, else `verbs`, else
    /// `tcp`.
    #[default]
    Auto,
    /// Only `process`.
    Process,
    /// Only `verbs`.
    Verbs,
    /// Only `tcp`.
    Tcp,
    /// Only `mori`. Never taken by itself: its engine keeps a processor busy.
    Mori,
}

/// Why a connection is of a transport behind a better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PassedOver {
    /// This rank cannot use it, where the source can.
    Missing,
    /// The source does not offer it.
    NotOffered,
    /// It did not reach the source, or its probe failed.
    NotReached,
}

impl PassedOver {
    /// As metrics spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::NotOffered => "not_offered",
            Self::NotReached => "not_reached",
        }
    }
}

/// What stands behind a name.
enum Candidate {
    Usable(Arc<dyn Transport>),
    /// Why this process cannot use it, whatever the source offers.
    Missing(&'static str),
}

impl TransportChoice {
    /// Best first.
    fn names(self) -> &'static [TransportName] {
        match self {
            Self::Auto => &[
                TransportName::Process,
                TransportName::Verbs,
                TransportName::Tcp,
            ],
            Self::Process => &[TransportName::Process],
            Self::Verbs => &[TransportName::Verbs],
            Self::Tcp => &[TransportName::Tcp],
            Self::Mori => &[TransportName::Mori],
        }
    }
}

fn candidate(name: TransportName, options: &ReaderOptions) -> Candidate {
    match name {
        TransportName::Process => Candidate::Usable(Arc::new(ProcessTransport)),
        TransportName::Tcp => Candidate::Usable(Arc::new(TcpTransport::new(options.keys.clone()))),
        TransportName::Verbs => match &options.verbs {
            Some(node) => {
                let transport = VerbsTransport::new(Arc::clone(node), options.keys.clone());
                Candidate::Usable(Arc::new(transport))
            }
            None => Candidate::Missing("this rank has no RDMA device open"),
        },
        TransportName::Mori => match &options.mori {
            Some(mori) => Candidate::Usable(Arc::<MoriTransport>::clone(mori)),
            None => Candidate::Missing("no engine of it was started"),
        },
    }
}

/// A connection, what it can do, and why it is of this transport.
pub(super) struct Chosen {
    pub(super) connection: Box<dyn Connection>,
    pub(super) capabilities: Capabilities,
    pub(super) why: String,
    /// Better transports that it is not of, where the best one is asked for.
    pub(super) passed_over: Vec<(TransportName, PassedOver)>,
}

/// Reaches a source by the first transport that does.
pub(super) fn connect(
    options: &ReaderOptions,
    source: &Source,
    memory: &Arc<LocalMemory>,
    deadline: Time,
    interrupt: &Interrupt<'_>,
) -> Result<Chosen, TransportError> {
    let choice = options.choice;
    let mut failed: Vec<TransportError> = Vec::new();
    let mut reasons = Vec::new();
    let mut passed_over = Vec::new();
    for &name in choice.names() {
        let transport = match candidate(name, options) {
            Candidate::Usable(transport) => transport,
            Candidate::Missing(why) => {
                // Without a device on either side there is nothing to tell.
                if choice != TransportChoice::Auto || source.endpoints.verbs.is_some() {
                    reasons.push(format!("{name}: {why}"));
                    passed_over.push((name, PassedOver::Missing));
                }
                continue;
            }
        };
        if !transport.offered(&source.endpoints) {
            reasons.push(format!("{name} is not offered"));
            // Without a device on either side there is nothing to tell.
            if name != TransportName::Verbs || options.verbs.is_some() {
                passed_over.push((name, PassedOver::NotOffered));
            }
            continue;
        }
        match transport.connect(source, Arc::clone(memory), deadline, interrupt) {
            Ok(connection) => {
                let why = match (choice, reasons.is_empty()) {
                    (TransportChoice::Auto, true) => "best offered, probe passed".into(),
                    (TransportChoice::Auto, false) => reasons.join("; "),
                    (
                        TransportChoice::Process
                        | TransportChoice::Verbs
                        | TransportChoice::Tcp
                        | TransportChoice::Mori,
                        _,
                    ) => "set by choice".into(),
                };
                return Ok(Chosen {
                    connection,
                    capabilities: transport.capabilities(),
                    why,
                    passed_over,
                });
            }
            Err(error) if error.kind == ReadFailureKind::Cancelled => return Err(error),
            Err(error) => {
                reasons.push(format!("{name}: {error}"));
                passed_over.push((name, PassedOver::NotReached));
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
