//! The slots that a request needs, taken together or not at all.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::app::{App, Side};
use crate::lease::SlotLease;
use crate::routing::policy::RequestKey;
use crate::routing::{
    Ask, Bound, Drawn, Fit, InstanceIndex, KindSet, Kinds, NoSlot, Outlook, Picked, Pool, Role,
    Scene, Wants,
};
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
    /// The instance that the other leg has already.
    pub partner: Option<InstanceIndex>,
    /// What the policies go by.
    pub key: &'a RequestKey,
    /// Which workers may serve it.
    pub bound: Bound<'a>,
}

/// What was wanted.
#[derive(Debug, Default)]
pub struct Slots {
    /// Of the prefill leg.
    pub prefill: Option<Box<SlotLease>>,
    /// Of the decode leg.
    pub decode: Option<Box<SlotLease>>,
    /// The revision that they are of, where it was drawn.
    pub drawn: Option<Drawn>,
}

impl Want<'_> {
    /// The roles of which a slot is wanted.
    pub fn wants(&self) -> Wants {
        Wants {
            prefill: self.prefill.is_some(),
            decode: self.decode.is_some(),
            lane: None,
        }
    }
}

/// One try to take slots.
#[derive(Clone, Copy)]
struct Try<'a> {
    want: &'a Want<'a>,
    now_ms: u64,
}

impl App {
    /// Takes all slots that `want` asks for, or none.
    ///
    /// # Errors
    /// [`NoSlot`].
    pub(crate) fn try_slots(self: &Arc<Self>, want: &Want<'_>) -> Result<Slots, NoSlot> {
        // Where workers tell nothing of themselves, all go together.
        let told = self.told.load(Ordering::Relaxed) || want.bound.draw.is_some();
        // Where both are wanted, prefill's side is locked first by everyone, and the kinds last.
        let mut prefill = want
            .prefill
            .map(|choice| (choice, lock(self.side(Role::Prefill))));
        // A prefill leg is of no use without a decode worker that goes with it.
        let with_decode = want.decode.is_some() || (told && want.prefill.is_some());
        let mut decode = with_decode.then(|| lock(self.side(Role::Decode)));
        if prefill.is_some() && decode.is_none() {
            // Blocks that nobody will read would stay until their lease ends.
            let decodes = self.with_pool(Role::Decode, |pool| pool.has_routable());
            if !decodes {
                return Err(NoSlot::NoEngine(Role::Decode));
            }
        }
        let kinds = told.then(|| lock(&self.kinds));
        let this = Try {
            want,
            now_ms: self.now_ms(),
        };
        let only = match &prefill {
            Some((Choice::At(instance), side)) => side.pool.kind(*instance),
            Some((Choice::Any { .. }, _)) | None => None,
        };
        let bound = Bound { only, ..want.bound };
        let mut fit = match (&kinds, &prefill, &decode) {
            (Some(kinds), Some((_, prefill)), Some(decode)) => {
                let (prefill, decode) = (&prefill.pool, &decode.pool);
                Some(Fit::pair(kinds, prefill, decode, &bound, this.now_ms)?)
            }
            (Some(kinds), None, Some(decode)) => {
                Some(Fit::decode(kinds, &decode.pool, &want.bound, this.now_ms)?)
            }
            (Some(_) | None, _, _) => None,
        };
        if let (Some(kinds), Some(fit), Some(barred)) = (&kinds, &mut fit, want.bound.barred) {
            fit.leave_barred(kinds, barred, want.prefill.is_some())?;
        }
        // Prefill may find none; decode then has room.
        if let (Some(_), Some(choice), Some(side)) = (&prefill, want.decode, &mut decode) {
            match (&kinds, &mut fit) {
                (Some(kinds), Some(fit)) => this.with_room(kinds, fit, &mut side.pool, choice)?,
                (Some(_) | None, _) => this.room(&mut side.pool, choice, None)?,
            }
        }
        let mut partner = want.partner;
        let mut first = None;
        if let Some((choice, side)) = &mut prefill {
            let among = fit.as_ref().map(|fit| &fit.prefill);
            let others = || match &decode {
                Some(decode) => decode.pool.routable(),
                None => self.routable(Role::Decode),
            };
            let shun = self.shunned(Role::Prefill, want.partner, others);
            let picked = this.pick(&mut side.pool, *choice, among, &shun)?;
            partner = Some(picked.instance);
            if let (Some(kinds), Some(fit)) = (&kinds, &mut fit) {
                let kind = side.pool.kind(picked.instance).unwrap_or_default();
                fit.decode = fit.decode_for(kinds, kind);
            }
            first = Some(picked);
        }
        let mut second = None;
        if let (Some(choice), Some(side)) = (want.decode, &mut decode) {
            let among = fit.as_ref().map(|fit| &fit.decode);
            let shun = self.shunned(Role::Decode, partner, Vec::new);
            let mut picked = this.pick(&mut side.pool, choice, among, &shun);
            if first.is_some() && picked == Err(NoSlot::Full) {
                // There is room, if only at an instance that is shunned.
                picked = this.pick(&mut side.pool, choice, among, &[]);
            }
            match picked {
                Ok(picked) => second = Some(picked),
                Err(none) => {
                    if let (Some(picked), Some((_, side))) = (first, &mut prefill) {
                        side.pool.release(picked.slot);
                    }
                    return Err(none);
                }
            }
        }
        // A lease that is dropped locks its side again: there is none before both are there.
        let lease = |side: &Side, picked: Picked| {
            // Pool and list hold the same instances.
            let instance = side.get(picked.instance).map(Arc::clone);
            instance.map(|instance| SlotLease::new(Arc::clone(self), instance, picked))
        };
        let prefill = prefill.zip(first);
        Ok(Slots {
            prefill: prefill.and_then(|((_, side), picked)| lease(&side, picked)),
            decode: decode
                .zip(second)
                .and_then(|(side, picked)| lease(&side, picked)),
            drawn: fit.and_then(|fit| fit.drawn),
        })
    }
}

