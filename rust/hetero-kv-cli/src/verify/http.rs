//! HTTP to proxies and engines, with a deadline and a size limit on every answer.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::http::Uri;

/// Longest answer read; a vLLM engine's counters are some hundred KiB.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Characters of a failed answer's body that a message shows.
const SHOWN_CHARS_MAX: usize = 300;

/// Scheme, host and port of a server, with the path that its endpoints lie under.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Url(String);

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let uri: Uri = text
            .parse()
            .map_err(|error| format!("{error}; expected http://HOST:PORT"))?;
        match (uri.scheme_str(), uri.host()) {
            (Some("http"), Some(host)) if !host.is_empty() && uri.query().is_none() => {
                Ok(Self(text.trim_end_matches('/').to_owned()))
            }
            _ => Err("expected http://HOST:PORT, IPv6 in brackets, without https".to_owned()),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An answer other than 200.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) status: u16,
    pub(super) body: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body: String = self.body.trim().chars().take(SHOWN_CHARS_MAX).collect();
        write!(f, "status {}: {body}", self.status)
    }
}

impl std::error::Error for Refused {}

pub(super) struct Client(ureq::Agent);

impl Client {
    pub(super) fn new(timeout: Duration) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(timeout))
            .timeout_connect(Some(CONNECT_TIMEOUT.min(timeout)))
            .http_status_as_error(false)
            .max_redirects(0)
            // Engines and proxies of a cluster are reached directly.
            .proxy(None)
            // A connection kept for seconds may be closed by the peer just as it is used again.
            .max_idle_connections(0)
            .build();
        Self(config.into())
    }

    pub(super) fn get_text(
        &self,
        url: &Url,
        path: &str,
        api_key: Option<&str>,
    ) -> anyhow::Result<String> {
        let mut request = self.0.get(format!("{url}{path}"));
        if let Some(key) = api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        text(request.call(), url, path)
    }

    pub(super) fn get_json<T: DeserializeOwned>(
        &self,
        url: &Url,
        path: &str,
        api_key: Option<&str>,
    ) -> anyhow::Result<T> {
        let text = self.get_text(url, path, api_key)?;
        serde_json::from_str(&text).with_context(|| format!("GET {url}{path}: not as expected"))
    }

    pub(super) fn post_json<T: DeserializeOwned>(
        &self,
        url: &Url,
        path: &str,
        api_key: Option<&str>,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let mut request = self.0.post(format!("{url}{path}"));
        if let Some(key) = api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let text = text(request.send_json(body), url, path)?;
        serde_json::from_str(&text).with_context(|| format!("POST {url}{path}: not as expected"))
    }
}

fn text(
    answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    url: &Url,
    path: &str,
) -> anyhow::Result<String> {
    let mut answer = answer.with_context(|| format!("{url}{path}"))?;
    let status = answer.status().as_u16();
    let body = answer
        .body_mut()
        .with_config()
        .limit(ANSWER_BYTES_MAX)
        .lossy_utf8(true)
        .read_to_string()
        .with_context(|| format!("{url}{path}: reading the answer"))?;
    if status != 200 {
        bail!(anyhow::Error::new(Refused { status, body }).context(format!("{url}{path}")));
    }
    Ok(body)
}
