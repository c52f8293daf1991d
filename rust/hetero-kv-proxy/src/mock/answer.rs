//! The texts of a mock's answers, in vLLM's shapes.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::json;

use super::Worker;
use super::cli::Usage;
use super::leg::Leg;

/// Tokens in one block of the prompt, for the number of block ids.
const BLOCK_TOKENS: u64 = 16;

/// What one answer consists of.
#[derive(Debug)]
pub struct Script {
    worker: Arc<Worker>,
    chat: bool,
    id: String,
    created: u64,
    n: u64,
    /// Of each choice.
    tokens: u64,
    prompt_tokens: u64,
    /// A stream ends with its usage.
    usage: bool,
    /// From one step to the next.
    step: Duration,
}

impl Script {
    /// The answer to `leg`.
    pub fn new(worker: Arc<Worker>, leg: &Leg, chat: bool) -> Self {
        let args = &worker.args;
        let usage = match args.usage {
            Usage::Request => leg.include_usage,
            Usage::Always => true,
            Usage::Never => false,
        };
        let step = Duration::from_secs_f64(args.pace_ms * args.chunk_tokens as f64 / 1e3);
        let mut random = [0; 8];
        // An id that repeats is no fault of an answer.
        let _filled = getrandom::fill(&mut random);
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            chat,
            id: format!(
                "{}-{}",
                if chat { "chatcmpl" } else { "cmpl" },
                hex::encode(random)
            ),
            created: since.map_or(0, |since| since.as_secs()),
            n: leg.n,
            tokens: leg.tokens.unwrap_or(args.tokens),
            prompt_tokens: leg.prompt_tokens,
            usage,
            step,
            worker,
        }
    }

    /// Tokens of all choices.
    pub fn tokens_in_all(&self) -> u64 {
        self.tokens * self.n
    }

    /// From the first token to the last.
    pub fn span(&self) -> Duration {
        self.step * u32::try_from(self.steps() - 1).unwrap_or(u32::MAX)
    }

    fn steps(&self) -> u64 {
        self.tokens.div_ceil(self.worker.args.chunk_tokens)
    }

    /// Events that name the role, in front of a chat's chunks.
    fn openers(&self) -> usize {
        if self.chat { self.n as usize } else { 0 }
    }

    fn chunks(&self) -> usize {
        (self.steps() * self.n) as usize
    }

    /// Events of the whole stream.
    pub fn count(&self) -> usize {
        self.openers() + self.chunks() + usize::from(self.usage) + 1
    }

    /// Chunks with tokens in front of the event at `at`.
    pub fn chunks_before(&self, at: usize) -> u64 {
        at.saturating_sub(self.openers()).min(self.chunks()) as u64
    }

    /// When the event at `at` is due, from the first token on.
    pub fn due(&self, at: usize) -> Duration {
        let step = self.chunks_before(at).min(self.chunks() as u64 - 1) / self.n;
        self.step * u32::try_from(step).unwrap_or(u32::MAX)
    }

    /// The event at `at` and the tokens in it; none past the end.
    pub fn event(&self, at: usize, skip_done: bool) -> Option<(Bytes, u64)> {
        let (openers, chunks) = (self.openers(), self.chunks());
        if at < openers {
            return Some((self.opener(at), 0));
        }
        let at = at - openers;
        if at < chunks {
            return Some(self.chunk(at as u64));
        }
        let at = at - chunks;
        if at == 0 && self.usage {
            let choices = format_args!("\"choices\":[],\"usage\":{}", self.usage_object());
            return Some((self.framed(choices), 0));
        }
        if at == usize::from(self.usage) && !skip_done {
            return Some((Bytes::from_static(b"data: [DONE]\n\n"), 0));
        }
        None
    }

    /// What stands for an engine's error under a 200.
    pub fn error_event(&self) -> Bytes {
        Bytes::from_static(
            b"data: {\"error\":{\"message\":\"a fault on purpose\",\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}\n\n",
        )
    }

    /// The plain answer; with `params` that of a prefill leg.
    pub fn plain(&self, params: Option<&str>) -> Bytes {
        let mut choices = String::new();
        for index in 0..self.n {
            let text = self.text(0, self.tokens);
            let comma = if index > 0 { "," } else { "" };
            let shape = if self.chat {
                format!("\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}}")
            } else {
                format!("\"text\":\"{text}\"")
            };
            let _ok = write!(
                choices,
                "{comma}{{\"index\":{index},{shape},\"logprobs\":null,\"finish_reason\":\"length\"}}"
            );
        }
        let params = params.unwrap_or("null");
        Bytes::from(format!(
            "{{\"id\":\"{}\",\"object\":\"{}\",\"created\":{},\"model\":{},\"choices\":[{choices}],\
             \"usage\":{},\"kv_transfer_params\":{params}}}",
            self.id,
            if self.chat {
                "chat.completion"
            } else {
                "text_completion"
            },
            self.created,
            json!(self.worker.args.model),
            self.usage_object(),
        ))
    }

    fn opener(&self, index: usize) -> Bytes {
        self.framed(format_args!(
            "\"choices\":[{{\"index\":{index},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\
             \"logprobs\":null,\"finish_reason\":null}}]"
        ))
    }

    fn chunk(&self, at: u64) -> (Bytes, u64) {
        let per_chunk = self.worker.args.chunk_tokens;
        let (step, index) = (at / self.n, at % self.n);
        let first = step * per_chunk;
        let past = (first + per_chunk).min(self.tokens);
        let text = self.text(first, past);
        let finish = if past == self.tokens {
            "\"length\""
        } else {
            "null"
        };
        let event = if self.chat {
            self.framed(format_args!(
                "\"choices\":[{{\"index\":{index},\"delta\":{{\"content\":\"{text}\"}},\
                 \"logprobs\":null,\"finish_reason\":{finish}}}]"
            ))
        } else {
            self.framed(format_args!(
                "\"choices\":[{{\"index\":{index},\"text\":\"{text}\",\
                 \"logprobs\":null,\"finish_reason\":{finish}}}]"
            ))
        };
        (event, past - first)
    }

    fn framed(&self, choices: std::fmt::Arguments<'_>) -> Bytes {
        Bytes::from(format!(
            "data: {{\"id\":\"{}\",\"object\":\"{}\",\"created\":{},\"model\":{},{choices}}}\n\n",
            self.id,
            if self.chat {
                "chat.completion.chunk"
            } else {
                "text_completion"
            },
            self.created,
            json!(self.worker.args.model),
        ))
    }

    fn usage_object(&self) -> String {
        let completion = self.tokens_in_all();
        format!(
            "{{\"prompt_tokens\":{},\"completion_tokens\":{completion},\"total_tokens\":{}}}",
            self.prompt_tokens,
            self.prompt_tokens + completion
        )
    }

    /// Tokens `first..past`: each a blank and its number in the answer, of fixed length.
    fn text(&self, first: u64, past: u64) -> String {
        let width = self.worker.args.token_bytes as usize - 1;
        let wrap = 10u64.checked_pow(width as u32).unwrap_or(u64::MAX);
        let mut text = String::with_capacity((past - first) as usize * (width + 1));
        for token in first..past {
            let _ok = write!(text, " {:0width$}", token % wrap);
        }
        text
    }
}

/// What a prefill worker says of the blocks it pinned.
pub fn params(
    worker: &Worker,
    leg: &Leg,
    transfer_id: &str,
    epoch: u64,
    request_id: &str,
) -> String {
    let blocks = leg.prompt_tokens.div_ceil(BLOCK_TOKENS);
    let mut ids = String::new();
    for block in 1..=blocks {
        let _ok = write!(ids, "{}{block}", if block > 1 { "," } else { "" });
    }
    format!(
        "{{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"hetero_version\":1,\
         \"transfer_id\":\"{transfer_id}\",\"remote_engine_id\":\"mock-{}\",\
         \"remote_incarnation\":\"{}\",\"remote_host\":\"{}\",\"remote_port\":{},\
         \"remote_dp_rank\":0,\"remote_request_id\":{},\"tp_size\":1,\"pp_size\":1,\
         \"remote_block_ids\":[[{ids}]],\"remote_num_tokens\":{},\"lease_epoch\":{epoch},\
         \"prompt_digest\":\"{:064x}\"}}",
        worker.address,
        worker.transfers.incarnation,
        worker.address.ip(),
        worker.address.port(),
        json!(request_id),
        leg.prompt_tokens,
        leg.prompt_hash,
    )
}
