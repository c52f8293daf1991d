//! The holding end: queue pairs that answer a reader's requests, as long as its connection stands.

use std::sync::Arc;

use hetero_kv_core::wire::data::{QUEUE_PAIRS_MAX, QueuePairEnd, QueuePairEnds};

use super::completion::CompletionQueue;
use super::error::VerbsError;
use super::memory::Access;
use super::node::Node;
use super::path::{Path, fresh_packet_number};
use super::queue_pair::{Depth, QueuePair, ReadyToReceive};

/// Queue pairs of one reader. Dropping it ends them.
pub(crate) struct HolderEnds {
    _queue_pairs: Vec<QueuePair<ReadyToReceive>>,
    _node: Arc<Node>,
}

/// Makes this side's ends of a reader's queue pairs, ready to answer, and what to tell it.
pub(crate) fn answer(
    node: &Arc<Node>,
    reader: &QueuePairEnds,
) -> Result<(HolderEnds, QueuePairEnds), VerbsError> {
    let count = reader.queue_pairs.len();
    if !(1..=QUEUE_PAIRS_MAX).contains(&count) {
        return Err(VerbsError::Mismatch(format!(
            "{count} queue pairs were asked for; 1 to {QUEUE_PAIRS_MAX} are made"
        )));
    }
    if node.fault.happened() {
        return Err(VerbsError::Mismatch(format!(
            "the holder's device failed: {}",
            node.describe()
        )));
    }
    let path = Path::to(node, reader)?;
    // Requests of the reader make no completion here; the queue only has to exist.
    let queue = CompletionQueue::new(&node.domain.context, count)?;
    let depth = Depth {
        sends: 1,
        receives: 1,
        pieces: 1,
    };
    let mut queue_pairs = Vec::with_capacity(count);
    let mut ends = Vec::with_capacity(count);
    for end in &reader.queue_pairs {
        let queue_pair = QueuePair::new(&node.domain, &queue, depth)?
            .init(&node.port, Access::RemoteRead)?
            .ready_to_receive(&node.port, path.gid.index, &path.peer_end(*end))?;
        ends.push(QueuePairEnd(queue_pair.number(), fresh_packet_number()?));
        queue_pairs.push(queue_pair);
    }
    let told = path.ends(node, ends);
    Ok((
        HolderEnds {
            _queue_pairs: queue_pairs,
            _node: Arc::clone(node),
        },
        told,
    ))
}
