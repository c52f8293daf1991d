//! The control thread's loop: sockets, timers and the machines' outputs, one turn after another.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use hetero_kv_core::consumer::{Consumer, ConsumerOutput};
use hetero_kv_core::producer::{ConnectionId, Producer, ProducerOutput};
use hetero_kv_core::step::PeerId;
use hetero_kv_core::time::Time;
use hetero_kv_core::wire::message::{Message, RejectCode};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};

use super::connection::{Broken, Connection};
use super::standstill::{SLEEP_MAX, Steps};
use super::{ControlLimits, SharedDesk, dial};
use crate::clock;
use crate::keys;
use crate::lines::{Cause, Lines};
use crate::waker::Waker;

/// Silence of a consumer after which the kernel asks whether its host is still there; some nine
/// unanswered questions later the connection breaks.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);

/// One attempt to reach a peer; a later attempt has a higher number.
pub(super) type DialNumber = u64;
pub(super) type DialResult = (PeerId, DialNumber, io::Result<OwnedFd>);

pub(super) struct Loop {
    desk: Arc<SharedDesk>,
    listener: Option<OwnedFd>,
    limits: ControlLimits,
    waker: Arc<Waker>,
    stop: Arc<AtomicBool>,
    pub(super) inbound: BTreeMap<ConnectionId, Connection>,
    outbound: BTreeMap<PeerId, Connection>,
    next_inbound: u64,
    /// The dials that the machine waits for. One that it gave up may end at any time, also while
    /// the next one is under way or has succeeded.
    pub(super) dialing: BTreeMap<PeerId, DialNumber>,
    next_dial: DialNumber,
    pub(super) dialed: Sender<DialResult>,
    dial_results: Receiver<DialResult>,
    /// Lines of the log that those who dial may still cause.
    lines: Lines,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Inbound(ConnectionId),
    Outbound(PeerId),
}

impl Loop {
    pub(super) fn new(
        desk: Arc<SharedDesk>,
        listener: Option<OwnedFd>,
        limits: ControlLimits,
        waker: Arc<Waker>,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let (dialed, dial_results) = channel();
        Self {
            desk,
            listener,
            limits,
            waker,
            stop,
            inbound: BTreeMap::new(),
            outbound: BTreeMap::new(),
            next_inbound: 0,
            dialing: BTreeMap::new(),
            next_dial: 0,
            dialed,
            dial_results,
            lines: Lines::default(),
        }
    }

    pub(super) fn run(&mut self) {
        let mut steps = Steps::new();
        loop {
            // Cleared before anything is looked at: a wake that comes later ends the sleep.
            self.waker.clear();
            if self.stop.load(Ordering::Acquire) {
                break;
            }
            let timeout = self.turn().map_or(SLEEP_MAX, |due| due.min(SLEEP_MAX));
            steps.end("sending");
            let ready = self.sleep(Some(timeout));
            steps.end_after("asleep (no processor was given to it)", timeout);
            for key in ready {
                self.serve(key);
            }
            steps.end("receiving");
        }
        self.say_goodbye();
    }

    /// Timers, dial results, outputs. Returns how long nothing is due.
    pub(super) fn turn(&mut self) -> Option<Duration> {
        let now = clock::now();
        while let Ok((peer, number, result)) = self.dial_results.try_recv() {
            if self.dialing.get(&peer) != Some(&number) {
                continue;
            }
            self.dialing.remove(&peer);
            let mut desk = self.desk.lock();
            let Some(consumer) = desk.consumer.as_mut() else {
                continue;
            };
            match result {
                Ok(stream) => match keys::nonce() {
                    Ok(nonce) => {
                        self.outbound.insert(peer, Connection::dialled(stream));
                        consumer.handle_dialed(now, peer, nonce);
                    }
                    Err(error) => consumer.handle_closed(now, peer, &error.to_string()),
                },
                Err(error) => consumer.handle_closed(now, peer, &error.to_string()),
            }
        }
        self.drop_overdue(now);
        // Carrying out an output can break a connection, which makes more outputs.
        loop {
            let outputs = self.collect(now);
            if outputs.is_empty() {
                break;
            }
            for output in outputs {
                self.perform(now, output);
            }
        }
        let due = {
            let desk = self.desk.lock();
            let producer = desk.producer.as_ref().and_then(Producer::poll_timeout);
            let consumer = desk.consumer.as_ref().and_then(Consumer::poll_timeout);
            let owed = self
                .inbound
                .values()
                .chain(self.outbound.values())
                .filter_map(Connection::owed_since)
                .map(|since| since + self.limits.frame_timeout)
                .min();
            [producer, consumer, owed].into_iter().flatten().min()
        };
        due.map(|due| due.since(clock::now()))
    }

