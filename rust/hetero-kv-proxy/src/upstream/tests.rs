//! Heads and bodies against what was meant, wherever the bytes are cut; exchanges over real sockets.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use super::chunked::{Chunked, Step};
use super::head::{self, AnswerHead, Framing, Malformed, RequestHead};
use super::{LegBody, PoolLimits, SendError, Upstream, Written};
use crate::config::BaseUrl;

/// Feeds `coded` in the given portions; the data, whether it ended, and what is left unread.
fn decode(coded: &[u8], portions: &[usize]) -> Result<(Vec<u8>, bool, Vec<u8>), String> {
    let mut chunked = Chunked::default();
    let mut unread = BytesMut::new();
    let mut data = Vec::new();
    let mut portions = portions.iter().cycle();
    let mut rest = coded;
    loop {
        match chunked.next(&mut unread) {
            Ok(Step::Data(piece)) => {
                assert!(!piece.is_empty(), "a piece has bytes");
                data.extend_from_slice(&piece);
                let _ = chunked.has_ended(&mut unread);
            }
            Ok(Step::End) => {
                unread.extend_from_slice(rest);
                return Ok((data, true, unread.to_vec()));
            }
            Ok(Step::More) if rest.is_empty() => return Ok((data, false, unread.to_vec())),
            Ok(Step::More) => {
                let portion = portions.next().copied().unwrap_or(1).clamp(1, rest.len());
                unread.extend_from_slice(&rest[..portion]);
                rest = &rest[portion..];
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

proptest! {
    #[test]
    fn chunks_are_decoded_wherever_they_are_cut(
        chunks in proptest::collection::vec(
            (proptest::collection::vec(any::<u8>(), 1..200), "(|;a=b| ;x)"), 0..8),
        trailers in proptest::collection::vec("x-[a-z]{1,8}: [a-z]{0,8}", 0..3),
        behind in proptest::collection::vec(any::<u8>(), 0..5),
        portions in proptest::collection::vec(1..64_usize, 1..8),
        upper in any::<bool>(),
    ) {
        let mut coded = Vec::new();
        let mut want = Vec::new();
        for (data, extension) in &chunks {
            let size = if upper { format!("{:X}", data.len()) } else { format!("{:04x}", data.len()) };
            coded.extend_from_slice(format!("{size}{extension}\r\n").as_bytes());
            coded.extend_from_slice(data);
            coded.extend_from_slice(b"\r\n");
            want.extend_from_slice(data);
        }
        coded.extend_from_slice(b"0\r\n");
        for trailer in &trailers {
            coded.extend_from_slice(format!("{trailer}\r\n").as_bytes());
        }
        coded.extend_from_slice(b"\r\n");
        let whole = coded.len();
        coded.extend_from_slice(&behind);
        let (data, ended, left) = decode(&coded, &portions).expect("well formed");
        prop_assert_eq!(&data, &want);
        prop_assert!(ended);
        prop_assert_eq!(left, behind);
        // Cut short anywhere it has not ended, and no byte is invented.
        for short in (0..whole).step_by(7) {
            let (data, ended, _) = decode(&coded[..short], &portions).expect("well formed so far");
            prop_assert!(!ended);
            prop_assert!(want.starts_with(&data));
        }
    }

    #[test]
    fn no_bytes_make_a_decoder_panic_or_spin(
        bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b'1'), Just(b'0')], 0..300),
        portions in proptest::collection::vec(1..32_usize, 1..4),
    ) {
        let _any = decode(&bytes, &portions);
        let mut unread = BytesMut::from(&bytes[..]);
        let _any = head::parse(&mut unread, &Method::POST);
    }
}

#[test]
fn broken_chunks_are_refused() {
    for coded in [
        "5\nhello\r\n0\r\n\r\n",
        "\r\n",
        "g\r\n",
        "-5\r\nhello\r\n",
        "+5\r\nhello\r\n",
        "0x5\r\nhello\r\n",
        "5 5\r\nhello\r\n",
        "5\rx\r\nhello\r\n",
        "5;a\rb\r\nhello\r\n",
        "5\r\nhelloo\r\n0\r\n\r\n",
        "5\r\nhello0\r\n\r\n",
        "11111111111111111\r\n",
        "0\r\nx: y\n\r\n",
    ] {
        assert!(decode(coded.as_bytes(), &[3]).is_err(), "{coded:?}");
    }
    let long = format!("5;{}\r\nhello\r\n", "x".repeat(20_000));
    assert!(decode(long.as_bytes(), &[1_000]).is_err());
    let trailers = format!("0\r\n{}\r\n", "x: yyyyyyyy\r\n".repeat(2_000));
    assert!(decode(trailers.as_bytes(), &[1_000]).is_err());
}

fn parsed(text: &str, method: &Method) -> Result<Option<AnswerHead>, Malformed> {
    head::parse(&mut BytesMut::from(text), method)
}

/// `length N`, `chunked` or `close`, and whether the connection is kept.
fn framed(text: &str, method: &Method) -> String {
    match parsed(text, method) {
        Ok(Some(answer)) => {
            let kept = if answer.keeps { "kept" } else { "closed" };
            match answer.framing {
                Framing::Length(length) => format!("length {length} {kept}"),
                Framing::Chunked(_) => format!("chunked {kept}"),
                Framing::UntilClose => format!("until close {kept}"),
            }
        }
        Ok(None) => "more".to_owned(),
        Err(error) => format!("{error}"),
    }
}

#[test]
fn the_end_of_a_body_is_known_as_rfc_9112_says() {
    let post = Method::POST;
    for (text, want) in [
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
            "length 5 kept",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\ncontent-length: 5\r\n\r\n",
            "length 5 kept",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            "its Content-Length is not one number: `5, 6`",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
            "its Content-Length is not one number: `+5`",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: \r\n\r\n",
            "its Content-Length is not one number: ``",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
            "its Content-Length is not one number: `99999999999999999999`",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
            "chunked kept",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\ntransfer-encoding: chunked \r\n\r\n",
            "chunked kept",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
            "its Transfer-Encoding is not `chunked` alone, and no other was asked for: `gzip, chunked`",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: xchunked\r\n\r\n",
            "its Transfer-Encoding is not `chunked` alone, and no other was asked for: `xchunked`",
        ),
        (
            "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            "HTTP/1.0 with Transfer-Encoding",
        ),
        ("HTTP/1.1 200 OK\r\n\r\n", "until close closed"),
        (
            "HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n",
            "length 0 kept",
        ),
        (
            "HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
            "length 0 kept",
        ),
        (
            "HTTP/1.1 101 Switching\r\n\r\n",
            "101 Switching Protocols, which was not asked for",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: x, Close\r\n\r\n",
            "length 5 closed",
        ),
        (
            "HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n",
            "length 5 closed",
        ),
        (
            "HTTP/1.0 200 OK\r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\n",
            "length 5 kept",
        ),
        (
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\nHTTP/1.1 200 OK\r\n\
          content-length: 7\r\n\r\n",
            "length 7 kept",
        ),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 O", "more"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n", "more"),
        (
            "SSH-2.0-\u{7}\r\n\r\n",
            r"no HTTP/1 (invalid HTTP version): `SSH-2.0-\x07`",
        ),
        (
            "HTTP/1.1 200 OK\r\na: b\r\nbad name: c\r\nd: e\r\n\r\n",
            "no HTTP/1 (invalid header name): `bad name: c`",
        ),
    ] {
        assert_eq!(framed(text, &post), want, "{text:?}");
    }
    let sized = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n";
    assert_eq!(framed(sized, &Method::HEAD), "length 0 kept");
    assert_eq!(framed(sized, &Method::CONNECT), "length 0 closed");
    let endless = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(head::HEAD_BYTES_MAX));
    assert!(parsed(&endless, &post).is_err());
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(101));
    assert!(parsed(&many, &post).is_err());
}

