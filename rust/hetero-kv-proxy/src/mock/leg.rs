//! What a request is, and whether an engine would take it.

use std::borrow::Cow;
use std::hash::Hasher;

use serde::Deserialize;
use serde_json::value::RawValue;

/// As vLLM's own limit on `n` is far lower than what a mock could send.
const N_MAX: u64 = 128;
/// Tokens of the longest answer.
const TOKENS_MAX: u64 = 1_000_000;

/// The three kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegKind {
    /// The first leg of a pair.
    Prefill,
    /// The second.
    Decode,
    /// Neither.
    Plain,
}

/// A request without fault.
#[derive(Debug)]
pub struct Leg {
    /// What it is, and what it carries as such.
    pub order: Order,
    /// Tokens of each choice.
    pub tokens: Option<u64>,
    /// Choices.
    pub n: u64,
    /// Answer as an event stream.
    pub stream: bool,
    /// With a usage chunk at its end.
    pub include_usage: bool,
    /// Tokens of the prompt: counted in a list of ids, else a quarter of the characters.
    pub prompt_tokens: u64,
    /// Of the prompt as it stands in the body.
    pub prompt_hash: u64,
}

/// What a request's params ask for.
#[derive(Debug)]
pub enum Order {
    /// Pin, under this id or one of the worker's own.
    Prefill(Option<String>),
    /// Read and free.
    Decode(Handle),
    /// Compute.
    Plain,
}

/// The params of a decode leg that say which blocks.
#[derive(Debug)]
pub struct Handle {
    /// 32 hexadecimal digits.
    pub transfer_id: String,
    /// Of the process that pinned.
    pub incarnation: String,
    /// Of the lease.
    pub epoch: u64,
}

impl Leg {
    /// Its kind.
    pub fn kind(&self) -> LegKind {
        match self.order {
            Order::Prefill(_) => LegKind::Prefill,
            Order::Decode(_) => LegKind::Decode,
            Order::Plain => LegKind::Plain,
        }
    }
}

/// Why a request is answered 400.
#[derive(Debug, PartialEq, Eq)]
pub struct LegError {
    /// For counting.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(default)]
    max_tokens: Option<u64>,
    #[serde(default)]
    max_completion_tokens: Option<u64>,
    #[serde(default)]
    min_tokens: Option<u64>,
    #[serde(default)]
    n: Option<u64>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(borrow, default)]
    kv_transfer_params: Option<Params<'a>>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
}

/// As the contract has them; a type that differs is serde's to refuse, by its path.
#[derive(Deserialize)]
struct Params<'a> {
    #[serde(default)]
    do_remote_decode: Option<bool>,
    #[serde(default)]
    do_remote_prefill: Option<bool>,
    #[serde(default)]
    hetero_version: Option<u64>,
    #[serde(borrow, default)]
    transfer_id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    remote_engine_id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    remote_incarnation: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    remote_host: Option<Cow<'a, str>>,
    #[serde(default)]
    remote_port: Option<u16>,
    #[serde(default)]
    remote_dp_rank: Option<u64>,
    #[serde(borrow, default)]
    remote_request_id: Option<Cow<'a, str>>,
    #[serde(default)]
    tp_size: Option<u64>,
    #[serde(default)]
    pp_size: Option<u64>,
    #[serde(default)]
    remote_block_ids: Option<Vec<Vec<u64>>>,
    #[serde(default)]
    remote_num_tokens: Option<u64>,
    #[serde(default)]
    lease_epoch: Option<u64>,
    #[serde(borrow, default)]
    prompt_digest: Option<Cow<'a, str>>,
}