    fn collect(&mut self, now: Time) -> Vec<Output> {
        let mut outputs = Vec::new();
        let mut notes = Vec::new();
        let mut desk = self.desk.lock();
        if let Some(producer) = desk.producer.as_mut() {
            if producer.poll_timeout().is_some_and(|due| due <= now) {
                producer.handle_timeout(now);
            }
            while let Some(output) = producer.poll_output() {
                outputs.push(Output::Producer(output));
            }
        }
        if let Some(consumer) = desk.consumer.as_mut() {
            if consumer.poll_timeout().is_some_and(|due| due <= now) {
                consumer.handle_timeout(now);
            }
            while let Some(output) = consumer.poll_output() {
                outputs.push(Output::Consumer(output));
            }
            notes = consumer.take_notes();
        }
        drop(desk);
        self.desk.changed.notify_all();
        // Whoever reads the log may be slow, and the scheduler's thread must not wait for that.
        for note in notes {
            if note.warning {
                tracing::warn!("{}", note.text);
            } else {
                tracing::info!("{}", note.text);
            }
        }
        outputs
    }

    fn perform(&mut self, now: Time, output: Output) {
        match output {
            Output::Producer(ProducerOutput::Send(id, message)) => {
                self.warn_of_unauthenticated(id, &message);
                self.push(now, Key::Inbound(id), &message);
            }
            Output::Producer(ProducerOutput::Close(id)) => {
                if let Some(connection) = self.inbound.get_mut(&id) {
                    connection.close_when_sent(now);
                    if !connection.wants_write() {
                        self.inbound.remove(&id);
                    }
                }
            }
            Output::Consumer(ConsumerOutput::Send(peer, message)) => {
                self.push(now, Key::Outbound(peer), &message);
            }
            Output::Consumer(ConsumerOutput::Close(peer)) => {
                self.outbound.remove(&peer);
                self.dialing.remove(&peer);
            }
            Output::Consumer(ConsumerOutput::Dial(peer, address)) => {
                let number = self.next_dial;
                self.next_dial += 1;
                self.dialing.insert(peer, number);
                let results = self.dialed.clone();
                let started = dial::start(peer, number, address, results, Arc::clone(&self.waker));
                if let Err(error) = started {
                    // Taken up by the next turn like any other failed dial.
                    let _ = self.dialed.send((peer, number, Err(error)));
                    self.waker.wake();
                }
            }
        }
    }

    fn push(&mut self, now: Time, key: Key, message: &Message) {
        let Some(connection) = self.connection(key) else {
            return;
        };
        if matches!(message, Message::Accept(_)) {
            connection.accept_stranger();
        }
        let pushed = connection.push(message).and_then(|()| connection.flush());
        if let Err(broken) = pushed {
            self.close(now, key, &broken);
        }
    }