#[test]
fn a_head_is_taken_and_what_follows_stays() {
    let mut unread = BytesMut::from(
        "HTTP/1.1 404 Nope\r\nX-One: a \r\nx-one:b\r\ncontent-length: 4\r\n\r\nbody",
    );
    let answer = head::parse(&mut unread, &Method::POST)
        .expect("a head")
        .expect("a whole head");
    assert_eq!(answer.parts.status, StatusCode::NOT_FOUND);
    let values: Vec<_> = answer.parts.headers.get_all("x-one").iter().collect();
    assert_eq!(values, ["a", "b"]);
    assert_eq!(&unread[..], b"body");
}

#[test]
fn a_request_head_is_framed_by_the_connection_alone() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("content-length", "99"),
        ("transfer-encoding", "chunked"),
        ("host", "elsewhere"),
        ("x-request-id", "theirs"),
        ("x-many", "1"),
        ("x-many", "2"),
    ] {
        let name: HeaderName = name.parse().expect("a name");
        headers.append(name, HeaderValue::from_static(value));
    }
    let id = HeaderName::from_static("x-request-id");
    let head = RequestHead {
        method: &Method::POST,
        target: &["/base", "/v1/completions?a=b"],
        host: &HeaderValue::from_static("10.0.0.1:80"),
        headers: &headers,
        extra: &[(id, HeaderValue::from_static("ours"))],
        length: 12,
    };
    assert_eq!(
        String::from_utf8(head.encode()).expect("UTF-8"),
        "POST /base/v1/completions?a=b HTTP/1.1\r\nhost: 10.0.0.1:80\r\nx-many: 1\r\nx-many: 2\r\n\
         x-request-id: ours\r\ncontent-length: 12\r\n\r\n"
    );
}

