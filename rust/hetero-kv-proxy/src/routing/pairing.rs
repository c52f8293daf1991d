//! Which workers a request may go to, by what they tell: its model, and the other leg's worker.

use super::{Drawn, Field, KindId, KindSet, Kinds, NoSlot, Pool, Role, Traits, Unlike, Weights};

/// What binds a request to some of the workers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bound<'a> {
    /// The model that it names.
    pub model: Option<&'a str>,
    /// What the other leg's worker tells, where that is chosen already.
    pub peer: Option<&'a Traits>,
    /// By what its revision is drawn, where revisions have weights.
    pub draw: Option<Draw<'a>>,
    /// The kind of the prefill worker that the request names. Its revision is then that one's.
    pub only: Option<KindId>,
    /// The kinds that it may not take, since others stand before it there.
    pub barred: Option<&'a KindSet>,
}

/// The draw of one request.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    /// The shares of revisions.
    pub weights: &'a Weights,
    /// The request's number; see [`Weights::draw`].
    pub number: u64,
}

/// The kinds of worker that legs may go to.
#[derive(Debug, Clone, Default)]
pub struct Fit {
    /// For the prefill leg: those that some decode worker goes with.
    pub prefill: KindSet,
    /// For the decode leg.
    pub decode: KindSet,
    /// The revision that both are of, where it was drawn.
    pub drawn: Option<Drawn>,
}

impl Fit {
    /// For a pair of legs, or a prefill leg. Each kind of `prefill` has a partner among the decode
    /// workers that take legs, or goes with the one that is chosen.
    ///
    /// # Errors
    /// [`NoSlot`], before any leg is sent: no engine, no model or no pair.
    pub fn pair(
        kinds: &Kinds,
        prefill: &Pool,
        decode: &Pool,
        bound: &Bound<'_>,
        now_ms: u64,
    ) -> Result<Self, NoSlot> {
        let named = bound.only.map(|kind| KindSet::from_iter([kind]));
        let prefills = named.as_ref().unwrap_or_else(|| prefill.kinds());
        let prefills = of_model(kinds, prefills, bound.model)?;
        let prefills = prefills.and(prefill.routable_kinds());
        let decodes = of_model(kinds, decode.kinds(), bound.model)?;
        let decodes = decodes.and(decode.routable_kinds());
        let decodes = match bound.only {
            Some(kind) => same_revision(kinds, decodes, bound.draw, kinds.traits(kind)),
            None => decodes,
        };
        for (role, found) in [(Role::Prefill, &prefills), (Role::Decode, &decodes)] {
            if found.is_empty() {
                return Err(NoSlot::NoEngine(role));
            }
        }
        let none = || {
            let first = prefills.iter().next().map(|kind| kinds.traits(kind));
            no_pair(kinds, first, &decodes)
        };
        let paired = match bound.peer {
            Some(decode) => {
                let goes = |kind: &KindId| kinds.traits(*kind).unlike(decode).is_none();
                let fitting = prefills.iter().filter(goes).collect();
                same_revision(kinds, fitting, bound.draw, decode)
            }
            None => with_partner(kinds, &prefills, &decodes),
        };
        if paired.is_empty() {
            return Err(none());
        }
        let free = bound.peer.is_none() && bound.only.is_none();
        let Some(draw) = bound.draw.filter(|_| free) else {
            return Ok(Self {
                prefill: paired,
                decode: decodes,
                drawn: None,
            });
        };
        let of = |revision: &str| {
            let decodes = of_revision(kinds, &decodes, revision);
            let prefills = of_revision(kinds, &paired, revision);
            (with_partner(kinds, &prefills, &decodes), decodes)
        };
        let drawn = draw.from(|revision| {
            let (prefills, decodes) = of(revision);
            let prefill = prefill.best_tier(&prefills, now_ms)?;
            Some(prefill.max(decode.best_tier(&decodes, now_ms)?))
        })?;
        let (prefill, decode) = of(draw.name(drawn));
        Ok(Self {
            prefill,
            decode,
            drawn: Some(drawn),
        })
    }

