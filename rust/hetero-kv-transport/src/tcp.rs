//! `tcp`: reads a rank anywhere. The holder sends straight from KV memory and the reader receives
//! straight into it, both in pieces as scattered as the plan makes them; neither side keeps a
//! thread that spins, and there is no limit on the length of a read.
//!
//! The messages are in [`hetero_kv_core::wire::data`]. The holder checks the lease before it sends
//! and after the last byte was handed to the kernel (which has then copied it), so the reader need
//! not.

pub(crate) mod attach;
mod connection;
mod framing;
mod places;
mod prove;
mod serve;
mod server;
pub(crate) mod socket;

use std::sync::Arc;

use hetero_kv_core::auth::Keys;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::card::Endpoints;
use hetero_kv_core::wire::data::{FETCH_BYTES_MAX, FETCH_RUNS_MAX};

use connection::TcpConnection;
pub use server::{DataServer, HolderPlace, ServeError, ServerOptions, ServerStats};

use crate::error::{ReadFailureKind, TransportError};
use crate::memory::LocalMemory;
use crate::transport::{Capabilities, Connection, Interrupt, Source, Transport, TransportName};

/// Fetches of one connection that are asked for and not answered. Four of 4 MiB cover the product
/// of bandwidth and delay of a 100 Gb/s link at 1 ms, and are what a cancel throws away.
const FETCHES_IN_FLIGHT_MAX: usize = 4;

/// Fetches over one TCP connection per source rank.
#[derive(Clone, Debug, Default)]
pub struct TcpTransport {
    keys: Option<Keys>,
}

impl TcpTransport {
    /// Reads only from holders that prove one of these keys.
    pub fn new(keys: Option<Keys>) -> Self {
        Self { keys }
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> TransportName {
        TransportName::Tcp
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            one_sided: false,
            batch_runs_max: FETCH_RUNS_MAX,
            batch_bytes_max: FETCH_BYTES_MAX,
            in_flight_max: FETCHES_IN_FLIGHT_MAX,
        }
    }

    fn offered(&self, endpoints: &Endpoints) -> bool {
        endpoints.tcp.is_some()
    }

    fn connect(
        &self,
        source: &Source,
        memory: Arc<LocalMemory>,
        deadline: Time,
        interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Connection>, TransportError> {
        let endpoint = source.endpoints.tcp.as_ref().ok_or_else(|| {
            TransportError::new(
                ReadFailureKind::Unreachable,
                "connect",
                "the source does not offer tcp",
            )
        })?;
        let attached = attach::reach(
            &endpoint.host,
            endpoint.port,
            source,
            deadline,
            self.keys.as_ref(),
            interrupt,
        )?;
        Ok(Box::new(TcpConnection::new(
            attached,
            source.regions.clone(),
            memory,
        )))
    }
}
