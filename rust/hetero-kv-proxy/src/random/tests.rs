use std::collections::HashSet;

use super::random_hex;

#[test]
fn ids_are_32_hex_digits_and_no_two_are_alike_also_on_several_threads() {
    let draw = || -> Vec<String> {
        let ids = (0..1_000).map(|_| random_hex().expect("random numbers"));
        ids.collect()
    };
    let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(draw)).collect();
    let mut seen = HashSet::new();
    for thread in threads {
        for id in thread.join().expect("a thread") {
            assert_eq!(id.len(), 32);
            let digits = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            assert!(id.bytes().all(digits), "{id}");
            // Bytes that were wiped make no id.
            assert!(!id.ends_with("00000000"), "{id}");
            assert!(seen.insert(id));
        }
    }
}
