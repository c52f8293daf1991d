use super::*;

/// Fresh seeds of one test run.
const FRESH_SEEDS: u64 = 300;
/// The first of 65,536 seeds with keys.
const KEYED_SEEDS: u64 = 1 << 16;

fn holds(seed: u64, profile: Option<Profile>) -> Coverage {
    let Run {
        violation,
        coverage,
        ..
    } = run(seed, profile, false);
    if let Some(violation) = violation {
        let tail = run(seed, profile, true).trace;
        let tail = &tail[tail.len().saturating_sub(40)..];
        panic!(
            "{}\nseed {seed}, profile {profile:?}: {violation}\nagain: cargo run --release -p hetero-kv-sim -- --seed {seed} --trace",
            tail.join("\n")
        );
    }
    coverage
}

#[test]
fn the_corpus_holds() {
    let seeds = parse_corpus(include_str!("../corpus.txt")).expect("a seed and a reason a line");
    assert!(seeds.len() >= 10, "the corpus has been lost");
    for (seed, profile) in seeds {
        holds(seed, profile);
    }
}

#[test]
fn fresh_seeds_hold_and_every_kind_of_trouble_comes() {
    // Another base in every process: its address space is laid out at random. HETERO_KV_SIM_FROM
    // repeats one.
    let base = std::env::var("HETERO_KV_SIM_FROM")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| {
            let fresh = std::hash::BuildHasher::hash_one(
                &std::collections::hash_map::RandomState::new(),
                FRESH_SEEDS,
            );
            fresh >> 16
        });
    println!("seeds from {base}");
    let mut coverage = Coverage::default();
    for seed in base..base + FRESH_SEEDS / 2 {
        for seed in [seed, seed ^ KEYED_SEEDS] {
            coverage.add(&holds(seed, None));
        }
    }
    assert_eq!(
        coverage.missing(),
        Vec::new(),
        "trouble that never came in seeds from {base}"
    );
    for event in [
        "reads of several sources",
        "reads posted again",
        "legs by another name of the host",
        "handshakes with keys",
    ] {
        assert!(coverage.events.contains_key(event), "no {event}");
    }
    let answered = coverage.outcomes[&Outcome::Answered];
    let all: u64 = coverage.outcomes.values().sum();
    assert!(
        answered * 3 > all,
        "too little is moved to show anything: {answered} of {all}"
    );
}

#[test]
fn without_trouble_every_request_is_answered_from_moved_kv() {
    for seed in (0..60).chain(KEYED_SEEDS..KEYED_SEEDS + 60) {
        let run = run(seed, Some(Profile::Calm), false);
        assert_eq!(run.violation, None, "seed {seed}");
        let keyed = run.coverage.events.contains_key("handshakes with keys");
        assert_eq!(keyed, seed >= KEYED_SEEDS, "seed {seed}");
        assert!(run.coverage.failures.is_empty(), "seed {seed}");
        let moved = run.coverage.outcomes.get(&Outcome::Answered).copied();
        assert!(moved.unwrap_or(0) > 0, "seed {seed}: nothing was moved");
        let ends: Vec<&Outcome> = run.coverage.outcomes.keys().collect();
        assert!(
            ends.iter()
                .all(|end| matches!(end, Outcome::Answered | Outcome::Computed)),
            "seed {seed}: {ends:?}"
        );
    }
}

#[test]
fn a_seed_replays_exactly() {
    for seed in [3, 7, 15, 23] {
        let first = run(seed, None, true);
        let second = run(seed, None, true);
        assert_eq!(first.trace, second.trace, "seed {seed}");
        assert_eq!(first.coverage, second.coverage, "seed {seed}");
        assert!(first.trace.len() > 100, "seed {seed} does nothing");
    }
}

#[test]
fn a_corpus_needs_seeds_and_reasons() {
    assert_eq!(
        parse_corpus("# only words\n\n12 # why\n"),
        Ok(vec![(12, None)])
    );
    assert_eq!(
        parse_corpus("12 storm # why"),
        Ok(vec![(12, Some(Profile::Storm))])
    );
    for (text, error) in [
        ("12", "line 1: no reason"),
        ("1 # a\nx # b", "line 2: no seed"),
        ("1 calmer # a", "line 1: no such profile"),
    ] {
        assert_eq!(parse_corpus(text), Err(error.into()));
    }
}
