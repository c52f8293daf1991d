//! What two ports agree on: which addresses, how large a packet, how many reads at once.

use hetero_kv_core::wire::data::{QueuePairEnd, QueuePairEnds};

use super::error::VerbsError;
use super::gid::Gid;
use super::node::Node;
use super::queue_pair::{PACKET_NUMBER_MASK, PeerEnd};
use super::sys;

/// The way to one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    /// This side's GID for it.
    pub(super) gid: Gid,
    /// Reads that this side may start at once.
    pub(super) reads_to_start: u8,
    /// Reads of the peer that this side answers at once.
    reads_to_answer: u8,
    peer_gid: [u8; 16],
    peer_lid: u16,
    mtu: sys::ibv_mtu,
}

impl Path {
    /// The way to a peer that announced these ends.
    pub(super) fn to(node: &Node, peer: &QueuePairEnds) -> Result<Self, VerbsError> {
        let peer_gid = gid_bytes(&peer.gid)?;
        let gid = towards(node, peer_gid)?;
        let theirs = mtu_of(peer.mtu_bytes).ok_or_else(|| {
            VerbsError::Mismatch(format!(
                "the peer announces packets of {} bytes; RDMA has 256 to 4096",
                peer.mtu_bytes
            ))
        })?;
        if peer.reads_in_flight_max == 0 {
            return Err(VerbsError::Mismatch(
                "the peer announces that it takes no read at all".into(),
            ));
        }
        let (start, answer) = node.reads_in_flight();
        Ok(Self {
            gid,
            reads_to_start: start.min(peer.reads_in_flight_max),
            reads_to_answer: answer.min(peer.reads_in_flight_max),
            peer_gid,
            peer_lid: peer.lid,
            mtu: theirs.min(node.port.mtu),
        })
    }

    /// One end of the peer's.
    pub(super) fn peer_end(&self, end: QueuePairEnd) -> PeerEnd {
        PeerEnd {
            number: end.0,
            packet_number: end.1 & PACKET_NUMBER_MASK,
            gid: self.peer_gid,
            lid: self.peer_lid,
            mtu: self.mtu,
            reads_in_flight: self.reads_to_answer,
        }
    }

    /// What to tell the peer of this side's ends.
    pub(super) fn ends(&self, node: &Node, queue_pairs: Vec<QueuePairEnd>) -> QueuePairEnds {
        QueuePairEnds {
            reads_in_flight_max: self.reads_to_answer,
            ..ends(node, self.gid, queue_pairs)
        }
    }
}

/// What to tell a peer of whose ends nothing is known yet.
pub(super) fn ends(node: &Node, gid: Gid, queue_pairs: Vec<QueuePairEnd>) -> QueuePairEnds {
    let (start, answer) = node.reads_in_flight();
    QueuePairEnds {
        gid: gid.raw.to_vec(),
        lid: node.port.lid,
        mtu_bytes: mtu_bytes(node.port.mtu),
        reads_in_flight_max: start.min(answer),
        queue_pairs,
    }
}

/// This side's GID that reaches a peer's.
pub(super) fn towards(node: &Node, peer: [u8; 16]) -> Result<Gid, VerbsError> {
    let none = || VerbsError::NoGid {
        device: node.domain.context.name.clone(),
        port: node.port.number,
        wanted: format!(
            "GID of the kind of the peer's {}",
            std::net::Ipv6Addr::from(peer)
        ),
        found: node.describe(),
    };
    node.port.gid_towards(peer, node.gid).ok_or_else(none)
}

/// A GID as it came over the wire.
pub(super) fn gid_bytes(gid: &[u8]) -> Result<[u8; 16], VerbsError> {
    gid.try_into().map_err(|_| {
        VerbsError::Mismatch(format!("the peer's GID has {} bytes, not 16", gid.len()))
    })
}

/// Where packet numbers begin: at random, so that a stray packet of an earlier queue pair of the
/// same number does not fit.
pub(super) fn fresh_packet_number() -> Result<u32, VerbsError> {
    let drawn = getrandom::u32().map_err(|error| VerbsError::Call {
        verb: "getrandom",
        problem: error.to_string(),
    })?;
    Ok(drawn & PACKET_NUMBER_MASK)
}

pub(super) fn mtu_bytes(mtu: sys::ibv_mtu) -> u32 {
    match mtu {
        sys::IBV_MTU_512 => 512,
        sys::IBV_MTU_1024 => 1024,
        sys::IBV_MTU_2048 => 2048,
        sys::IBV_MTU_4096 => 4096,
        _ => 256,
    }
}

fn mtu_of(bytes: u32) -> Option<sys::ibv_mtu> {
    Some(match bytes {
        256 => sys::IBV_MTU_256,
        512 => sys::IBV_MTU_512,
        1024 => sys::IBV_MTU_1024,
        2048 => sys::IBV_MTU_2048,
        4096 => sys::IBV_MTU_4096,
        _ => return None,
    })
}
