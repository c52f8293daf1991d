//! Heads of requests as they are written, and of answers as they are read. Pure.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes, BytesMut};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header};

use super::chunked::Chunked;
use super::malformed::Excerpt;

/// Longest head of an answer.
pub(super) const HEAD_BYTES_MAX: usize = 400 << 10;
/// Most headers of an answer.
const HEADERS_MAX: usize = 100;
/// What a header takes, about.
const HEADER_BYTES: usize = 40;

/// Headers that the connection decides.
static FRAMING: [HeaderName; 3] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
];

/// A request line and headers; those of `extra` stand in place of those of `headers`.
pub(super) struct RequestHead<'a> {
    pub(super) method: &'a Method,
    /// Path and query, which hold neither spaces nor control characters.
    pub(super) target: &'a [&'a str],
    pub(super) host: &'a HeaderValue,
    pub(super) headers: &'a HeaderMap,
    pub(super) extra: &'a [(HeaderName, HeaderValue)],
    /// Bytes of the body.
    pub(super) length: u64,
}

impl RequestHead<'_> {
    /// As it is written.
    pub(super) fn encode(&self) -> Vec<u8> {
        let headers = self.headers.len() + self.extra.len() + 3;
        let mut out = Vec::with_capacity(headers * HEADER_BYTES + 128);
        out.extend_from_slice(self.method.as_str().as_bytes());
        out.push(b' ');
        for part in self.target {
            out.extend_from_slice(part.as_bytes());
        }
        out.extend_from_slice(b" HTTP/1.1\r\n");
        put(&mut out, &header::HOST, self.host.as_bytes());
        for (name, value) in self.headers {
            let elsewhere = FRAMING.contains(name) || self.extra.iter().any(|(own, _)| own == name);
            if !elsewhere {
                put(&mut out, name, value.as_bytes());
            }
        }
        for (name, value) in self.extra {
            put(&mut out, name, value.as_bytes());
        }
        if self.length > 0 {
            let length = HeaderValue::from(self.length);
            put(&mut out, &header::CONTENT_LENGTH, length.as_bytes());
        }
        out.extend_from_slice(b"\r\n");
        out
    }
}

fn put(out: &mut Vec<u8>, name: &HeaderName, value: &[u8]) {
    out.extend_from_slice(name.as_str().as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// How the end of an answer's body is known.
#[derive(Debug)]
pub(super) enum Framing {
    /// So many bytes are left.
    Length(u64),
    Chunked(Chunked),
    /// It ends with the connection.
    UntilClose,
}

/// Head of an answer.
#[derive(Debug)]
pub(super) struct AnswerHead {
    pub(super) parts: Parts,
    pub(super) framing: Framing,
    /// Whether the engine keeps the connection behind the body.
    pub(super) keeps: bool,
}

/// The bytes are no head of an answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Malformed {
    #[error("no HTTP/1 ({fault}): {seen}")]
    Syntax {
        fault: httparse::Error,
        seen: Excerpt,
    },
    #[error("the response head is longer than {HEAD_BYTES_MAX} bytes: {0}")]
    TooLong(Excerpt),
    #[error("a header is not valid: {0}")]
    Header(Excerpt),
    #[error("its Content-Length is not one number: {0}")]
    Length(Excerpt),
    #[error("HTTP/1.0 with Transfer-Encoding")]
    OldCoding,
    #[error("its Transfer-Encoding is not `chunked` alone, and no other was asked for: {0}")]
    Coding(Excerpt),
    #[error("101 Switching Protocols, which was not asked for")]
    Switch,
}

impl Malformed {
    /// What the parser found in a head that begins `text`.
    fn syntax(fault: httparse::Error, text: &[u8]) -> Self {
        let of_headers = [httparse::Error::HeaderName, httparse::Error::HeaderValue];
        let seen = match of_headers.contains(&fault) {
            true => bad_header(text),
            false => text,
        };
        Self::Syntax {
            fault,
            seen: Excerpt::of_line(seen),
        }
    }
}

/// From the first line behind the status line that is no header, as far as a look can tell.
fn bad_header(text: &[u8]) -> &[u8] {
    let mut rest = text;
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        rest = &rest[end + 1..];
        let line = rest.split(|byte| *byte == b'\n').next().unwrap_or(rest);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let mut parts = line.splitn(2, |byte| *byte == b':');
        let name = parts.next().map(HeaderName::from_bytes);
        let value = parts.next().map(HeaderValue::from_bytes);
        if !matches!((name, value), (Some(Ok(_)), Some(Ok(_)))) {
            return rest;
        }
    }
    text
}

