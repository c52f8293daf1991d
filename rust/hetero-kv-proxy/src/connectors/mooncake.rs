//! vLLM's `MooncakeConnector`: both legs name a transfer id that the proxy mints; decode asks the
//! prefill instance's bootstrap server where the ranks are, and the prefill rank by its engine id.
//!
//! Prefill answers without params. It keeps the blocks exactly when it ended for its token limit.
//! Decode goes second although it could go at once: a decode engine that asks for a transfer of
//! which prefill has never heard, since its leg failed, would leave a waiting entry there.

use super::{Connector, Leg, Order, PrefillAnswer, Transfer, quoted};
use crate::openai::response::Ended;

/// `mooncake`.
#[derive(Debug)]
pub(super) struct Mooncake;

impl Connector for Mooncake {
    fn name(&self) -> &'static str {
        "mooncake"
    }

    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    fn engine_names(&self) -> &'static [&'static str] {
        &["MooncakeConnector"]
    }

    fn needs_engine_id(&self) -> bool {
        true
    }

    fn worker_keys(&self) -> &'static [&'static str] {
        &["bootstrap"]
    }

    fn prefill_leg(&self, transfer: &Transfer<'_>) -> Leg {
        let id = transfer.id;
        Leg {
            params: format!(
                r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-{id}"}}"#
            ),
            request_id: None,
        }
    }

    fn decode_leg(
        &self,
        transfer: &Transfer<'_>,
        answer: Option<&PrefillAnswer<'_>>,
    ) -> Option<Leg> {
        match answer?.ended {
            Ended::Length => {}
            Ended::Stopped | Ended::Unknown => return None,
        }
        let Transfer { id, prefill, .. } = transfer;
        Some(Leg {
            params: format!(
                r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":{},"remote_engine_id":{},"transfer_id":"xfer-{id}"}}"#,
                quoted(&prefill.peer.bootstrap),
                quoted(prefill.engine_id?),
            ),
            request_id: None,
        })
    }
}