const LIMITS: PoolLimits = PoolLimits {
    connect_timeout: Duration::from_secs(5),
    idle_max: 8,
    idle_timeout: Duration::from_secs(60),
};

/// An engine whose connections the test speaks for.
async fn engine() -> (TcpListener, std::sync::Arc<Upstream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let port = listener.local_addr().expect("bound").port();
    let base = BaseUrl {
        host: "127.0.0.1".to_owned(),
        port,
        authority: format!("127.0.0.1:{port}"),
        path: String::new(),
    };
    (listener, Upstream::new(base, LIMITS).expect("an authority"))
}

async fn send(
    upstream: &std::sync::Arc<Upstream>,
    body: LegBody,
) -> Result<Box<super::Answer>, SendError> {
    let (post, none) = (Method::POST, HeaderMap::new());
    let sent = upstream.send(&post, "/p", &none, &[], body, false);
    timeout(Duration::from_secs(10), sent)
        .await
        .expect("no hang")
}

fn small() -> LegBody {
    LegBody::new(
        [
            Bytes::from_static(b"he"),
            Bytes::new(),
            Bytes::from_static(b"llo"),
        ],
        None,
    )
}

async fn accept(listener: &TcpListener) -> TcpStream {
    let accepted = timeout(Duration::from_secs(10), listener.accept()).await;
    accepted.expect("a connection").expect("accepted").0
}

/// Reads until `end` was seen.
async fn read_until(stream: &mut TcpStream, end: &[u8]) -> Vec<u8> {
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(end) {
        stream.read_exact(&mut byte).await.expect("more bytes");
        seen.push(byte[0]);
    }
    seen
}

#[tokio::test]
async fn a_connection_is_kept_for_the_next_exchange() {
    let (listener, upstream) = engine().await;
    let serve = async {
        let mut stream = accept(&listener).await;
        for _ in 0..2 {
            let request = read_until(&mut stream, b"hello").await;
            let request = String::from_utf8(request).expect("UTF-8");
            assert!(request.contains("content-length: 5\r\n"), "{request}");
            let answer =
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.expect("taken");
        }
        stream
    };
    let ask = async {
        for _ in 0..2 {
            let answer = send(&upstream, small()).await.expect("an answer");
            let body = answer.body.collect().await.expect("a body").to_bytes();
            assert_eq!(body, "abc");
        }
    };
    let (_stream, ()) = tokio::join!(serve, ask);
    let second = timeout(Duration::from_millis(50), listener.accept()).await;
    assert!(second.is_err(), "one connection serves both");
}

#[tokio::test]
async fn a_connection_whose_answer_is_not_clean_is_not_kept() {
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\n",
    ] {
        let (listener, upstream) = engine().await;
        let serve = async {
            let mut streams = Vec::new();
            for _ in 0..2 {
                let mut stream = accept(&listener).await;
                read_until(&mut stream, b"hello").await;
                stream.write_all(answer.as_bytes()).await.expect("taken");
                streams.push(stream);
            }
        };
        let ask = async {
            for _ in 0..2 {
                let answer = send(&upstream, small()).await.expect("an answer");
                let body = answer.body.collect().await.expect("a body").to_bytes();
                assert_eq!(body, "abc");
            }
        };
        tokio::join!(serve, ask);
    }
}

