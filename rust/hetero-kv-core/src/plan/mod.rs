//! Who reads what from whom, and which bytes that is.
//!
//! [`Pairing`] knows two tensor parallel sizes and the heads; [`RankPlan`] is what one consumer rank
//! does for one transfer; [`expand()`] turns it into runs of bytes. All of it is a pure function of its
//! arguments, so any process can replay any other's plan from a log line.

mod choose;
mod emit;
mod error;
mod expand;
mod pairing;
mod pieces;
mod policy;
mod region;
mod route;
mod shape;
mod spans;
mod stages;
mod stripe;
mod transfer;
mod transfer_plan;

pub use choose::SourceChooser;
pub use error::{PlanError, Side};
pub use expand::{BlockPair, RUNS_MAX, expand, planned_bytes, source_bytes};
pub use pairing::{PairError, Pairing, RankPlan, Source};
pub use policy::{RoundRobinGate, SourcePolicy, UnknownPolicy};
pub use region::{REGIONS_COMPARED_MAX, Region, RegionAxis, RegionError, TokenRange};
pub use route::{Owner, Route};
pub use shape::{EngineShape, GrammarError, InstanceShape, KvShape};
pub use spans::GroupBlocks;
pub use stages::{LayerRange, StagesError, stage_layers};
pub use stripe::Striping;
pub use transfer::Transfer;
pub use transfer_plan::{PlannedRead, Read, TransferOutline, TransferPlan};

#[cfg(test)]
mod tests;
