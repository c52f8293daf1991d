//! The life of a leg in its slot: chosen, counted, released; and of blocks that outlive it.

use std::collections::VecDeque;

use super::super::policy::RequestKey;
use super::super::{InstanceIndex, KindSet, Role, Unlike};
use super::{Pool, Slot, Standing};

/// One DP rank of one instance. It stays valid after its instance was removed: to release it is
/// then without effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotId {
    instance: InstanceIndex,
    rank: u32,
    /// Its leg tries an instance that was kept out.
    trial: bool,
}

/// What a slot is chosen by.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// What the policies go by.
    pub key: &'a RequestKey,
    /// Instances that failed the request, the last one last.
    pub avoid: &'a [InstanceIndex],
    /// Instances that do not go with the other leg's, see [`super::super::BadPairs`].
    pub shun: &'a [InstanceIndex],
    /// Kinds of instance to choose among; `None` is all.
    pub among: Option<&'a KindSet>,
    /// The time.
    pub now_ms: u64,
}

/// A slot that was chosen; it counts as in flight until [`Pool::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Picked {
    /// What to hand back to [`Pool::release`].
    pub slot: SlotId,
    /// The instance to send the leg to.
    pub instance: InstanceIndex,
    /// DP rank within the instance, from 0.
    pub rank: u32,
    /// Value of the DP rank header: `rank0 + rank`, and none for an instance with one rank.
    pub rank_header: Option<u32>,
}

/// Why no slot was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoSlot {
    /// No instance of the role takes legs.
    NoEngine(Role),
    /// Those that it would go to have as many legs as they may.
    Full,
    /// All workers of a role tell their model, and none the request's.
    NoModel,
    /// Workers of both roles take legs, and no two of them go together.
    NoPair(Box<Unlike>),
    /// No revision with a weight has workers for the legs.
    NoRevision,
}

/// What a pick would meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outlook {
    /// Load of the least loaded slot.
    pub load_min: u32,
    /// Bytes of the prompt's beginning that a slot is known to have in its cache.
    pub known_bytes: usize,
}

impl Pool {
    /// Chooses a slot for a request with these keys and counts it as in flight.
    ///
    /// Instances of the best health present share the load. Those to avoid are left out as long as
    /// another exists, and else only the last of them. With every instance unhealthy one is still
    /// tried, where [`super::Trust`] allows: a wrong verdict must not turn into an outage. An instance of
    /// lesser health is no substitute for room at a better one. Among those of the best health, the
    /// shunned are left out as long as there is another.
    ///
    /// # Errors
    /// [`NoSlot`].
    pub fn pick(&mut self, ask: &Ask<'_>) -> Result<Picked, NoSlot> {
        self.room(ask)?;
        let place = self.policy.choose(&self.round, ask.key);
        let Slot { at, rank } = self.slots[place];
        Ok(self.take(at, rank, ask.now_ms))
    }

    /// Whether [`Pool::pick`] would find a slot.
    ///
    /// # Errors
    /// Those of [`Pool::pick`].
    pub fn room(&mut self, ask: &Ask<'_>) -> Result<(), NoSlot> {
        self.bring_loads(ask.now_ms);
        self.bring_reach(ask)?;
        match self.round.open_count() {
            0 => Err(NoSlot::Full),
            _ => Ok(()),
        }
    }

    /// What [`Pool::pick`] would meet.
    ///
    /// # Errors
    /// Those of [`Pool::pick`].
    pub fn outlook(&mut self, ask: &Ask<'_>) -> Result<Outlook, NoSlot> {
        self.room(ask)?;
        Ok(Outlook {
            load_min: self.round.load_min().unwrap_or(u32::MAX),
            known_bytes: self.policy.known_bytes(&self.round, ask.key),
        })
    }

    /// Takes the slot of `instance` with the fewest legs in flight, whatever its health.
    ///
    /// # Errors
    /// [`NoSlot`]; no engine where the instance takes no legs.
    pub fn pick_at(&mut self, instance: InstanceIndex, now_ms: u64) -> Result<Picked, NoSlot> {
        let (at, rank) = self.emptiest(instance)?;
        Ok(self.take(at, rank, now_ms))
    }

