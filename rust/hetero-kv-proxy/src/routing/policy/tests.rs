//! Each policy over candidates made by hand.

use super::*;
use proptest::prelude::*;

/// One slot that may be chosen.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    slot: usize,
    load: u32,
    cache_used: u16,
    weight: u32,
    due: u64,
    picked: u64,
    identity: u64,
}

/// A round of these slots.
fn round(slots: &[Candidate]) -> Round {
    let mut round = Round::new(slots.iter().map(|slot| slot.identity).collect());
    for (at, slot) in slots.iter().enumerate() {
        let turn = Turn {
            due: slot.due,
            picked: slot.picked,
        };
        let facts = SlotFacts {
            load: slot.load,
            cache_used: slot.cache_used,
            weight: slot.weight,
            turn,
            has_room: true,
        };
        round.set(at, &facts);
    }
    round.set_reach(|_| true);
    round
}

fn candidates(loads: &[u32]) -> Vec<Candidate> {
    loads
        .iter()
        .enumerate()
        .map(|(slot, &load)| Candidate {
            slot,
            load,
            cache_used: 0,
            weight: 1,
            due: 0,
            picked: 0,
            identity: slot_identity(&format!("http://engine-{}:8000", slot / 2), slot as u32 % 2),
        })
        .collect()
}

fn of_prompt(prompt: &[u8]) -> RequestKey {
    RequestKey::new(&KeyParts {
        model: b"\"m\"",
        prompt,
        session: None,
        prompt_bytes: 256,
    })
}

fn of_session(session: &str) -> RequestKey {
    RequestKey::new(&KeyParts {
        session: Some(session.as_bytes()),
        ..KeyParts::default()
    })
}

/// Text of which any two of one length, by different seeds, have no beginning in common.
fn text(seed: u32, bytes: usize) -> Vec<u8> {
    (0..)
        .flat_map(|at: u32| format!("{seed} {at} ").into_bytes())
        .take(bytes)
        .collect()
}

#[test]
fn a_hash_differs_by_every_bit_by_order_by_length_and_by_seed() {
    let base = text(1, 100);
    let mut seen = std::collections::BTreeSet::from([hash::hash(0, &base)]);
    let mut add = |seed: u64, bytes: &[u8]| {
        assert!(seen.insert(hash::hash(seed, bytes)), "{seed} {bytes:?}");
    };
    add(1, &base);
    for bit in 0..800 {
        let mut other = base.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        add(0, &other);
    }
    // Words within a round, and whole rounds.
    for (word, with) in [(0, 8), (0, 32), (8, 40), (32, 64)] {
        let mut other = base.clone();
        (0..8).for_each(|at| other.swap(word + at, with + at));
        add(0, &other);
    }
    let mut rounds = base[32..64].to_vec();
    rounds.extend_from_slice(&base[..32]);
    rounds.extend_from_slice(&base[64..]);
    add(0, &rounds);
    (0..100).for_each(|zeros| add(0, &vec![0; zeros]));
}

#[test]
fn a_hash_taken_on_the_way_is_that_of_what_was_added() {
    let base = text(1, 200);
    let mut hasher = hash::Hasher::new(7);
    for (from, end) in [(0, 32), (32, 64), (64, 128), (128, 200)] {
        hasher.update(&base[from..end]);
        assert_eq!(hasher.digest(), hash::hash(7, &base[..end]), "{end}");
    }
}

#[test]
fn a_key_is_the_header_or_the_beginning_of_the_prompt_and_the_model() {
    let long = text(1, 2_000);
    let parts = KeyParts {
        model: b"\"m\"",
        prompt: &long,
        session: None,
        prompt_bytes: 256,
    };
    let key = RequestKey::new(&parts);
    let mut tail = long.clone();
    tail[256] ^= 1;
    let mut head = long.clone();
    head[255] ^= 1;
    let group = |parts: KeyParts<'_>| RequestKey::new(&parts).group();
    assert_eq!(
        group(KeyParts {
            prompt: &tail,
            ..parts
        }),
        key.group()
    );
    assert_ne!(
        group(KeyParts {
            prompt: &head,
            ..parts
        }),
        key.group()
    );
    assert_ne!(
        group(KeyParts {
            model: b"\"n\"",
            ..parts
        }),
        key.group()
    );
    let session = Some(&b"s"[..]);
    let in_session = group(KeyParts { session, ..parts });
    assert_ne!(in_session, key.group());
    assert_eq!(
        group(KeyParts {
            session,
            prompt: &head,
            ..parts
        }),
        in_session
    );
    assert_eq!(
        group(KeyParts {
            prompt_bytes: 0,
            ..parts
        }),
        None
    );
    assert_eq!(
        group(KeyParts {
            prompt: b"",
            ..parts
        }),
        None
    );
}