/// Takes the head of the answer to a request of `method` from the front of `unread`; `None` when it
/// is not all there. Interim answers (1xx) are passed over.
///
/// # Errors
/// [`Malformed`].
pub(super) fn parse(
    unread: &mut BytesMut,
    method: &Method,
) -> Result<Option<AnswerHead>, Malformed> {
    loop {
        let Some(parts) = parse_one(unread)? else {
            return match unread.len() > HEAD_BYTES_MAX {
                true => Err(Malformed::TooLong(Excerpt::of_line(unread))),
                false => Ok(None),
            };
        };
        let status = parts.status;
        if status.is_informational() && status != StatusCode::SWITCHING_PROTOCOLS {
            continue;
        }
        let (framing, reusable) = framing(&parts, method)?;
        let keeps = reusable && keeps(&parts);
        return Ok(Some(AnswerHead {
            parts,
            framing,
            keeps,
        }));
    }
}

fn parse_one(unread: &mut BytesMut) -> Result<Option<Parts>, Malformed> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let text = &unread[..];
    let status = parser
        .parse_response_with_uninit_headers(&mut parsed, text, &mut headers)
        .map_err(|fault| Malformed::syntax(fault, text))?;
    let httparse::Status::Complete(length) = status else {
        return Ok(None);
    };
    let no_status = || Malformed::syntax(httparse::Error::Status, text);
    let code = parsed.code.ok_or_else(no_status)?;
    let (mut parts, ()) = Response::new(()).into_parts();
    parts.status = StatusCode::from_u16(code).map_err(|_| no_status())?;
    parts.version = match parsed.version {
        Some(1) => Version::HTTP_11,
        Some(_) | None => Version::HTTP_10,
    };
    // The values are slices of one copy of the head: what is behind it in `unread` moves on.
    let head = Bytes::copy_from_slice(&text[..length]);
    let base = text.as_ptr().addr();
    parts.headers.reserve(parsed.headers.len());
    for found in &*parsed.headers {
        let bad = || Malformed::Header(Excerpt::of(found.name.as_bytes()));
        let name = HeaderName::from_bytes(found.name.as_bytes()).map_err(|_| bad())?;
        let start = found.value.as_ptr().addr() - base;
        let value = head.slice(start..start + found.value.len());
        let value = HeaderValue::from_maybe_shared(value).map_err(|_| bad())?;
        parts.headers.append(name, value);
    }
    unread.advance(length);
    Ok(Some(parts))
}

/// RFC 9112, section 6.3, and whether the connection is still HTTP behind the body.
fn framing(head: &Parts, method: &Method) -> Result<(Framing, bool), Malformed> {
    let none = Framing::Length(0);
    match head.status {
        StatusCode::SWITCHING_PROTOCOLS => return Err(Malformed::Switch),
        StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED => return Ok((none, true)),
        _ => {}
    }
    if method == Method::HEAD {
        return Ok((none, true));
    }
    if method == Method::CONNECT && head.status.is_success() {
        return Ok((none, false));
    }
    if head.headers.contains_key(header::TRANSFER_ENCODING) {
        if head.version == Version::HTTP_10 {
            return Err(Malformed::OldCoding);
        }
        // Whatever else was done to the body, the client would take for the answer itself.
        return match is_chunked(&head.headers) {
            true => Ok((Framing::Chunked(Chunked::default()), true)),
            false => {
                let coding = all_of(&head.headers, &header::TRANSFER_ENCODING);
                Err(Malformed::Coding(coding))
            }
        };
    }
    let mut length = None;
    for value in head.headers.get_all(header::CONTENT_LENGTH) {
        for one in value.as_bytes().split(|byte| *byte == b',') {
            let bad = || Malformed::Length(all_of(&head.headers, &header::CONTENT_LENGTH));
            let one = number(one.trim_ascii()).ok_or_else(bad)?;
            if length.is_some_and(|other| other != one) {
                return Err(bad());
            }
            length = Some(one);
        }
    }
    Ok(match length {
        Some(length) => (Framing::Length(length), true),
        None => (Framing::UntilClose, false),
    })
}

/// All values of a header, as one.
fn all_of(headers: &HeaderMap, name: &HeaderName) -> Excerpt {
    let values = headers.get_all(name).iter().map(HeaderValue::as_bytes);
    Excerpt::of(&values.collect::<Vec<_>>().join(&b", "[..]))
}

/// Digits and nothing else.
fn number(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| digits)?;
    text.parse().ok()
}

/// Whether `chunked` is the only coding. Servers behind a careless gateway name it twice and do it
/// once.
fn is_chunked(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::TRANSFER_ENCODING)
        .iter()
        .all(|value| {
            value
                .as_bytes()
                .trim_ascii()
                .eq_ignore_ascii_case(b"chunked")
        })
}

fn keeps(head: &Parts) -> bool {
    let says = |word: &str| {
        let values = head.headers.get_all(header::CONNECTION).iter();
        values
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .any(|token| token.trim().eq_ignore_ascii_case(word))
    };
    match head.version == Version::HTTP_11 {
        true => !says("close"),
        false => says("keep-alive") && !says("close"),
    }
}
