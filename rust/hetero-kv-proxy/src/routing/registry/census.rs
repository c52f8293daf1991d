//! The kinds of instance that there are, counted when one changes and not for each request.

use super::super::KindSet;
use super::Pool;
use super::instance::Instance;

/// What kinds there are.
#[derive(Debug, Default)]
pub(super) struct Census {
    all: KindSet,
    /// Of the instances that take legs.
    routable: KindSet,
    /// Some instance that takes legs is not of the best tier, or may leave it, or come to it, with time.
    is_uneven: bool,
}

impl Census {
    pub(super) fn count(&mut self, instances: &[Instance]) {
        self.all = instances.iter().map(|known| known.kind).collect();
        let routable = || instances.iter().filter(|known| known.is_routable());
        self.routable = routable().map(|known| known.kind).collect();
        self.is_uneven = routable()
            .any(|known| known.health.edge_ms().is_some() || known.health.tier(0) != TIER_BEST);
    }

    /// No instance takes legs.
    pub(super) fn takes_none(&self) -> bool {
        self.routable.is_empty()
    }
}

/// What [`super::super::Health::tier`] is where nothing speaks against an instance.
const TIER_BEST: u8 = 0;

impl Pool {
    /// The kinds of all instances.
    pub fn kinds(&self) -> &KindSet {
        &self.census.all
    }

    /// The kinds of the instances that take legs at this moment.
    pub fn routable_kinds(&self) -> &KindSet {
        &self.census.routable
    }

    /// How good the best instance of these kinds is that takes legs, lower being better; `None`
    /// where there is none.
    pub fn best_tier(&self, among: &KindSet, now_ms: u64) -> Option<u8> {
        if !self.census.is_uneven {
            return among.meets(&self.census.routable).then_some(TIER_BEST);
        }
        let fits = |known: &&Instance| known.is_routable() && among.contains(known.kind);
        let fitting = self.instances.iter().filter(fits);
        fitting.map(|known| known.health.tier(now_ms)).min()
    }
}