#[test]
fn prefixes_double_and_end_with_the_longest() {
    for (bytes, levels) in [(0, 0), (127, 0), (128, 1), (255, 1), (256, 2), (1 << 20, 8)] {
        assert_eq!(
            of_prompt(&text(1, bytes)).prefixes().len(),
            levels,
            "{bytes}"
        );
    }
    assert_eq!(PREFIX_BYTES_MAX, 16 << 10);
    let base = text(1, PREFIX_BYTES_MAX);
    let prefixes = of_prompt(&base);
    // A changed byte changes the beginnings that hold it and no other.
    for (at, level) in [
        (0, 0),
        (127, 0),
        (128, 1),
        (300, 2),
        (PREFIX_BYTES_MAX - 1, 7),
    ] {
        let mut other = base.clone();
        other[at] ^= 0x20;
        let other = of_prompt(&other);
        let same = (prefixes.prefixes().iter())
            .zip(other.prefixes())
            .take_while(|(a, b)| a == b)
            .count();
        let unlike = (prefixes.prefixes()[level..].iter()).zip(&other.prefixes()[level..]);
        assert_eq!(same, level, "byte {at}");
        assert!(unlike.into_iter().all(|(a, b)| a != b), "byte {at}");
    }
}

#[test]
fn only_beginnings_of_a_quarter_of_the_prompt_count() {
    for (bytes, long) in [(128, 1), (512, 3), (513, 2), (4_096, 3), (1 << 20, 3)] {
        let key = of_prompt(&text(1, bytes));
        let found: Vec<u64> = key.long_prefixes().map(|(_, prefix)| prefix).collect();
        assert_eq!(found.len(), long, "{bytes}");
        assert_eq!(found.first(), key.prefixes().last(), "the longest first");
    }
}

#[test]
fn power_of_two_never_takes_the_heavier_of_two_and_spreads_over_many() {
    let mut policy = PowerOfTwo::default();
    let key = RequestKey::default();
    let two = candidates(&[3, 2]);
    assert!((0..100).all(|_| policy.choose(&round(&two), &key) == 1));
    assert_eq!(policy.choose(&round(&candidates(&[7])), &key), 0);

    let mut many = candidates(&[0; 64]);
    for _ in 0..64 * 100 {
        let chosen = policy.choose(&round(&many), &key);
        many[chosen].load += 1;
    }
    let loads = many.iter().map(|candidate| candidate.load);
    let (low, high) = (loads.clone().min(), loads.max());
    // One random choice leaves some 25 on either side of the mean.
    assert!(low >= Some(95) && high <= Some(105), "{low:?} {high:?}");
}