#[tokio::test]
async fn a_kept_connection_that_was_closed_is_replaced_unseen() {
    let (listener, upstream) = engine().await;
    let serve = async {
        for _ in 0..2 {
            let mut stream = accept(&listener).await;
            read_until(&mut stream, b"hello").await;
            let answer = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.expect("taken");
        }
    };
    let ask = async {
        for _ in 0..2 {
            let answer = send(&upstream, small()).await.expect("an answer");
            assert!(answer.body.is_end_stream());
            // The engine closes.
            sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::join!(serve, ask);
}

#[tokio::test]
async fn a_kept_connection_that_was_closed_leaves_the_pool_at_the_next_look() {
    let (listener, upstream) = engine().await;
    let serve = async {
        let mut stream = accept(&listener).await;
        read_until(&mut stream, b"hello").await;
        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.expect("taken");
        stream
    };
    let (stream, answer) = tokio::join!(serve, send(&upstream, small()));
    assert!(answer.is_ok());
    upstream.close_stale();
    assert_eq!(super::lock(&upstream.idle).len(), 1);
    drop(stream);
    sleep(Duration::from_millis(50)).await;
    upstream.close_stale();
    assert_eq!(super::lock(&upstream.idle).len(), 0);
}

#[tokio::test]
async fn an_answer_may_come_before_the_request_was_taken() {
    let (listener, upstream) = engine().await;
    let large = Bytes::from(vec![b'x'; 32 << 20]);
    let written = Written::default();
    let serve = async {
        let mut stream = accept(&listener).await;
        read_until(&mut stream, b"\r\n\r\n").await;
        let answer = "HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nabc";
        stream.write_all(answer.as_bytes()).await.expect("taken");
        stream
    };
    let body = LegBody::new([large], Some(written.clone()));
    let (stream, answer) = tokio::join!(serve, send(&upstream, body));
    let answer = answer.expect("an answer");
    assert_eq!(answer.head.status, StatusCode::PAYLOAD_TOO_LARGE);
    let body = answer.body.collect().await.expect("a body").to_bytes();
    assert_eq!(body, "abc");
    assert_eq!(written.at(), None, "the leg was not written whole");
    assert_eq!(
        super::lock(&upstream.idle).len(),
        0,
        "nor can another follow"
    );
    drop(stream);
}

#[tokio::test]
async fn a_large_request_is_written_while_its_answer_is_read() {
    let (listener, upstream) = engine().await;
    let bytes = 32 << 20;
    let written = Written::default();
    let serve = async {
        let mut stream = accept(&listener).await;
        read_until(&mut stream, b"\r\n\r\n").await;
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nearly\r\n";
        stream.write_all(head.as_bytes()).await.expect("taken");
        let mut left = vec![0; bytes];
        stream.read_exact(&mut left).await.expect("the whole body");
        stream
            .write_all(b"4\r\nlate\r\n0\r\n\r\n")
            .await
            .expect("taken");
        stream
    };
    let body = LegBody::new([Bytes::from(vec![b'x'; bytes])], Some(written.clone()));
    let ask = async {
        let answer = send(&upstream, body).await.expect("an answer");
        answer.body.collect().await.expect("a body").to_bytes()
    };
    let both = async { tokio::join!(serve, ask) };
    let (_stream, body) = timeout(Duration::from_secs(20), both)
        .await
        .expect("no hang");
    assert_eq!(body, "earlylate");
    assert!(written.at().is_some());
    assert_eq!(super::lock(&upstream.idle).len(), 1);
}

#[tokio::test]
async fn a_body_cut_short_is_an_error_and_never_a_whole_one() {
    for (answer, whole) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", false),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
            false,
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
            false,
        ),
        ("HTTP/1.1 200 OK\r\n\r\nabc", true),
    ] {
        let (listener, upstream) = engine().await;
        let serve = async {
            let mut stream = accept(&listener).await;
            read_until(&mut stream, b"hello").await;
            stream.write_all(answer.as_bytes()).await.expect("taken");
        };
        let (_, sent) = tokio::join!(serve, send(&upstream, small()));
        let body = sent.expect("a head").body.collect().await;
        assert_eq!(body.is_ok(), whole, "{answer:?}");
    }
}

#[tokio::test]
async fn a_connection_that_ends_before_a_head_is_a_reset_and_nonsense_is_told_as_that() {
    for (answer, is_reset) in [
        ("", true),
        ("HTTP/1.1 200 OK\r\n", true),
        ("nonsense\r\n\r\n", false),
    ] {
        let (listener, upstream) = engine().await;
        let serve = async {
            let mut stream = accept(&listener).await;
            read_until(&mut stream, b"hello").await;
            stream.write_all(answer.as_bytes()).await.expect("taken");
        };
        let (_, sent) = tokio::join!(serve, send(&upstream, small()));
        match sent {
            Err(SendError::Reset { reused: false, .. }) => assert!(is_reset, "{answer:?}"),
            Err(SendError::Malformed(fault)) => {
                assert!(!is_reset && fault.ends_with(": `nonsense`"), "{fault}");
            }
            other => panic!("{answer:?}: {other:?}"),
        }
    }
}
