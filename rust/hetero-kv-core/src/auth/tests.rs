//! What a proof covers, whose key it is by, and what a file of keys may hold.

use super::*;
use crate::ids::{DpRank, EngineId, Incarnation, PpRank, TpRank};
use crate::testing::identity;
use crate::wire::data::Attach;
use crate::wire::message::{EngineIdentity, Hello};

const FILE: &[u8] = b"# ours\n\nfirst-key-of-ours\r\n  second-key-of-ours  \n";

fn hello() -> Hello {
    Hello {
        versions: (1, 1),
        from: identity("decode", 100, 2),
        expect_engine: EngineId::new("prefill").expect("valid"),
        expect_incarnation: Incarnation(1),
        any_engine: false,
        compat_digest: vec![9; 32],
        nonce: Some(vec![1; 32]),
    }
}

fn attach() -> Attach {
    Attach {
        engine: EngineId::new("prefill").expect("valid"),
        incarnation: Incarnation(1),
        dp_rank: DpRank(0),
        tp_rank: TpRank(3),
        pp_rank: PpRank(0),
        nonce: Some(vec![1; 32]),
    }
}

fn control<'a>(
    hello: &'a Hello,
    accepted: Option<(u8, &'a EngineIdentity)>,
) -> ControlTranscript<'a> {
    ControlTranscript {
        hello,
        dialer: Nonce([1; 32]),
        listener: Nonce([2; 32]),
        accepted,
    }
}

fn data<'a>(attach: &'a Attach, accepted: Option<&'a [u64]>) -> AttachTranscript<'a> {
    AttachTranscript {
        attach,
        dialer: Nonce([1; 32]),
        listener: Nonce([2; 32]),
        accepted,
    }
}

fn keys() -> Keys {
    Keys::parse(FILE).expect("keys")
}

/// By Python's `hmac`, from the texts as they are defined.
#[test]
fn proofs_have_their_bytes() {
    let keys = keys();
    let prefill = identity("prefill", 1, 4);
    let hex = |proof: Vec<u8>| hex::encode(proof);
    assert_eq!(
        hex(control(&hello(), None).prove(keys.first())),
        "5bb684b49477b884a986d13cc509f88ee0565bd84877d065b0ac9cf1ce064670"
    );
    assert_eq!(
        hex(control(&hello(), Some((1, &prefill))).prove(keys.first())),
        "ae537b853079ba52c14fd5c54dfeac392a983007e1573fa6e8336ade5026e98c"
    );
    assert_eq!(
        hex(data(&attach(), None).prove(keys.first())),
        "5ecfe87409ceeb8746c8917c51f073cf57581245a183cb4279df06f81ceb5468"
    );
    assert_eq!(
        hex(data(&attach(), Some(&[1 << 20, 12])).prove(keys.first())),
        "68f9b73f0102d86e51375e46f7cd1e119b0ca1bf4f6a4aeb7ebbe8ed06da3684"
    );
}

#[test]
fn a_proof_is_good_for_nothing_but_its_own_text() {
    let keys = keys();
    let (said, prefill) = (hello(), identity("prefill", 1, 4));
    let proof = control(&said, None).prove(keys.first());
    assert!(keys.that_made(&control(&said, None), &proof).is_some());
    let changes: [fn(&mut Hello); 11] = [
        |h| h.versions.0 = 0,
        |h| h.versions.1 = 2,
        |h| h.from.engine = EngineId::new("decodf").expect("valid"),
        |h| h.from.incarnation.0 += 1,
        |h| h.from.dp_rank.0 += 1,
        |h| h.from.tp_size += 1,
        |h| h.from.dp_size += 1,
        |h| h.expect_engine = EngineId::new("prefilm").expect("valid"),
        |h| h.expect_incarnation.0 += 1,
        |h| h.any_engine = true,
        |h| h.compat_digest[31] ^= 1,
    ];
    for (change, index) in changes.iter().zip(0..) {
        let mut other = said.clone();
        change(&mut other);
        let transcript = control(&other, None);
        assert!(keys.that_made(&transcript, &proof).is_none(), "{index}");
    }
    // Another connection's nonces, also the two changed for one another.
    for (dialer, listener) in [(1, 3), (3, 2), (2, 1)] {
        let transcript = ControlTranscript {
            dialer: Nonce([dialer; 32]),
            listener: Nonce([listener; 32]),
            ..control(&said, None)
        };
        assert!(keys.that_made(&transcript, &proof).is_none());
    }
    // Given back to the one who made it, and what the listener accepts with.
    let answer = control(&said, Some((1, &prefill)));
    assert!(keys.that_made(&answer, &proof).is_none());
    let proof = answer.prove(keys.first());
    let other = identity("prefill", 2, 4);
    assert!(
        keys.that_made(&control(&said, Some((1, &other))), &proof)
            .is_none()
    );
    assert!(
        keys.that_made(&control(&said, Some((2, &prefill))), &proof)
            .is_none()
    );
    assert!(keys.that_made(&control(&said, None), &proof).is_none());
}

