//! What a piece of a plan covers.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::LayerRange;
use crate::layout::HeadRange;

/// Most regions that are compared with one another.
pub const REGIONS_COMPARED_MAX: usize = 1 << 13;

/// Consecutive tokens, by their position in the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TokenRange {
    /// First token.
    pub first: u32,
    /// One past the last token.
    pub past_last: u32,
}

impl TokenRange {
    /// How many tokens.
    pub fn count(self) -> u32 {
        self.past_last.saturating_sub(self.first)
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.count() == 0
    }

    /// The tokens that are in both.
    pub fn intersection(self, other: Self) -> Self {
        let first = self.first.max(other.first);
        Self {
            first,
            past_last: self.past_last.min(other.past_last).max(first),
        }
    }
}

impl fmt::Display for TokenRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.first, self.past_last)
    }
}

/// A box of KV: some tokens of one sequence, in some heads, in some layers. All three are counted
/// over the whole sequence and the whole model, so that plans, stores and tests of any rank speak of
/// the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Which tokens.
    pub tokens: TokenRange,
    /// Which KV heads; `0..1` for a latent.
    pub heads: HeadRange,
    /// Which layers.
    pub layers: LayerRange,
}

/// An axis of a [`Region`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionAxis {
    /// Over tokens.
    Tokens,
    /// Over heads.
    Heads,
    /// Over layers.
    Layers,
}

impl fmt::Display for RegionAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tokens => "tokens",
            Self::Heads => "heads",
            Self::Layers => "layers",
        })
    }
}

/// Regions that are none, or that do not fit one another.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// A range ends where or before it begins.
    #[error("{axis}: {first}..{past_last} holds nothing")]
    Empty {
        /// Which range.
        axis: RegionAxis,
        /// Its begin.
        first: u32,
        /// Its end.
        past_last: u32,
    },
    /// A range reaches past the whole.
    #[error("{axis}: {first}..{past_last} is not inside {whole_first}..{whole_past_last}")]
    Outside {
        /// Which range.
        axis: RegionAxis,
        /// Its begin.
        first: u32,
        /// Its end.
        past_last: u32,
        /// Begin of the whole.
        whole_first: u32,
        /// End of the whole.
        whole_past_last: u32,
    },
    /// Two regions share something.
    #[error("{first} and {second} overlap")]
    Overlap {
        /// One.
        first: Region,
        /// The other.
        second: Region,
    },
    /// The regions leave something out.
    #[error("{covered} of {wanted} (token, head, layer) of {whole} are covered")]
    Gap {
        /// What has to be covered.
        whole: Region,
        /// Triples of it that are.
        covered: u128,
        /// Triples of it.
        wanted: u128,
    },
    /// More than [`REGIONS_COMPARED_MAX`].
    #[error("{0} regions are above the 8192 that are compared")]
    TooMany(usize),
}

impl Region {
    /// Triples of (token, head, layer).
    pub fn volume(&self) -> u128 {
        u128::from(self.tokens.count())
            * u128::from(self.heads.count())
            * u128::from(self.layers.count())
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.volume() == 0
    }

    /// What is in both; empty where they are apart.
    pub fn intersection(&self, other: &Self) -> Self {
        Self {
            tokens: self.tokens.intersection(other.tokens),
            heads: self.heads.intersection(other.heads),
            layers: self.layers.intersection(other.layers),
        }
    }

    fn ranges(&self) -> [(RegionAxis, u32, u32); 3] {
        [
            (RegionAxis::Tokens, self.tokens.first, self.tokens.past_last),
            (RegionAxis::Heads, self.heads.first, self.heads.past_last),
            (RegionAxis::Layers, self.layers.first, self.layers.past_last),
        ]
    }

    /// That each range holds something: a region from outside may be anything.
    ///
    /// # Errors
    /// [`RegionError::Empty`] names the axis and both ends.
    pub fn check(&self) -> Result<(), RegionError> {
        for (axis, first, past_last) in self.ranges() {
            if first >= past_last {
                return Err(RegionError::Empty {
                    axis,
                    first,
                    past_last,
                });
            }
        }
        Ok(())
    }

    /// That it is a region and lies inside `whole`.
    ///
    /// # Errors
    /// [`RegionError::Empty`] or [`RegionError::Outside`] name the axis and both ranges.
    pub fn check_inside(&self, whole: &Self) -> Result<(), RegionError> {
        self.check()?;
        for ((axis, first, past_last), (_, whole_first, whole_past_last)) in
            self.ranges().into_iter().zip(whole.ranges())
        {
            if first < whole_first || past_last > whole_past_last {
                return Err(RegionError::Outside {
                    axis,
                    first,
                    past_last,
                    whole_first,
                    whole_past_last,
                });
            }
        }
        Ok(())
    }

    /// That `parts` are this region: each inside it, no two sharing anything, nothing left out.
    ///
    /// # Errors
    /// [`RegionError`] for the first part that does not fit.
    pub fn check_covered_once(&self, parts: &[Self]) -> Result<(), RegionError> {
        if parts.len() > REGIONS_COMPARED_MAX {
            return Err(RegionError::TooMany(parts.len()));
        }
        let mut covered = 0;
        for (index, part) in parts.iter().enumerate() {
            part.check_inside(self)?;
            if let Some(other) = parts[..index]
                .iter()
                .find(|other| !other.intersection(part).is_empty())
            {
                return Err(RegionError::Overlap {
                    first: *other,
                    second: *part,
                });
            }
            covered += part.volume();
        }
        if covered == self.volume() {
            return Ok(());
        }
        Err(RegionError::Gap {
            whole: *self,
            covered,
            wanted: self.volume(),
        })
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [("token", "tokens"), ("head", "heads"), ("layer", "layers")];
        for (index, ((_, first, past_last), (one, several))) in
            self.ranges().into_iter().zip(names).enumerate()
        {
            if index > 0 {
                f.write_str(", ")?;
            }
            if past_last.checked_sub(first) == Some(1) {
                write!(f, "{one} {first}")?;
            } else {
                write!(f, "{several} {first}..{past_last}")?;
            }
        }
        Ok(())
    }
}