#[test]
fn power_of_two_draws_every_slot_of_equal_loads_alike() {
    let mut policy = PowerOfTwo::default();
    let slots = candidates(&[1; 12]);
    let mut counts = [0; 12];
    for _ in 0..12_000 {
        counts[policy.choose(&round(&slots), &RequestKey::default())] += 1;
    }
    assert!(
        counts.iter().all(|count| (880..1_120).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn consistent_hash_gives_sessions_even_shares() {
    let mut policy = ConsistentHash::default();
    let slots = candidates(&[0; 16]);
    let mut counts = [0; 16];
    for session in 0..16_000 {
        counts[policy.choose(&round(&slots), &of_session(&session.to_string()))] += 1;
    }
    assert!(
        counts.iter().all(|count| (880..1_120).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn one_hot_key_does_not_drown_its_slot() {
    for mut policy in [
        Box::new(ConsistentHash::default()) as Box<dyn Policy>,
        Box::new(PrefixAware::default()),
    ] {
        let key = of_prompt(&text(1, 300));
        let mut slots = candidates(&[0; 8]);
        let home = policy.choose(&round(&slots), &key);
        for placed in 0..800_u32 {
            let chosen = policy.choose(&round(&slots), &key);
            if placed < LEGS_FREE {
                assert_eq!(chosen, home, "{policy:?}: a few legs are no load");
            }
            slots[chosen].load += 1;
            let bound = ((placed + 1) * 5).div_ceil(4 * 8).max(LEGS_FREE);
            assert!(slots[chosen].load <= bound, "{slots:?}");
        }
        // Its own slot is the first to take more again.
        slots.iter_mut().for_each(|slot| slot.load = 1);
        assert_eq!(policy.choose(&round(&slots), &key), home);
    }
}

#[test]
fn the_cap_is_a_quarter_over_the_mean_with_the_leg_to_place() {
    for (loads, cap) in [
        (vec![0; 8], LEGS_FREE),
        (vec![4; 8], 6),
        (vec![0, 0, 0, 33], 11),
        (vec![100], 127),
    ] {
        assert_eq!(
            round(&candidates(&loads)).load_cap().legs(1),
            cap,
            "{loads:?}"
        );
    }
}

#[test]
fn keyless_requests_go_to_the_least_loaded() {
    for kind in [PolicyKind::ConsistentHash, PolicyKind::PrefixAware] {
        let mut policy = kind.build();
        let chosen = policy.choose(&round(&candidates(&[2, 1, 0, 1])), &RequestKey::default());
        assert_eq!(chosen, 2, "{kind:?}");
    }
}

#[test]
fn a_conversation_stays_where_it_began() {
    let mut policy = PrefixAware::default();
    let slots = candidates(&[0; 6]);
    let mut turns: Vec<Vec<u8>> = (0..12).map(|seed| text(seed, 200)).collect();
    let homes: Vec<usize> = turns
        .iter()
        .map(|turn| policy.choose(&round(&slots), &of_prompt(turn)))
        .collect();
    // New conversations spread.
    for slot in 0..6 {
        assert_eq!(
            homes.iter().filter(|home| **home == slot).count(),
            2,
            "{homes:?}"
        );
    }
    // Each turn brings more, the last two more than twice what was there. The order is another
    // than that of the beginnings: taking turns would not bring each back.
    for more in [270, 360, 480, 640, 900, 1_200, 3_000, 7_000, 20_000] {
        for (seed, (turn, home)) in turns.iter_mut().zip(&homes).enumerate().rev() {
            *turn = text(seed as u32, more);
            assert_eq!(
                policy.choose(&round(&slots), &of_prompt(turn)),
                *home,
                "{more} bytes"
            );
        }
    }
}

#[test]
fn the_longest_beginning_wins_and_a_short_one_does_not_bind() {
    let mut policy = PrefixAware::default();
    let base = text(1, 4_096);
    let mut branch = base.clone();
    branch.splice(1_024.., text(2, 3_072));
    let mut idle = candidates(&[0; 4]);
    let of_base = policy.choose(&round(&idle), &of_prompt(&base));
    // Its half of a common beginning is not enough while that slot is full.
    idle[of_base].load = 50;
    let of_branch = policy.choose(&round(&idle), &of_prompt(&branch));
    assert_ne!(of_base, of_branch);
    idle[of_base].load = 0;
    for _ in 0..3 {
        assert_eq!(policy.choose(&round(&idle), &of_prompt(&base)), of_base);
        assert_eq!(policy.choose(&round(&idle), &of_prompt(&branch)), of_branch);
    }
    // 512 bytes in common with either are an eighth of it.
    let mut spread = std::collections::BTreeSet::new();
    for seed in 3..40 {
        let mut other = base[..512].to_vec();
        other.extend(text(seed, 3_584));
        spread.insert(policy.choose(&round(&idle), &of_prompt(&other)));
    }
    assert_eq!(spread.len(), 4);
}

#[test]
fn a_beginning_that_outgrows_its_slot_is_known_on_several() {
    let mut policy = PrefixAware::default();
    let key = of_prompt(&text(1, 500));
    let mut slots = candidates(&[0; 8]);
    let first = policy.choose(&round(&slots), &key);
    slots[first].load = LEGS_FREE;
    let second = policy.choose(&round(&slots), &key);
    assert_ne!(first, second);
    // Both are warm: the emptier of them is taken, and no third.
    slots[first].load = 2;
    slots[second].load = 1;
    assert_eq!(policy.choose(&round(&slots), &key), second);
    slots[second].load = 3;
    assert_eq!(policy.choose(&round(&slots), &key), first);
    // The first is gone.
    slots.remove(first);
    let at = policy.choose(&round(&slots), &key);
    assert_eq!(slots[at].slot, second);
}

#[test]
fn what_is_used_stays_while_many_others_pass() {
    let mut policy = PrefixAware::default();
    let slots = round(&candidates(&[0; 8]));
    let key = of_prompt(&text(1, 600));
    let home = policy.choose(&slots, &key);
    let mut passed_by = 0;
    for seed in 2..500_002 {
        policy.choose(&slots, &of_prompt(&text(seed, 130)));
        if seed % 20_000 == 0 {
            passed_by += usize::from(policy.choose(&slots, &key) == home);
        }
    }
    assert_eq!(passed_by, 25);
    // What nobody asks for goes.
    let old = of_prompt(&text(2, 130));
    let kept = (policy.warm(&slots, &old)).is_some();
    assert!(!kept, "500,000 prompts are more than the table holds");
}

proptest! {
    /// A slot that goes takes only its own keys away; one that comes takes keys only to itself.
    #[test]
    fn consistent_hash_moves_only_the_keys_of_a_slot(
        count in 2_usize..40,
        gone in any::<prop::sample::Index>(),
        sessions in prop::collection::vec("[a-z0-9]{1,20}", 1..60),
    ) {
        let mut policy = ConsistentHash::default();
        let all = candidates(&vec![0; count]);
        let gone = gone.index(count);
        let mut fewer = all.clone();
        fewer.remove(gone);
        // Positions say nothing of who a slot is.
        fewer.iter_mut().zip(0..).for_each(|(candidate, at)| candidate.slot = at);
        for session in sessions {
            let key = of_session(&session);
            let with = all[policy.choose(&round(&all), &key)];
            let without = fewer[policy.choose(&round(&fewer), &key)];
            prop_assert!(
                with.slot == gone || with.identity == without.identity,
                "{with:?} {without:?}"
            );
        }
    }

    /// Whatever the loads: the choice is one of the candidates, and, for a request with a key,
    /// below the cap.
    #[test]
    fn choices_are_in_bounds(
        loads in prop::collection::vec(0_u32..50, 1..40),
        prompts in prop::collection::vec((0_u32..4, 0_usize..2_000), 1..20),
    ) {
        let slots = candidates(&loads);
        let cap = round(&slots).load_cap();
        for kind in PolicyKind::ALL {
            let mut policy = kind.build();
            for (seed, bytes) in &prompts {
                let key = of_prompt(&text(*seed, *bytes));
                let chosen = policy.choose(&round(&slots), &key);
                prop_assert!(chosen < slots.len());
                if kind.reads_key() {
                    prop_assert!(cap.admits(slots[chosen].load, slots[chosen].weight), "{kind:?}");
                }
            }
        }
    }
}

#[test]
fn of_equal_loads_the_emptier_cache_is_taken_and_load_counts_first() {
    let mut policy = PolicyKind::LeastLoaded.build();
    let mut slots = candidates(&[3, 3, 4]);
    (
        slots[0].cache_used,
        slots[1].cache_used,
        slots[2].cache_used,
    ) = (900, 300, 0);
    for _ in 0..4 {
        assert_eq!(policy.choose(&round(&slots), &RequestKey::default()), 1);
    }
    // Within a quarter they are alike, and served in turn.
    slots[0].cache_used = 499;
    let taken: Vec<usize> = (0..4)
        .map(|_| policy.choose(&round(&slots), &RequestKey::default()))
        .collect();
    assert!(taken == [0, 1, 0, 1] || taken == [1, 0, 1, 0], "{taken:?}");
}

#[test]
fn turns_are_kept_whoever_else_is_served_in_between() {
    for kind in [PolicyKind::RoundRobin, PolicyKind::LeastLoaded] {
        let mut policy = kind.build();
        let mut slots = candidates(&[0; 5]);
        let mut counts = [0; 5];
        // Requests of two kinds in turn, as those of two revisions are: the first kind may go to
        // three slots, the other to two.
        for turn in 1..=120_u64 {
            let among = match turn % 2 {
                0 => 0..3,
                _ => 3..5,
            };
            let chosen =
                among.start + policy.choose(&round(&slots[among.clone()]), &RequestKey::default());
            slots[chosen].picked = turn;
            counts[chosen] += 1;
        }
        assert_eq!(counts, [20, 20, 20, 30, 30], "{kind:?}");
    }
}
