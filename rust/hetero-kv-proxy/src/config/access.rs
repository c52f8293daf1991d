//! Who may come in where: the listeners beside that of the clients.

use super::{Faults, host_port};
use crate::connectors::Connector;

/// Three heartbeats of a MoRI-IO worker, one of which may be lost and one late.
pub(super) const ZMQ_TTL_MS_MIN: u64 = 9_000;

impl Faults {
    /// Where workers register over ZeroMQ.
    pub(super) fn zmq(
        &mut self,
        listen: Option<&String>,
        connector: &dyn Connector,
    ) -> Option<String> {
        let listen = listen?;
        if let Err(fault) = host_port(listen) {
            self.add(format!("--zmq-listen {listen}: {fault}"));
        }
        if connector.moriio_mode().is_none() {
            self.add(format!(
                "--zmq-listen {listen}: only MoRI-IO's workers register over ZeroMQ, and --connector \
                 is {}; take moriio-read or moriio-write, or --admin-listen for others",
                connector.name()
            ));
        }
        Some(listen.clone())
    }
}
