//! The slots that a request needs, taken together or not at all.

use std::sync::Arc;

use crate::app::{App, Side};
use crate::lease::SlotLease;
use crate::routing::policy::RequestKey;
use crate::routing::{Ask, InstanceIndex, NoSlot, Picked, Pool, Role, Wants};
use crate::sync::lock;

/// Which slot of a role.
#[derive(Debug, Clone, Copy)]
pub enum Choice<'a> {
    /// The policy's, on another instance than these where there is one.
    Any {
        /// The instances that failed the request before, the last one last.
        avoid: &'a [InstanceIndex],
    },
    /// One of this instance.
    At(InstanceIndex),
}

/// The slots that a request needs at once.
#[derive(Debug, Clone, Copy)]
pub struct Want<'a> {
    /// Of the prefill leg.
    pub prefill: Option<Choice<'a>>,
    /// Of the decode leg.
    pub decode: Option<Choice<'a>>,
    /// What the policies go by.
    pub key: &'a RequestKey,
}

/// What was wanted.
#[derive(Debug, Default)]
pub struct Slots {
    /// Of the prefill leg.
    pub prefill: Option<SlotLease>,
    /// Of the decode leg.
    pub decode: Option<SlotLease>,
}

impl Want<'_> {
    /// The roles of which a slot is wanted.
    pub fn wants(&self) -> Wants {
        Wants {
            prefill: self.prefill.is_some(),
            decode: self.decode.is_some(),
        }
    }
}

impl App {
    /// Takes all slots that `want` asks for, or none.
    ///
    /// # Errors
    /// [`NoSlot`].
    pub(crate) fn try_slots(self: &Arc<Self>, want: &Want<'_>) -> Result<Slots, NoSlot> {
        // Where both are wanted, prefill's side is locked first by everyone.
        let mut prefill = want
            .prefill
            .map(|choice| (choice, lock(self.side(Role::Prefill))));
        let mut decode = want
            .decode
            .map(|choice| (choice, lock(self.side(Role::Decode))));
        let now_ms = self.now_ms();
        if let (Some(_), Some((choice, side))) = (&prefill, &mut decode) {
            room(&mut side.pool, *choice, want.key, now_ms)?;
        }
        let take = |locked: &mut Option<(Choice<'_>, std::sync::MutexGuard<'_, Side>)>| {
            let Some((choice, side)) = locked else {
                return Ok(None);
            };
            let picked = pick(&mut side.pool, *choice, want.key, now_ms)?;
            // Pool and list hold the same instances.
            let instance = side.get(picked.instance).map(Arc::clone);
            Ok(instance.map(|instance| SlotLease::new(Arc::clone(self), instance, picked)))
        };
        // The first may find none; the second has room.
        let prefill = take(&mut prefill)?;
        let decode = take(&mut decode)?;
        Ok(Slots { prefill, decode })
    }
}

fn room(pool: &mut Pool, choice: Choice<'_>, key: &RequestKey, now_ms: u64) -> Result<(), NoSlot> {
    match choice {
        Choice::Any { avoid } => pool.room(&Ask { key, avoid, now_ms }),
        Choice::At(instance) => pool.room_at(instance),
    }
}

fn pick(
    pool: &mut Pool,
    choice: Choice<'_>,
    key: &RequestKey,
    now_ms: u64,
) -> Result<Picked, NoSlot> {
    match choice {
        Choice::Any { avoid } => pool.pick(&Ask { key, avoid, now_ms }),
        Choice::At(instance) => pool.pick_at(instance, now_ms),
    }
}
