//! What workers tell of themselves that the two of a pair must agree on, and who goes with whom.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::line::Lane;

/// Something that a worker may tell of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// Names under which it serves its model, separated by `|`.
    Model,
    /// Of the model's weights: KV of another one is wrong KV.
    Revision,
    /// Of the KV cache.
    Dtype,
    /// KV heads of the model, over all ranks.
    KvHeads,
    /// Of the KV cache in memory.
    Layout,
    /// How its connector moves KV.
    Mode,
    /// Which peers reach its control address.
    Control,
}

impl Field {
    /// Every field, in the order in which a pair is compared.
    pub const ALL: [Self; 7] = [
        Self::Model,
        Self::Revision,
        Self::Dtype,
        Self::KvHeads,
        Self::Layout,
        Self::Mode,
        Self::Control,
    ];

    /// The key of a worker that tells it.
    pub fn key(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Revision => "revision",
            Self::Dtype => "dtype",
            Self::KvHeads => "kv-heads",
            Self::Layout => "layout",
            Self::Mode => "mode",
            Self::Control => "control",
        }
    }
}

/// [`Field::Control`] of a worker that only peers on its own host reach.
pub const LOOPBACK: &str = "loopback";
/// [`Field::Control`] of any other.
pub const NETWORK: &str = "network";

/// What one worker tells; what it does not tell goes with everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traits {
    told: [Option<Box<str>>; Field::ALL.len()],
    /// The whole of what its connector's handshake compares.
    compat: Option<Arc<BTreeMap<String, String>>>,
}

/// The name under which a handshake compares revisions.
const COMPAT_REVISION: &str = "revision";
/// Its value there for a model that was named without one.
const NO_REVISION: &str = "none";
/// Stands for the value of a field that one of two handshakes has and the other has not.
const NOT_TOLD: &str = "(not told)";

/// In what the workers of a pair differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unlike {
    /// Name of the first field that they differ in: a [`Field::key`], or one of a handshake's.
    pub field: Box<str>,
    /// What the prefill worker tells.
    pub prefill: Box<str>,
    /// What the decode worker tells.
    pub decode: Box<str>,
}

impl Traits {
    /// What is told of `field`; the revision also where only the handshake has it.
    pub fn get(&self, field: Field) -> Option<&str> {
        let told = self.told[field as usize].as_deref();
        let compat = self.compat.as_ref().filter(|_| field == Field::Revision);
        let revision = || compat?.get(COMPAT_REVISION).map(String::as_str);
        told.or_else(|| revision().filter(|revision| *revision != NO_REVISION))
    }

    /// The same with `field` told.
    #[must_use]
    pub fn with(mut self, field: Field, value: &str) -> Self {
        self.told[field as usize] = Some(value.into());
        self
    }

    /// The same with what its connector's handshake compares.
    #[must_use]
    pub fn with_compat(mut self, compat: Option<Arc<BTreeMap<String, String>>>) -> Self {
        self.compat = compat;
        self
    }

    /// The same with the fields that only `other` tells.
    #[must_use]
    pub fn or(mut self, other: &Self) -> Self {
        for (own, other) in self.told.iter_mut().zip(&other.told) {
            if own.is_none() {
                own.clone_from(other);
            }
        }
        self
    }

    /// Whether a model of this name is served; `None` where no model is told.
    pub fn serves(&self, model: &str) -> Option<bool> {
        let told = self.get(Field::Model)?;
        Some(told.split('|').any(|name| name == model))
    }

    /// Why `self` on prefill and `decode` are no pair; `None` where they are.
    pub fn unlike(&self, decode: &Self) -> Option<Unlike> {
        self.unlike_field(decode)
            .or_else(|| self.unlike_handshake(decode))
    }

    fn unlike_field(&self, decode: &Self) -> Option<Unlike> {
        Field::ALL.into_iter().find_map(|field| {
            let (own, other) = (self.get(field)?, decode.get(field)?);
            let go_together = match field {
                // Decode dials prefill.
                Field::Control => own == other || own == NETWORK,
                Field::Model
                | Field::Revision
                | Field::Dtype
                | Field::KvHeads
                | Field::Layout
                | Field::Mode => own == other,
            };
            (!go_together).then(|| Unlike {
                field: field.key().into(),
                prefill: own.into(),
                decode: other.into(),
            })
        })
    }