#[test]
fn a_proof_of_one_rank_is_none_of_another() {
    let keys = keys();
    let said = attach();
    let proof = data(&said, None).prove(keys.first());
    assert!(keys.that_made(&data(&said, None), &proof).is_some());
    let changes: [fn(&mut Attach); 5] = [
        |a| a.engine = EngineId::new("prefilm").expect("valid"),
        |a| a.incarnation.0 += 1,
        |a| a.dp_rank.0 += 1,
        |a| a.tp_rank.0 += 1,
        |a| a.pp_rank.0 += 1,
    ];
    for (change, index) in changes.iter().zip(0..) {
        let mut other = said.clone();
        change(&mut other);
        assert!(
            keys.that_made(&data(&other, None), &proof).is_none(),
            "{index}"
        );
    }
    assert!(keys.that_made(&data(&said, Some(&[])), &proof).is_none());
    let answer = data(&said, Some(&[5, 6])).prove(keys.first());
    assert!(
        keys.that_made(&data(&said, Some(&[5, 7])), &answer)
            .is_none()
    );
}

#[test]
fn each_key_of_a_file_proves_and_no_other() {
    let keys = keys();
    let said = hello();
    let transcript = control(&said, None);
    for key in [&b"first-key-of-ours"[..], b"second-key-of-ours"] {
        let proof = transcript.prove(key);
        assert_eq!(keys.that_made(&transcript, &proof), Some(key));
        for wrong in [&[][..], &proof[..31], &[proof.as_slice(), &[0]].concat()] {
            assert!(keys.that_made(&transcript, wrong).is_none());
        }
        for bit in 0..8 * PROOF_BYTES {
            let mut wrong = proof.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(keys.that_made(&transcript, &wrong).is_none(), "bit {bit}");
        }
    }
    for key in [&b"first-key-of-our"[..], b"third-key-of-ours", b"# ours"] {
        assert!(
            keys.that_made(&transcript, &transcript.prove(key))
                .is_none()
        );
    }
}

/// The proxy's key files have the same rules, and its tests the same cases.
#[test]
fn a_fault_names_the_line_and_not_the_key() {
    assert_eq!(keys().first(), b"first-key-of-ours");
    assert_eq!(format!("{:?}", keys()), "Keys(2)");
    let fault = |text: &[u8]| Keys::parse(text).expect_err("a fault");
    assert_eq!(fault(b"# only this\n"), "no key in it; one a line");
    assert_eq!(fault(b""), "no key in it; one a line");
    assert_eq!(
        fault(b"\nsecret"),
        "line 2: a key has 16 to 512 characters, not 6"
    );
    assert_eq!(
        fault(&[FILE, &[b'x'; 513]].concat()),
        "line 5: a key has 16 to 512 characters, not 513"
    );
    assert_eq!(
        fault(b"secret secret secret"),
        "line 1: a key is visible ASCII without blanks"
    );
    assert!(fault("secret-of-sixteen-\u{fc}".as_bytes()).starts_with("line 1"));
}

#[test]
fn nonces_have_one_length() {
    assert_eq!(Nonce::parse(&[7; 32]), Ok(Nonce([7; 32])));
    for bytes in [0, 16, 31, 33] {
        let fault = Nonce::parse(&vec![7; bytes]).expect_err("another length");
        assert_eq!(
            fault,
            format!("control_key_file: the peer's nonce has {bytes} bytes, 32 are needed")
        );
    }
}
