//! How one slot is chosen among those that may serve a leg.

mod consistent_hash;
mod hash;
mod key;
mod least_loaded;
mod load;
mod power_of_two;
mod prefix_aware;
mod round_robin;

#[cfg(test)]
mod tests;

use std::cmp::Ordering;

pub use consistent_hash::ConsistentHash;
pub use key::{KeyParts, PREFIX_BYTES_MAX, PREFIX_BYTES_MIN, PREFIX_LEVELS, RequestKey};
pub use least_loaded::LeastLoaded;
pub use load::{LEGS_FREE, LoadCap, load_cap};
pub use power_of_two::PowerOfTwo;
pub use prefix_aware::PrefixAware;
pub use round_robin::RoundRobin;

/// One slot that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Position of the slot in its pool.
    pub slot: usize,
    /// Legs that this slot is serving, and what it does for others as far as it is known.
    pub load: u32,
    /// Share of its KV cache that was in use when it was last asked, in thousandths; 0 where that is
    /// not known.
    pub cache_used: u16,
    /// How much it gets beside others, at least 1.
    pub weight: u32,
    /// When it is due, where each gets turns by its weight: the smallest is next.
    pub due: u64,
    /// Number of the pick at which it was last chosen; 0 before the first.
    pub picked: u64,
    /// Who the slot is, whatever its position: see [`slot_identity`].
    pub identity: u64,
}

impl Candidate {
    /// Compares what both have to do for their weight.
    fn load_beside(&self, other: &Self) -> Ordering {
        let ours = u64::from(self.load) * u64::from(other.weight);
        ours.cmp(&(u64::from(other.load) * u64::from(self.weight)))
    }

    /// Whose turn it is: by weights, and of equals who was chosen longest ago.
    fn turn(&self) -> (u64, u64) {
        (self.due, self.picked)
    }
}

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
    /// Position in `candidates` of the chosen one, for a request with these keys. `candidates` is
    /// never empty, and its order is the order of the pool's slots.
    fn choose(&mut self, candidates: &[Candidate], key: &RequestKey) -> usize;

    /// How many bytes of the prompt's beginning a candidate within the bounds of load is known to
    /// have in its cache; 0 where the policy knows of no caches.
    fn known_bytes(&self, candidates: &[Candidate], key: &RequestKey) -> usize {
        let (_, _) = (candidates, key);
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

    /// Whether the policy looks at [`Candidate::load`], which engines are otherwise not asked for.
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
