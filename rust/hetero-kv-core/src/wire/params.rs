//! `kv_transfer_params`: the one definition of what travels from P through a router to D.
//!
//! Routers treat it as opaque JSON and copy it, so it crosses hands that may cut, change or invent
//! fields. Parsing checks every field and bounds every size; what fails names the field. What is
//! read afterwards never comes from here but from the holder's answer to a claim.

use serde_json::{Map, Value, json};

use crate::ids::{BlockId, DpRank, EngineId, Incarnation, PromptDigest, TransferId};

/// `hetero_version` of this build. A pair of other versions is refused by name.
pub const PARAMS_VERSION: u64 = 1;

/// Largest JSON text taken, in bytes: a million block ids with room to spare.
pub const PARAMS_BYTES_MAX: usize = 16 << 20;
/// KV cache groups of one engine.
pub const GROUPS_MAX: usize = 64;
/// Blocks of one prompt over all groups.
pub const BLOCKS_MAX: usize = 1 << 20;
/// Ranks of a tensor parallel group or stages of a pipeline.
pub const RANKS_MAX: u64 = 1024;
/// Longest host name, per RFC 1035.
pub const HOST_BYTES_MAX: usize = 253;
/// Longest request id.
pub const REQUEST_ID_BYTES_MAX: usize = 1024;

/// What a request's params ask of this engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferParams {
    /// Nothing: an ordinary request.
    Absent,
    /// `do_remote_decode`: prefill here, another engine decodes.
    Prefill {
        /// Minted by the router, if it did.
        transfer_id: Option<TransferId>,
    },
    /// `do_remote_prefill`: another engine has prefilled.
    Decode(Box<RemotePrefill>),
}

/// What P answers and D receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemotePrefill {
    /// Names the transfer.
    pub transfer_id: TransferId,
    /// Engine that ran the prefill.
    pub engine: EngineId,
    /// Its start.
    pub incarnation: Incarnation,
    /// Its control listener's host, as advertised.
    pub host: String,
    /// Its control listener's port.
    pub port: u16,
    /// Its data parallel index.
    pub dp_rank: DpRank,
    /// vLLM's internal id of the request there.
    pub request_id: String,
    /// Its tensor parallel size.
    pub tp_size: u32,
    /// Its pipeline size.
    pub pp_size: u32,
    /// Blocks per KV cache group; for people and routers, never read from.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Prompt tokens with KV.
    pub num_tokens: u32,
    /// Epoch of the lease.
    pub lease_epoch: u64,
    /// Which prompt.
    pub prompt_digest: PromptDigest,
}

/// Params that cannot be used, by the field at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kv_transfer_params.{field} {problem}")]
pub struct ParamsError {
    /// Name of the key.
    pub field: &'static str,
    /// What is wrong.
    pub problem: String,
}

impl TransferParams {
    /// Parses JSON text; `null` and an object without our flags are [`TransferParams::Absent`].
    pub fn parse(text: &str) -> Result<Self, ParamsError> {
        if text.len() > PARAMS_BYTES_MAX {
            return Err(fault(
                "*",
                format!("are over the limit of {PARAMS_BYTES_MAX} bytes"),
            ));
        }
        let value: Value = serde_json::from_str(text)
            .map_err(|error| fault("*", format!("are not JSON: {error}")))?;
        let map = match value {
            Value::Null => return Ok(Self::Absent),
            Value::Object(map) => map,
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                return Err(fault("*", "are not an object".into()));
            }
        };
        let decode_elsewhere = flag(&map, "do_remote_decode")?;
        let prefilled_elsewhere = flag(&map, "do_remote_prefill")?;
        match (decode_elsewhere, prefilled_elsewhere) {
            (false, false) => Ok(Self::Absent),
            (true, true) => Err(fault(
                "do_remote_decode",
                "and do_remote_prefill are both true".into(),
            )),
            (true, false) => Ok(Self::Prefill {
                transfer_id: match map.get("transfer_id") {
                    None | Some(Value::Null) => None,
                    Some(_) => Some(hex_id(&map, "transfer_id", TransferId::parse)?),
                },
            }),
            (false, true) => RemotePrefill::from_map(&map).map(|p| Self::Decode(Box::new(p))),
        }
    }
}

