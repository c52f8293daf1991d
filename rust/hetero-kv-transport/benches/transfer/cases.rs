//! What is moved: lists of runs as KV caches make them.

use hetero_kv_core::memory::Run;

/// One kind of transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// As orders name it.
    pub(crate) name: &'static str,
    /// What it is an example of.
    pub(crate) text: &'static str,
    pub(crate) runs: u64,
    pub(crate) run_bytes: u64,
    /// Distance of one destination run to the next, in runs: 2 where a wider head group is filled
    /// by two sources.
    pub(crate) dest_step: u64,
}

pub(crate) const CASES: &[Case] = &[
    Case::new("tiny", "8 bytes", 1, 8, 1),
    Case::new("whole", "64 MiB in one piece", 1, 64 << 20, 1),
    Case::new("16k", "4096 blocks of 16 KiB", 4096, 16 << 10, 1),
    Case::new("64k", "4096 blocks of 64 KiB", 4096, 64 << 10, 1),
    Case::new(
        "mla",
        "MLA, 61 layers of 128 blocks of 18 KiB",
        61 * 128,
        18 << 10,
        1,
    ),
    Case::new(
        "tp8",
        "Llama-70B, TP8, 20480 runs of 4 KiB",
        20_480,
        4 << 10,
        1,
    ),
    Case::new(
        "split",
        "TP4 to TP2: runs of 8 KiB into every second half of 16 KiB",
        10_240,
        8 << 10,
        2,
    ),
];

impl Case {
    const fn new(
        name: &'static str,
        text: &'static str,
        runs: u64,
        run_bytes: u64,
        dest_step: u64,
    ) -> Self {
        Self {
            name,
            text,
            runs,
            run_bytes,
            dest_step,
        }
    }

    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        CASES.iter().find(|case| case.name == name)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.runs * self.run_bytes
    }

    /// Bytes that the larger of both pools has to have.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.bytes() * self.dest_step
    }

    /// The runs, in the order of the destination as a planner gives them, from blocks in an order
    /// that has nothing to do with it: neighbours on both sides are rare, so nothing merges.
    pub(crate) fn list(&self) -> Vec<Run> {
        (0..self.runs)
            .map(|at| Run {
                source_region: 0,
                source_offset: scattered(at, self.runs) * self.run_bytes,
                dest_region: 0,
                dest_offset: at * self.dest_step * self.run_bytes,
                bytes: self.run_bytes,
            })
            .collect()
    }
}

/// The `at`th number below `count` of a fixed order that jumps about; each comes once.
fn scattered(at: u64, count: u64) -> u64 {
    // A step without a common factor visits all; the golden section keeps neighbours apart.
    let mut step = (count as f64 * 0.618) as u64 | 1;
    while gcd(step, count) != 1 {
        step += 1;
    }
    at * step % count
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 {
        one
    } else {
        gcd(other, one % other)
    }
}

/// One line of JSON per case, for the caller and for the peers that it runs beside ours.
pub(crate) fn print() {
    for case in CASES {
        let line = serde_json::json!({
            "name": case.name,
            "text": case.text,
            "runs": case.runs,
            "run_bytes": case.run_bytes,
            "bytes": case.bytes(),
            "pool_bytes": case.pool_bytes(),
            "list": case.list().iter().map(|run| (run.source_offset, run.dest_offset)).collect::<Vec<_>>(),
        });
        println!("{line}");
    }
}
