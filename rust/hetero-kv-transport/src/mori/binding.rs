//! What this crate asks of MoRI-IO. The extension module implements it over Python; a call takes
//! the interpreter lock for as long as it runs and gives it up where the engine waits.

use std::time::Duration;

/// Why the engine refused, in words for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MoriError(pub String);

/// The package, ready to make engines.
pub trait MoriLibrary: Send + Sync {
    /// Starts an engine with its RDMA backend, listening at `host` (an IPv4 address) and `port`
    /// (0: assigned by the system).
    fn start(
        &self,
        host: &str,
        port: u16,
        notifications: Notifications,
    ) -> Result<Box<dyn MoriEngine>, MoriError>;
}

/// Whether an engine sends a message behind the data of each transfer, read or write, and takes
/// those of its peers. One that sends them needs a peer that takes them: a message that nobody takes
/// stops the sender's queue, and all that is behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notifications {
    /// Reads need none, and a message costs each of them a work request on both sides.
    Off,
    /// The peer of a write learns of it by the write's number.
    On,
}

/// Where an engine is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoriEngineAddress {
    /// Its descriptor, packed.
    pub descriptor: Vec<u8>,
    /// IPv4 address of its listener.
    pub host: String,
    /// Port of its listener.
    pub port: u16,
    /// Version of the package.
    pub version: String,
}

/// Memory of this process that an engine has registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoriMemory {
    /// The engine's number for it.
    pub id: usize,
    /// Its descriptor, packed, for peers.
    pub descriptor: Vec<u8>,
}

/// An engine. Dropping it ends its threads and its connections.
pub trait MoriEngine: Send + Sync {
    /// Where it is reached.
    fn address(&self) -> Result<MoriEngineAddress, MoriError>;

    /// Registers host memory of this process.
    fn register(&self, base: u64, bytes: u64) -> Result<MoriMemory, MoriError>;

    /// Takes back every registration. After `Ok` the device reads and writes none of it.
    fn deregister_all(&self) -> Result<(), MoriError>;

    /// Learns of another engine and of memory it has registered. Does not wait for it.
    fn learn(&self, descriptor: &[u8], memories: &[&[u8]]) -> Result<Box<dyn MoriPeer>, MoriError>;
}

/// One transfer: pieces of one memory of the peer, from or into pieces of one memory of this
/// process; entry by entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MoriPart {
    /// What the peer is told a write by. Used once in an engine's life: the peer's engine keeps
    /// every number that has arrived, and would tell the second use as arrived before it begins.
    pub uid: u64,
    /// [`MoriMemory::id`] of this process's memory.
    pub local: usize,
    /// Index of the peer's memory among those that it was learnt with.
    pub remote: usize,
    /// Byte offsets in this process's memory.
    pub local_offsets: Vec<u64>,
    /// Byte offsets in the peer's memory.
    pub remote_offsets: Vec<u64>,
    /// Lengths in bytes.
    pub bytes: Vec<u64>,
}

/// Another engine, as an engine of this process knows it. Dropping it forgets it.
pub trait MoriPeer: Send + Sync {
    /// Begins to read. The first one between two engines waits for the peer's handshake.
    ///
    /// An error may come after a part has been posted: it is no proof that nothing arrives.
    fn read(&self, parts: Vec<MoriPart>) -> Result<Box<dyn MoriTransfer>, MoriError>;

    /// Begins to write; otherwise as [`Self::read`].
    fn write(&self, parts: Vec<MoriPart>) -> Result<Box<dyn MoriTransfer>, MoriError>;

    /// Whether the peer's write of this [`MoriPart::uid`] has arrived, with all of its bytes. For
    /// engines with [`Notifications::On`].
    fn arrived(&self, uid: u64) -> Result<bool, MoriError>;

    /// What the engine has seen of the peer's end or of its own device's, in words, once.
    fn failure(&self) -> Option<String>;
}

/// How a transfer stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferState {
    /// Not ended.
    Running,
    /// Every byte has arrived, and nothing of it is written any more. Of a write it does not say
    /// that the peer was told.
    Done,
    /// The engine gave it up, in its words. Parts of it may still arrive.
    Failed(String),
}

/// A transfer under way.
pub trait MoriTransfer: Send {
    /// Waits until it has ended, at most `timeout`; zero only looks.
    fn wait(&mut self, timeout: Duration) -> TransferState;
}
