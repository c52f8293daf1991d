//! `Transfer-Encoding` of a request: `chunked`, once, and nothing else. Pure.

use http::{HeaderMap, header};

use crate::openai::error::ApiError;

/// Longest part of a client's word that it is told.
const TOLD_CHARS_MAX: usize = 64;

/// Refuses whatever else was done to a body than to cut it into chunks: the server takes only these
/// off, and the rest would be read as JSON and passed on (RFC 9112, section 6.1).
///
/// # Errors
/// 501 that names the coding; 400 where `chunked` is named more than once, which says nothing
/// certain of where the body ends.
pub(crate) fn check(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut chunked = 0;
    for value in headers.get_all(header::TRANSFER_ENCODING) {
        for coding in value.as_bytes().split(|byte| *byte == b',') {
            let coding = coding.trim_ascii();
            if coding.eq_ignore_ascii_case(b"chunked") {
                chunked += 1;
            } else if !coding.is_empty() {
                let coding = String::from_utf8_lossy(coding);
                let coding: String = coding.chars().take(TOLD_CHARS_MAX).collect();
                let text = format!(
                    "Transfer-Encoding: only chunked is understood, this body is coded as \
                     {coding:?} too; send it without"
                );
                return Err(ApiError::new(501, "transfer_coding", text));
            }
        }
    }
    match chunked {
        0 | 1 => Ok(()),
        _ => Err(ApiError::new(
            400,
            "transfer_coding",
            "Transfer-Encoding names chunked more than once",
        )),
    }
}

#[cfg(test)]
mod tests;
