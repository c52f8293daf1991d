//! What each target demands of any bytes at all. Used by the fuzzer, and by the test that replays
//! the corpus.

use bytes::Bytes;
use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::config::Config;
use hetero_kv_proxy::openai::Route;
use hetero_kv_proxy::openai::request::{Request, refuse_params};
use hetero_kv_proxy::openai::response;
use hetero_kv_proxy::openai::sse::Tail;
use hetero_kv_proxy::workers;
use serde_json::{Map, Value};

/// Panics where a demand is not met.
type Demand = fn(&[u8]);

/// Name and demand of each target; the name is that of its corpus.
pub(crate) const ALL: [(&str, Demand); 4] = [
    ("splice", splice),
    ("answer", answer),
    ("registration", registration),
    ("config", config),
];

const PARAMS: &str = r#"{"transfer_id":"00112233445566778899aabbccddeeff","n":0.1e-7}"#;
/// Longer than any text that repeats a name or a value of the input, which are cut.
const MESSAGE_BYTES_MAX: usize = 8 << 10;
/// What the prefill leg may set or remove.
const OF_PREFILL: [&str; 12] = [
    "kv_transfer_params",
    "max_tokens",
    "min_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "store",
    "n",
    "stream",
    "stream_options",
    "echo",
    "best_of",
    "prompt",
];

/// A client's body: refused in words, or two legs that say what it said.
fn splice(data: &[u8]) {
    for route in [Route::Completions, Route::ChatCompletions, Route::Responses] {
        let request = match Request::parse(Bytes::copy_from_slice(data), route) {
            Ok(request) => request,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                continue;
            }
        };
        assert!(
            refuse_params(data, true).is_ok(),
            "relayed, it would be refused"
        );
        assert_eq!(request.decode_body(None).concat(), data);
        let decode = request.decode_body(Some(PARAMS)).concat();
        let prefill = request.prefill_body(PARAMS).concat();
        // The client's bytes stand in front of and behind what was put in.
        let at = find(&decode, PARAMS.as_bytes()).expect("the params are there");
        let behind = &decode[at + PARAMS.len()..];
        let rest = behind.strip_prefix(b",").unwrap_or(behind);
        assert!(data.ends_with(behind) || data.ends_with(rest));
        // serde_json's values end at a depth that the splicer does not have.
        let Some(sent) = object(data) else { continue };
        let decoded = object(&decode).expect("decode's leg is one JSON object");
        let prefilled = object(&prefill).expect("prefill's leg is one JSON object");
        let params: Value = serde_json::from_str(PARAMS).expect("JSON");
        assert_eq!(decoded.get("kv_transfer_params"), Some(&params));
        assert_eq!(prefilled.get("kv_transfer_params"), Some(&params));
        assert_eq!(
            without(&decoded, &["kv_transfer_params"]),
            without(&sent, &["kv_transfer_params"])
        );
        assert_eq!(
            without(&prefilled, &OF_PREFILL),
            without(&sent, &OF_PREFILL)
        );
        let limit = match route {
            Route::Completions | Route::ChatCompletions => "max_tokens",
            Route::Responses => "max_output_tokens",
        };
        assert_eq!(prefilled.get(limit), Some(&Value::from(1)));
        assert_ne!(prefilled.get("stream"), Some(&Value::Bool(true)));
        if let Some(count) = prefilled.get("n") {
            assert_eq!(count, &Value::from(1));
        }
    }
}

/// An engine's answer: what is read of it is a part of it, and nothing ends the proxy.
fn answer(data: &[u8]) {
    if let Some(params) = response::read(data).params {
        assert!(find(data, params.as_bytes()).is_some());
        assert!(params.starts_with('{'), "only an object is handed over");
    }
    // Cut anywhere, a stream has ended or not.
    let mut whole = Tail::default();
    whole.push(data);
    for cut in [0, data.len() / 3, data.len() / 2, data.len()] {
        let mut parts = Tail::default();
        parts.push(&data[..cut]);
        parts.push(&data[cut..]);
        assert_eq!(parts.is_done(), whole.is_done());
    }
}

/// A worker's registration: taken, or refused with a status and a message of bounded length.
fn registration(data: &[u8]) {
    if let Err(refused) = workers::check_registration(data) {
        assert_eq!(refused.status, 400);
        assert!(!refused.message.is_empty() && refused.message.len() < MESSAGE_BYTES_MAX);
    }
}

/// A configuration file: what it resolves to is written as a file that resolves to the same.
fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(settings) = toml::from_str::<Settings>(text) else {
        return;
    };
    match Config::from_settings(settings) {
        Ok(config) => {
            let written = config.to_toml().expect("settings are TOML");
            let again = toml::from_str::<Settings>(&written).expect("it reads its own file");
            let again = Config::from_settings(again).expect("it takes its own settings");
            assert_eq!(again.to_toml().expect("settings are TOML"), written);
        }
        Err(faults) => assert!(!faults.0.is_empty(), "a refusal says why"),
    }
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

fn object(text: &[u8]) -> Option<Map<String, Value>> {
    match serde_json::from_slice(text) {
        Ok(Value::Object(members)) => Some(members),
        _ => None,
    }
}

fn without(members: &Map<String, Value>, names: &[&str]) -> Map<String, Value> {
    let mut rest = members.clone();
    rest.retain(|name, _| !names.contains(&name.as_str()));
    rest
}
