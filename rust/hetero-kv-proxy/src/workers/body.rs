//! Bodies of an administrator's requests, checked member by member so that a fault names its field.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::facts::{self, Facts};
use crate::config::{Worker, WorkerFault, assemble_worker, worker_keys};
use crate::openai::error::ApiError;
use crate::routing::{Role, WORKER_WEIGHT_MAX};

/// Longest string in a body: no URL and no engine id comes near it.
const TEXT_BYTES_MAX: usize = 1_024;
/// What a worker's heartbeats are expected at, where it does not say.
const HEARTBEAT_MS_DEFAULT: u64 = 5_000;
const HEARTBEAT_MS_MIN: u64 = 100;
const HEARTBEAT_MS_MAX: u64 = 600_000;
/// One heartbeat may be lost and one late.
const HEARTBEATS_PER_TTL_MIN: u64 = 3;
const TTL_MS_MAX: u64 = 3_600_000;

/// One registration or heartbeat.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) role: Role,
    pub(super) worker: Worker,
    pub(super) engine_id: Option<String>,
    pub(super) ttl_ms: u64,
    pub(super) facts: Facts,
}

/// The members of one JSON object, each once, in their order.
pub(super) struct Members(pub(super) Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members: Vec<(String, Value)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if members.iter().any(|(known, _)| *known == name) {
                        return Err(de::Error::custom(format!("`{name}` is given twice")));
                    }
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

pub(super) fn fault(code: &'static str, field: &str, message: String) -> ApiError {
    ApiError {
        param: Some(field.to_owned()),
        ..ApiError::new(400, code, message)
    }
}

fn members(body: &[u8], allowed: &[String]) -> Result<Members, ApiError> {
    let members: Members = serde_json::from_slice(body).map_err(|error| {
        let message = format!("the body must be one JSON object, each field once: {error}");
        ApiError::new(400, "invalid_json", message)
    })?;
    let unknown = |(name, _): &&(String, Value)| !allowed.contains(name);
    if let Some((name, _)) = members.0.iter().find(unknown) {
        let shown: String = name.chars().take(64).collect();
        let message = format!(
            "`{shown}` is no field here; fields are {}",
            allowed.join(", ")
        );
        return Err(fault("unknown_field", &shown, message));
    }
    Ok(members)
}

impl Members {
    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        let found = self.0.iter().find(|(name, _)| name == field);
        found
            .map(|(_, value)| value)
            .filter(|value| !value.is_null())
    }

    fn needed(&self, field: &str, what: &str) -> Result<&Value, ApiError> {
        self.get(field).ok_or_else(|| {
            fault(
                "missing_field",
                field,
                format!("`{field}` is needed: {what}"),
            )
        })
    }

    fn milliseconds(&self, field: &str, default: u64) -> Result<u64, ApiError> {
        let Some(value) = self.get(field) else {
            return Ok(default);
        };
        value.as_u64().ok_or_else(|| {
            let message = format!("`{field}` must be a whole number of milliseconds, not {value}");
            fault("invalid_field", field, message)
        })
    }
}

/// A string that can stand in a header, a label and a worker's flag.
fn text<'a>(field: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    let plain = |text: &&str| {
        let byte_ok = |byte: u8| byte.is_ascii_graphic() && byte != b',';
        !text.is_empty() && text.len() <= TEXT_BYTES_MAX && text.bytes().all(byte_ok)
    };
    value.as_str().filter(plain).ok_or_else(|| {
        let message = format!(
            "`{field}` must be a string of 1 to {TEXT_BYTES_MAX} visible ASCII characters without a comma"
        );
        fault("invalid_field", field, message)
    })
}

fn role_of(field: &str, value: &Value) -> Result<Role, ApiError> {
    let roles = [Role::Prefill, Role::Decode];
    let known = roles
        .into_iter()
        .find(|role| Some(role.name()) == value.as_str());
    known.ok_or_else(|| {
        let message = format!("`{field}` must be \"prefill\" or \"decode\"");
        fault("invalid_field", field, message)
    })
}

