//! Our own connector: decode reads what the prefill answer names.

use super::{Connector, Leg, Order, PrefillAnswer, Transfer};

/// `hetero`.
#[derive(Debug)]
pub(super) struct Hetero;

impl Connector for Hetero {
    fn name(&self) -> &'static str {
        "hetero"
    }

    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    fn engine_names(&self) -> &'static [&'static str] {
        &["HeteroKVConnector"]
    }

    /// The params name the prompt they belong to by its digest, and acknowledgements are sets: the
    /// sequence that they fit reads, the others compute.
    fn shares_transfer(&self) -> bool {
        true
    }

    /// A claim on a lease that is over, or that another engine owns, is refused by name.
    fn refuses_second_read(&self) -> bool {
        true
    }

    fn prefill_leg(&self, transfer: &Transfer<'_>) -> Leg {
        let id = transfer.id;
        Leg {
            params: format!(
                r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{id}"}}"#
            ),
            request_id: None,
        }
    }

    fn decode_leg(&self, _: &Transfer<'_>, answer: Option<&PrefillAnswer<'_>>) -> Option<Leg> {
        super::nixl::as_returned(answer)
    }
}
