//! Moving KV bytes between ranks, and nothing about which bytes: plans come from
//! [`hetero_kv_core::plan`].
//!
//! Plain operating system threads; no async runtime, no Python, and no HTTP but in [`registration`]. Nothing starts at import:
//! the reading side starts a thread per source when the first job for it comes, the holding side
//! when it is told to serve. A forked child has none of these threads and gets a clear error.
//!
//! | transport | one-sided | fence | copies | needs |
//! |---|---|---|---|---|
//! | `process` | yes | reader reads the lease page after the data | 1 | same host, permission to read the other process |
//! | `verbs` | yes | reader reads the lease page after the data | 1 | an RDMA device on both sides, libibverbs |
//! | `tcp` | no | holder checks the lease before and after it sends | socket | a route |
//! | `mori` | yes | reader reads the lease page after the data | none | `amd-mori`, an RDMA device |
//!
//! What every transport promises is written at [`transport::Connection`] and proven by one
//! conformance suite, which runs each transport against a holder in a process of its own.

pub mod clock;
pub mod control;
pub mod error;
mod fence;
pub mod keys;
pub mod lease_page;
mod lines;
pub mod memory;
pub mod mori;
pub mod net;
pub mod process;
pub mod reader;
pub mod registration;
pub mod scheduler;
pub mod tcp;
pub mod transport;
pub mod verbs;
pub mod waker;
pub mod worker;

#[cfg(test)]
mod testing;
