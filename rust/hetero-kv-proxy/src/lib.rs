//! P/D proxy for vLLM: sends each request to a prefill engine and then, with the KV handle that
//! came back, to a decode engine.
//!
//! [`routing`], [`openai`] and [`connectors`] are pure; everything else is I/O on tokio and hyper. The crate knows
//! nothing of the KV data plane: `kv_transfer_params` is raw JSON to it, and it never dials an
//! engine's control port, but for Mooncake's bootstrap server, which speaks HTTP.

pub mod admin;
pub mod admission;
mod admit;
pub mod answer;
pub mod app;
pub mod auth;
mod bad_pairs;
pub mod bench;
mod bootstrap;
pub mod cli;
pub mod client_io;
pub mod completions;
pub mod config;
pub mod connectors;
mod decode;
pub mod fanout;
pub mod handover;
pub mod headers;
pub mod histogram;
pub mod instance;
pub mod lease;
mod legs;
mod lines;
mod listener;
pub mod meters;
pub mod metrics;
pub mod mock;
pub mod openai;
mod pairs;
mod prefill;
pub mod probe;
mod random;
pub mod relay;
mod release;
pub mod reload;
pub(crate) mod revisions;
pub mod routing;
pub mod run;
pub mod running;
mod scrape;
mod seats;
pub mod server;
pub mod slots;
pub mod stream;
mod sync;
pub mod tell;
pub mod timeline;
mod together;
pub mod trace_context;
mod transfer_coding;
mod twins;
pub mod upstream;
pub mod workers;
