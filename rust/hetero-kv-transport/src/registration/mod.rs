//! An engine that tells `hetero-kv-proxy` of itself: registered at start, heard of at each interval,
//! removed at its end.
//!
//! One thread, which sleeps between heartbeats and takes no lock of anybody else's: whatever the
//! engine's interpreter does, heartbeats go on. A proxy that is not there costs the engine nothing.

mod sign;

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hetero_kv_core::auth::Keys;
use serde_json::Value;

use self::sign::Signed;
use crate::clock;
use crate::scheduler::random_bytes;

/// For one request, from its name's lookup to the last byte of its answer.
const WITHIN: Duration = Duration::from_secs(3);
/// For the last one, which the engine's end waits for.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// An answer shows one worker.
const ANSWER_BYTES_MAX: u64 = 128 << 10;
/// First pause after a failure; it doubles up to the interval of the heartbeats, or to
/// [`PAUSE_MAX`] where that is shorter.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);
const PATH: &str = "/v1/workers";

/// What to tell, whom, and how often.
#[derive(Clone, Debug)]
pub struct RegistrationOptions {
    /// `http://HOST:PORT` of the proxy's admin listener, without a slash at the end.
    pub proxy_url: String,
    /// The body of each heartbeat.
    pub body: Value,
    /// Between heartbeats.
    pub interval: Duration,
    /// Of which the first signs, where the proxy asks for it.
    pub keys: Option<Keys>,
}

/// Why a heartbeat did not count.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Failure {
    /// No answer.
    Unreachable(String),
    /// An answer that says no.
    Refused(String),
}

/// The thread that registers. [`Registration::stop`] says goodbye; dropping it does too.
#[derive(Debug)]
pub struct Registration {
    stop: Arc<Stop>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pid: u32,
}

#[derive(Debug, Default)]
struct Stop {
    told: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps for `pause`, or until the end; true at the end.
    fn wait(&self, pause: Duration) -> bool {
        let told = self.lock();
        let waited = self
            .changed
            .wait_timeout_while(told, pause, |told| !*told)
            .unwrap_or_else(PoisonError::into_inner);
        *waited.0
    }
}

