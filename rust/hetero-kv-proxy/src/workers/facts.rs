//! What a worker's connector says of itself beyond what legs need: shown as it was told, for people
//! and for whoever pairs workers.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::body::fault;
use crate::openai::error::ApiError;

/// Members of `kv`, and of `compat`.
const MEMBERS_MAX: usize = 64;
const NAME_BYTES_MAX: usize = 64;
/// A connector's own limit of a compatibility field.
const VALUE_BYTES_MAX: usize = 4_096;

/// The member of `kv` that the proxy goes by.
const LEASE: &str = "lease_ms";
/// A day, as of `--lease-s`.
const LEASE_MS_MAX: u64 = 86_400_000;

/// Of one worker; empty where it has told nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Facts {
    /// Its connector: texts, numbers and truth values by name.
    pub(crate) kv: Option<Arc<Map<String, Value>>>,
    /// What must be equal in a pair, by name.
    pub(crate) compat: Option<Arc<BTreeMap<String, String>>>,
}

impl Facts {
    /// How long it keeps blocks that decode was not seen to take, where it tells that.
    pub(crate) fn lease_ms(&self) -> Option<u64> {
        self.kv.as_ref()?.get(LEASE)?.as_u64()
    }

    /// The name of its connector, where it tells one.
    pub(super) fn connector(&self) -> Option<&str> {
        self.kv.as_ref()?.get("connector")?.as_str()
    }
}

fn object<'a>(
    field: &str,
    value: Option<&'a Value>,
) -> Result<Option<&'a Map<String, Value>>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    let members = value.as_object();
    let members = members.filter(|members| members.len() <= MEMBERS_MAX);
    let members = members.ok_or_else(|| {
        let message = format!("`{field}` must be an object of up to {MEMBERS_MAX} members");
        fault("invalid_field", field, message)
    })?;
    let named = |name: &String| {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(plain)
    };
    if let Some(name) = members.keys().find(|name| !named(name)) {
        let shown: String = name.chars().take(NAME_BYTES_MAX).collect();
        let message =
            format!("`{field}`: `{shown}` is no name of 1 to {NAME_BYTES_MAX} of a-z, 0-9 and _");
        return Err(fault("invalid_field", field, message));
    }
    Ok(Some(members))
}

fn is_text(value: &Value) -> bool {
    value
        .as_str()
        .is_some_and(|text| text.len() <= VALUE_BYTES_MAX)
}

/// The member `kv` of a registration.
pub(super) fn kv(value: Option<&Value>) -> Result<Option<Arc<Map<String, Value>>>, ApiError> {
    let Some(members) = object("kv", value)? else {
        return Ok(None);
    };
    for (name, value) in members {
        if !(is_text(value) || value.is_i64() || value.is_u64() || value.is_boolean()) {
            let message = format!(
                "`kv.{name}` must be a text of up to {VALUE_BYTES_MAX} bytes, a whole number, or true \
                 or false"
            );
            return Err(fault("invalid_field", "kv", message));
        }
        if name == LEASE && value.as_u64().is_none_or(|lease| lease > LEASE_MS_MAX) {
            let message = format!(
                "`kv.{LEASE}` must be 0 to {LEASE_MS_MAX}, the milliseconds for which the engine keeps \
                 blocks that decode does not take (its lease_s and grace_ms), not {value}"
            );
            return Err(fault("invalid_field", "kv", message));
        }
    }
    Ok(Some(Arc::new(members.clone())))
}

/// The member `compat` of a registration.
pub(super) fn compat(
    value: Option<&Value>,
) -> Result<Option<Arc<BTreeMap<String, String>>>, ApiError> {
    let Some(members) = object("compat", value)? else {
        return Ok(None);
    };
    let text = |(name, value): (&String, &Value)| {
        let text = value.as_str().filter(|_| is_text(value)).ok_or_else(|| {
            let message =
                format!("`compat.{name}` must be a text of up to {VALUE_BYTES_MAX} bytes");
            fault("invalid_field", "compat", message)
        })?;
        Ok((name.clone(), text.to_owned()))
    };
    let fields: Result<BTreeMap<String, String>, ApiError> = members.iter().map(text).collect();
    Ok(Some(Arc::new(fields?)))
}
