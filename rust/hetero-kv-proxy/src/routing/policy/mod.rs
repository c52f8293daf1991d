//! How one slot is chosen among those that may serve a leg.

mod consistent_hash;
mod hash;
mod key;
mod least_loaded;
mod load;
mod power_of_two;
mod prefix_aware;
mod round;
mod round_robin;

#[cfg(test)]
mod tests;

pub use consistent_hash::ConsistentHash;
pub use key::{KeyParts, PREFIX_BYTES_MAX, PREFIX_BYTES_MIN, PREFIX_LEVELS, RequestKey};
pub use least_loaded::LeastLoaded;
pub use load::{LEGS_FREE, LoadCap};
pub use power_of_two::PowerOfTwo;
pub use prefix_aware::PrefixAware;
pub use round::{Round, SlotFacts, Turn};
pub use round_robin::RoundRobin;

/// A number for one DP rank of one engine, the same in every proxy that knows the engine by this
/// URL and whatever other engines there are.
pub fn slot_identity(url: &str, rank: u32) -> u64 {
    hash::hash(u64::from(rank), url.as_bytes())
}

/// A number for a session, the same in every proxy, evenly spread.
pub fn draw_of_session(session: &[u8]) -> u64 {
    stir(hash::hash(0, session))
}

/// Another number, which says nothing of `number` to whoever looks at a part of either.
pub(super) fn stir(number: u64) -> u64 {
    const KEYS: [u64; 2] = [0x9fb2_1c65_1e98_df25, 0xd6e8_feb8_6659_fd93];
    hash::mix(hash::mix(number ^ KEYS[0], KEYS[1]) ^ KEYS[1], KEYS[0])
}

/// A way to choose among slots. One policy object serves one role, so that its counter runs over
/// all slots of that role and of no other.
pub trait Policy: Send + std::fmt::Debug {
    /// Position of the chosen slot, for a request with these keys. Some slot of `round` is open, and
    /// one that is open is chosen.
    fn choose(&mut self, round: &Round, key: &RequestKey) -> usize;

    /// How many bytes of the prompt's beginning an open slot within the bounds of load is known to
    /// have in its cache; 0 where the policy knows of no caches.
    fn known_bytes(&self, round: &Round, key: &RequestKey) -> usize {
        let (_, _) = (round, key);
        0
    }
}

/// The policies of this build, by the name that the command line uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyKind {
    /// Each slot in turn.
    RoundRobin,
    /// The slot with the least to do; ties in turn.
    LeastLoaded,
    /// The less loaded of two slots drawn at random.
    PowerOfTwo,
    /// One slot for each session, or beginning of a prompt, while its load is within bounds.
    ConsistentHash,
    /// The slot that served the longest beginning of the prompt, while its load is within bounds.
    PrefixAware,
}

impl PolicyKind {
    /// Every kind, in the order of the help text.
    pub const ALL: [Self; 5] = [
        Self::RoundRobin,
        Self::LeastLoaded,
        Self::PowerOfTwo,
        Self::ConsistentHash,
        Self::PrefixAware,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
            Self::ConsistentHash => "consistent-hash",
            Self::PrefixAware => "prefix-aware",
        }
    }

    /// Whether the policy looks at [`Round::load`], which engines are otherwise not asked for.
    pub fn reads_load(self) -> bool {
        match self {
            Self::RoundRobin => false,
            Self::LeastLoaded | Self::PowerOfTwo | Self::ConsistentHash | Self::PrefixAware => true,
        }
    }

    /// Whether the policy looks at the [`RequestKey`], which is otherwise not worth making.
    pub fn reads_key(self) -> bool {
        match self {
            Self::RoundRobin | Self::LeastLoaded | Self::PowerOfTwo => false,
            Self::ConsistentHash | Self::PrefixAware => true,
        }
    }

    /// A fresh policy object of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::LeastLoaded => Box::new(LeastLoaded::default()),
            Self::PowerOfTwo => Box::new(PowerOfTwo::default()),
            Self::ConsistentHash => Box::new(ConsistentHash::default()),
            Self::PrefixAware => Box::new(PrefixAware::default()),
        }
    }
}
