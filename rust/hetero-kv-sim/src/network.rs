//! The control plane between scheduler sides: connections, and frames on their way as bytes.

use std::collections::VecDeque;
use std::time::Duration;

use hetero_kv_core::auth::{NONCE_BYTES, Nonce};
use hetero_kv_core::consumer::{ConsumerOutput, PeerAddress};
use hetero_kv_core::producer::{ConnectionId, ProducerOutput};
use hetero_kv_core::step::PeerId;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::FrameDecoder;
use hetero_kv_core::wire::message::{Ack, Message};

use crate::book::Invariant;
use crate::fault::Fault;
use crate::world::{Event, Host, World};

/// First control port; prefill engine `p` listens on the `p`-th after it, over restarts.
pub(crate) const CONTROL_PORT: u16 = 5000;

/// Which way an item goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToPrefill,
    ToDecode,
}

#[derive(Clone, Debug)]
enum Item {
    Frame(Vec<u8>),
    /// The other end has closed.
    Closed,
}

/// One connection.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) decode: usize,
    decode_incarnation: u64,
    peer: PeerId,
    pub(crate) prefill: usize,
    prefill_incarnation: u64,
    connection: ConnectionId,
    open_at_prefill: bool,
    open_at_decode: bool,
    queues: [VecDeque<Item>; 2],
    /// Latest arrival each way, for order.
    latest: [Time; 2],
}

impl World {
    /// Takes every machine's outputs onto the network.
    pub(crate) fn pump(&mut self) {
        for p in 0..self.prefill.len() {
            self.collect_orders(p);
            while let Some(output) = self.prefill[p].poll_output() {
                let (connection, message) = match output {
                    ProducerOutput::Send(connection, message) => (connection, Some(message)),
                    ProducerOutput::Close(connection) => (connection, None),
                };
                let link = self
                    .links
                    .iter_mut()
                    .find(|(_, link)| link.connection == connection && link.open_at_prefill);
                match (link, message) {
                    (Some((id, _)), Some(message)) => {
                        let id = *id;
                        self.post(id, Way::ToDecode, &message);
                    }
                    (Some((id, link)), None) => {
                        link.open_at_prefill = false;
                        let id = *id;
                        self.launch(id, Way::ToDecode, Item::Closed, Duration::ZERO);
                    }
                    (None, _) => {}
                }
            }
        }
        for d in 0..self.decode.len() {
            while let Some(output) = self.decode[d].poll_output() {
                match output {
                    ConsumerOutput::Dial(peer, address) => self.dial(d, peer, address),
                    ConsumerOutput::Send(peer, message) => {
                        self.decode[d].note_sent(self.now, &message);
                        if let Some(link) = self.link_of(d, peer) {
                            self.post(link, Way::ToPrefill, &message);
                        }
                    }
                    ConsumerOutput::Close(peer) => {
                        self.decode[d].forget_dial(peer);
                        if let Some(id) = self.link_of(d, peer) {
                            if let Some(link) = self.links.get_mut(&id) {
                                link.open_at_decode = false;
                            }
                            self.launch(id, Way::ToPrefill, Item::Closed, Duration::ZERO);
                        }
                    }
                }
            }
        }
    }

    fn link_of(&self, d: usize, peer: PeerId) -> Option<u64> {
        self.links
            .iter()
            .find(|(_, link)| link.decode == d && link.peer == peer && link.open_at_decode)
            .map(|(id, _)| *id)
    }

