//! A client's request, checked in the fields that the proxy touches, and its two leg bodies.

use bytes::Bytes;
use serde::de::IgnoredAny;

use super::Route;
use super::fields::{Fields, first_of_several, has_engine_tools};
use super::splice::{Change, DuplicateField, Object, SyntaxError};

/// A run of the client's bytes that is at least so long is shared by both legs. A shorter one is
/// copied: that costs less than one more piece to write.
const SHARED_BYTES_MIN: usize = 2 << 10;

/// Why a client's body is answered 400.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Not one JSON object in UTF-8.
    #[error(transparent)]
    Syntax(#[from] SyntaxError),
    /// A field that the proxy changes is there twice.
    #[error(transparent)]
    Duplicate(#[from] DuplicateField),
    /// A field that the proxy changes has a value that no engine accepts.
    #[error("`{field}` must be {want}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What it may be.
        want: &'static str,
    },
    /// The engine hand-over field came from outside.
    #[error("`kv_transfer_params` is set by the proxy and not accepted from a client")]
    ForeignParams,
}

impl RequestError {
    /// The field at fault, for the `param` member of the answer.
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Syntax(_) => None,
            Self::Duplicate(DuplicateField(name)) => Some(name),
            Self::Field { field, .. } => Some(field),
            Self::ForeignParams => Some("kv_transfer_params"),
        }
    }
}

/// A client's body with what the legs need to know of it.
#[derive(Debug)]
pub struct Request {
    body: Bytes,
    object: Object,
    route: Route,
    sent: Sent,
    first_prompt: Option<std::ops::Range<usize>>,
    sequences: Sequences,
    alone: Option<&'static str>,
    prefill_endpoint: Option<String>,
}

/// The member with which a client names the prefill worker; engines do not get it.
const PREFILL_ENDPOINT: &str = "prefill_endpoint";

/// Which members the client sent that the prefill leg changes only then.
#[derive(Debug)]
struct Sent {
    completion_limit: bool,
    n: bool,
    stream: bool,
    echo: bool,
    prefill_endpoint: bool,
}

/// Refuses a JSON object with `kv_transfer_params`. With `is_json` an engine reads the body as JSON:
/// what cannot be read here is then refused too, since engines read more than that (Python takes
/// other encodings than UTF-8, a byte order mark and `NaN`). Otherwise the body may be what it
/// likes.
///
/// # Errors
/// [`RequestError::ForeignParams`], [`RequestError::Syntax`].
pub fn refuse_params(body: &[u8], is_json: bool) -> Result<(), RequestError> {
    let object = match Object::parse(body) {
        Ok(object) => object,
        Err(_) if !is_json || body.is_empty() || is_json_without_members(body) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let fields = Fields {
        object: &object,
        text: body,
    };
    match fields.has_params() {
        Ok(false) => Ok(()),
        Ok(true) | Err(_) => Err(RequestError::ForeignParams),
    }
}

/// Whether a body that is no JSON object is another JSON value.
fn is_json_without_members(body: &[u8]) -> bool {
    let text = std::str::from_utf8(body);
    text.is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok())
}

/// Whether a raw `temperature` is one that vLLM takes for greedy sampling (`_SAMPLING_EPS`).
fn is_greedy(temperature: Option<&[u8]>) -> bool {
    const SAMPLED_MIN: f64 = 1e-5;
    let number = temperature.and_then(|raw| serde_json::from_slice::<f64>(raw).ok());
    number.is_some_and(|number| (0.0..SAMPLED_MIN).contains(&number))
}

/// How many sequences one request makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sequences {
    One,
    /// Several that share a transfer where the connector allows it.
    Several,
}

