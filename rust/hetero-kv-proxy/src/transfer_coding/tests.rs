//! Spellings of `Transfer-Encoding`.

use http::HeaderValue;

use super::*;

fn checked(lines: &[&str]) -> Option<u16> {
    let mut headers = HeaderMap::new();
    for line in lines {
        let value = HeaderValue::from_str(line).expect("a value");
        headers.append(header::TRANSFER_ENCODING, value);
    }
    check(&headers).err().map(|error| error.status)
}

#[test]
fn chunked_alone_is_taken_however_it_is_spelled() {
    for lines in [
        &[][..],
        &["chunked"],
        &["Chunked"],
        &[" CHUNKED\t"],
        &[", chunked ,"],
        &["", "chunked"],
    ] {
        assert_eq!(checked(lines), None, "{lines:?}");
    }
}

#[test]
fn any_other_coding_is_refused_and_chunked_twice() {
    for lines in [
        &["gzip, chunked"][..],
        &["gzip,chunked"],
        &["GZIP ,\tChunked"],
        &["gzip", "chunked"],
        &["chunked", "gzip"],
        &["chunked, gzip"],
        &["identity, chunked"],
        &["identity"],
        &["chunked;q=1"],
        &["x, deflate", "chunked"],
        &["\"chunked\""],
        &["xchunked"],
    ] {
        assert_eq!(checked(lines), Some(501), "{lines:?}");
    }
    for lines in [&["chunked, chunked"][..], &["chunked", "chunked"]] {
        assert_eq!(checked(lines), Some(400), "{lines:?}");
    }
}

#[test]
fn the_coding_is_named_and_not_at_length() {
    let mut headers = HeaderMap::new();
    let long = format!("{}, chunked", "x".repeat(5000));
    let value = HeaderValue::from_str(&long).expect("a value");
    headers.append(header::TRANSFER_ENCODING, value);
    let error = check(&headers).expect_err("no coding of ours");
    assert!(error.message.contains(&"x".repeat(TOLD_CHARS_MAX)));
    assert!(error.message.len() < 300, "{}", error.message);
}