    fn post(&mut self, id: u64, way: Way, message: &Message) {
        self.book
            .trace(|| format!("link {id} {way:?}: {message:?}"));
        let split = self.book.may(Fault::AckSplit) && self.rng.permille(500);
        let messages = if let Message::Ack(ack) = message
            && split
            && ack.ranks.len() > 1
        {
            self.book.happened(Fault::AckSplit);
            let of = |rank: usize| {
                Message::Ack(Ack {
                    transfer_id: ack.transfer_id,
                    ranks: vec![ack.ranks[rank]],
                    number: ack.number,
                })
            };
            let mut each: Vec<Message> = (0..ack.ranks.len()).map(of).collect();
            each.insert(1, of(0));
            each
        } else {
            vec![message.clone()]
        };
        let spread = messages.len() > 1;
        for message in messages {
            let Ok(frame) = message.to_frame() else {
                self.book
                    .broken(Invariant::Spins, format!("{message:?} does not encode"));
                return;
            };
            let mut delay = if spread {
                self.millis(0, 300)
            } else {
                Duration::ZERO
            };
            if self.book.may(Fault::FrameDelayed) && self.rng.permille(60) {
                self.book.happened(Fault::FrameDelayed);
                delay += self.millis(300, 3500);
                // Lost packets take their connection with them more often than not.
                if self.book.may(Fault::ConnectionBreaks) && self.rng.permille(300) {
                    self.book.happened(Fault::ConnectionBreaks);
                    let soon = self.millis(0, 150);
                    self.after(soon, Event::BreakLink(id, true));
                }
            }
            let repeatable = match message {
                Message::Claim(_) | Message::Renew(_) | Message::Ack(_) | Message::Release(_) => {
                    true
                }
                Message::Hello(_)
                | Message::Accept(_)
                | Message::Reject(_)
                | Message::Layout(_)
                | Message::Granted(_)
                | Message::Gone(_)
                | Message::Ping
                | Message::Pong
                | Message::Bye
                | Message::Challenge(_)
                | Message::Proof(_) => false,
            };
            if repeatable && self.book.may(Fault::FrameTwice) && self.rng.permille(200) {
                self.book.happened(Fault::FrameTwice);
                self.launch(id, way, Item::Frame(frame.clone()), delay);
            }
            self.launch(id, way, Item::Frame(frame), delay);
        }
    }

    fn launch(&mut self, id: u64, way: Way, item: Item, delay: Duration) {
        let latency = self.millis(0, 2) + delay;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let reachable = self
            .partitions
            .get(&(link.prefill, link.decode))
            .copied()
            .unwrap_or(Time::ZERO);
        let at = (self.now + latency)
            .max(reachable)
            .max(link.latest[way as usize]);
        link.latest[way as usize] = at;
        link.queues[way as usize].push_back(item);
        self.at(at, Event::Arrive(id, way));
    }

