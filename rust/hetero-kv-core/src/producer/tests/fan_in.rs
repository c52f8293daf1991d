//! Acknowledgements of several ranks, for pairs of unlike sizes, and those of nothing known.

use super::*;
use crate::ids::{PpRank, TpRank};
use crate::wire::message::Release;

fn ack_of(n: u8, ranks: &[u32]) -> Message {
    Message::Ack(Ack {
        transfer_id: transfer(n),
        ranks: ranks.iter().map(|tp| (TpRank(*tp), PpRank(0))).collect(),
        number: None,
    })
}

fn tell(p: &mut Producer, from: ConnectionId, message: Message) {
    p.handle_message(at(secs(5)), from, message);
    assert!(drain(p).is_empty(), "it has no answer");
}

#[test]
fn the_last_rank_of_the_reader_ends_the_lease_whatever_both_sizes_are() {
    for producer_tp in [1, 2, 4, 8] {
        for consumer_tp in [1, 2, 4, 8] {
            let mut p = Producer::new(
                identity("prefill", 1, producer_tp),
                common_fields(),
                cards(producer_tp),
                lease_times(),
                8,
            );
            greet(&mut p, D, "decode", consumer_tp);
            let lease = finish(&mut p, at(secs(0)), 5);
            assert_granted(&claim(&mut p, at(secs(1)), D, claim_of(5, lease)), 30_000);
            // Highest first, and each of them twice: order and repetition mean nothing.
            for rank in (0..consumer_tp).rev() {
                assert!(!p.has_releases(), "{producer_tp} <- {consumer_tp}: {rank}");
                tell(&mut p, D, ack_of(5, &[rank]));
                tell(&mut p, D, ack_of(5, &[rank]));
            }
            // One release for the engine, whose scheduler orders it on every worker.
            assert_eq!(ordered(&mut p), ["r5"], "{producer_tp} <- {consumer_tp}");
            let counts = p.counts();
            assert_eq!((counts.read_out, counts.late), (1, 1));
        }
    }
}

#[test]
fn sets_of_several_transfers_are_kept_apart() {
    let mut p = producer();
    greet(&mut p, D, "decode", 2);
    for n in [5, 6] {
        let lease = finish(&mut p, at(secs(0)), n);
        assert_granted(&claim(&mut p, at(secs(1)), D, claim_of(n, lease)), 30_000);
    }
    tell(&mut p, D, ack_of(5, &[0]));
    tell(&mut p, D, ack_of(6, &[1]));
    assert!(!p.has_releases(), "half of each is not a whole of either");
    tell(&mut p, D, ack_of(6, &[0]));
    assert_eq!(ordered(&mut p), ["r6"]);
    tell(&mut p, D, ack_of(5, &[1]));
    assert_eq!(ordered(&mut p), ["r5"]);
}

#[test]
fn what_comes_for_a_transfer_before_its_prefill_is_done_neither_ends_nor_outlives_it() {
    let mut p = producer();
    greet(&mut p, D, "decode", 2);
    // A reader cannot know an id before the prefill's answer: these are invented, and the lease
    // that later has the id owes them nothing.
    for _ in 0..100_000 {
        tell(&mut p, D, ack_of(5, &[0, 1]));
        let release = Release {
            transfer_id: transfer(5),
            number: None,
        };
        tell(&mut p, D, Message::Release(release));
    }
    let before = p.counts();
    assert_eq!(before.late, 200_000);
    assert_eq!((before.read_out, before.released), (0, 0));
    let lease = finish(&mut p, at(secs(6)), 5);
    assert!(!p.has_releases());
    assert_granted(&claim(&mut p, at(secs(7)), D, claim_of(5, lease)), 30_000);
    tell(&mut p, D, ack_of(5, &[0, 1]));
    assert_eq!(ordered(&mut p), ["r5"]);
}
