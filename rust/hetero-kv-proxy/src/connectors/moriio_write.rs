//! vLLM's `MoRIIOConnector` without `read_mode`: both legs at once; decode names its blocks to the
//! prefill rank, which writes into them.

use super::{Connector, Leg, Order, PeerSpec, PrefillAnswer, Transfer, moriio};
use crate::routing::Role;

/// `moriio-write`.
#[derive(Debug)]
pub(super) struct MoriioWrite;

impl Connector for MoriioWrite {
    fn name(&self) -> &'static str {
        "moriio-write"
    }

    fn order(&self) -> Order {
        Order::Together
    }

    fn engine_names(&self) -> &'static [&'static str] {
        &moriio::ENGINE_NAMES
    }

    fn needs_pair(&self) -> bool {
        true
    }

    fn moriio_mode(&self) -> Option<&'static str> {
        Some("WRITE")
    }

    fn worker_keys(&self) -> &'static [&'static str] {
        &moriio::KEYS
    }

    fn check(&self, role: Role, worker: &PeerSpec) -> Result<(), String> {
        if role == Role::Decode && worker.dp < worker.dp_size {
            return Err(format!(
                "dp={} of dp-size={}: in WRITE mode prefill must reach every rank of a decode \
                 engine, at addresses that a part of it does not know; use moriio-read, or one \
                 decode engine for each instance",
                worker.dp, worker.dp_size
            ));
        }
        moriio::check(role, worker)
    }

    fn prefill_leg(&self, transfer: &Transfer<'_>) -> Leg {
        let decode = transfer.decode;
        let (dp, dp_size, tp) = decode.map_or((1, 1, 0), |decode| {
            (decode.peer.dp, decode.peer.dp_size, decode.peer.tp)
        });
        Leg {
            params: format!(
                r#"{{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"tx-{}","remote_dp_size":{dp_size},"remote_dp_size_local":{dp}{}}}"#,
                transfer.id,
                tp_size(tp)
            ),
            request_id: decode.map(|decode| moriio::request_id(transfer, &decode)),
        }
    }

    /// The leg names the prefill rank, and says that the rank it lands on is the one to tell it:
    /// without that word only ranks of the first instance of an engine would.
    fn decode_leg(&self, transfer: &Transfer<'_>, _: Option<&PrefillAnswer<'_>>) -> Option<Leg> {
        let decode = transfer.decode?;
        let prefill = transfer.prefill;
        let PeerSpec {
            dp, dp_size, tp, ..
        } = prefill.peer;
        Some(Leg {
            params: format!(
                r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"tx-{}","remote_dp_size":{dp_size},"remote_dp_size_local":{dp},"remote_dp_rank":{},"is_request_leader":true{}}}"#,
                transfer.id,
                prefill.global_rank(),
                tp_size(*tp)
            ),
            request_id: Some(moriio::request_id(transfer, &decode)),
        })
    }
}

/// The member for a known size; vLLM takes an unknown one as equal to its own.
fn tp_size(tp: u32) -> String {
    match tp {
        0 => String::new(),
        tp => format!(r#","remote_tp_size":{tp}"#),
    }
}
