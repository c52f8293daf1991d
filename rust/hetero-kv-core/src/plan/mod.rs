//! Who reads what from whom, and which bytes that is.
//!
//! [`Pairing`] knows two tensor parallel sizes and the heads; [`RankPlan`] is what one consumer rank
//! does for one transfer; [`expand()`] turns it into runs of bytes. All of it is a pure function of its
//! arguments, so any process can replay any other's plan from a log line.

mod choose;
mod expand;
mod pairing;
mod route;
mod shape;
mod stages;

pub use choose::SourceChooser;
pub use expand::{BlockPair, PlanError, RUNS_MAX, Side, expand, planned_bytes, source_bytes};
pub use pairing::{PairError, Pairing, RankPlan, Source};
pub use route::{Owner, Route};
pub use shape::{EngineShape, GrammarError, InstanceShape, KvShape};
pub use stages::{LayerRange, StagesError, stage_layers};

#[cfg(test)]
mod tests;