impl Request {
    /// Checks the fields that the legs change.
    ///
    /// Faults in them are answered here because the prefill leg would hide them: it carries its own
    /// values, prefill would pin blocks, and decode would then refuse the request. Every other
    /// field is the engine's to judge.
    ///
    /// # Errors
    /// [`RequestError`], one variant for each kind of fault.
    pub fn parse(body: Bytes, route: Route) -> Result<Self, RequestError> {
        let object = Object::parse(&body)?;
        let fields = Fields {
            object: &object,
            text: &body,
        };
        if fields.has_params()? {
            return Err(RequestError::ForeignParams);
        }
        const COUNT: &str = "a non-negative integer";
        const POSITIVE: &str = "a positive integer";
        let limits = match route {
            Route::Completions | Route::ChatCompletions => [
                fields.number("max_completion_tokens", 0.0, COUNT)?,
                fields.number("max_tokens", 0.0, COUNT)?,
            ],
            Route::Responses => [fields.number("max_output_tokens", 0.0, COUNT)?, None],
        };
        let limit = limits[0].or(limits[1]);
        // Which of two counts differs from engine to engine.
        let has_zero = limits.contains(&Some(0.0));
        if let (Some(low), Some(high)) = (fields.number("min_tokens", 0.0, COUNT)?, limit)
            && low > high
        {
            return Err(RequestError::Field {
                field: "min_tokens",
                want: "at most the token limit",
            });
        }
        let n = fields.number("n", 1.0, POSITIVE)?;
        let best_of = fields.number("best_of", 1.0, POSITIVE)?;
        let beams = fields.flag("use_beam_search")?;
        let stream = fields.flag("stream")?;
        let echo = fields.flag("echo")?;
        match fields.get("stream_options")? {
            None => {}
            Some(raw) if raw.starts_with(b"{") && stream => {}
            Some(_) => {
                return Err(RequestError::Field {
                    field: "stream_options",
                    want: "an object, and only with `stream` true",
                });
            }
        }

        let mut first_prompt = None;
        let mut alone = None;
        let several_of = |count: Option<f64>| count.is_some_and(|count| count > 1.0);
        let mut several = beams || several_of(n) || several_of(best_of);
        // vLLM refuses several sequences of greedy sampling, but for beams. Prefill computes one, and
        // would pin blocks before decode says so.
        if several && !beams && is_greedy(fields.get("temperature")?) {
            alone = Some("greedy_sequences");
        }
        // Logprobs of the prompt come from where it is computed; what prefill computed is thrown
        // away, and decode has no state of a prompt whose KV it read.
        if fields.get("prompt_logprobs")?.is_some() {
            alone = Some("prompt_logprobs");
        }
        match route {
            Route::Completions => {
                if let Some(range) = object.find(&body, "prompt")?
                    && let Some(first) = first_of_several(&body[range.clone()])
                {
                    first_prompt = Some(range.start + first.start..range.start + first.end);
                    several = true;
                }
                let logprobs = fields.get("logprobs")?;
                if echo && logprobs.is_some_and(|raw| raw != b"false") {
                    alone = Some("prompt_logprobs");
                }
                if fields.get("prompt_embeds")?.is_some() {
                    alone = Some("prompt_embeds");
                }
            }
            Route::ChatCompletions => {}
            Route::Responses => {
                // Only the decode engine has the earlier response, or will have this one.
                if fields.get("previous_response_id")?.is_some() || fields.flag("background")? {
                    alone = Some("stored_response");
                }
                // Tools that the engine itself runs make several engine requests of one.
                several |= fields.get("tools")?.is_some_and(has_engine_tools);
            }
        }
        // Nothing would be made of KV that prefill pins: most engines refuse such a limit. With
        // `echo` the prompt is the answer.
        if has_zero && !(echo && route == Route::Completions) {
            alone.get_or_insert("no_tokens");
        }
        let prefill_endpoint = match fields.get(PREFILL_ENDPOINT)? {
            None => None,
            Some(raw) => Some(
                serde_json::from_slice(raw).map_err(|_| RequestError::Field {
                    field: PREFILL_ENDPOINT,
                    want: "a string, the URL of a prefill worker",
                })?,
            ),
        };
        Ok(Self {
            sent: Sent {
                completion_limit: fields.is_sent("max_completion_tokens")?,
                n: fields.is_sent("n")?,
                stream: fields.is_sent("stream")?,
                echo: fields.is_sent("echo")?,
                prefill_endpoint: fields.is_sent(PREFILL_ENDPOINT)?,
            },
            sequences: if several {
                Sequences::Several
            } else {
                Sequences::One
            },
            first_prompt,
            alone,
            prefill_endpoint,
            route,
            object,
            body,
        })
    }

