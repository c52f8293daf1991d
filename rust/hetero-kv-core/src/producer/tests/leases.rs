//! Grants, renewals, expiry, slots.

use super::*;
use crate::ids::Epoch;
use crate::testing::ms;

#[test]
fn a_claim_hears_the_fence_and_the_blocks() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(1)), 5);
    let answer = claim(&mut p, at(secs(2)), D, claim_of(5, lease));
    assert_eq!(
        answer,
        Message::Granted(Box::new(Granted {
            transfer_id: transfer(5),
            granted_ms: 30_000,
            lease,
            block_ids: vec![vec![BlockId(3), BlockId(4)]],
            num_tokens: 20,
            question: 7,
        }))
    );
}

#[test]
fn what_is_not_alive_is_gone_for_a_reason() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(0)), 5);
    let mut other_epoch = claim_of(5, lease);
    other_epoch.epoch += 1;
    let mut other_prompt = claim_of(5, lease);
    other_prompt.prompt_digest = prompt(99);
    for (asked, reason) in [
        (claim_of(6, lease), GoneReason::Unknown),
        (other_epoch, GoneReason::Foreign),
        (other_prompt, GoneReason::Foreign),
    ] {
        assert_gone(&claim(&mut p, at(secs(1)), D, asked), reason);
    }
    // Nobody has claimed it, so nobody knows which prompt a renewal means.
    assert_gone(&renew(&mut p, at(secs(1)), D, 5), GoneReason::Foreign);
    assert_eq!(p.counts().gone, 4);
    // The lease itself took no harm and was not extended.
    assert_eq!(p.poll_timeout(), Some(at(secs(30))));
}

#[test]
fn time_that_is_over_is_not_handed_out_before_the_sweep_either() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(0)), 5);
    let answer = claim(&mut p, at(secs(30)), D, claim_of(5, lease));
    assert_gone(&answer, GoneReason::Expired);
    assert!(ordered(&mut p).is_empty(), "only the sweep releases");
}

#[test]
fn expiry_waits_the_grace_and_refuses_meanwhile() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(0)), 5);
    assert_granted(&claim(&mut p, at(secs(1)), D, claim_of(5, lease)), 30_000);
    assert_eq!(p.poll_timeout(), Some(at(secs(31))));
    p.handle_timeout(at(ms(30_999)));
    assert_eq!(p.counts().expired, 0);
    p.handle_timeout(at(secs(31)));
    assert_eq!(p.counts().expired, 1);
    assert!(ordered(&mut p).is_empty());
    assert_gone(
        &claim(&mut p, at(ms(31_001)), D, claim_of(5, lease)),
        GoneReason::Expired,
    );
    assert_gone(&renew(&mut p, at(ms(31_002)), D, 5), GoneReason::Expired);
    assert_eq!(p.poll_timeout(), Some(at(ms(31_500))));
    p.handle_timeout(at(ms(31_499)));
    assert!(ordered(&mut p).is_empty());
    p.handle_timeout(at(ms(31_500)));
    assert_eq!(ordered(&mut p), ["r5"]);
    assert_eq!(p.gauges(at(secs(32))).leases_alive, 1, "not freed yet");
    assert_eq!(p.gauges(at(secs(32))).oldest_lease, secs(32));
    p.handle_sent("r5");
    assert_eq!(p.gauges(at(secs(33))), ProducerGauges::default());
    assert_eq!(p.poll_timeout(), None);
    let answer = claim(&mut p, at(secs(33)), D, claim_of(5, lease));
    assert_gone(&answer, GoneReason::Expired);
}

#[test]
fn renewals_keep_a_lease_for_ten_times_its_length() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(0)), 5);
    assert_granted(&claim(&mut p, at(secs(0)), D, claim_of(5, lease)), 30_000);
    for second in (15..=300).step_by(15) {
        p.handle_timeout(at(secs(second)));
        assert_granted(&renew(&mut p, at(secs(second)), D, 5), 30_000);
    }
    p.handle_timeout(at(secs(329)));
    assert_eq!(p.counts().expired, 0);
    p.handle_timeout(at(secs(330)));
    assert_eq!(p.counts().expired, 1);
}

