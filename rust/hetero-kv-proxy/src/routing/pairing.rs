//! Which workers a request may go to, by what they tell: its model, and the other leg's worker.

use super::{KindId, KindSet, Kinds, NoSlot, Pool, Role, Traits, Unlike};

/// What binds a request to some of the workers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bound<'a> {
    /// The model that it names.
    pub model: Option<&'a str>,
    /// What the other leg's worker tells, where that is chosen already.
    pub peer: Option<&'a Traits>,
}

/// The kinds of worker that legs may go to.
#[derive(Debug, Clone, Default)]
pub struct Fit {
    /// For the prefill leg: those that some decode worker goes with.
    pub prefill: KindSet,
    /// For the decode leg.
    pub decode: KindSet,
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
    ) -> Result<Self, NoSlot> {
        let prefills = of_model(kinds, &prefill.kinds(), bound.model)?;
        let prefills = prefills.and(&prefill.routable_kinds());
        let decodes = of_model(kinds, &decode.kinds(), bound.model)?;
        let decodes = decodes.and(&decode.routable_kinds());
        for (role, found) in [(Role::Prefill, &prefills), (Role::Decode, &decodes)] {
            if found.is_empty() {
                return Err(NoSlot::NoEngine(role));
            }
        }
        let goes = |kind: &KindId| match bound.peer {
            Some(decode) => kinds.traits(*kind).unlike(decode).is_none(),
            None => kinds.decodes(*kind).meets(&decodes),
        };
        let paired: KindSet = prefills.iter().filter(goes).collect();
        if paired.is_empty() {
            let first = prefills.iter().next().map(|kind| kinds.traits(kind));
            return Err(no_pair(kinds, first, &decodes));
        }
        Ok(Self {
            prefill: paired,
            decode: decodes,
        })
    }

    /// For a decode leg: one alone, or one of which the prefill leg has run.
    ///
    /// # Errors
    /// As [`Fit::pair`].
    pub fn decode(kinds: &Kinds, decode: &Pool, bound: &Bound<'_>) -> Result<Self, NoSlot> {
        let decodes = of_model(kinds, &decode.kinds(), bound.model)?;
        let decodes = decodes.and(&decode.routable_kinds());
        let fitting = match bound.peer {
            Some(prefill) => kinds.going_with(prefill, &decodes),
            None => decodes.clone(),
        };
        if fitting.is_empty() && !decodes.is_empty() {
            return Err(no_pair(kinds, bound.peer, &decodes));
        }
        Ok(Self {
            prefill: KindSet::default(),
            decode: fitting,
        })
    }

    /// The kinds for the decode leg once a prefill worker of this kind was chosen.
    pub fn decode_for(&self, kinds: &Kinds, prefill: KindId) -> KindSet {
        self.decode.and(kinds.decodes(prefill))
    }
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
