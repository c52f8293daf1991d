//! The rules of moving KV between engines of unlike layouts, and nothing else.
//!
//! This crate has no I/O, no clock, no randomness, no thread, no async runtime and no Python. Time
//! enters as an argument ([`time::Time`]), bytes as slices, randomness as seeds; results are values.
//! That is what lets the simulator drive whole clusters from one seed, and what makes the state
//! machines testable by scripted traces.

pub mod auth;
pub mod consumer;
pub mod digest;
pub mod failure;
pub mod ids;
pub mod layout;
pub mod lease_page;
pub mod memory;
pub mod plan;
pub mod producer;
pub mod step;
pub mod time;
pub mod wire;

#[cfg(test)]
mod testing;
