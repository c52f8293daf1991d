//! The control plane: dialling, greeting and pairing with prefill engines, and losing them.

use super::greeting::Greeting;
use super::peer::{Peer, PeerAddress, PeerState, Resuming, check_layout, refusal};
use super::{BACKOFF_MAX, Consumer, ConsumerOutput, PEERS_MAX, REFUSAL_KEPT, RESUME_MAX};
use crate::auth::Nonce;
use crate::failure::{Failure, FailureReason};
use crate::ids::TransferId;
use crate::step::PeerId;
use crate::time::Time;
use crate::wire::WIRE_VERSION;
use crate::wire::message::{Hello, Layout, Message, RejectCode};

impl Consumer {
    /// Pairs with an engine before any request needs it.
    pub fn connect(&mut self, now: Time, address: PeerAddress) -> Result<PeerId, Failure> {
        let peer_id = self.peer(now, address)?;
        self.wake_peer(now, peer_id);
        Ok(peer_id)
    }

    /// The connection asked for by [`ConsumerOutput::Dial`] stands. After a
    /// [`ConsumerOutput::Close`] nothing of that connection may come any more. The nonce is for this
    /// connection alone.
    pub fn handle_dialed(&mut self, now: Time, peer_id: PeerId, nonce: Nonce) {
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            self.outputs.push_back(ConsumerOutput::Close(peer_id));
            return;
        };
        match peer.state {
            PeerState::Dialing => {}
            // Given up while the dial was on its way.
            PeerState::Idle | PeerState::Down { .. } => {
                self.outputs.push_back(ConsumerOutput::Close(peer_id));
                return;
            }
            PeerState::Greeting | PeerState::Asking(_) | PeerState::Ready(_) => return,
        }
        peer.hear(now);
        peer.enter(now, PeerState::Greeting);
        peer.greeted_as_scout = peer.scout;
        let hello = Hello {
            versions: (WIRE_VERSION, WIRE_VERSION),
            from: self.identity.clone(),
            expect_engine: peer.address.engine.clone(),
            expect_incarnation: peer.address.incarnation,
            any_engine: peer.scout,
            compat_digest: self.fields.digest().to_vec(),
            nonce: self.keys.is_some().then(|| nonce.0.to_vec()),
        };
        peer.greeting = (self.keys.is_some()).then(|| Greeting::new(hello.clone(), nonce));
        self.send(peer_id, Message::Hello(Box::new(hello)));
    }

    /// The connection could not be made, broke, or was closed by the peer.
    pub fn handle_closed(&mut self, now: Time, peer_id: PeerId, why: &str) {
        let Some(peer) = self.peers.get(&peer_id) else {
            return;
        };
        let (reason, text) = match peer.state {
            PeerState::Dialing | PeerState::Idle => (
                FailureReason::Unreachable,
                format!("{}: {why}", peer.place()),
            ),
            PeerState::Greeting | PeerState::Asking(_) | PeerState::Ready(_) => (
                FailureReason::PeerLost,
                format!("{} is gone: {why}", peer.place()),
            ),
            PeerState::Down { .. } => return,
        };
        self.resume_or_lose(now, peer_id, Failure::new(reason, text));
    }

    /// A message has come.
    pub fn handle_message(&mut self, now: Time, peer_id: PeerId, message: Message) {
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return;
        };
        if !peer.is_connected() {
            // Still in the socket when the connection was given up.
            return;
        }
        peer.hear(now);
        if matches!(peer.state, PeerState::Greeting) && self.is_about_keys(now, peer_id, &message) {
            return;
        }
        let Some(peer) = self.peers.get(&peer_id) else {
            return;
        };
        if let (true, PeerState::Greeting, Message::Accept(accept)) =
            (peer.scout, &peer.state, &message)
            && !self.found(now, peer_id, &accept.from)
        {
            return;
        }
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return;
        };
        match (&peer.state, message) {
            (PeerState::Greeting, Message::Accept(accept)) if accept.version != WIRE_VERSION => {
                let failure = Failure::of_field(
                    FailureReason::PairRefused,
                    "wire_version",
                    format!(
                        "prefill chose wire version {}, this engine speaks {WIRE_VERSION}",
                        accept.version
                    ),
                );
                self.hang_up(now, peer_id, failure);
            }
            (PeerState::Greeting, Message::Accept(accept)) => {
                if accept.from.engine != peer.address.engine
                    || accept.from.incarnation != peer.address.incarnation
                {
                    let failure = Failure::of_field(
                        FailureReason::PairRefused,
                        "remote_engine_id",
                        format!(
                            "the engine there is {} ({}), expected {} ({})",
                            accept.from.engine,
                            accept.from.incarnation,
                            peer.address.engine,
                            peer.address.incarnation
                        ),
                    );
                    self.hang_up(now, peer_id, failure);
                    return;
                }
                peer.enter(now, PeerState::Asking(Box::new(accept.from)));
                let layout = Layout {
                    from: self.identity.clone(),
                    workers: Vec::new(),
                };
                self.send(peer_id, Message::Layout(Box::new(layout)));
            }
            (
                PeerState::Greeting | PeerState::Asking(_) | PeerState::Ready(_),
                Message::Reject(reject),
            ) => {
                if reject.code == RejectCode::AlreadyConnected
                    && peer.greeted_as_scout
                    && matches!(peer.state, PeerState::Greeting)
                {
                    self.scout_is_not_needed(now, peer_id);
                    return;
                }
                let failure = refusal(&self.fields, &reject);
                self.hang_up(now, peer_id, failure);
            }
            (PeerState::Asking(identity), Message::Layout(layout)) => {
                let cut = (self.heads, self.options.block_size);
                match check_layout(&self.identity, cut, identity, &layout) {
                    Err(failure) => self.hang_up(now, peer_id, failure),
                    Ok(()) => self.pair(now, peer_id, layout),
                }
            }
            (PeerState::Ready(_), Message::Granted(granted)) => {
                self.handle_granted(now, peer_id, *granted);
            }
            (PeerState::Ready(_), Message::Gone(gone)) => self.handle_gone(now, peer_id, gone),
            (_, Message::Ping) => self.send(peer_id, Message::Pong),
            (_, Message::Pong) => {}
            (_, Message::Bye) => {
                let failure = Failure::new(FailureReason::PeerLost, "prefill is going down");
                self.hang_up(now, peer_id, failure);
            }
            (PeerState::Idle | PeerState::Dialing | PeerState::Down { .. }, Message::Reject(_))
            | (
                PeerState::Idle
                | PeerState::Dialing
                | PeerState::Greeting
                | PeerState::Asking(_)
                | PeerState::Ready(_)
                | PeerState::Down { .. },
                Message::Hello(_)
                | Message::Accept(_)
                | Message::Layout(_)
                | Message::Claim(_)
                | Message::Granted(_)
                | Message::Gone(_)
                | Message::Renew(_)
                | Message::Ack(_)
                | Message::Release(_)
                | Message::Challenge(_)
                | Message::Proof(_),
            ) => {
                let failure = Failure::new(
                    FailureReason::PairRefused,
                    "prefill sent a message out of place",
                );
                self.hang_up(now, peer_id, failure);
            }
        }
    }

    pub(super) fn peer(&mut self, now: Time, address: PeerAddress) -> Result<PeerId, Failure> {
        if let Some(id) = self.by_address.get(&address) {
            return Ok(*id);
        }
        if let Some(id) = self.take_over_scout(&address) {
            return Ok(id);
        }
        if self.peers.len() >= PEERS_MAX {
            let busy: std::collections::BTreeSet<PeerId> = self
                .transfers
                .values()
                .map(|transfer| transfer.peer)
                .collect();
            let idle = self
                .peers
                .iter()
                .filter(|(id, _)| !busy.contains(id))
                .min_by_key(|(_, peer)| peer.used_at)
                .map(|(id, _)| *id);
            let Some(idle) = idle else {
                return Err(Failure::new(
                    FailureReason::Unreachable,
                    format!("{PEERS_MAX} prefill engines are in use at once"),
                ));
            };
            if let Some(peer) = self.peers.remove(&idle) {
                self.by_address.remove(&peer.address);
                if peer.is_connected() {
                    self.outputs.push_back(ConsumerOutput::Close(idle));
                }
            }
        }
        let id = PeerId(self.next_peer);
        self.next_peer += 1;
        self.by_address.insert(address.clone(), id);
        self.peers.insert(id, Peer::new(address, now));
        Ok(id)
    }

    /// Dials a peer that is idle or whose back-off is over; true while it may still become ready.
    pub(super) fn wake_peer(&mut self, now: Time, peer_id: PeerId) -> bool {
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return false;
        };
        peer.used_at = now;
        match &peer.state {
            PeerState::Down { until, .. } if *until > now => false,
            PeerState::Idle | PeerState::Down { .. } => {
                peer.enter(now, PeerState::Dialing);
                let address = peer.address.clone();
                self.counts.dials += 1;
                self.outputs
                    .push_back(ConsumerOutput::Dial(peer_id, address));
                true
            }
            PeerState::Dialing
            | PeerState::Greeting
            | PeerState::Asking(_)
            | PeerState::Ready(_) => true,
        }
    }

    pub(super) fn pair(&mut self, now: Time, peer_id: PeerId, layout: Box<Layout>) {
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return;
        };
        if peer.announced {
            self.counts.reconnects += 1;
        }
        let text = format!(
            "paired with prefill engine {} at {}:{}: its dp rank {} has tp {}, pp {}; ours tp {}, pp {}",
            peer.address.engine,
            peer.address.host,
            peer.address.port,
            layout.from.dp_rank,
            layout.from.tp_size,
            layout.from.pp_size,
            self.identity.tp_size,
            self.identity.pp_size,
        );
        peer.failures = 0;
        peer.resuming = None;
        peer.enter(now, PeerState::Ready(layout));
        self.note(false, text);
        self.stands(peer_id);
        self.replace_others_at(now, peer_id);
        let waiting: Vec<TransferId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.peer == peer_id)
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            self.ask(now, id);
            self.settle_when_unused(now, id);
        }
    }

    /// A listener belongs to one start of one engine. Whoever was paired at this address before is
    /// gone, even where its connection has not noticed.
    fn replace_others_at(&mut self, now: Time, peer_id: PeerId) {
        let Some(new) = self.peers.get(&peer_id).map(|peer| peer.address.clone()) else {
            return;
        };
        let gone: Vec<PeerId> = self
            .peers
            .iter()
            .filter(|(id, peer)| {
                **id != peer_id
                    && peer.is_connected()
                    && peer.address.host == new.host
                    && peer.address.port == new.port
            })
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            let failure = Failure::new(
                FailureReason::PeerLost,
                format!(
                    "another start lives at {}:{}: engine {} ({})",
                    new.host, new.port, new.engine, new.incarnation
                ),
            );
            self.hang_up(now, id, failure);
        }
    }

    pub(super) fn hang_up(&mut self, now: Time, peer_id: PeerId, failure: Failure) {
        self.outputs.push_back(ConsumerOutput::Close(peer_id));
        self.lose(now, peer_id, failure);
    }

    /// The connection is gone, whoever noticed. One that was paired is dialled again at once where
    /// transfers need it, and else with the next request: a firewall, a switch or a stalled host may
    /// have cut it, and the leases are still held. A connection that breaks as soon as it stands is
    /// not worth that.
    fn resume_or_lose(&mut self, now: Time, peer_id: PeerId, failure: Failure) {
        let needed = self.transfers.values().any(|t| t.peer == peer_id);
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return;
        };
        if !peer.is_ready() || now.since(peer.since) < self.options.backoff {
            self.lose(now, peer_id, failure);
            return;
        }
        if !needed {
            peer.enter(now, PeerState::Idle);
            let text = format!("{}; it is dialled when it is needed", failure.text);
            self.note(true, text);
            return;
        }
        let text = format!("{}; it is dialled again", failure.text);
        peer.resuming = Some(Resuming {
            why: failure,
            until: now + RESUME_MAX,
        });
        peer.enter(now, PeerState::Idle);
        self.note(true, text);
        self.await_holder(now, peer_id);
        self.wake_peer(now, peer_id);
    }

    /// The peer is down: everything that depends on it fails at once.
    pub(super) fn lose(&mut self, now: Time, peer_id: PeerId, failure: Failure) {
        if self.peers.get(&peer_id).is_some_and(|peer| peer.scout) {
            self.lose_scout(now, peer_id, &failure);
            return;
        }
        let Some(peer) = self.peers.get_mut(&peer_id) else {
            return;
        };
        let pause = if failure.reason == FailureReason::PairRefused {
            REFUSAL_KEPT
        } else {
            let doubled = self
                .options
                .backoff
                .saturating_mul(1 << peer.failures.min(8));
            doubled.min(BACKOFF_MAX)
        };
        peer.failures = peer.failures.saturating_add(1);
        peer.enter(
            now,
            PeerState::Down {
                why: failure.clone(),
                until: now + pause,
            },
        );
        // What was under way fails by the break, whatever the second try met.
        let broken = peer.resuming.take().map(|Resuming { why, .. }| {
            let text = format!("{}; dialled again: {}", why.text, failure.text);
            Failure { text, ..why }
        });
        let failure = broken.unwrap_or(failure);
        self.note(true, failure.text.clone());
        let lost: Vec<TransferId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.peer == peer_id)
            .map(|(id, _)| *id)
            .collect();
        for id in lost {
            self.fail_transfer(now, id, failure.clone());
            // One that had failed before, and waited to tell the holder.
            self.settle_when_unused(now, id);
        }
    }

    pub(super) fn sweep_peers(&mut self, now: Time) {
        let ids: Vec<PeerId> = self.peers.keys().copied().collect();
        for peer_id in ids {
            let Some(peer) = self.peers.get_mut(&peer_id) else {
                continue;
            };
            let place = peer.place();
            match &peer.state {
                PeerState::Dialing | PeerState::Greeting | PeerState::Asking(_)
                    if peer.handshake_due(&self.options) <= now =>
                {
                    let mut time = self.options.claim_timeout;
                    if peer.resuming.is_some() {
                        time = time.min(RESUME_MAX);
                    }
                    let failure = Failure::new(
                        FailureReason::Unreachable,
                        format!("{place}: no handshake within {time:?}"),
                    );
                    self.hang_up(now, peer_id, failure);
                }
                PeerState::Ready(_)
                    if peer.lost_due(&self.options).is_some_and(|lost| lost <= now) =>
                {
                    let failure = Failure::new(
                        FailureReason::PeerLost,
                        format!(
                            "{place}: silent for {:?} (peer_silence_s)",
                            now.since(peer.heard_at)
                        ),
                    );
                    self.outputs.push_back(ConsumerOutput::Close(peer_id));
                    self.resume_or_lose(now, peer_id, failure);
                }
                PeerState::Ready(_) if peer.ping_due(&self.options) <= now => {
                    peer.pinged_at = now;
                    peer.doubted_at.get_or_insert(now);
                    self.send(peer_id, Message::Ping);
                }
                PeerState::Idle
                | PeerState::Dialing
                | PeerState::Greeting
                | PeerState::Asking(_)
                | PeerState::Ready(_)
                | PeerState::Down { .. } => {}
            }
        }
    }
}
