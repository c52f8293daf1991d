//! `hetero-kv-proxy sign`: the headers of one signed request.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;

use super::keys::Keys;
use super::signature::{NONCE, SIGNATURE, Signed, TIMESTAMP};
use super::{ADMIN_KEY_BYTES_MIN, now_s};

pub(crate) const EXAMPLE: &str = "\
Example: register a worker at a proxy that runs with --admin-key-file

  BODY='{\"role\":\"decode\",\"url\":\"http://10.0.0.3:8200\"}'
  hetero-kv-proxy sign --key-file admin.key --data \"$BODY\" POST /v1/workers |
    curl http://127.0.0.1:8001/v1/workers -H @- -d \"$BODY\"

The first key of the file signs. A signature is good once, within 30 s.";

/// The methods of the admin listener.
const METHODS: [&str; 5] = ["GET", "HEAD", "POST", "PUT", "DELETE"];

/// What is signed, and by which key.
#[derive(Debug, Args)]
pub struct SignArgs {
    /// File of keys, as --admin-key-file of serve; the first one signs
    #[arg(long, env = "HETERO_KV_PROXY_ADMIN_KEY_FILE", value_name = "FILE")]
    pub key_file: PathBuf,
    /// Body of the request, or @FILE with it (send that with curl's --data-binary) [default: none]
    #[arg(long, value_name = "TEXT|@FILE")]
    pub data: Option<String>,
    /// Method of the request, such as POST; in either case
    pub method: String,
    /// Its path and query, such as /v1/workers/decode-0/drain?wait_s=30
    pub target: String,
}

/// The three headers, a line each.
///
/// # Errors
/// A file that cannot be read, no random numbers, a method that no path has, or a target without a
/// slash in front.
pub fn run(args: &SignArgs) -> anyhow::Result<()> {
    let keys = Keys::read(&args.key_file, ADMIN_KEY_BYTES_MIN).map_err(|fault| anyhow!(fault))?;
    if !args.target.starts_with('/') {
        return Err(anyhow!(
            "{}: the path and query of the request, with a / in front",
            args.target
        ));
    }
    let method = args.method.to_ascii_uppercase();
    if !METHODS.contains(&&*method) {
        return Err(anyhow!(
            "{}: no method of the admin listener; one of {}",
            args.method,
            METHODS.join(", ")
        ));
    }
    let body = match args.data.as_deref() {
        Some(data) => match data.strip_prefix('@') {
            Some(path) => std::fs::read(path).with_context(|| path.to_owned())?,
            None => data.as_bytes().to_vec(),
        },
        None => Vec::new(),
    };
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|error| anyhow!("no random numbers: {error}"))?;
    let signed = Signed {
        method: &method,
        target: &args.target,
        timestamp_s: now_s(),
        nonce: u128::from_be_bytes(nonce),
        body: &body,
    };
    crate::tell::answer(&format!(
        "{TIMESTAMP}: {}\n{NONCE}: {:032x}\n{SIGNATURE}: {}\n",
        signed.timestamp_s,
        signed.nonce,
        signed.sign(keys.first())
    ))
}