impl RemotePrefill {
    fn from_map(map: &Map<String, Value>) -> Result<Self, ParamsError> {
        let version = number(map, "hetero_version", 0, u64::MAX)?;
        if version != PARAMS_VERSION {
            return Err(fault(
                "hetero_version",
                format!("is {version}, this engine takes {PARAMS_VERSION}"),
            ));
        }
        let host = text(map, "remote_host", HOST_BYTES_MAX)?;
        let engine = EngineId::new(text(map, "remote_engine_id", usize::MAX)?)
            .map_err(|error| fault("remote_engine_id", error.problem.into()))?;
        let digits = text(map, "remote_incarnation", 16)?;
        // `from_str_radix` alone takes a sign and fewer digits.
        let whole = digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let incarnation = u64::from_str_radix(digits, 16)
            .ok()
            .filter(|_| whole)
            .ok_or_else(|| fault("remote_incarnation", "is not 16 hexadecimal digits".into()))?;
        Ok(Self {
            transfer_id: hex_id(map, "transfer_id", TransferId::parse)?,
            engine,
            incarnation: Incarnation(incarnation),
            host: host.to_owned(),
            port: narrow(number(map, "remote_port", 1, 65_535)?),
            dp_rank: DpRank(narrow(number(
                map,
                "remote_dp_rank",
                0,
                u64::from(u32::MAX),
            )?)),
            request_id: text(map, "remote_request_id", REQUEST_ID_BYTES_MAX)?.to_owned(),
            tp_size: narrow(number(map, "tp_size", 1, RANKS_MAX)?),
            pp_size: narrow(number(map, "pp_size", 1, RANKS_MAX)?),
            block_ids: block_ids(map)?,
            num_tokens: narrow(number(map, "remote_num_tokens", 1, u64::from(u32::MAX))?),
            lease_epoch: number(map, "lease_epoch", 1, u64::MAX)?,
            prompt_digest: hex_id(map, "prompt_digest", PromptDigest::parse)?,
        })
    }

    /// The JSON object that goes into P's HTTP response.
    pub fn to_json(&self) -> Value {
        json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "hetero_version": PARAMS_VERSION,
            "transfer_id": self.transfer_id.to_string(),
            "remote_engine_id": self.engine.as_str(),
            "remote_incarnation": self.incarnation.to_string(),
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_dp_rank": self.dp_rank.0,
            "remote_request_id": self.request_id,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "remote_block_ids": self.block_ids,
            "remote_num_tokens": self.num_tokens,
            "lease_epoch": self.lease_epoch,
            "prompt_digest": self.prompt_digest.to_string(),
        })
    }
}

fn fault(field: &'static str, problem: String) -> ParamsError {
    ParamsError { field, problem }
}

fn present<'a>(map: &'a Map<String, Value>, field: &'static str) -> Result<&'a Value, ParamsError> {
    match map.get(field) {
        None | Some(Value::Null) => Err(fault(field, "is missing".into())),
        Some(value) => Ok(value),
    }
}

fn flag(map: &Map<String, Value>, field: &'static str) -> Result<bool, ParamsError> {
    match map.get(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_)) => {
            Err(fault(field, "is not true or false".into()))
        }
    }
}

fn text<'a>(
    map: &'a Map<String, Value>,
    field: &'static str,
    bytes_max: usize,
) -> Result<&'a str, ParamsError> {
    let Value::String(text) = present(map, field)? else {
        return Err(fault(field, "is not a text".into()));
    };
    if text.is_empty() {
        return Err(fault(field, "is empty".into()));
    }
    if text.len() > bytes_max {
        return Err(fault(field, format!("is longer than {bytes_max} bytes")));
    }
    if text.chars().any(char::is_control) {
        return Err(fault(field, "contains control characters".into()));
    }
    Ok(text)
}

fn hex_id<T>(
    map: &Map<String, Value>,
    field: &'static str,
    parse: impl FnOnce(&str) -> Result<T, crate::ids::InvalidId>,
) -> Result<T, ParamsError> {
    parse(text(map, field, usize::MAX)?).map_err(|error| fault(field, error.problem.into()))
}

fn number(
    map: &Map<String, Value>,
    field: &'static str,
    min: u64,
    max: u64,
) -> Result<u64, ParamsError> {
    // A JSON text as well: some routers turn numbers into texts on their way.
    let value = match present(map, field)? {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    };
    match value {
        Some(value) if (min..=max).contains(&value) => Ok(value),
        Some(_) => Err(fault(field, format!("is not within {min} to {max}"))),
        None => Err(fault(field, "is not a whole number".into())),
    }
}

fn narrow<T: TryFrom<u64> + Default>(value: u64) -> T {
    // Only called with a value that `number` has bounded to T's range.
    T::try_from(value).unwrap_or_default()
}

fn block_ids(map: &Map<String, Value>) -> Result<Vec<Vec<BlockId>>, ParamsError> {
    const FIELD: &str = "remote_block_ids";
    let Value::Array(groups) = present(map, FIELD)? else {
        return Err(fault(FIELD, "is not a list of lists of block ids".into()));
    };
    if groups.len() > GROUPS_MAX {
        return Err(fault(FIELD, format!("has more than {GROUPS_MAX} groups")));
    }
    let mut left = BLOCKS_MAX;
    let mut parsed = Vec::with_capacity(groups.len());
    for group in groups {
        let Value::Array(ids) = group else {
            return Err(fault(FIELD, "is not a list of lists of block ids".into()));
        };
        left = left
            .checked_sub(ids.len())
            .ok_or_else(|| fault(FIELD, format!("has more than {BLOCKS_MAX} blocks")))?;
        let ids = ids
            .iter()
            .map(|id| {
                id.as_u64()
                    .and_then(|id| u32::try_from(id).ok())
                    .map(BlockId)
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| fault(FIELD, "has an id that is not a 32-bit whole number".into()))?;
        parsed.push(ids);
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests;