    /// Waits for sockets, the waker or the timeout.
    pub(super) fn sleep(&self, timeout: Option<Duration>) -> Vec<Ready> {
        let mut keys = Vec::with_capacity(self.inbound.len() + self.outbound.len());
        let mut fds = vec![PollFd::from_borrowed_fd(self.waker.as_fd(), PollFlags::IN)];
        if let Some(listener) = &self.listener {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        let first = fds.len();
        let inbound = self.inbound.iter().map(|(id, c)| (Key::Inbound(*id), c));
        let outbound = self.outbound.iter().map(|(id, c)| (Key::Outbound(*id), c));
        for (key, connection) in inbound.chain(outbound) {
            keys.push(key);
            fds.push(PollFd::new(&connection.stream, connection.interest()));
        }
        let timeout = timeout.map(clock::timespec);
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!("control plane: poll: {}", io::Error::from(error));
                thread::sleep(Duration::from_millis(100));
                return Vec::new();
            }
        }
        let mut ready = Vec::new();
        if self.listener.is_some() && !fds[1].revents().is_empty() {
            ready.push(Ready::Listener);
        }
        for (fd, key) in fds[first..].iter().zip(keys) {
            if !fd.revents().is_empty() {
                ready.push(Ready::Connection(key));
            }
        }
        ready
    }

    pub(super) fn serve(&mut self, ready: Ready) {
        match ready {
            Ready::Listener => self.accept(),
            Ready::Connection(key) => self.exchange(key),
        }
    }

    pub(super) fn accept(&mut self) {
        // As many as can be in the queue; whoever comes meanwhile is met in the next turn.
        for _ in 0..self.limits.inbound_max {
            let Some(listener) = &self.listener else {
                return;
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let stream = match accept_with(listener, flags) {
                Ok(stream) => stream,
                Err(Errno::AGAIN | Errno::CONNABORTED) => return,
                Err(Errno::INTR) => continue,
                Err(error) => {
                    if let Some(unlogged) = self.lines.due(Cause::System, clock::now()) {
                        let error = io::Error::from(error);
                        tracing::error!(unlogged, "control plane: accept: {error}");
                    }
                    // Out of descriptors: the listener stays ready, so pause instead of spinning.
                    thread::sleep(Duration::from_millis(100));
                    return;
                }
            };
            if self.inbound.len() >= self.limits.inbound_max && !self.drop_oldest_stranger() {
                if let Some(unlogged) = self.lines.due(Cause::Crowd, clock::now()) {
                    tracing::warn!(
                        unlogged,
                        "control plane: {} peers are connected, one more is closed",
                        self.inbound.len()
                    );
                }
                continue;
            }
            // Claims are small and waited for.
            let _ = sockopt::set_tcp_nodelay(&stream, true);
            // Consumers send the heartbeats. One whose host is gone without a word would keep its
            // place for good.
            let _ = sockopt::set_socket_keepalive(&stream, true);
            let _ = sockopt::set_tcp_keepidle(&stream, KEEPALIVE_IDLE);
            let nonce = match keys::nonce() {
                Ok(nonce) => nonce,
                Err(error) => {
                    if let Some(unlogged) = self.lines.due(Cause::System, clock::now()) {
                        tracing::error!(
                            unlogged,
                            "control plane: no random bytes for a peer: {error}"
                        );
                    }
                    continue;
                }
            };
            let id = ConnectionId(self.next_inbound);
            self.next_inbound += 1;
            let connection = Connection::from_stranger(stream, clock::now());
            self.inbound.insert(id, connection);
            if let Some(producer) = self.desk.lock().producer.as_mut() {
                producer.handle_connected(id, nonce);
            }
        }
    }

    /// Makes room; false when every connection is of an accepted peer.
    fn drop_oldest_stranger(&mut self) -> bool {
        let oldest = self
            .inbound
            .iter()
            .filter_map(|(id, connection)| Some((connection.stranger_since()?, *id)))
            .min();
        let Some((_, id)) = oldest else {
            return false;
        };
        let crowded = Broken::Late("others wait for the place of a peer that says nothing");
        self.close(clock::now(), Key::Inbound(id), &crowded);
        true
    }

    fn exchange(&mut self, key: Key) {
        let now = clock::now();
        let Some(connection) = self.connection(key) else {
            return;
        };
        if let Err(broken) = connection.flush() {
            self.close(now, key, &broken);
            return;
        }
        if connection.is_closing() {
            if !connection.wants_write() {
                self.forget(key);
            }
            return;
        }
        let mut messages = Vec::new();
        let received = connection.receive(now, &mut messages);
        if let Key::Inbound(_) = key {
            messages.iter().for_each(trace_acknowledgement);
        }
        {
            let mut desk = self.desk.lock();
            for message in messages {
                match key {
                    Key::Inbound(id) => {
                        if let Some(producer) = desk.producer.as_mut() {
                            producer.handle_message(now, id, message);
                        }
                    }
                    Key::Outbound(peer) => {
                        if let Some(consumer) = desk.consumer.as_mut() {
                            consumer.handle_message(now, peer, message);
                        }
                    }
                }
            }
        }
        if let Err(broken) = received {
            self.close(now, key, &broken);
        }
    }

    pub(super) fn drop_overdue(&mut self, now: Time) {
        let timeout = self.limits.frame_timeout;
        let inbound = self.inbound.iter().map(|(id, c)| (Key::Inbound(*id), c));
        let outbound = self.outbound.iter().map(|(id, c)| (Key::Outbound(*id), c));
        let overdue: Vec<(Key, Broken)> = inbound
            .chain(outbound)
            .filter(|(_, connection)| {
                connection
                    .owed_since()
                    .is_some_and(|since| since + timeout <= now)
            })
            .map(|(key, connection)| (key, connection.overdue()))
            .collect();
        for (key, broken) in overdue {
            self.close(now, key, &broken);
        }
    }

    fn close(&mut self, now: Time, key: Key, broken: &Broken) {
        if let Key::Inbound(id) = key
            && !matches!(broken, Broken::Closed)
        {
            self.warn_of(
                id,
                &format_args!("a consumer's connection is closed: {broken}"),
            );
        }
        self.forget(key);
        let mut desk = self.desk.lock();
        match key {
            Key::Inbound(id) => {
                if let Some(producer) = desk.producer.as_mut() {
                    producer.handle_closed(id);
                }
            }
            Key::Outbound(peer) => {
                if let Some(consumer) = desk.consumer.as_mut() {
                    consumer.handle_closed(now, peer, &broken.to_string());
                }
            }
        }
    }

    pub(super) fn connection(&mut self, key: Key) -> Option<&mut Connection> {
        match key {
            Key::Inbound(id) => self.inbound.get_mut(&id),
            Key::Outbound(peer) => self.outbound.get_mut(&peer),
        }
    }

    fn forget(&mut self, key: Key) {
        match key {
            Key::Inbound(id) => self.inbound.remove(&id),
            Key::Outbound(peer) => self.outbound.remove(&peer),
        };
    }

    /// The consumer's log has it as well; but where its key is wrong, somebody here should know.
    fn warn_of_unauthenticated(&mut self, id: ConnectionId, message: &Message) {
        if let Message::Reject(reject) = message
            && reject.code == RejectCode::Unauthenticated
        {
            self.warn_of(
                id,
                &format_args!("a consumer is refused: {}", reject.reason),
            );
        }
    }

    /// Warns of somebody who dialled us, unless enough was said about those at its address.
    fn warn_of(&mut self, id: ConnectionId, what: &fmt::Arguments<'_>) {
        let from = self.inbound.get(&id).and_then(|known| known.from);
        if let Some(unlogged) = self.lines.due(Cause::Peer(from), clock::now()) {
            let from = from.map(tracing::field::display);
            tracing::warn!(from, unlogged, "control plane: {what}");
        }
    }

    /// Peers that hear a goodbye need not find out by a broken connection.
    fn say_goodbye(&mut self) {
        for connection in self.inbound.values_mut().chain(self.outbound.values_mut()) {
            // Going down: what does not fit in the socket is not worth waiting for.
            let _ = connection
                .push(&Message::Bye)
                .and_then(|()| connection.flush());
        }
    }
}

/// Target of the one event, at level `TRACE`, that an acknowledgement from a consumer makes; its
/// fields are `transfer_id`, in hexadecimal, and `ranks`, how many have read.
pub const ACKNOWLEDGED: &str = "hetero_kv::acknowledged";

/// Before the machines hear of it, and under no lock: whoever reads the log may be slow.
fn trace_acknowledgement(message: &Message) {
    if let Message::Ack(ack) = message {
        tracing::trace!(
            target: ACKNOWLEDGED,
            transfer_id = %ack.transfer_id,
            ranks = ack.ranks.len(),
        );
    }
}

enum Output {
    Producer(ProducerOutput),
    Consumer(ConsumerOutput),
}

pub(super) enum Ready {
    Listener,
    Connection(Key),
}
