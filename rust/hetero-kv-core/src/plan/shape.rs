//! The texts people write: shapes of engines and of caches.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::layout::KvHeads;

/// One instance's parallel layout: `dp` engines of `tp` x `pp` workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineShape {
    /// Data parallel ranks, each an engine of its own.
    pub dp: u32,
    /// Tensor parallel ranks of one engine.
    pub tp: u32,
    /// Pipeline stages of one engine.
    pub pp: u32,
}

/// `[Nx]dp=D,tp=T[,pp=P]`: some instances of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceShape {
    /// How many instances.
    pub instances: u32,
    /// The shape of each.
    pub engine: EngineShape,
}

/// `gqa:HEADS_TOTAL:HEAD_DIM` or `mla:LATENT`: what a token's KV is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KvShape {
    /// Keys and values of `heads` KV heads in all, `head_dim` elements each.
    Grouped {
        /// KV heads in all.
        heads: NonZeroU32,
        /// Elements of one head's key, and of its value.
        head_dim: NonZeroU32,
    },
    /// One latent of so many elements.
    Latent {
        /// Elements of the latent with its rope part.
        latent: NonZeroU32,
    },
}

impl KvShape {
    /// The heads as the planner counts them.
    pub fn heads(self) -> KvHeads {
        match self {
            Self::Grouped { heads, .. } => KvHeads::Grouped(heads),
            Self::Latent { .. } => KvHeads::Latent,
        }
    }

    /// Elements of one token in one head: key and value, or the latent.
    pub fn elements_per_head_token(self) -> u64 {
        match self {
            Self::Grouped { head_dim, .. } => 2 * u64::from(head_dim.get()),
            Self::Latent { latent } => latent.get().into(),
        }
    }
}

/// A text outside its grammar. The message says what was found and what is accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; expected {expected}")]
pub struct GrammarError {
    /// What is wrong, quoting a bounded part of the text.
    pub problem: String,
    /// The grammar.
    pub expected: &'static str,
}

impl fmt::Display for EngineShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dp={},tp={}", self.dp, self.tp)?;
        if self.pp > 1 {
            write!(f, ",pp={}", self.pp)?;
        }
        Ok(())
    }
}

impl fmt::Display for InstanceShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.instances > 1 {
            write!(f, "{}x", self.instances)?;
        }
        self.engine.fmt(f)
    }
}

impl fmt::Display for KvShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grouped { heads, head_dim } => write!(f, "gqa:{heads}:{head_dim}"),
            Self::Latent { latent } => write!(f, "mla:{latent}"),
        }
    }
}

impl FromStr for InstanceShape {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        parse::instance_shape(text)
    }
}

impl FromStr for KvShape {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        parse::kv_shape(text)
    }
}

mod parse;