    /// Whether [`Pool::pick_at`] would find a slot.
    ///
    /// # Errors
    /// Those of [`Pool::pick_at`].
    pub fn room_at(&self, instance: InstanceIndex) -> Result<(), NoSlot> {
        self.emptiest(instance).map(|_| ())
    }

    /// Position and rank of the slot of `instance` with the fewest legs.
    fn emptiest(&self, instance: InstanceIndex) -> Result<(usize, u32), NoSlot> {
        let none = || NoSlot::NoEngine(self.role);
        let at = self.position(instance).ok_or_else(none)?;
        let known = &self.instances[at];
        if !known.is_routable() {
            return Err(none());
        }
        let (rank, own) = (0..)
            .zip(&known.ranks)
            .min_by_key(|(_, own)| own.in_flight)
            .ok_or_else(none)?;
        match own.in_flight >= self.legs_max {
            true => Err(NoSlot::Full),
            false => Ok((at, rank)),
        }
    }

    fn take(&mut self, at: usize, rank: u32, now_ms: u64) -> Picked {
        let known = &mut self.instances[at];
        let trial = known.health.on_begin(now_ms);
        if trial {
            self.reach.forget();
        }
        let own = &mut known.ranks[rank as usize];
        own.in_flight += 1;
        self.picks += 1;
        own.picked = self.picks;
        self.turned = self.turned.max(own.due);
        own.due = known.weight.next_due(self.turned);
        let picked = Picked {
            slot: SlotId {
                instance: known.index,
                rank,
                trial,
            },
            instance: known.index,
            rank,
            rank_header: (known.spec.dp > 1).then(|| known.spec.rank0 + rank),
        };
        self.show(at, rank as usize);
        picked
    }

    /// Ends the leg that [`Pool::pick`] counted. True where it was the last one of an instance that
    /// takes no others.
    pub fn release(&mut self, slot: SlotId) -> bool {
        // Removed meanwhile: its count went with it.
        let Some(at) = self.position(slot.instance) else {
            return false;
        };
        let known = &mut self.instances[at];
        if slot.trial {
            known.health.on_trial_ended();
            self.reach.forget();
        }
        let count = &mut known.ranks[slot.rank as usize].in_flight;
        debug_assert!(*count > 0, "each pick is released once");
        *count = count.saturating_sub(1);
        let last = known.standing != Standing::Serving && known.is_idle();
        self.show(at, slot.rank as usize);
        last
    }

    /// A transfer's blocks stay on an instance until [`Pool::unkeep`].
    pub fn keep(&mut self, instance: InstanceIndex) {
        if let Some(known) = self.get_mut(instance) {
            known.kept += 1;
        }
    }

    /// Ends what [`Pool::keep`] began; returns as [`Pool::release`].
    pub fn unkeep(&mut self, instance: InstanceIndex) -> bool {
        let Some(known) = self.get_mut(instance) else {
            return false;
        };
        debug_assert!(known.kept > 0, "what is kept ends once");
        known.kept = known.kept.saturating_sub(1);
        known.standing != Standing::Serving && known.is_idle()
    }

    /// What [`Pool::keep`] began ends at `until_ms`: decode was not seen to take it. What was left
    /// later ends no earlier.
    pub fn leave(&mut self, instance: InstanceIndex, until_ms: u64) {
        if let Some(known) = self.get_mut(instance) {
            known.left.push_back(until_ms);
        }
    }

    /// Ends what was left until now. Returns who of them takes no legs and is idle since.
    pub fn lapse(&mut self, now_ms: u64) -> Vec<InstanceIndex> {
        let mut emptied = Vec::new();
        for known in &mut self.instances {
            let before = known.kept;
            while known
                .left
                .front()
                .is_some_and(|until_ms| *until_ms <= now_ms)
            {
                known.left.pop_front();
                known.kept = known.kept.saturating_sub(1);
            }
            if known.kept < before && known.standing != Standing::Serving && known.is_idle() {
                emptied.push(known.index);
            }
        }
        emptied
    }

    /// Ends all that was left: the engine that kept it is gone.
    pub fn lapse_all(&mut self, instance: InstanceIndex) {
        if let Some(known) = self.get_mut(instance) {
            let left = u32::try_from(known.left.len()).unwrap_or(u32::MAX);
            known.left = VecDeque::new();
            known.kept = known.kept.saturating_sub(left);
        }
    }
}
