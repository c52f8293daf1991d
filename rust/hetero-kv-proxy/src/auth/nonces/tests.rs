//! For how long a nonce is remembered, and how many are.

use super::*;

#[test]
fn a_nonce_is_known_for_at_least_its_time_and_then_forgotten() {
    let mut nonces = Nonces::new(60);
    for at in [1_000u32, 1_030, 1_061] {
        assert_eq!(nonces.take(u128::from(at), u64::from(at)), Ok(()));
        for later in 0..=60 {
            // As of another generation, and again.
            let mut then = Nonces {
                young: nonces.young.clone(),
                old: nonces.old.clone(),
                ..Nonces::new(60)
            };
            then.begun_s = nonces.begun_s;
            let again = then.take(u128::from(at), u64::from(at) + later);
            assert_eq!(again, Err(Refused::Replayed), "{at} + {later}");
        }
    }
    assert_eq!(nonces.take(1_000, 1_300), Ok(()));
    assert_eq!(nonces.old.len(), 0);
}

#[test]
fn memory_ends_and_comes_back() {
    let mut nonces = Nonces::new(60);
    for nonce in 0..PER_GENERATION_MAX as u128 {
        assert_eq!(nonces.take(nonce, 100), Ok(()));
    }
    let more = PER_GENERATION_MAX as u128;
    assert_eq!(nonces.take(more, 160), Err(Refused::Full));
    assert_eq!(nonces.take(7, 160), Err(Refused::Replayed));
    assert_eq!(nonces.take(more, 161), Ok(()));
    assert_eq!(nonces.take(7, 161), Err(Refused::Replayed));
}
