//! The signature against one that `openssl` made, and against every change of what it covers.

use super::*;

const KEY: &[u8] = b"an-admin-key-of-ours";
const SIGNED: Signed<'_> = Signed {
    method: "POST",
    target: "/v1/workers?x=1",
    timestamp_s: 1_800_000_000,
    nonce: 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10,
    body: br#"{"role":"decode","url":"http://10.0.0.3:8200"}"#,
};
/// By `openssl dgst -sha256 -hmac an-admin-key-of-ours` over the text of the module's head.
const BY_OPENSSL: &str = "c86ee77008dcefbbba8e22d65244adb208377b991def30559632b394696659c2";

fn keys() -> Keys {
    Keys::parse(b"another-key-of-ours\nan-admin-key-of-ours\n", 16).expect("keys")
}

#[test]
fn it_is_what_openssl_computes() {
    assert_eq!(SIGNED.sign(KEY), BY_OPENSSL);
    let signature = hex::decode(BY_OPENSSL).expect("hex");
    assert!(SIGNED.is_signed_by(&keys(), &signature));
}

#[test]
fn whatever_changes_is_noticed() {
    let signature = hex::decode(SIGNED.sign(KEY)).expect("hex");
    for other in [
        Signed {
            method: "PUT",
            ..SIGNED
        },
        Signed {
            target: "/v1/workers",
            ..SIGNED
        },
        Signed {
            timestamp_s: 1_800_000_001,
            ..SIGNED
        },
        Signed {
            nonce: SIGNED.nonce + 1,
            ..SIGNED
        },
        Signed {
            body: b"",
            ..SIGNED
        },
    ] {
        assert!(!other.is_signed_by(&keys(), &signature), "{other:?}");
    }
    let mut unlike = signature.clone();
    unlike[31] ^= 1;
    assert!(!SIGNED.is_signed_by(&keys(), &unlike));
    assert!(!SIGNED.is_signed_by(&keys(), &signature[..31]));
    let others = Keys::parse(b"another-key-of-ours", 16).expect("keys");
    assert!(!SIGNED.is_signed_by(&others, &signature));
}

#[test]
fn a_claim_names_the_header_that_is_wrong() {
    let claim = |timestamp: &str, nonce: &str, signature: &str| {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            (TIMESTAMP, timestamp),
            (NONCE, nonce),
            (SIGNATURE, signature),
        ] {
            if !value.is_empty() {
                headers.insert(name, value.parse().expect("a value"));
            }
        }
        Claim::read(&headers)
    };
    let (nonce, signature) = ("0a".repeat(16), "0b".repeat(32));
    let good = claim("12", &nonce, &signature).expect("a claim");
    assert_eq!(
        (good.timestamp_s, good.nonce),
        (12, u128::from_be_bytes([10; 16]))
    );
    for bad in ["", "+12", "12.0", "-1", "99999999999999999999"] {
        assert_eq!(claim(bad, &nonce, &signature), Err(TIMESTAMP));
    }
    for bad in ["", "0a", "zz", &"0a".repeat(17)] {
        assert_eq!(claim("12", bad, &signature), Err(NONCE));
        assert_eq!(claim("12", &nonce, bad), Err(SIGNATURE));
    }
    let mut twice = HeaderMap::new();
    twice.append(TIMESTAMP, "12".parse().expect("a value"));
    twice.append(TIMESTAMP, "13".parse().expect("a value"));
    assert_eq!(Claim::read(&twice), Err(TIMESTAMP));
}
