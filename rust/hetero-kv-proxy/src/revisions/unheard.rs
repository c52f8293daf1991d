//! Revisions that have a share and that no worker tells: a slip in a name would give that share to
//! the others without a word.

use std::collections::BTreeSet;

use crate::routing::Weights;

/// How long workers that may still register have, from the first worker that is there: the engines
/// of one rollout come within moments of each other, and those that run beat within 5 s.
const WAIT_MS: u64 = 10_000;

/// What is asked of the workers once for all shares that are set.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    /// Nobody has been there to answer.
    #[default]
    Asked,
    /// Some worker is there; the others may come until then.
    Until(u64),
    /// Answered, or told.
    Closed,
}

/// Who tells which revision: for each role that requests need, the revisions of its workers.
pub(super) type Told = Vec<(&'static str, Vec<Option<String>>)>;

/// What is to be told of the shares.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unheard {
    /// `v2 (prefill, decode)` of each.
    pub(super) unheard: String,
    /// The revisions that workers tell.
    pub(super) known: String,
    /// Whether a revision with a share is told in every role, so that requests are served at all.
    pub(super) is_any_served: bool,
}

impl Question {
    /// Looks at who is there; a part of an answer where the question is over and revisions with a
    /// share are unheard of in some role. `may_come` says whether workers may still register.
    pub(super) fn look(
        &mut self,
        weights: Option<&Weights>,
        told: &Told,
        may_come: bool,
        now_ms: u64,
    ) -> Option<Unheard> {
        let Some(weights) = weights else {
            *self = Self::Closed;
            return None;
        };
        let is_told = |workers: &[Option<String>], revision: &str| {
            workers.iter().flatten().any(|told| told == revision)
        };
        let with_share = weights.entries().iter().filter(|(_, weight)| *weight > 0);
        let is_any_served = with_share
            .clone()
            .any(|(revision, _)| told.iter().all(|(_, all)| is_told(all, revision)));
        let unheard: Vec<String> = with_share
            .filter_map(|(revision, _)| {
                let lacking = told.iter().filter(|(_, all)| !is_told(all, revision));
                let lacking: Vec<&str> = lacking.map(|(role, _)| *role).collect();
                (!lacking.is_empty()).then(|| format!("{revision} ({})", lacking.join(", ")))
            })
            .collect();
        if unheard.is_empty() {
            *self = Self::Closed;
            return None;
        }
        if may_come {
            match *self {
                Self::Asked if told.iter().all(|(_, all)| all.is_empty()) => return None,
                Self::Asked => *self = Self::Until(now_ms + WAIT_MS),
                Self::Until(_) | Self::Closed => {}
            }
            if matches!(*self, Self::Until(end_ms) if now_ms < end_ms) {
                return None;
            }
        }
        *self = Self::Closed;
        let all = told.iter().flat_map(|(_, all)| all).flatten();
        let known: BTreeSet<&str> = all.map(|told| &**told).collect();
        let known: Vec<&str> = known.into_iter().collect();
        Some(Unheard {
            unheard: unheard.join(", "),
            known: match known.is_empty() {
                true => "none".to_owned(),
                false => known.join(", "),
            },
            is_any_served,
        })
    }

    pub(super) fn is_open(self) -> bool {
        self != Self::Closed
    }
}

#[cfg(test)]
mod tests;
