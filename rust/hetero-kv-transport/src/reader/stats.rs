//! What can be seen of a reader from outside.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::plan::Route;

use super::choose::PassedOver;
use super::job::Job;
use crate::transport::TransportName;

/// Gauges of a reader, and its open sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReaderStats {
    /// Jobs taken and not done.
    pub jobs_in_flight: usize,
    /// Jobs stopped longer ago than the quiesce timeout and not done: their blocks stay held.
    pub jobs_unquiesced: usize,
    /// Reading threads.
    pub sessions: usize,
    /// Open sessions, by route.
    pub peers: Vec<PeerStats>,
    /// Connections since the start that are of a worse transport than this one, by the reason.
    pub passed_over: BTreeMap<(TransportName, PassedOver), u64>,
}

/// One open session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStats {
    /// The source.
    pub route: Route,
    /// Transport of its last connection; `None` before the first.
    pub transport: Option<TransportName>,
    /// Why it is that one.
    pub why: String,
    /// Connections made after the first.
    pub reconnects: u64,
    /// Bytes read and fenced.
    pub bytes: u64,
}

/// Counts the unquiesced jobs and logs each of them once.
/// Under no lock: whoever reads the log may be slow.
pub(super) fn report_unquiesced(jobs: &[Arc<Job>], timeout: Duration) -> usize {
    jobs.iter().filter(|job| job.unquiesced(timeout)).count()
}