    /// The oldest item of a link is there.
    pub(crate) fn arrive(&mut self, id: u64, way: Way) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let (p, d) = (link.prefill, link.decode);
        let host = match way {
            Way::ToPrefill => Host::Prefill(p),
            Way::ToDecode => Host::Decode(d),
        };
        let paused = self.paused_until(host);
        if paused > self.now {
            self.at(paused, Event::Arrive(id, way));
            return;
        }
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let Some(item) = link.queues[way as usize].pop_front() else {
            return;
        };
        let (connection, peer) = (link.connection, link.peer);
        match (item, way) {
            (Item::Closed, Way::ToPrefill) => {
                let lives = self.prefill[p].is(link.prefill_incarnation);
                if std::mem::take(&mut link.open_at_prefill) && lives {
                    self.prefill[p].closed(connection);
                }
            }
            (Item::Closed, Way::ToDecode) => {
                let lives = self.decode[d].is(link.decode_incarnation);
                if std::mem::take(&mut link.open_at_decode) && lives {
                    self.decode[d].closed(self.now, peer, "reset");
                }
            }
            (Item::Frame(bytes), Way::ToPrefill) => {
                let lives = self.prefill[p].is(link.prefill_incarnation);
                let sender = link.decode_incarnation;
                if lives && link.open_at_prefill {
                    if let Some(message) = self.decoded(&bytes) {
                        self.prefill_hears(p, d, sender, connection, message);
                    }
                } else if !self.prefill[p].vanished {
                    self.launch(id, Way::ToDecode, Item::Closed, Duration::ZERO);
                }
            }
            (Item::Frame(bytes), Way::ToDecode) => {
                let lives = self.decode[d].is(link.decode_incarnation);
                let open = lives && link.open_at_decode;
                if open && let Some(message) = self.decoded(&bytes) {
                    self.decode[d].hears(self.now, peer, message);
                }
            }
        }
        if let Some(link) = self.links.get(&id)
            && !link.open_at_decode
            && !link.open_at_prefill
            && link.queues.iter().all(VecDeque::is_empty)
        {
            self.links.remove(&id);
        }
    }

    fn decoded(&mut self, bytes: &[u8]) -> Option<Message> {
        let mut decoder = FrameDecoder::new();
        decoder.push(bytes);
        let message = match decoder.next_frame() {
            Ok(Some((kind, payload))) => Message::from_frame(kind, &payload).ok(),
            Ok(None) | Err(_) => None,
        };
        if message.is_none() {
            self.book
                .broken(Invariant::Spins, "a frame of ours does not decode".into());
        }
        message
    }

    fn dial(&mut self, d: usize, peer: PeerId, address: PeerAddress) {
        let generation = self.number();
        let Some(incarnation) = self.decode[d].note_dial(peer, generation, &address) else {
            return;
        };
        self.book.trace(|| format!("decode {d} dials {address:?}"));
        let delay = self.millis(0, 3);
        self.after(
            delay,
            Event::Dialed {
                decode: d,
                incarnation,
                peer,
                generation,
                address,
            },
        );
    }

    /// A dial meets whoever listens at the address now.
    pub(crate) fn dialed(
        &mut self,
        d: usize,
        incarnation: u64,
        peer: PeerId,
        generation: u64,
        address: &PeerAddress,
    ) {
        if !self.decode[d].dials(incarnation, peer, generation) {
            return;
        }
        let p = usize::from(address.port.wrapping_sub(CONTROL_PORT));
        if self
            .partitions
            .get(&(p, d))
            .is_some_and(|until| *until > self.now)
        {
            self.book.count("dials that hang");
            return;
        }
        let refused = self.book.may(Fault::DialRefused) && self.rng.permille(300);
        if refused {
            self.book.happened(Fault::DialRefused);
        }
        let Some(host) = self.prefill.get(p) else {
            self.decode[d].closed(self.now, peer, "no route to host");
            return;
        };
        let Some(prefill_incarnation) = host.incarnation().filter(|_| !refused) else {
            if !host.vanished || refused {
                self.decode[d].closed(self.now, peer, "connection refused");
            }
            return;
        };
        let id = self.number();
        let link = Link {
            decode: d,
            decode_incarnation: incarnation,
            peer,
            prefill: p,
            prefill_incarnation,
            connection: ConnectionId(id),
            open_at_prefill: true,
            open_at_decode: true,
            queues: [VecDeque::new(), VecDeque::new()],
            latest: [self.now; 2],
        };
        self.links.insert(id, link);
        self.prefill[p].connected(ConnectionId(id), nonce(2 * id));
        self.decode[d].connected(self.now, peer, nonce(2 * id + 1));
        self.book.count("connections");
    }

    /// Both ends will see it broken, each in its time. What decode had sent may still arrive, also
    /// behind what it says on its next connection.
    pub(crate) fn break_link(&mut self, id: u64, arrives: bool) {
        let late = self.millis(0, 1500);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.queues[Way::ToDecode as usize].clear();
        if !arrives {
            link.queues[Way::ToPrefill as usize].clear();
        }
        self.launch(id, Way::ToDecode, Item::Closed, Duration::ZERO);
        self.launch(id, Way::ToPrefill, Item::Closed, late);
    }

    /// A process has ended; with `seen`, its kernel tells the other ends.
    pub(crate) fn end_links(&mut self, host: Host, seen: bool) {
        let ids: Vec<u64> = self.links.keys().copied().collect();
        for id in ids {
            let Some(link) = self.links.get_mut(&id) else {
                continue;
            };
            match host {
                Host::Prefill(p) if link.prefill == p && link.open_at_prefill => {
                    link.open_at_prefill = false;
                    if seen {
                        self.launch(id, Way::ToDecode, Item::Closed, Duration::ZERO);
                    }
                }
                Host::Decode(d) if link.decode == d && link.open_at_decode => {
                    link.open_at_decode = false;
                    self.launch(id, Way::ToPrefill, Item::Closed, Duration::ZERO);
                }
                Host::Prefill(_) | Host::Decode(_) => {}
            }
        }
    }
}

/// Never drawn twice, and no draw of the run's.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; NONCE_BYTES];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce(bytes)
}
