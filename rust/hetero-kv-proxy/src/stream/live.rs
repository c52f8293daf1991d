//! What lives as long as a decode answer, and what its first bytes say of who made it.

use http::StatusCode;
use http_body::Body;

use crate::answer::Record;
use crate::app::App;
use crate::handover::DecodeHead;
use crate::meters::DecodeMeters;
use crate::openai::{error, sse};
use crate::routing::LegFault;
use crate::running::Running;
use crate::seats::Seat;

/// A decode answer that has not ended.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) decode: DecodeHead,
    pub(super) record: Record,
    pub(super) _seat: Seat,
    pub(super) running: Running,
}

impl Live {
    /// The meters of the engine that answers.
    pub(super) fn meters(&self) -> Option<&DecodeMeters> {
        self.decode.lease.instance().meters.decode.as_ref()
    }

    /// Whether the engine sends nothing more.
    #[inline]
    pub(super) fn engine_ended(&self) -> bool {
        self.decode.early.is_none() && self.decode.answer.body.is_end_stream()
    }

    /// What the first bytes of the body, which may be of an event stream, say of the engine, and of
    /// the pair that moved its KV.
    pub(super) fn judge(&mut self, app: &App, is_events: bool, first: &[u8]) {
        let kept = self.decode.kept.take();
        let DecodeHead {
            answer,
            lease,
            source,
            ..
        } = &self.decode;
        let status = answer.head.status;
        let broke = is_events && sse::is_failure(first);
        if broke {
            lease.note_failed(LegFault::Failed);
        } else if status.is_success() {
            lease.note_served();
            app.note_pair_served(source.as_deref(), lease.instance());
            // Decode has read its KV.
            if let Some(kept) = kept {
                kept.taken();
            }
        }
        let names_kv = (broke || status.is_server_error()) && error::names_kv(first);
        // Gateways answer 502 to 504 for what has nothing to do with KV.
        let failed = broke || names_kv || status == StatusCode::INTERNAL_SERVER_ERROR;
        if let (true, Some(source)) = (failed, source) {
            app.note_pair_failed(source, lease.instance(), names_kv);
        }
    }
}
