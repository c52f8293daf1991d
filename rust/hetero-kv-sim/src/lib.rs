//! Whole clusters from one seed: prefill and decode engines, their ranks' memory, the network
//! between them, clients and a router, on virtual time in one thread. No socket, no clock, no
//! randomness but the seed's.
//!
//! **Real**, as it ships: the two state machines of `hetero-kv-core` ([`Producer`] and
//! [`Consumer`]), every frame they exchange (as bytes), `kv_transfer_params` as JSON text, the
//! orders to workers (encoded and decoded), pairing, choice of sources and expansion into runs of
//! bytes over real layouts, the layout of lease pages.
//!
//! **Modelled** here, because the product's is threads around system calls or vLLM itself: vLLM's
//! scheduler (blocks, queue, steps, its aggregation of reports, both load failure policies), a
//! worker's part (bump, then report; start, extend, cancel), the reader (operations that complete
//! later, fence after data, quiesce before report), TCP, clocks, clients, routers.
//!
//! Beside the cluster runs a **reference model** of what may happen: each engine's leases
//! (`ledger`), each grant as it crossed the wire, what of each source has landed and been fenced
//! (`reads`), each request's expected tokens, and for each failure the kinds of trouble that explain it. After every event the [`Invariant`]s hold, or the
//! run ends with a [`Violation`]. When trouble is over, everything has to come to its end.
//!
//! [`Producer`]: hetero_kv_core::producer::Producer
//! [`Consumer`]: hetero_kv_core::consumer::Consumer

mod book;
mod clock;
mod decode;
mod fault;
mod holders;
mod ledger;
mod memory;
mod network;
mod ops;
mod orders;
mod pool;
mod prefill;
mod prefill_steps;
mod reader;
mod reads;
mod reports;
mod rng;
mod router;
mod scenario;
mod steps;
mod trouble;
mod world;

pub use book::{Coverage, Invariant, Outcome, Violation};
pub use clock::DRIFT_PPM_MAX;
pub use fault::Fault;
pub use scenario::{BLOCK_TOKENS, PROMPT_TOKENS_MAX, Profile, Scenario, Shape};

use world::World;

/// What became of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// The first broken invariant.
    pub violation: Option<Violation>,
    /// What happened how often.
    pub coverage: Coverage,
    /// With `traced`: what happened, in order; the last few thousand lines.
    pub trace: Vec<String>,
}

/// Runs one seed. The same seed, profile and build give the same run.
pub fn run(seed: u64, profile: Option<Profile>, traced: bool) -> Run {
    let scenario = Scenario::new(seed, profile);
    let mut world = World::new(scenario, traced);
    world.run();
    Run {
        violation: world.book.violation.take(),
        trace: world.book.take_trace(),
        coverage: world.book.coverage,
    }
}

/// Seeds of a corpus file: one a line, with a profile behind it where it is not the seed's own, a
/// `#` and why it is kept.
///
/// # Errors
/// The first line that is not of that form.
pub fn parse_corpus(text: &str) -> Result<Vec<(u64, Option<Profile>)>, String> {
    let mut seeds = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let fail = |problem: &str| Err(format!("line {}: {problem}", number + 1));
        let (what, why) = line.split_once('#').unwrap_or((line, ""));
        let mut words = what.split_whitespace();
        let Some(seed) = words.next() else {
            continue;
        };
        let Ok(seed) = seed.parse() else {
            return fail("no seed");
        };
        let profile = match words.next() {
            None => None,
            Some("calm") => Some(Profile::Calm),
            Some("mixed") => Some(Profile::Mixed),
            Some("storm") => Some(Profile::Storm),
            Some(_) => return fail("no such profile"),
        };
        if why.trim().is_empty() {
            return fail("no reason");
        }
        seeds.push((seed, profile));
    }
    Ok(seeds)
}

#[cfg(test)]
mod tests;
