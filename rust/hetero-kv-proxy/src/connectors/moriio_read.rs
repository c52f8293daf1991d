//! vLLM's `MoRIIOConnector` with `read_mode`: decode reads what the prefill answer names.

use bytes::Bytes;

use super::{Connector, Leg, Order, PeerSpec, PrefillAnswer, Transfer, moriio};
use crate::openai::splice::{Change, Object};
use crate::routing::Role;

/// `moriio-read`.
#[derive(Debug)]
pub(super) struct MoriioRead;

impl Connector for MoriioRead {
    fn name(&self) -> &'static str {
        "moriio-read"
    }

    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    fn engine_names(&self) -> &'static [&'static str] {
        &moriio::ENGINE_NAMES
    }

    fn needs_pair(&self) -> bool {
        true
    }

    fn moriio_mode(&self) -> Option<&'static str> {
        Some("READ")
    }

    fn worker_keys(&self) -> &'static [&'static str] {
        &moriio::KEYS
    }

    fn check(&self, role: Role, worker: &PeerSpec) -> Result<(), String> {
        moriio::check(role, worker)
    }

    fn prefill_leg(&self, transfer: &Transfer<'_>) -> Leg {
        let decode = transfer.decode;
        let dp_size = decode.map_or(1, |decode| decode.peer.dp_size);
        Leg {
            params: format!(
                r#"{{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"tx-{}","remote_dp_size":{dp_size}}}"#,
                transfer.id
            ),
            request_id: decode.map(|decode| moriio::request_id(transfer, &decode)),
        }
    }

    /// The answer's params, with what an older prefill engine leaves out.
    ///
    /// The rank in the answer is the one that ran the prefill, and stays. Where the instance is a
    /// part of a larger engine, rank and size become those within the instance: the reader pairs
    /// with each rank up to the size, all at one host.
    fn decode_leg(
        &self,
        transfer: &Transfer<'_>,
        answer: Option<&PrefillAnswer<'_>>,
    ) -> Option<Leg> {
        let returned = answer?.params?;
        let text = returned.as_bytes();
        let object = Object::parse(text).ok()?;
        let number = |name, without: u32| -> Option<u32> {
            match object.find(text, name).ok()? {
                Some(range) => returned.get(range)?.parse().ok(),
                None => Some(without),
            }
        };
        let peer = transfer.prefill.peer;
        let size = number("remote_dp_size", peer.dp_size)?;
        let rank = number("remote_dp_rank", transfer.prefill.global_rank())?;
        let local = match number("remote_dp_size_local", peer.dp)? {
            0 => size,
            local => local.min(size),
        };
        let (rank, size) = (rank.checked_rem(local)?.to_string(), local.to_string());
        let tp = peer.tp.to_string();
        let mut changes = vec![
            Change::Set("remote_dp_rank", &rank),
            Change::Set("remote_dp_size", &size),
        ];
        if peer.tp > 0 && object.find(text, "tp_size").ok()?.is_none() {
            changes.push(Change::Set("remote_tp_size", &tp));
        }
        let text = Bytes::copy_from_slice(text);
        let pieces = object.apply(&text, &changes, usize::MAX);
        let params = String::from_utf8(pieces.concat()).ok()?;
        let decode = transfer.decode?;
        Some(Leg {
            params,
            request_id: Some(moriio::request_id(transfer, &decode)),
        })
    }
}
