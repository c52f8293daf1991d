//! What vLLM's `MoRIIOConnector` expects in both of its modes (0.32 and 0.33).
//!
//! Both legs carry a request id in which each engine finds the other's control sockets. A DP rank
//! in params is the rank within the whole engine, and vLLM folds it by `remote_dp_size_local` to the
//! port within the instance; a DP rank in a header is the instance's own business.

use super::{PeerSpec, Slot, Transfer};
use crate::routing::Role;

/// What engines of both modes are started with.
pub(super) const ENGINE_NAMES: [&str; 1] = ["MoRIIOConnector"];

/// The keys of a worker in both modes.
pub(super) const KEYS: [&str; 6] = [
    "dp-size",
    "dp-rank0",
    "tp",
    "kv-host",
    "handshake",
    "notify",
];

/// The request id of both legs.
pub(super) fn request_id(transfer: &Transfer<'_>, decode: &Slot<'_>) -> String {
    format!(
        "___prefill_addr_{}___decode_addr_{}_{}",
        transfer.prefill.peer.zmq, decode.peer.zmq, transfer.id
    )
}

/// Shapes that no mode can serve.
pub(super) fn check(_: Role, worker: &PeerSpec) -> Result<(), String> {
    let PeerSpec {
        dp,
        dp_size,
        dp_rank0,
        tp,
        zmq,
        ..
    } = worker;
    if *dp > 1 && *tp > 1 {
        return Err(format!(
            "dp={dp} with tp={tp}: vLLM's MoRIIOConnector gives DP rank d and TP rank t the port \
             base + d + t, so that ranks of one instance share ports; run one of the two at 1"
        ));
    }
    if dp_rank0 % dp != 0 || dp_rank0 + dp > *dp_size || dp_size % dp != 0 {
        return Err(format!(
            "dp-size={dp_size} and dp-rank0={dp_rank0} with dp={dp}: an instance owns dp ranks of \
             dp-size, from a multiple of dp on"
        ));
    }
    // vLLM finds the address by these marks.
    if zmq.host.contains("___") || zmq.host.contains([',', ' ']) {
        return Err(format!("kv-host={}: not an address", zmq.host));
    }
    Ok(())
}
