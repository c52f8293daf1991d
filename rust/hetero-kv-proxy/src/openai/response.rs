//! What the proxy reads in a prefill answer.

use super::splice::Object;

/// The raw `kv_transfer_params` object of a prefill answer, byte for byte as the engine wrote it.
///
/// `None` when the answer carries none that a decode engine could use: not JSON, the field absent,
/// twice, null or anything but an object.
pub fn kv_transfer_params(body: &[u8]) -> Option<&str> {
    let object = Object::parse(body).ok()?;
    let range = object.find(body, "kv_transfer_params").ok()??;
    let raw = std::str::from_utf8(&body[range]).ok()?;
    raw.starts_with('{').then_some(raw)
}
