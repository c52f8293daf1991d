//! What connectors must know of an instance beyond its URL.

/// The keys of a worker (`URL,key=value`) that only some connectors use.
pub const WORKER_KEYS: [&str; 7] = [
    "dp-size",
    "dp-rank0",
    "tp",
    "kv-host",
    "handshake",
    "notify",
    "bootstrap",
];

/// Where the control sockets of a MoRI-IO worker are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZmqAddress {
    /// Address that its peers dial.
    pub host: String,
    /// Port of the handshake of its first rank.
    pub handshake: u16,
    /// Port of the notifications of its first rank.
    pub notify: u16,
}

impl std::fmt::Display for ZmqAddress {
    /// The text that vLLM takes apart: `host:IP,handshake:PORT,notify:PORT`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "host:{},handshake:{},notify:{}",
            self.host, self.handshake, self.notify
        )
    }
}

/// One instance as connectors see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSpec {
    /// DP ranks behind its URL, at least 1.
    pub dp: u32,
    /// DP ranks of the whole engine, of which this instance may be a part; at least `dp`.
    pub dp_size: u32,
    /// Rank of this instance's first rank in the whole engine.
    pub dp_rank0: u32,
    /// Tensor parallel size; 0 where it is not known.
    pub tp: u32,
    /// MoRI-IO's control sockets.
    pub zmq: ZmqAddress,
    /// `http://HOST:PORT` of Mooncake's bootstrap server.
    pub bootstrap: String,
    /// Which of [`WORKER_KEYS`] were given.
    pub given: Vec<&'static str>,
}

/// One DP rank of an instance.
#[derive(Debug, Clone, Copy)]
pub struct Slot<'a> {
    /// The instance.
    pub peer: &'a PeerSpec,
    /// Rank within the instance, from 0.
    pub rank: u32,
    /// Id of the engine at this rank, where the connector needs it.
    pub engine_id: Option<&'a str>,
}

impl Slot<'_> {
    /// Rank within the whole engine.
    pub fn global_rank(&self) -> u32 {
        self.peer.dp_rank0 + self.rank
    }
}
