//! vLLM's `NixlConnector`, pull and push: prefill answers with the handle, decode is sent it.

use super::{Connector, Leg, Order, PrefillAnswer, Transfer};

/// `nixl`.
#[derive(Debug)]
pub(super) struct Nixl;

impl Connector for Nixl {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    fn engine_names(&self) -> &'static [&'static str] {
        &["NixlConnector", "NixlPullConnector", "NixlPushConnector"]
    }

    fn prefill_leg(&self, _: &Transfer<'_>) -> Leg {
        Leg {
            params: concat!(
                r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"#,
                r#""remote_block_ids":null,"remote_host":null,"remote_port":null}"#
            )
            .to_owned(),
            request_id: None,
        }
    }

    fn decode_leg(&self, _: &Transfer<'_>, answer: Option<&PrefillAnswer<'_>>) -> Option<Leg> {
        as_returned(answer)
    }
}

/// The params of the answer, byte for byte.
pub(super) fn as_returned(answer: Option<&PrefillAnswer<'_>>) -> Option<Leg> {
    Some(Leg {
        params: answer?.params?.to_owned(),
        request_id: None,
    })
}