/// Reads and checks a body; `prompt_field` is `prompt` or `messages`.
///
/// # Errors
/// [`LegError`], which names the field.
pub fn parse(bytes: &[u8], chat: bool) -> Result<Leg, LegError> {
    let body: Body<'_> =
        serde_json::from_slice(bytes).map_err(|error| refuse("body", error.to_string()))?;
    let (field, prompt) = if chat {
        ("messages", body.messages)
    } else {
        ("prompt", body.prompt)
    };
    let prompt = prompt.ok_or_else(|| refuse(field, format!("`{field}` is missing")))?;
    let n = body.n.unwrap_or(1);
    if !(1..=N_MAX).contains(&n) {
        return Err(refuse("n", format!("`n` must be 1 to {N_MAX}, not {n}")));
    }
    let tokens = body.max_completion_tokens.or(body.max_tokens);
    if let Some(tokens) = tokens
        && !(1..=TOKENS_MAX).contains(&tokens)
    {
        let message = format!("`max_tokens` must be 1 to {TOKENS_MAX}, not {tokens}");
        return Err(refuse("max_tokens", message));
    }
    if let (Some(low), Some(high)) = (body.min_tokens, tokens)
        && low > high
    {
        let message = format!("`min_tokens` {low} is above `max_tokens` {high}");
        return Err(refuse("min_tokens", message));
    }
    let stream = body.stream.unwrap_or(false);
    if body.stream_options.is_some() && !stream {
        let message = "`stream_options` is for `stream`: true only".to_owned();
        return Err(refuse("stream_options", message));
    }
    let include_usage = body
        .stream_options
        .and_then(|options| options.include_usage);
    let order = match body.kv_transfer_params {
        None => Order::Plain,
        Some(params) => match (params.do_remote_decode, params.do_remote_prefill) {
            (Some(true), Some(true)) => {
                let message = "`do_remote_decode` and `do_remote_prefill` are both true".to_owned();
                return Err(refuse("kv_transfer_params", message));
            }
            (Some(true), Some(false) | None) => {
                prefill_is_short(tokens, stream, n)?;
                Order::Prefill(own_id(params.transfer_id)?)
            }
            (Some(false) | None, Some(true)) => Order::Decode(handle(&params)?),
            (Some(false) | None, Some(false) | None) => Order::Plain,
        },
    };
    let prompt = prompt.get();
    let mut hash = std::hash::DefaultHasher::new();
    hash.write(prompt.as_bytes());
    Ok(Leg {
        order,
        tokens,
        n,
        stream,
        include_usage: include_usage.unwrap_or(false),
        prompt_tokens: prompt_tokens(prompt),
        prompt_hash: hash.finish(),
    })
}

/// A prefill leg that goes on decoding would hold its slot and its blocks for nothing.
fn prefill_is_short(tokens: Option<u64>, stream: bool, n: u64) -> Result<(), LegError> {
    if tokens != Some(1) {
        let given = tokens.map_or("absent".to_owned(), |tokens| tokens.to_string());
        let message = format!("a prefill leg has `max_tokens` 1, not {given}");
        return Err(refuse("max_tokens", message));
    }
    if stream {
        let message = "a prefill leg has no `stream`: true".to_owned();
        return Err(refuse("stream", message));
    }
    if n != 1 {
        return Err(refuse("n", format!("a prefill leg has `n` 1, not {n}")));
    }
    Ok(())
}

fn own_id(id: Option<Cow<'_, str>>) -> Result<Option<String>, LegError> {
    match id {
        None => Ok(None),
        Some(id) if is_hex(&id, 32) => Ok(Some(id.into_owned())),
        Some(_) => Err(param("transfer_id", "32 hexadecimal digits")),
    }
}

fn handle(params: &Params<'_>) -> Result<Handle, LegError> {
    let text = |name, value: &Option<Cow<'_, str>>| match value {
        Some(text) if !text.is_empty() => Ok(text.clone().into_owned()),
        Some(_) | None => Err(param(name, "a text that is not empty")),
    };
    let number = |name, value: Option<u64>| value.ok_or_else(|| param(name, "a number"));
    let transfer_id = text("transfer_id", &params.transfer_id)?;
    if !is_hex(&transfer_id, 32) {
        return Err(param("transfer_id", "32 hexadecimal digits"));
    }
    number("hetero_version", params.hetero_version)?;
    text("remote_engine_id", &params.remote_engine_id)?;
    text("remote_host", &params.remote_host)?;
    text("remote_request_id", &params.remote_request_id)?;
    number("remote_port", params.remote_port.map(u64::from))?;
    number("remote_dp_rank", params.remote_dp_rank)?;
    number("tp_size", params.tp_size)?;
    number("pp_size", params.pp_size)?;
    number("remote_num_tokens", params.remote_num_tokens)?;
    if params.remote_block_ids.as_ref().is_none_or(Vec::is_empty) {
        return Err(param("remote_block_ids", "a list for each KV group"));
    }
    if !is_hex(&text("prompt_digest", &params.prompt_digest)?, 64) {
        return Err(param("prompt_digest", "64 hexadecimal digits"));
    }
    Ok(Handle {
        transfer_id,
        incarnation: text("remote_incarnation", &params.remote_incarnation)?,
        epoch: number("lease_epoch", params.lease_epoch)?,
    })
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|digit| digit.is_ascii_hexdigit())
}

fn refuse(reason: &'static str, message: String) -> LegError {
    LegError { reason, message }
}

fn param(name: &'static str, wanted: &str) -> LegError {
    let message = format!("`kv_transfer_params.{name}` must be {wanted}");
    refuse(name, message)
}

/// An estimate: a mock has no tokenizer.
fn prompt_tokens(prompt: &str) -> u64 {
    let inner = prompt.trim_start_matches('[').trim_start();
    let ids = prompt.starts_with('[') && inner.starts_with(|first: char| first.is_ascii_digit());
    let count = if ids {
        prompt.bytes().filter(|byte| *byte == b',').count() + 1
    } else {
        prompt.len() / 4
    };
    (count as u64).max(1)
}

#[cfg(test)]
mod tests;
