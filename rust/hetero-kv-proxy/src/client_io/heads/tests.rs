use proptest::prelude::*;

use super::*;

const PLAIN: &str = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
const SIZED: &str = "POST /a HTTP/1.1\r\nContent-Length: 12\r\n\r\n\r\n\r\nT: C\r\n\r\n";
const CODED: &str = "POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n6;x=y\r\n\r\n\r\nT:\r\n0\r\nC: d\r\n\r\n";
const BOTH: &str =
    "POST /c HTTP/1.1\r\ncontent-LENGTH: 3\r\nHost: x\r\nTransfer-encoding: chunked\r\n\r\n";

fn has_two(pieces: &[&[u8]]) -> bool {
    let mut heads = Heads::default();
    let found = pieces.iter().map(|piece| heads.note(piece).two_lengths);
    found.fold(false, |any, found| any | found)
}

#[test]
fn a_head_with_both_is_found_behind_whatever_comes_with_it() {
    for before in ["", PLAIN, SIZED, CODED, "\r\n", "\r\n\r\n"] {
        assert!(has_two(&[before.as_bytes(), BOTH.as_bytes()]), "{before}");
        assert!(has_two(&[[before, BOTH].concat().as_bytes()]), "{before}");
        let alone = [before, PLAIN, SIZED, CODED].concat();
        assert!(!has_two(&[alone.as_bytes()]), "{before}");
    }
    // A body may hold whatever it likes.
    let body = format!(
        "POST / HTTP/1.1\r\nContent-Length: {}\r\n\r\n{BOTH}",
        BOTH.len()
    );
    assert!(!has_two(&[body.as_bytes()]));
    let body = format!(
        "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{BOTH}\r\n0\r\n\r\n",
        BOTH.len()
    );
    assert!(!has_two(&[body.as_bytes()]));
}

#[test]
fn where_the_framing_is_lost_no_later_request_is_taken_for_a_good_one() {
    let broken = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n";
    assert!(!has_two(&[broken.as_bytes()]));
    assert!(has_two(&[broken.as_bytes(), PLAIN.as_bytes()]));
    let endless = vec![b'a'; HEAD_BYTES_MAX + 1];
    assert!(!has_two(&[&endless]));
    assert!(has_two(&[&endless, b"a"]));
}

proptest! {
    /// It does not matter where what was sent is cut.
    #[test]
    fn heads_are_found_wherever_the_bytes_are_cut(
        requests in prop::collection::vec(prop::sample::select(vec![PLAIN, SIZED, CODED]), 0..4),
        both in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = [requests.concat(), if both { BOTH.to_owned() } else { String::new() }].concat();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]).collect();
        prop_assert_eq!(has_two(&pieces), both);
    }
}
