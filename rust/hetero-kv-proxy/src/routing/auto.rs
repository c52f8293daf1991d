//! Whether a request is worth two legs: prefill elsewhere costs a hand-over.

/// When it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutoRules {
    /// Bytes of a prompt that have to be computed from which on prefill computes them; about four
    /// are a token.
    pub prompt_bytes_min: usize,
}

/// What is known when a request comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scene {
    /// Length of its prompt.
    pub prompt_bytes: usize,
    /// Length of its beginning that the decode engine to which it would go has in its cache.
    pub known_bytes: usize,
    /// Load of the least loaded prefill slot; [`u32::MAX`] where none has room.
    pub prefill_load: u32,
    /// Load of the least loaded decode slot; [`u32::MAX`] where none has room.
    pub decode_load: u32,
}

/// Why decode serves it alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alone {
    /// The prompt is short.
    Short,
    /// So is what decode does not have in its cache.
    Known,
    /// Prefill has a queue, and decode next to nothing to do.
    Busy,
}

/// Load of the least loaded prefill slot from which on prefill has a queue.
pub const PREFILL_LOAD_LONG: u32 = 8;
/// Load of the least loaded decode slot up to which a prompt there disturbs hardly anyone.
pub const DECODE_LOAD_IDLE: u32 = 1;

impl Alone {
    /// The label in `fallbacks_total`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Short => "auto_short",
            Self::Known => "auto_known",
            Self::Busy => "auto_busy",
        }
    }
}

impl AutoRules {
    /// Why decode serves a request alone; `None` where prefill has its part.
    pub fn alone(&self, scene: &Scene) -> Option<Alone> {
        let unknown = scene.prompt_bytes.saturating_sub(scene.known_bytes);
        if scene.prompt_bytes < self.prompt_bytes_min {
            Some(Alone::Short)
        } else if unknown < self.prompt_bytes_min {
            Some(Alone::Known)
        } else if scene.prefill_load >= PREFILL_LOAD_LONG && scene.decode_load <= DECODE_LOAD_IDLE {
            Some(Alone::Busy)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests;
