//! One suite that each transport passes, against holders in processes of their own.

mod buffer;
mod cancel;
mod crowd;
mod exact;
mod faults;
mod holder;
mod hygiene;
mod keys;
mod leases;
mod listener;
mod relay;
mod sessions;
mod throughput;
mod unquiesced;
mod verbs;
