//! What both planes need of the network: names to addresses with a deadline, and listeners.

pub mod listen;
pub(crate) mod resolve;