    /// For a decode leg: one alone, or one of which the prefill leg has run.
    ///
    /// # Errors
    /// As [`Fit::pair`].
    pub fn decode(
        kinds: &Kinds,
        decode: &Pool,
        bound: &Bound<'_>,
        now_ms: u64,
    ) -> Result<Self, NoSlot> {
        let decodes = of_model(kinds, decode.kinds(), bound.model)?;
        let decodes = decodes.and(decode.routable_kinds());
        let fitting = match bound.peer {
            Some(prefill) => {
                let fitting = kinds.going_with(prefill, &decodes);
                same_revision(kinds, fitting, bound.draw, prefill)
            }
            None => decodes.clone(),
        };
        if fitting.is_empty() && !decodes.is_empty() {
            return Err(no_pair(kinds, bound.peer, &decodes));
        }
        let Some(draw) = bound.draw.filter(|_| bound.peer.is_none()) else {
            return Ok(Self {
                decode: fitting,
                ..Self::default()
            });
        };
        let of = |revision: &str| of_revision(kinds, &fitting, revision);
        let drawn = draw.from(|revision| decode.best_tier(&of(revision), now_ms))?;
        Ok(Self {
            decode: of(draw.name(drawn)),
            drawn: Some(drawn),
            ..Self::default()
        })
    }

    /// Leaves those kinds that are not barred, for the roles of which a slot is wanted.
    ///
    /// # Errors
    /// [`NoSlot::Full`] where none is left: who is barred waits.
    pub fn leave_barred(
        &mut self,
        kinds: &Kinds,
        barred: &KindSet,
        prefill: bool,
    ) -> Result<(), NoSlot> {
        self.decode = self.decode.without(barred);
        if prefill {
            self.prefill = with_partner(kinds, &self.prefill.without(barred), &self.decode);
        }
        let left = if prefill { &self.prefill } else { &self.decode };
        match left.is_empty() {
            true => Err(NoSlot::Full),
            false => Ok(()),
        }
    }

    /// The kinds for the decode leg once a prefill worker of this kind was chosen.
    pub fn decode_for(&self, kinds: &Kinds, prefill: KindId) -> KindSet {
        self.decode.and(kinds.decodes(prefill))
    }
}

impl Draw<'_> {
    /// Draws; `tier` says how good the workers of a revision are.
    fn from(&self, tier: impl Fn(&str) -> Option<u8>) -> Result<Drawn, NoSlot> {
        let entries = self.weights.entries().iter();
        let tiers: Vec<Option<u8>> = entries.map(|(revision, _)| tier(revision)).collect();
        self.weights
            .draw(self.number, &tiers)
            .ok_or(NoSlot::NoRevision)
    }

    fn name(&self, drawn: Drawn) -> &str {
        &self.weights.entries()[drawn.revision].0
    }
}

fn of_revision(kinds: &Kinds, among: &KindSet, revision: &str) -> KindSet {
    let tells = |kind: &KindId| kinds.traits(*kind).get(Field::Revision) == Some(revision);
    among.iter().filter(tells).collect()
}

/// Where revisions are drawn, a request stays in that of its other leg: a worker that tells none
/// serves none of them.
fn same_revision(kinds: &Kinds, among: KindSet, draw: Option<Draw<'_>>, peer: &Traits) -> KindSet {
    match (draw, peer.get(Field::Revision)) {
        (Some(_), Some(revision)) => of_revision(kinds, &among, revision),
        (Some(_) | None, _) => among,
    }
}

/// Those of `prefills` that some of `decodes` goes with.
fn with_partner(kinds: &Kinds, prefills: &KindSet, decodes: &KindSet) -> KindSet {
    let goes = |kind: &KindId| kinds.decodes(*kind).meets(decodes);
    prefills.iter().filter(goes).collect()
}

/// Those of `present` that serve a model: who tell its name, or, where nobody does, who tell none.
fn of_model(kinds: &Kinds, present: &KindSet, model: Option<&str>) -> Result<KindSet, NoSlot> {
    let Some(model) = model else {
        return Ok(present.clone());
    };
    let serves = |wanted: Option<bool>| -> KindSet {
        let serves = |kind: &KindId| kinds.traits(*kind).serves(model) == wanted;
        present.iter().filter(serves).collect()
    };
    let named = serves(Some(true));
    if !named.is_empty() {
        return Ok(named);
    }
    let silent = serves(None);
    match silent.is_empty() && !present.is_empty() {
        true => Err(NoSlot::NoModel),
        false => Ok(silent),
    }
}

/// Names one field that keeps a prefill worker from one of the decode workers.
fn no_pair(kinds: &Kinds, prefill: Option<&Traits>, decodes: &KindSet) -> NoSlot {
    let unlike: Option<Unlike> = prefill.and_then(|prefill| {
        decodes
            .iter()
            .find_map(|kind| prefill.unlike(kinds.traits(kind)))
    });
    unlike.map_or(NoSlot::NoEngine(Role::Decode), |unlike| {
        NoSlot::NoPair(Box::new(unlike))
    })
}

#[cfg(test)]
mod tests;