impl App {
    /// What a request that may run on decode alone would meet; `None` where it would meet no pair
    /// of workers at all.
    pub(crate) fn scene(&self, want: &Want<'_>, prompt_bytes: usize) -> Option<Scene> {
        let told = self.told.load(Ordering::Relaxed) || want.bound.draw.is_some();
        let mut prefill = lock(self.side(Role::Prefill));
        let mut decode = lock(self.side(Role::Decode));
        let kinds = told.then(|| lock(&self.kinds));
        let this = Try {
            want,
            now_ms: self.now_ms(),
        };
        let pair =
            |kinds: &Kinds| Fit::pair(kinds, &prefill.pool, &decode.pool, &want.bound, this.now_ms);
        let fit = kinds.as_deref().map(pair).transpose().ok()?;
        let look = |pool: &mut Pool, among: Option<&KindSet>| match pool.outlook(&this.ask(
            &[],
            &[],
            among,
        )) {
            Ok(outlook) => Some(outlook),
            Err(NoSlot::Full) => Some(Outlook {
                load_min: u32::MAX,
                known_bytes: 0,
            }),
            Err(NoSlot::NoEngine(_) | NoSlot::NoModel | NoSlot::NoPair(_) | NoSlot::NoRevision) => {
                None
            }
        };
        let before = look(&mut prefill.pool, fit.as_ref().map(|fit| &fit.prefill))?;
        let after = look(&mut decode.pool, fit.as_ref().map(|fit| &fit.decode))?;
        Some(Scene {
            prompt_bytes,
            known_bytes: after.known_bytes,
            prefill_load: before.load_min,
            decode_load: after.load_min,
        })
    }
}

impl Try<'_> {
    fn ask<'a>(
        &'a self,
        avoid: &'a [InstanceIndex],
        shun: &'a [InstanceIndex],
        among: Option<&'a KindSet>,
    ) -> Ask<'a> {
        Ask {
            key: self.want.key,
            avoid,
            shun,
            among,
            now_ms: self.now_ms,
        }
    }

    fn room(
        &self,
        pool: &mut Pool,
        choice: Choice<'_>,
        among: Option<&KindSet>,
    ) -> Result<(), NoSlot> {
        match choice {
            Choice::Any { avoid } => pool.room(&self.ask(avoid, &[], among)),
            Choice::At(instance) => pool.room_at(instance),
        }
    }

    fn pick(
        &self,
        pool: &mut Pool,
        choice: Choice<'_>,
        among: Option<&KindSet>,
        shun: &[InstanceIndex],
    ) -> Result<Picked, NoSlot> {
        match choice {
            Choice::Any { avoid } => pool.pick(&self.ask(avoid, shun, among)),
            Choice::At(instance) => pool.pick_at(instance, self.now_ms),
        }
    }

    /// Leaves those kinds of prefill worker that a decode worker with room goes with.
    fn with_room(
        &self,
        kinds: &Kinds,
        fit: &mut Fit,
        decode: &mut Pool,
        choice: Choice<'_>,
    ) -> Result<(), NoSlot> {
        let mut none = NoSlot::NoEngine(Role::Decode);
        let mut found = KindSet::default();
        for kind in fit.prefill.iter() {
            match self.room(decode, choice, Some(&fit.decode_for(kinds, kind))) {
                Ok(()) => found.insert(kind),
                // Who waits for room is served; who waits for an engine is not.
                Err(NoSlot::Full) => none = NoSlot::Full,
                Err(
                    NoSlot::NoEngine(_) | NoSlot::NoModel | NoSlot::NoPair(_) | NoSlot::NoRevision,
                ) => {}
            }
        }
        fit.prefill = found;
        match fit.prefill.is_empty() {
            true => Err(none),
            false => Ok(()),
        }
    }
}
