//! Errors: ours, as clients expect them, and those of engines.

use serde_json::{Value, json};

use crate::openai::error::{self, ApiError};

#[test]
fn errors_have_the_shape_that_clients_expect() {
    let mut error = ApiError::new(400, "invalid_field", "`n` \"x\"");
    error.param = Some("n".to_owned());
    let body: Value = serde_json::from_slice(&error.body()).expect("JSON");
    assert_eq!(
        body,
        json!({"error": {"message": "`n` \"x\"", "type": "invalid_request_error",
            "param": "n", "code": "invalid_field"}})
    );
}

#[test]
fn an_error_names_kv_by_its_code_or_type() {
    for (body, named) in [
        (
            r#"{"error":{"message":"x","type":"server_error","code":"lease_gone"}}"#,
            true,
        ),
        (
            r#"{"error":{"type":"kv_transfer_failed","code":500}}"#,
            true,
        ),
        ("data: {\"error\":{\"code\":\"kv_load\"}}\n\n", true),
        (
            r#"{"error":{"message":"kv_transfer lease_gone","code":500}}"#,
            false,
        ),
        (r#"{"error":{"code":"internal"}}"#, false),
        (r#"{"error":"kv_"}"#, false),
        ("kv_", false),
        ("", false),
    ] {
        assert_eq!(error::names_kv(body.as_bytes()), named, "{body}");
    }
}