    /// A handshake tells all that it compares: a field that one of two has not is a difference.
    fn unlike_handshake(&self, decode: &Self) -> Option<Unlike> {
        let (own, other) = (self.compat.as_ref()?, decode.compat.as_ref()?);
        if own == other {
            return None;
        }
        let names: BTreeSet<&String> = own.keys().chain(other.keys()).collect();
        let field = names
            .into_iter()
            .find(|name| own.get(*name) != other.get(*name))?;
        let value = |of: &BTreeMap<String, String>| of.get(field).map_or(NOT_TOLD, |v| v).into();
        Some(Unlike {
            field: field.as_str().into(),
            prefill: value(own),
            decode: value(other),
        })
    }
}

/// Workers that tell the same, by number among [`Kinds`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KindId(usize);

impl KindId {
    /// Of workers that tell nothing.
    pub const SILENT: Self = Self(0);
}

/// A set of kinds.
#[derive(Debug, Clone, Default)]
pub struct KindSet {
    /// The first kinds, in place: requests make sets, and seldom are there more.
    first: u64,
    rest: Vec<u64>,
}

/// Kinds that share a word.
const WORD: usize = u64::BITS as usize;

impl KindSet {
    /// Adds a kind.
    pub fn insert(&mut self, kind: KindId) {
        if kind.0 / WORD > self.rest.len() {
            self.rest.resize(kind.0 / WORD, 0);
        }
        if let Some(word) = self.word_mut(kind) {
            *word |= 1 << (kind.0 % WORD);
        }
    }

    /// Takes a kind out.
    pub fn remove(&mut self, kind: KindId) {
        if let Some(word) = self.word_mut(kind) {
            *word &= !(1 << (kind.0 % WORD));
        }
    }

    fn word_mut(&mut self, kind: KindId) -> Option<&mut u64> {
        match (kind.0 / WORD).checked_sub(1) {
            None => Some(&mut self.first),
            Some(at) => self.rest.get_mut(at),
        }
    }

    /// Whether a kind is in it.
    pub fn contains(&self, kind: KindId) -> bool {
        let word = match (kind.0 / WORD).checked_sub(1) {
            None => self.first,
            Some(at) => self.rest.get(at).copied().unwrap_or(0),
        };
        word >> (kind.0 % WORD) & 1 == 1
    }

    fn words(&self) -> impl Iterator<Item = u64> + '_ {
        [self.first].into_iter().chain(self.rest.iter().copied())
    }

    /// Whether the same kinds are in both.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let (short, long) = match self.rest.len() < other.rest.len() {
            true => (&self.rest, &other.rest),
            false => (&other.rest, &self.rest),
        };
        let (shared, more) = long.split_at(short.len());
        self.first == other.first && short == shared && more.iter().all(|word| *word == 0)
    }

    /// Becomes the same as another, in the memory that it has.
    pub(super) fn copy(&mut self, other: &Self) {
        self.first = other.first;
        self.rest.clone_from(&other.rest);
    }

    /// Whether no kind is in it.
    pub fn is_empty(&self) -> bool {
        self.words().all(|word| word == 0)
    }

    /// Whether some kind is in both.
    pub fn meets(&self, other: &Self) -> bool {
        self.words()
            .zip(other.words())
            .any(|(one, two)| one & two != 0)
    }

    /// Those that are in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let rest = self.rest.iter().zip(&other.rest);
        Self {
            first: self.first & other.first,
            rest: rest.map(|(one, two)| one & two).collect(),
        }
    }

    /// Those that are not in the other.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let rest = self.rest.iter().enumerate();
        let theirs = |at: usize| other.rest.get(at).copied().unwrap_or(0);
        Self {
            first: self.first & !other.first,
            rest: rest.map(|(at, own)| own & !theirs(at)).collect(),
        }
    }

    /// Its kinds, in order.
    pub fn iter(&self) -> impl Iterator<Item = KindId> + '_ {
        self.words().enumerate().flat_map(|(at, word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                let any = left != 0;
                left &= left.wrapping_sub(1);
                any.then_some(KindId(at * WORD + bit))
            })
        })
    }
}

impl FromIterator<KindId> for KindSet {
    fn from_iter<I: IntoIterator<Item = KindId>>(kinds: I) -> Self {
        let mut set = Self::default();
        for kind in kinds {
            set.insert(kind);
        }
        set
    }
}

#[derive(Debug, Clone, Default)]
struct Kind {
    traits: Traits,
    workers: usize,
    /// Kinds of decode worker that go with a prefill worker of this one.
    decodes: KindSet,
}

