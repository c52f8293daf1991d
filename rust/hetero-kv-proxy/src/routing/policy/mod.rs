//! How one slot is chosen among those that may serve a leg.

mod least_loaded;
mod round_robin;

pub use least_loaded::LeastLoaded;
pub use round_robin::RoundRobin;

/// One slot that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Position of the slot in its pool.
    pub slot: usize,
    /// Legs that this slot is serving.
    pub in_flight: u32,
}

/// A way to choose among slots. One policy object serves one role, so that its counter runs over
/// all slots of that role and of no other.
pub trait Policy: Send + std::fmt::Debug {
    /// Position in `candidates` of the chosen one. `candidates` is never empty, and its order is
    /// the order of the pool's slots.
    fn choose(&mut self, candidates: &[Candidate]) -> usize;
}

/// The policies of this build, by the name that the command line uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyKind {
    /// Each slot in turn.
    RoundRobin,
    /// The slot with the fewest legs in flight; ties in turn.
    LeastLoaded,
}

impl PolicyKind {
    /// Every kind, in the order of the help text.
    pub const ALL: [Self; 2] = [Self::RoundRobin, Self::LeastLoaded];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
        }
    }

    /// A fresh policy object of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::LeastLoaded => Box::new(LeastLoaded::default()),
        }
    }
}
