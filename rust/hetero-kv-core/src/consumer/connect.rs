//! Prefill engines that D pairs with before any request names them, and stays paired with.
//!
//! Who lives at such an address is not known before it has answered: a *scout* dials it, and becomes
//! an ordinary peer with the answer, or with the first request that names an engine there.

use super::peer::{Peer, PeerAddress, PeerState};
use super::{BACKOFF_MAX, Consumer, ConsumerOutput, PEERS_MAX, REFUSAL_KEPT};
use crate::failure::{Failure, FailureReason};
use crate::step::PeerId;
use crate::time::Time;
use crate::wire::message::EngineIdentity;

/// Most addresses that are kept connected.
pub const STANDING_MAX: usize = 256;

/// An address of the setting `connect`.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    host: String,
    port: u16,
    retry_at: Time,
    /// Failures in a row.
    failures: u32,
}

impl Consumer {
    /// Pairs with whichever prefill engine listens at this address, and again whenever that is lost.
    /// Failures are tried again with growing pauses for as long as it takes; the first in a row is
    /// noted. At most [`STANDING_MAX`] addresses are kept, others are noted.
    pub fn keep_connected(&mut self, now: Time, host: String, port: u16) {
        if self.standing.len() >= STANDING_MAX {
            let text = format!("connect: {host}:{port} is one more than {STANDING_MAX} addresses");
            self.note(true, text);
            return;
        }
        self.standing.push(Standing {
            host,
            port,
            retry_at: now,
            failures: 0,
        });
        self.sweep_standing(now);
    }

    pub(super) fn sweep_standing(&mut self, now: Time) {
        for index in 0..self.standing.len() {
            let standing = &self.standing[index];
            if self.is_in_hand(standing) {
                let backoff = self.options.backoff;
                self.standing[index].retry_at = now + backoff;
            } else if standing.retry_at <= now {
                self.send_scout(now, index);
            }
        }
    }

    /// When an address has to be dialled.
    pub(super) fn standing_due(&self) -> impl Iterator<Item = Time> {
        self.standing
            .iter()
            .filter(|standing| !self.is_in_hand(standing))
            .map(|standing| standing.retry_at)
    }

    /// Whether a peer there is connected or about to be.
    fn is_in_hand(&self, standing: &Standing) -> bool {
        self.peers.values().any(|peer| {
            peer.address.host == standing.host
                && peer.address.port == standing.port
                && (peer.is_connected() || matches!(peer.state, PeerState::Dialing))
        })
    }

    fn send_scout(&mut self, now: Time, index: usize) {
        if self.peers.len() >= PEERS_MAX {
            // Requests make room for themselves; this is only for those to come.
            self.standing[index].retry_at = now + BACKOFF_MAX;
            return;
        }
        // However soon it is known to be of no use, and whoever answers: not in a circle.
        self.standing[index].retry_at = now + self.options.backoff;
        let standing = &self.standing[index];
        let address = PeerAddress {
            host: standing.host.clone(),
            port: standing.port,
            engine: self.identity.engine.clone(),
            incarnation: self.identity.incarnation,
        };
        let id = PeerId(self.next_peer);
        self.next_peer += 1;
        let mut scout = Peer::new(address, now);
        scout.scout = true;
        self.peers.insert(id, scout);
        self.wake_peer(now, id);
    }

    /// The scout of this host and port, if one is under way, becomes the peer that a request names:
    /// the engine there tells by its answer whether it is the one.
    pub(super) fn take_over_scout(&mut self, address: &PeerAddress) -> Option<PeerId> {
        let (id, scout) = self.peers.iter_mut().find(|(_, peer)| {
            peer.scout && peer.address.host == address.host && peer.address.port == address.port
        })?;
        scout.scout = false;
        scout.address = address.clone();
        self.by_address.insert(address.clone(), *id);
        Some(*id)
    }