/// The kinds of worker that there are. Who goes with whom is worked out when one comes, and not for
/// each request. As many as workers at most: the number of one that went is given again.
#[derive(Debug)]
pub struct Kinds(Vec<Kind>);

impl Default for Kinds {
    fn default() -> Self {
        let mut silent = Kind::default();
        silent.decodes.insert(KindId::SILENT);
        Self(vec![silent])
    }
}

impl Kinds {
    /// A worker comes. Each is followed by one [`Kinds::leave`].
    pub fn enter(&mut self, traits: &Traits) -> KindId {
        let known = self.0.iter().position(|kind| kind.traits == *traits);
        let at = known.unwrap_or_else(|| self.place(traits.clone()));
        self.0[at].workers += 1;
        KindId(at)
    }

    fn place(&mut self, traits: Traits) -> usize {
        let free = (1..self.0.len()).find(|at| self.0[*at].workers == 0);
        let at = free.unwrap_or_else(|| {
            self.0.push(Kind::default());
            self.0.len() - 1
        });
        self.0[at].traits = traits;
        self.0[at].decodes = KindSet::default();
        for other in 0..self.0.len() {
            for (prefill, decode) in [(at, other), (other, at)] {
                let unlike = self.0[prefill].traits.unlike(&self.0[decode].traits);
                match unlike {
                    None => self.0[prefill].decodes.insert(KindId(decode)),
                    Some(_) => self.0[prefill].decodes.remove(KindId(decode)),
                }
            }
        }
        at
    }

    /// A worker of this kind has gone.
    pub fn leave(&mut self, kind: KindId) {
        let known = &mut self.0[kind.0];
        debug_assert!(known.workers > 0, "each that comes goes once");
        known.workers = known.workers.saturating_sub(1);
        if known.workers == 0 && kind != KindId::SILENT {
            // Not found again under this number: another kind may get it.
            known.traits = Traits::default();
        }
    }

    /// What workers of a kind tell.
    pub fn traits(&self, kind: KindId) -> &Traits {
        &self.0[kind.0].traits
    }

    /// The kinds of decode worker that go with a prefill worker of this kind.
    pub fn decodes(&self, prefill: KindId) -> &KindSet {
        &self.0[prefill.0].decodes
    }

    /// The lane of requests for `model`: workers of one model serve no other. None where a worker
    /// tells no model, since it may serve all, and where names that share one are told. A model that
    /// no worker serves stands in nobody's way: whoever asks for it is told so at once.
    pub fn lane(&self, model: &str) -> Option<Lane> {
        let present = || self.0.iter().filter(|kind| kind.workers > 0);
        let mut own = None;
        for kind in present() {
            let told = kind.traits.get(Field::Model)?;
            if kind.traits.serves(model) == Some(true) {
                match own {
                    None => own = Some(told),
                    Some(known) if known == told => {}
                    Some(_) => return None,
                }
            }
        }
        let Some(own) = own else {
            return Some(Lane::NOBODYS);
        };
        let shares = |kind: &Kind| {
            let told = kind.traits.get(Field::Model);
            let other = told != Some(own);
            other
                && own
                    .split('|')
                    .any(|name| kind.traits.serves(name) == Some(true))
        };
        if present().any(shares) {
            return None;
        }
        let mut hasher = DefaultHasher::new();
        own.hash(&mut hasher);
        // Two that hash alike share a lane, which is only slower.
        Some(Lane(hasher.finish()))
    }

    /// The lane of workers of this kind, where they are of one.
    pub fn lane_of(&self, kind: KindId) -> Option<Lane> {
        let told = self.0.get(kind.0)?.traits.get(Field::Model)?;
        self.lane(told.split('|').next()?)
    }

    /// The kinds whose workers are of these lanes.
    pub fn of_lanes(&self, lanes: &[Lane]) -> KindSet {
        let all = (0..self.0.len()).map(KindId);
        let is_of = |kind: &KindId| {
            self.lane_of(*kind)
                .is_some_and(|lane| lanes.contains(&lane))
        };
        all.filter(is_of).collect()
    }

    /// Those of `decodes` that go with a prefill worker that tells `prefill`, which may have gone.
    pub fn going_with(&self, prefill: &Traits, decodes: &KindSet) -> KindSet {
        let goes = |kind: &KindId| prefill.unlike(self.traits(*kind)).is_none();
        decodes.iter().filter(goes).collect()
    }
}

#[cfg(test)]
mod tests;