/// The name of a worker's key in JSON.
fn field_of(key: &str) -> String {
    key.replace('-', "_")
}

/// Names the field of a worker that cannot be served.
pub(super) fn refused(found: &WorkerFault) -> ApiError {
    ApiError {
        param: found.key.map(field_of),
        ..ApiError::new(400, "worker_refused", found.text.clone())
    }
}

/// The body of `POST /v1/workers`.
pub(super) fn told(body: &[u8]) -> Result<Told, ApiError> {
    let own = [
        "role",
        "url",
        "engine_id",
        "heartbeat_interval_ms",
        "ttl_ms",
        "kv",
        "compat",
    ];
    let fields: Vec<String> = own
        .into_iter()
        .map(str::to_owned)
        .chain(worker_keys().map(field_of))
        .collect();
    let members = members(body, &fields)?;
    let role = role_of("role", members.needed("role", "\"prefill\" or \"decode\"")?)?;
    let url = text("url", members.needed("url", "the engine's base URL")?)?;
    let mut given: Vec<(&'static str, String)> = Vec::new();
    for key in worker_keys() {
        let field = field_of(key);
        let Some(value) = members.get(&field) else {
            continue;
        };
        // As a flag has it: `bootstrap` is a port or an address.
        given.push((
            key,
            match value.as_u64() {
                Some(number) => number.to_string(),
                None => text(&field, value)?.to_owned(),
            },
        ));
    }
    let given: Vec<(&'static str, &str)> = given
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    let mut worker = assemble_worker(url, &given).map_err(|found| ApiError {
        code: "invalid_field",
        ..refused(&found)
    })?;
    let engine_id = match members.get("engine_id") {
        Some(value) => Some(text("engine_id", value)?.to_owned()),
        None => None,
    };
    let interval = members.milliseconds("heartbeat_interval_ms", HEARTBEAT_MS_DEFAULT)?;
    if !(HEARTBEAT_MS_MIN..=HEARTBEAT_MS_MAX).contains(&interval) {
        let message = format!(
            "`heartbeat_interval_ms` must be {HEARTBEAT_MS_MIN} to {HEARTBEAT_MS_MAX}, not {interval}"
        );
        return Err(fault("invalid_field", "heartbeat_interval_ms", message));
    }
    let least = HEARTBEATS_PER_TTL_MIN * interval;
    let ttl_ms = members.milliseconds("ttl_ms", least)?;
    if !(least..=TTL_MS_MAX).contains(&ttl_ms) {
        let message = format!(
            "`ttl_ms` must be {HEARTBEATS_PER_TTL_MIN} times `heartbeat_interval_ms` ({interval}) or \
             more, and at most {TTL_MS_MAX}, not {ttl_ms}; leave it out for {least}"
        );
        return Err(fault("invalid_field", "ttl_ms", message));
    }
    let facts = Facts {
        kv: facts::kv(members.get("kv"))?,
        compat: facts::compat(members.get("compat"))?,
    };
    worker.traits = worker.traits.with_compat(facts.compat.clone());
    Ok(Told {
        role,
        worker,
        engine_id,
        ttl_ms,
        facts,
    })
}

/// The body of `POST /v1/workers/{id}/role`.
pub(super) fn role(body: &[u8]) -> Result<Role, ApiError> {
    let members = members(body, &["role".to_owned()])?;
    role_of("role", members.needed("role", "\"prefill\" or \"decode\"")?)
}

/// The body of `POST /v1/workers/{id}/weight`.
pub(super) fn weight(body: &[u8]) -> Result<u32, ApiError> {
    let members = members(body, &["weight".to_owned()])?;
    let what = format!("a whole number from 0 to {WORKER_WEIGHT_MAX}");
    let value = members.needed("weight", &what)?;
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
    number
        .filter(|number| *number <= WORKER_WEIGHT_MAX)
        .ok_or_else(|| {
            let message = format!("`weight` must be {what}, not {value}");
            fault("invalid_field", "weight", message)
        })
}
