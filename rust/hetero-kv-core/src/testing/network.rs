//! The virtual network between the machines: connections, frames on their way, what is lost.

use std::time::Duration;

use super::{NONCE, Pair};
use crate::consumer::ConsumerOutput;
use crate::producer::{ConnectionId, ProducerOutput};
use crate::step::PeerId;
use crate::time::Time;
use crate::wire::FrameDecoder;
use crate::wire::message::Message;

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToProducer,
    ToConsumer,
}

/// What the network does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Deliver,
    Drop,
    Twice,
    /// Later messages of the same direction wait behind it.
    Delay(Duration),
}

pub(super) type Network = Box<dyn FnMut(Direction, &Message) -> Fate>;

#[derive(Debug)]
pub(super) enum Flight {
    Dialed {
        consumer: usize,
        peer: PeerId,
        port: u16,
    },
    Frame(usize, Direction, Vec<u8>),
    /// The other end has closed.
    Closed(usize, Direction),
}

pub(super) struct Link {
    consumer: usize,
    peer: PeerId,
    producer: usize,
    connection: ConnectionId,
    open_at_consumer: bool,
    open_at_producer: bool,
    /// Latest delivery each way, for order.
    latest: [Time; 2],
}

impl Pair {
    /// A prefill engine says something of its own accord, on every connection.
    pub(crate) fn say_to_consumer(&mut self, message: Message) {
        for link in 0..self.links.len() {
            self.post(link, Direction::ToConsumer, message.clone());
        }
    }

    /// The prefill engine's process is killed: its kernel closes what it had open.
    pub(crate) fn kill_producer(&mut self, producer: usize) {
        self.listening.retain(|_, index| *index != producer);
        for link in 0..self.links.len() {
            if self.links[link].producer == producer && self.links[link].open_at_producer {
                self.links[link].open_at_producer = false;
                self.fly(
                    Flight::Closed(link, Direction::ToConsumer),
                    link,
                    Duration::ZERO,
                );
            }
        }
    }

    /// The network between them breaks; both ends see it.
    pub(crate) fn cut(&mut self) {
        for link in 0..self.links.len() {
            self.fly(
                Flight::Closed(link, Direction::ToConsumer),
                link,
                Duration::ZERO,
            );
            self.fly(
                Flight::Closed(link, Direction::ToProducer),
                link,
                Duration::ZERO,
            );
        }
    }

    fn fly(&mut self, flight: Flight, link: usize, delay: Duration) {
        let way = match &flight {
            Flight::Frame(_, way, _) | Flight::Closed(_, way) => *way as usize,
            Flight::Dialed { .. } => 0,
        };
        let at = (self.now + self.latency + delay).max(self.links[link].latest[way]);
        self.links[link].latest[way] = at;
        self.launch(at, flight);
    }

    fn launch(&mut self, at: Time, flight: Flight) {
        self.next_flight += 1;
        self.flights.insert((at, self.next_flight), flight);
    }

    fn post(&mut self, link: usize, direction: Direction, message: Message) {
        let copies = match (self.network)(direction, &message) {
            Fate::Deliver => [Some(Duration::ZERO), None],
            Fate::Drop => [None, None],
            Fate::Twice => [Some(Duration::ZERO); 2],
            Fate::Delay(delay) => [Some(delay), None],
        };
        let frame = message.to_frame().expect("small messages encode");
        for delay in copies.into_iter().flatten() {
            self.fly(Flight::Frame(link, direction, frame.clone()), link, delay);
        }
        self.sent.push((self.now, direction, message));
    }