    /// A scout has been told who lives there. True when it goes on as a peer.
    pub(super) fn found(&mut self, now: Time, peer_id: PeerId, them: &EngineIdentity) -> bool {
        let Some(scout) = self.peers.get_mut(&peer_id) else {
            return false;
        };
        if them.engine == self.identity.engine {
            let failure = Failure::of_field(
                FailureReason::PairRefused,
                "connect",
                format!("{} is this engine itself", scout.place()),
            );
            self.hang_up(now, peer_id, failure);
            return false;
        }
        let address = PeerAddress {
            engine: them.engine.clone(),
            incarnation: them.incarnation,
            ..scout.address.clone()
        };
        if let Some(&known) = self.by_address.get(&address) {
            // Workers and transfers know it by its number, so it is that one that has to connect.
            self.outputs.push_back(ConsumerOutput::Close(peer_id));
            self.peers.remove(&peer_id);
            self.reach(now, known);
            return false;
        }
        scout.scout = false;
        scout.address = address.clone();
        self.by_address.insert(address, peer_id);
        true
    }

    /// Dials a peer that a scout has met, or lets the scouts wait until its back-off is over.
    fn reach(&mut self, now: Time, known: PeerId) {
        let Some(peer) = self.peers.get(&known) else {
            return;
        };
        if let PeerState::Down { until, .. } = peer.state
            && until > now
        {
            let PeerAddress { host, port, .. } = peer.address.clone();
            if let Some(standing) = self.standing_at(&host, port) {
                standing.retry_at = until;
            }
            return;
        }
        self.wake_peer(now, known);
    }

    /// The engine there has a connection of this start already, and says no more.
    pub(super) fn scout_is_not_needed(&mut self, now: Time, peer_id: PeerId) {
        self.outputs.push_back(ConsumerOutput::Close(peer_id));
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return;
        };
        if !peer.scout {
            // A request has taken it over and says whom it looks for.
            peer.enter(now, PeerState::Idle);
            self.wake_peer(now, peer_id);
            return;
        }
        let PeerAddress { host, port, .. } = peer.address.clone();
        // Under another name of its host; or by this one, and only here is it known to be broken.
        let broken = self.broken_at(&host, port);
        if let Some(standing) = self.end_scout(peer_id) {
            standing.failures = 0;
            if broken.is_none() {
                standing.retry_at = now + REFUSAL_KEPT;
            }
        }
        if let Some(broken) = broken {
            self.reach(now, broken);
        }
    }

    /// The latest peer there that was lost and not refused.
    fn broken_at(&self, host: &str, port: u16) -> Option<PeerId> {
        self.peers
            .iter()
            .rev()
            .find(|(_, peer)| {
                let lost = match &peer.state {
                    PeerState::Idle => true,
                    PeerState::Down { why, .. } => why.reason != FailureReason::PairRefused,
                    PeerState::Dialing
                    | PeerState::Greeting
                    | PeerState::Asking(_)
                    | PeerState::Ready(_) => false,
                };
                lost && peer.address.host == host && peer.address.port == port
            })
            .map(|(id, _)| *id)
    }

    pub(super) fn lose_scout(&mut self, now: Time, peer_id: PeerId, failure: &Failure) {
        let backoff = self.options.backoff;
        let Some(standing) = self.end_scout(peer_id) else {
            return;
        };
        let pause = if failure.reason == FailureReason::PairRefused {
            REFUSAL_KEPT
        } else {
            backoff
                .saturating_mul(1 << standing.failures.min(8))
                .min(BACKOFF_MAX)
        };
        standing.failures = standing.failures.saturating_add(1);
        standing.retry_at = now + pause;
        if standing.failures == 1 {
            let text = format!("connect: {failure}; tried again until it answers");
            self.note(true, text);
        }
    }

    fn end_scout(&mut self, peer_id: PeerId) -> Option<&mut Standing> {
        let PeerAddress { host, port, .. } = self.peers.remove(&peer_id)?.address;
        self.standing_at(&host, port)
    }

    fn standing_at(&mut self, host: &str, port: u16) -> Option<&mut Standing> {
        self.standing
            .iter_mut()
            .find(|standing| standing.host == host && standing.port == port)
    }

    /// A peer is paired: what failed there before is over.
    pub(super) fn stands(&mut self, peer_id: PeerId) {
        let Some(address) = self.peers.get(&peer_id).map(|peer| &peer.address) else {
            return;
        };
        for standing in &mut self.standing {
            if standing.host == address.host && standing.port == address.port {
                standing.failures = 0;
            }
        }
    }
}
