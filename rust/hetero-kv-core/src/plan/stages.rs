//! Which layers a pipeline stage runs.

use serde::{Deserialize, Serialize};

/// Consecutive layers, by their index in the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LayerRange {
    /// First layer.
    pub first: u32,
    /// One past the last layer.
    pub past_last: u32,
}

impl LayerRange {
    /// How many layers.
    pub fn count(self) -> u32 {
        self.past_last.saturating_sub(self.first)
    }

    /// The layers that are in both.
    pub fn intersection(self, other: Self) -> Self {
        let first = self.first.max(other.first);
        Self {
            first,
            past_last: self.past_last.min(other.past_last).max(first),
        }
    }
}

/// A pipeline with an empty stage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pp_size {pp_size} is not in 1..={layers}, the number of layers")]
pub struct StagesError {
    /// Stages asked for.
    pub pp_size: u32,
    /// Layers of the model.
    pub layers: u32,
}

/// The layers of each stage, as vLLM's `get_pp_indices` shares them out when the user does not say
/// otherwise: equal shares, the remainder one each to the stages before the last, from the back.
///
/// # Errors
/// [`StagesError`] when there are no stages or more stages than layers.
pub fn stage_layers(layers: u32, pp_size: u32) -> Result<Vec<LayerRange>, StagesError> {
    if pp_size == 0 || pp_size > layers {
        return Err(StagesError { pp_size, layers });
    }
    let remainder = layers % pp_size;
    let mut first = 0;
    Ok((0..pp_size)
        .map(|stage| {
            let from_back = pp_size - 1 - stage;
            let extra = u32::from((1..=remainder).contains(&from_back));
            let range = LayerRange {
                first,
                past_last: first + layers / pp_size + extra,
            };
            first = range.past_last;
            range
        })
        .collect())
}