    /// The raw value of `model`; empty where there is none.
    pub fn model(&self) -> &[u8] {
        self.raw("model")
    }

    /// The name in `model`; `None` where there is no string.
    pub fn model_name(&self) -> Option<String> {
        serde_json::from_slice(self.model()).ok()
    }

    /// The raw value of what the engine computes first, as the client sent it: `prompt`, `messages`
    /// or `input`; empty where there is none.
    pub fn prompt(&self) -> &[u8] {
        self.raw(match self.route {
            Route::Completions => "prompt",
            Route::ChatCompletions => "messages",
            Route::Responses => "input",
        })
    }

    /// Routing may look away where the engine has to judge: a member sent twice reads as absent.
    fn raw(&self, name: &str) -> &[u8] {
        let found = self.object.find(&self.body, name).ok().flatten();
        found.map_or(&[], |range| &self.body[range])
    }

    /// The prefill worker that the client names.
    pub fn prefill_endpoint(&self) -> Option<&str> {
        self.prefill_endpoint.as_deref()
    }

    /// Whether `prompt` is a list of several prompts.
    pub fn is_batch(&self) -> bool {
        self.first_prompt.is_some()
    }

    /// Why the request runs on decode alone, if it must. `shares_transfer` says whether several
    /// sequences may carry one transfer.
    pub fn runs_alone(&self, shares_transfer: bool) -> Option<&'static str> {
        match self.sequences {
            Sequences::Several if !shares_transfer => self.alone.or(Some("several_sequences")),
            Sequences::One | Sequences::Several => self.alone,
        }
    }

    /// The body of the prefill leg, in pieces that follow each other: one token, one sequence, no
    /// stream, and `params` (one JSON object).
    ///
    /// A list of prompts is cut to its first: the answer can carry the params of one prompt only,
    /// so prefilling the others would be thrown away. Decode computes those itself.
    pub fn prefill_body(&self, params: &str) -> Vec<Bytes> {
        let mut changes = vec![
            Change::Set("kv_transfer_params", params),
            Change::Remove("stream_options"),
        ];
        match self.route {
            Route::Completions | Route::ChatCompletions => changes.extend([
                Change::Set("max_tokens", "1"),
                // An end-of-sequence or stop token as the only token would end the request as
                // stopped, for which connectors may keep no blocks; vLLM masks both below
                // `min_tokens`.
                Change::Set("min_tokens", "1"),
                Change::Remove("best_of"),
            ]),
            Route::Responses => changes.extend([
                Change::Set("max_output_tokens", "1"),
                // Nobody will ask the prefill engine for it.
                Change::Set("store", "false"),
            ]),
        }
        if self.sent.completion_limit {
            changes.push(Change::Set("max_completion_tokens", "1"));
        }
        if self.sent.n {
            changes.push(Change::Set("n", "1"));
        }
        if self.sent.stream {
            changes.push(Change::Set("stream", "false"));
        }
        if self.sent.echo {
            changes.push(Change::Set("echo", "false"));
        }
        if self.sent.prefill_endpoint {
            changes.push(Change::Remove(PREFILL_ENDPOINT));
        }
        if let Some(range) = &self.first_prompt {
            // The whole body was validated as UTF-8, and JSON values begin and end at characters.
            if let Ok(first) = std::str::from_utf8(&self.body[range.clone()]) {
                changes.push(Change::Set("prompt", first));
            }
        }
        self.object.apply(&self.body, &changes, SHARED_BYTES_MIN)
    }

    /// The body of the decode leg, as above: the client's bytes, and `params` (one JSON object)
    /// spliced in.
    /// Without changes it is the client's body itself.
    pub fn decode_body(&self, params: Option<&str>) -> Vec<Bytes> {
        let mut changes = Vec::new();
        if let Some(params) = params {
            changes.push(Change::Set("kv_transfer_params", params));
        }
        if self.sent.prefill_endpoint {
            changes.push(Change::Remove(PREFILL_ENDPOINT));
        }
        match changes.is_empty() {
            true => vec![self.body.clone()],
            false => self.object.apply(&self.body, &changes, SHARED_BYTES_MIN),
        }
    }
}
