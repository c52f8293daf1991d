//! No KV connector: decode engines compute the prompt too.

use super::{Connector, Leg, Order, PrefillAnswer, Transfer};

/// `none`.
#[derive(Debug)]
pub(super) struct NoConnector;

impl Connector for NoConnector {
    fn name(&self) -> &'static str {
        "none"
    }

    fn order(&self) -> Order {
        Order::DecodeAlone
    }

    fn engine_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn prefill_leg(&self, _: &Transfer<'_>) -> Leg {
        Leg {
            params: "null".to_owned(),
            request_id: None,
        }
    }

    fn decode_leg(&self, _: &Transfer<'_>, _: Option<&PrefillAnswer<'_>>) -> Option<Leg> {
        None
    }
}
