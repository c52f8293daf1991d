//! Splicing is compared with a reference that works on parsed values, and byte for byte where the
//! bytes are the promise.

mod bodies;
mod error;
mod request;
mod response;
mod splice;
mod sse;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::Value;

use super::Route;
use super::request::{Request, RequestError};

/// What some connector's prefill leg carries.
const PARAMS: &str =
    r#"{"do_remote_decode":true,"transfer_id":"00112233445566778899aabbccddeeff"}"#;

fn completions(body: &str) -> Result<Request, RequestError> {
    Request::parse(Bytes::copy_from_slice(body.as_bytes()), Route::Completions)
}

fn parsed(body: &str, route: Route) -> Request {
    Request::parse(Bytes::copy_from_slice(body.as_bytes()), route).expect(body)
}

/// Any JSON value, small.
pub(super) fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        // Halves: serde_json's own reading of a float may be off by one bit.
        any::<i32>().prop_map(|halves| Value::from(f64::from(halves) / 2.0)),
        ".{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-c{},\":\\\\]{0,3}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

pub(super) fn space() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["", " ", "\n\t ", "\r\n"])
}