    /// Takes every machine's outputs onto the network.
    pub(super) fn pump(&mut self) {
        for index in 0..self.producers.len() {
            while let Some(output) = self.producers[index].poll_output() {
                let (connection, message) = match output {
                    ProducerOutput::Send(connection, message) => (connection, Some(message)),
                    ProducerOutput::Close(connection) => (connection, None),
                };
                let link = self
                    .links
                    .iter()
                    .position(|l| l.connection == connection && l.open_at_producer);
                match (link, message) {
                    (Some(link), Some(message)) => {
                        self.post(link, Direction::ToConsumer, message);
                    }
                    (Some(link), None) => {
                        self.links[link].open_at_producer = false;
                        let closed = Flight::Closed(link, Direction::ToConsumer);
                        self.fly(closed, link, Duration::ZERO);
                    }
                    (None, _) => {}
                }
            }
        }
        for consumer in 0..self.consumers.len() {
            while let Some(output) = self.consumers[consumer].poll_output() {
                let link_of = |peer| {
                    self.links.iter().position(|l| {
                        l.consumer == consumer && l.peer == peer && l.open_at_consumer
                    })
                };
                match output {
                    ConsumerOutput::Dial(peer, address) => {
                        let port = address.port;
                        if !self.dials_hang {
                            let flight = Flight::Dialed {
                                consumer,
                                peer,
                                port,
                            };
                            self.launch(self.now + self.latency, flight);
                        }
                    }
                    ConsumerOutput::Send(peer, message) => {
                        if let Some(link) = link_of(peer) {
                            self.workers[consumer].note_sent(self.now, &message);
                            self.post(link, Direction::ToProducer, message);
                        }
                    }
                    ConsumerOutput::Close(peer) => {
                        if let Some(link) = link_of(peer) {
                            self.links[link].open_at_consumer = false;
                            let closed = Flight::Closed(link, Direction::ToProducer);
                            self.fly(closed, link, Duration::ZERO);
                        }
                    }
                }
            }
        }
    }

    pub(super) fn deliver(&mut self) {
        while let Some(first) = self.flights.first_entry() {
            if first.key().0 > self.now {
                return;
            }
            match first.remove() {
                Flight::Dialed {
                    consumer,
                    peer,
                    port,
                } => self.dialed(consumer, peer, port),
                Flight::Frame(link, direction, frame) => self.arrived(link, direction, &frame),
                Flight::Closed(link, Direction::ToProducer) => {
                    if std::mem::take(&mut self.links[link].open_at_producer) {
                        let (producer, connection) =
                            (self.links[link].producer, self.links[link].connection);
                        self.producers[producer].handle_closed(connection);
                    }
                }
                Flight::Closed(link, Direction::ToConsumer) => {
                    if std::mem::take(&mut self.links[link].open_at_consumer) {
                        let (consumer, peer) = (self.links[link].consumer, self.links[link].peer);
                        self.consumers[consumer].handle_closed(self.now, peer, "reset");
                    }
                }
            }
            self.pump();
        }
    }

    fn dialed(&mut self, consumer: usize, peer: PeerId, port: u16) {
        let Some(producer) = self.listening.get(&port).copied() else {
            self.consumers[consumer].handle_closed(self.now, peer, "connection refused");
            return;
        };
        let connection = ConnectionId(self.links.len() as u64);
        self.links.push(Link {
            consumer,
            peer,
            producer,
            connection,
            open_at_consumer: true,
            open_at_producer: true,
            latest: [self.now; 2],
        });
        self.producers[producer].handle_connected(connection, NONCE);
        self.consumers[consumer].handle_dialed(self.now, peer, NONCE);
    }

    fn arrived(&mut self, link: usize, direction: Direction, frame: &[u8]) {
        let mut decoder = FrameDecoder::new();
        decoder.push(frame);
        let (kind, payload) = decoder
            .next_frame()
            .expect("a frame of ours")
            .expect("a whole frame");
        let message = Message::from_frame(kind, &payload).expect("a message of ours");
        let link = &self.links[link];
        match direction {
            Direction::ToProducer if link.open_at_producer => {
                self.producers[link.producer].handle_message(self.now, link.connection, message);
            }
            Direction::ToConsumer if link.open_at_consumer => {
                let incarnation = self.identities[link.producer].incarnation;
                self.workers[link.consumer].note_received(incarnation, &message);
                self.consumers[link.consumer].handle_message(self.now, link.peer, message);
            }
            Direction::ToProducer | Direction::ToConsumer => {}
        }
    }
}