impl Registration {
    /// Starts the thread; it has not registered yet.
    ///
    /// # Errors
    /// No thread is left.
    pub fn start(options: RegistrationOptions) -> io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let told = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("hkv-register".to_owned())
            .spawn(move || Registrar::new(options).run(&told))?;
        Ok(Self {
            stop,
            thread: Mutex::new(Some(thread)),
            pid: std::process::id(),
        })
    }

    /// Takes the engine out of the proxy's list and ends the thread. Waits for at most the two
    /// requests that may be under way, 4 s in all. Later calls do nothing.
    pub fn stop(&self) {
        // A forked child has neither the thread nor the registration.
        if self.pid != std::process::id() {
            return;
        }
        *self.stop.lock() = true;
        self.stop.changed.notify_all();
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // A panic there has already been printed by the panic hook.
            let _ended = thread.join();
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Registrar {
    options: RegistrationOptions,
    body: String,
    agent: ureq::Agent,
    /// The id that the proxy gave, while it knows this engine.
    id: Option<String>,
    /// The last failure that was logged, until one heartbeat counts.
    failed: Option<Failure>,
    failures: u32,
}

impl Registrar {
    fn new(options: RegistrationOptions) -> Self {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // Heartbeats go to the proxy of the cluster itself.
            .proxy(None)
            // A connection kept for seconds may be closed by the peer just as it is used again.
            .max_idle_connections(0)
            .build();
        Self {
            body: options.body.to_string(),
            options,
            agent: agent.into(),
            id: None,
            failed: None,
            failures: 0,
        }
    }

    fn run(mut self, stop: &Stop) {
        loop {
            let pause = match self.send("POST", PATH, WITHIN) {
                Ok(answer) => {
                    self.counted(&answer);
                    self.options.interval
                }
                Err(failure) => self.failed(failure),
            };
            if stop.wait(pause) {
                break;
            }
        }
        if let Some(id) = self.id.take() {
            let path = format!("{PATH}/{id}?wait_s=0");
            match self.send("DELETE", &path, GOODBYE_WITHIN) {
                Ok(_) => tracing::info!(id, "no longer registered at the proxy"),
                Err(failure) => tracing::warn!(
                    id,
                    ?failure,
                    "could not say goodbye to the proxy; it forgets this engine by itself"
                ),
            }
        }
    }

    fn counted(&mut self, answer: &Value) {
        let id = answer["id"].as_str().map(str::to_owned);
        if self.failed.take().is_some() || id != self.id {
            let proxy = &*self.options.proxy_url;
            let id = id.as_deref().unwrap_or_default();
            tracing::info!(proxy, id, "registered at the proxy");
        }
        self.failures = 0;
        self.id = id;
    }

    /// Says once what is wrong, and how long to wait.
    fn failed(&mut self, failure: Failure) -> Duration {
        let known = match (&self.failed, &failure) {
            (Some(Failure::Unreachable(_)), Failure::Unreachable(_)) => true,
            (Some(known), _) => *known == failure,
            (None, _) => false,
        };
        if !known {
            let proxy = &*self.options.proxy_url;
            match &failure {
                Failure::Unreachable(error) => tracing::warn!(
                    proxy,
                    error,
                    "cannot reach the proxy to register (register_url); trying again until it answers"
                ),
                Failure::Refused(reason) => tracing::error!(
                    proxy,
                    reason,
                    "the proxy refuses to register this engine; trying again"
                ),
            }
            self.failed = Some(failure);
        }
        let pause = pause(self.failures, self.options.interval);
        self.failures = self.failures.saturating_add(1);
        pause
    }

    fn send(&self, method: &str, target: &str, within: Duration) -> Result<Value, Failure> {
        let unreachable = |error: &dyn std::fmt::Display| Failure::Unreachable(error.to_string());
        let body = match method {
            "POST" => self.body.as_bytes(),
            _ => b"",
        };
        let mut request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}{target}", self.options.proxy_url))
            .header("content-type", "application/json");
        if let Some(keys) = &self.options.keys {
            let signed = Signed {
                method,
                target: &self.target(target),
                timestamp_s: clock::unix_s(),
                nonce: random_bytes().map_err(|error| unreachable(&error))?,
                body,
            };
            request = request
                .header("x-hetero-kv-timestamp", signed.timestamp_s.to_string())
                .header("x-hetero-kv-nonce", signed.nonce_hex())
                .header("x-hetero-kv-signature", signed.sign(keys.first()));
        }
        let request = request.body(body).map_err(|error| unreachable(&error))?;
        let request = self
            .agent
            .configure_request(request)
            .timeout_global(Some(within))
            .build();
        let mut answer = self
            .agent
            .run(request)
            .map_err(|error| unreachable(&error))?;
        let status = answer.status();
        let text = answer
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .lossy_utf8(true)
            .read_to_string()
            .map_err(|error| unreachable(&error))?;
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        if !status.is_success() {
            let error = &value["error"];
            let reason = match (error["code"].as_str(), error["message"].as_str()) {
                (Some(code), Some(message)) => format!("{} {code}: {message}", status.as_u16()),
                _ => format!("status {}, and no error of the proxy's", status.as_u16()),
            };
            return Err(Failure::Refused(reason));
        }
        Ok(value)
    }

    /// What stands in the request line: behind a path of the proxy's URL, where it has one.
    fn target(&self, target: &str) -> String {
        let url = &self.options.proxy_url;
        let rest = url.split_once("://").map_or(&**url, |(_, rest)| rest);
        let path = rest.find('/').map_or("", |at| &rest[at..]);
        format!("{path}{target}")
    }
}

/// After how many failures in a row, how long to wait for the next try.
fn pause(failures: u32, interval: Duration) -> Duration {
    let longest = interval.max(PAUSE_FIRST).min(PAUSE_MAX);
    PAUSE_FIRST
        .saturating_mul(1 << failures.min(16))
        .min(longest)
}

#[cfg(test)]
mod tests;