#[test]
fn a_renewal_never_shortens() {
    let times = LeaseTimes {
        renewal: secs(5),
        ..lease_times()
    };
    let mut p = producer_with(times, 8);
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(0)), 5);
    assert_granted(&claim(&mut p, at(secs(1)), D, claim_of(5, lease)), 29_000);
    assert_granted(&renew(&mut p, at(secs(2)), D, 5), 28_000);
    assert_granted(&renew(&mut p, at(secs(27)), D, 5), 5_000);
    assert_eq!(p.poll_timeout(), Some(at(secs(32))));
}

#[test]
fn without_grace_the_release_comes_with_the_expiry() {
    let times = LeaseTimes {
        grace: Duration::ZERO,
        ..lease_times()
    };
    let mut p = producer_with(times, 8);
    finish(&mut p, at(secs(0)), 5);
    p.handle_timeout(at(secs(30)));
    assert_eq!(ordered(&mut p), ["r5"]);
    assert_eq!(p.poll_timeout(), None);
}

#[test]
fn a_transfer_id_belongs_to_its_first_request_for_good() {
    let mut p = producer();
    finish(&mut p, at(secs(0)), 5);
    let taken = Err(OfferError::TransferIdTaken);
    assert_eq!(try_finish(&mut p, at(secs(1)), 6, 5), taken);
    assert_eq!(try_finish(&mut p, at(secs(1)), 5, 6), taken, "same request");
    p.revoke_all();
    p.handle_sent("r5");
    assert_eq!(
        try_finish(&mut p, at(secs(2)), 6, 5),
        taken,
        "after its end"
    );
    assert_eq!(p.counts().refused_offers, 3);
    assert_eq!(p.counts().granted, 1);
}

#[test]
fn slots_run_out_and_come_back_with_a_later_epoch() {
    let mut p = producer_with(lease_times(), 2);
    let first = finish(&mut p, at(secs(0)), 1);
    let second = finish(&mut p, at(secs(0)), 2);
    assert_ne!(first.slot, second.slot);
    let full = try_finish(&mut p, at(secs(0)), 3, 3);
    assert_eq!(full, Err(OfferError::NoSlot));
    p.revoke_all();
    assert_eq!(ordered(&mut p), ["r1", "r2"]);
    // The workers' pages have not been bumped yet.
    let full = try_finish(&mut p, at(secs(0)), 3, 3);
    assert_eq!(full, Err(OfferError::NoSlot));
    p.handle_sent("r1");
    let third = finish(&mut p, at(secs(0)), 3);
    assert_eq!(third.slot, first.slot);
    assert_eq!(third.epoch, Epoch(first.epoch.0 + 1));
    // A second report of the same request changes nothing.
    p.handle_sent("r1");
    let full = try_finish(&mut p, at(secs(0)), 4, 4);
    assert_eq!(full, Err(OfferError::NoSlot));
    assert_eq!((p.counts().granted, p.counts().refused_offers), (3, 3));
}

#[test]
fn revoked_leases_are_released_once_and_answer_released() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(0)), 5);
    p.revoke_all();
    p.revoke_all();
    assert_eq!(ordered(&mut p), ["r5"]);
    assert_eq!(p.counts().released, 1);
    assert_gone(
        &claim(&mut p, at(secs(1)), D, claim_of(5, lease)),
        GoneReason::Released,
    );
    p.handle_timeout(at(secs(100)));
    assert_eq!((p.counts().expired, ordered(&mut p).len()), (0, 0));
}

#[test]
fn ended_transfers_are_remembered_up_to_a_bound() {
    let mut p = producer();
    greet(&mut p, D, "decode", 1);
    let lease = finish(&mut p, at(secs(0)), 5);
    p.revoke_all();
    p.handle_sent("r5");
    for number in 0..ENDED_REMEMBERED {
        let mut id = [0xee; 16];
        id[..8].copy_from_slice(&(number as u64).to_le_bytes());
        p.finish(
            at(secs(1)),
            FinishedPrefill {
                request_id: "again".into(),
                transfer_id: TransferId(id),
                digest: prompt(1),
                block_ids: Vec::new(),
                num_tokens: 1,
            },
        )
        .expect("a slot is free");
        p.revoke_all();
        p.handle_sent("again");
        p.take_releases();
    }
    assert_eq!(p.ended.len(), ENDED_REMEMBERED);
    assert_eq!(p.ended_order.len(), ENDED_REMEMBERED);
    assert_gone(
        &claim(&mut p, at(secs(2)), D, claim_of(5, lease)),
        GoneReason::Unknown,
    );
}
