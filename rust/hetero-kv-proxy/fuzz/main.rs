//! One executable for all targets: `HETERO_KV_FUZZ_TARGET` names the one that libFuzzer feeds.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

mod targets;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("HETERO_KV_FUZZ_TARGET").unwrap_or_default();
    let found = targets::ALL.iter().find(|(known, _)| *known == name);
    let Some((_, target)) = found else {
        let names: Vec<&str> = targets::ALL.iter().map(|(known, _)| *known).collect();
        eprintln!("HETERO_KV_FUZZ_TARGET must be one of {}", names.join(", "));
        std::process::exit(2);
    };
    *target
});

fuzz_target!(|data: &[u8]| TARGET(data));
