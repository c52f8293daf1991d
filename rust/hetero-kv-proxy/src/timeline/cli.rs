//! `hetero-kv-proxy trace`: the times of one request, from a proxy that serves.

use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Args;
use http::{HeaderMap, Method};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use tokio::time::timeout;

use crate::config::BaseUrl;
use crate::upstream::{LegBody, PoolLimits, Upstream};

pub(crate) const EXAMPLE: &str = "\
Example: what happened to a request, by the id in its answer

  curl -i http://127.0.0.1:8000/v1/completions -d @body.json | grep -i x-request-id
  hetero-kv-proxy trace --admin http://127.0.0.1:8001 REQUEST_ID > request.json

Open the file at ui.perfetto.dev or chrome://tracing: a row for the client (admit, queue, prefill,
handover, stream), one for each leg, and one for the KV transfer. A request is there once it has
ended, for as long as it is among the last --trace-requests-max (256). Traces are read without a
signature, also where the proxy has --admin-key-file.

Exit status: 0 the trace is on stdout, 1 there is none and stderr says why, 2 usage.";

/// Longest wait, from the name's lookup to the last byte.
const WITHIN: Duration = Duration::from_secs(10);
/// A trace is some KiB; those that share an id are told together.
const TRACE_BYTES_MAX: usize = 64 << 20;
/// An id is told in a header, which is no longer than that.
const ID_BYTES_MAX: usize = 8 << 10;

/// Which request, and whom to ask.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// The proxy's admin listener, which --admin-listen of serve names
    #[arg(long, env = "HETERO_KV_PROXY_ADMIN", value_name = "http://HOST:PORT")]
    pub admin: String,
    /// The request's id: the client's own X-Request-Id, or the one in the answer
    #[arg(value_name = "REQUEST_ID")]
    pub request_id: String,
}

#[derive(Deserialize)]
struct Refused {
    error: Told,
}

#[derive(Deserialize)]
struct Told {
    code: String,
    message: String,
}

/// Writes the trace to stdout.
///
/// # Errors
/// An address that is none, a proxy that does not answer in time, or its reason why not.
pub async fn run(args: TraceArgs) -> anyhow::Result<()> {
    let text = timeout(WITHIN, fetch(&args)).await.unwrap_or_else(|_| {
        let within = WITHIN.as_secs();
        Err(anyhow!(
            "--admin {}: no answer within {within} s",
            args.admin
        ))
    })?;
    crate::tell::answer(&text)
}

async fn fetch(args: &TraceArgs) -> anyhow::Result<String> {
    let TraceArgs { admin, request_id } = args;
    if request_id.is_empty() || request_id.len() > ID_BYTES_MAX {
        bail!("REQUEST_ID: 1 to {ID_BYTES_MAX} bytes, as X-Request-Id has it");
    }
    if admin.starts_with("https://") {
        bail!("--admin {admin}: the admin listener speaks plain HTTP; write http://HOST:PORT");
    }
    let base = BaseUrl::of_server(admin).map_err(|fault| anyhow!("--admin {admin}: {fault}"))?;
    let limits = PoolLimits {
        connect_timeout: WITHIN,
        idle_max: 0,
        idle_timeout: Duration::ZERO,
    };
    let proxy = Upstream::new(base, limits)?;
    let path = format!("/v1/trace/{}", escaped(request_id));
    let (headers, body) = (HeaderMap::new(), LegBody::default());
    let sent = proxy.send(&Method::GET, &path, &headers, &[], body, true);
    let answer = sent.await.map_err(|error| {
        anyhow!("--admin {admin}: {error}; it is the address that --admin-listen of serve names")
    })?;
    let status = answer.head.status;
    let body = Limited::new(answer.body, TRACE_BYTES_MAX).collect().await;
    let body = body.map_err(|error| anyhow!("--admin {admin}: the answer broke off: {error}"))?;
    let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
    if status.is_success() && text.starts_with('{') && text.contains("\"traceEvents\"") {
        return Ok(text);
    }
    let refused = serde_json::from_str::<Refused>(&text).ok();
    match refused.map(|refused| refused.error) {
        Some(Told { code, message }) if code == "unknown_request" => Err(anyhow!(
            "{request_id}: {message}; one that still runs is told when it has ended"
        )),
        told => {
            let why = told.map(|told| format!(" {}: {}", told.code, told.message));
            let why = why.unwrap_or_default();
            Err(anyhow!(
                "--admin {admin}: answered {status}{why}; that is not the admin listener: give the \
                 address of --admin-listen, and not that of --listen"
            ))
        }
    }
}

/// An id as it stands in a path: letters, digits and `-._~` as they are.
fn escaped(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let mut text = String::with_capacity(id.len());
    for byte in id.bytes() {
        match plain(byte) {
            true => text.push(char::from(byte)),
            false => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}
