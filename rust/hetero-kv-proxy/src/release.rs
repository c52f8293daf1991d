//! Blocks that prefill keeps for a decode leg which was refused.
//!
//! What an engine answers with 4xx it has not handed to its scheduler: a token limit beyond its
//! context, several sequences of greedy sampling, a model that it has not. Prefill could not find
//! that out, since its leg has limits of its own. Its blocks are pinned then, and decode's connector,
//! which alone can free them, has never heard of them. So a decode engine gets what prefill took
//! without complaint, with the same handle: it reads the blocks and releases them. Nobody waits for
//! the one token; the leg is closed as that of a client that left. An engine that fails it is none that
//! fails: it may have had the blocks before it refused.
//!
//! Only with a connector that refuses a second read by itself: with others an engine that had read
//! the blocks before it answered 4xx would now read what is in them by then, and might keep that in
//! its prefix cache.

use std::sync::Arc;

use crate::connectors::Leg;
use crate::handover::{DecodeHead, HandOver};
use crate::instance::Instance;
use crate::lease::KeptBlocks;
use crate::legs::{Call, Failure};
use crate::routing::Role;
use crate::upstream::{LegBody, Written};

/// Has the blocks of `source` read and released in the background, by one leg that is not sent
/// again. `leg` is what a decode leg carries. Where it fails, the blocks stay until their lease ends
/// and count as left.
pub(crate) fn release(call: &Arc<Call>, source: Arc<Instance>, kept: KeptBlocks, leg: Option<Leg>) {
    let written = Written::default();
    let pending = {
        let (call, written) = (Arc::clone(call), written.clone());
        async move {
            let lease = call.slot(Role::Decode, &[], Some(&source)).await?;
            let leg = leg.ok_or(None)?;
            let body = call.request.prefill_body(&leg.params);
            let body = LegBody::new(body, Some(written));
            // Over a connection of its own: the engine may have closed the one that it refused on.
            let sent = call.send_unjudged(&lease, body, Some(&leg), true).await;
            let answer = sent.map_err(|error| {
                let url = &*source.label;
                tracing::debug!(url, %error, "blocks of a refused leg stay until their lease ends");
                None
            })?;
            Ok(DecodeHead {
                kept: Some(kept),
                ..DecodeHead::claiming(answer, lease)
            })
        }
    };
    // Dropped, it goes on in the background.
    drop(HandOver::<Option<Failure>>::new(
        Arc::clone(&call.app),
        written,
        pending,
    ));
}
