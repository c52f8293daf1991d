//! The settings once checked: what is here is valid, and every fault is reported at once.

use std::fmt::Display;
use std::time::Duration;

use http::HeaderName;

use crate::auth::keys::Keys;
use crate::cli::{Invocation, Settings};
use crate::connectors::{self, Connector, Order};
use crate::routing::policy::PolicyKind;
use crate::routing::{AutoRules, Role, Weights};

mod access;
mod address;
mod next;
mod place;

pub use address::{BaseUrl, Worker, host_port};
pub(crate) use address::{WorkerFault, base_url};
pub(crate) use address::{assemble as assemble_worker, keys as worker_keys};

/// Why there is no configuration: every fault that was found.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct ConfigError(pub Vec<String>);

/// Form of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What follows where no prefill engine takes legs or can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnNoPrefill {
    /// The request fails.
    Fail,
    /// Decode computes the prompt, and it is counted.
    DecodeOnly,
}

/// Everything `serve` runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// `HOST:PORT`, IPv6 in brackets.
    pub listen: String,
    /// `HOST:PORT` of the administrators' listener, where there is one.
    pub admin_listen: Option<String>,
    /// Keys by which administrators and workers sign, where they must.
    pub admin_keys: Option<Keys>,
    /// Keys of the clients, where they need one.
    pub api_keys: Option<Keys>,
    /// Whether engines get the client's `Authorization`.
    pub forward_authorization: bool,
    /// `HOST:PORT` where workers register over ZeroMQ, where they may.
    pub zmq_listen: Option<String>,
    /// For how long such a registration is good.
    pub zmq_ttl: Duration,
    /// KV connector of the engines.
    pub connector: &'static dyn Connector,
    /// Prefill instances: at least one where none can register, and none for a connector without a
    /// prefill leg.
    pub prefill: Vec<Worker>,
    /// Decode instances: at least one where none can register.
    pub decode: Vec<Worker>,
    /// Policy of the prefill leg.
    pub prefill_policy: PolicyKind,
    /// Policy of the decode leg.
    pub decode_policy: PolicyKind,
    /// When decode serves requests alone, where that is decided for each.
    pub auto: Option<AutoRules>,
    /// Header by whose value requests belong together.
    pub hash_header: Option<HeaderName>,
    /// Bytes of the prompt's beginning by which requests without that header belong together.
    pub hash_prompt_bytes: usize,
    /// Interval of scrapes; zero is none.
    pub scrape_interval: Duration,
    /// Whether a client may name the prefill worker.
    pub allow_prefill_endpoint: bool,
    /// Shares of revisions, at first.
    pub revision_weights: Option<Weights>,
    /// Whether a prefill answer without a KV handle fails the request.
    pub require_kv: bool,
    /// What follows where no prefill engine takes legs or can be reached.
    pub on_no_prefill: OnNoPrefill,
    /// Longest wait for a connection to an engine.
    pub connect_timeout: Duration,
    /// Deadline of a whole request.
    pub request_timeout: Duration,
    /// Longest silence between chunks of an answer.
    pub stream_idle_timeout: Duration,
    /// Longest wait for a request head.
    pub header_read_timeout: Duration,
    /// Longest silence within a request body.
    pub body_read_timeout: Duration,
    /// Longest time in which a client takes no byte.
    pub client_write_timeout: Duration,
    /// Largest request body.
    pub body_bytes_max: u64,
    /// Largest prefill answer.
    pub prefill_answer_bytes_max: u64,
    /// Requests at once.
    pub requests_max: usize,
    /// Legs in flight for each prefill slot; `None` is no limit.
    pub prefill_requests_max: Option<u32>,
    /// Legs in flight for each decode slot; `None` is no limit.
    pub decode_requests_max: Option<u32>,
    /// Requests that wait for room.
    pub queue_max: usize,
    /// Longest wait for room.
    pub queue_timeout: Duration,
    /// Client connections at once.
    pub connections_max: usize,
    /// Idle connections kept for each engine.
    pub pool_idle_max: usize,
    /// Age at which an idle engine connection is closed.
    pub pool_idle_timeout: Duration,
    /// Life of a decode leg after its client left.
    pub handover_grace: Duration,
    /// Interval of the health probes.
    pub health_interval: Duration,
    /// Longest wait for a probe's answer.
    pub health_timeout: Duration,
    /// Failed probes in a row that make an engine unhealthy.
    pub health_failures_max: u32,
    /// Retries of one leg of one request.
    pub retries_max: u32,
    /// Failed legs in a row that keep an engine out; 0 is never.
    pub breaker_failures_max: u32,
    /// For how long at first.
    pub breaker_open: Duration,
    /// Time for running requests to end at shutdown.
    pub drain_timeout: Duration,
    /// Requests whose times are kept.
    pub trace_requests_max: usize,
    /// Share of new traces that are sampled; 0 for no new traces.
    pub trace_sample: f64,
    /// Worker threads; 0 is one for each core.
    pub threads: usize,
    /// Tracing filter.
    pub log_level: String,
    /// Form of the log.
    pub log_format: LogFormat,
    resolved: Settings,
    /// What it was resolved from, to resolve it again.
    pub(crate) source: Invocation,
}

/// The policy that decides for both legs at once.
const AUTO: &str = "auto";
/// A larger file is no configuration.
const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;
const DAY_S: u64 = 86_400;

impl Config {
    /// Flags over environment over file over defaults, checked.
    ///
    /// # Errors
    /// [`ConfigError`] with one line for each fault.
    pub fn resolve(invocation: Invocation) -> Result<Self, ConfigError> {
        let file = match &invocation.config {
            Some(path) => read_file(path).map_err(|fault| ConfigError(vec![fault]))?,
            None => Settings::default(),
        };
        let resolved = Self::from_settings(invocation.settings.clone().or(file))?;
        Ok(Self {
            source: invocation,
            ..resolved
        })
    }

    /// The settings with defaults filled in, checked.
    ///
    /// # Errors
    /// [`ConfigError`] with one line for each fault.
    pub fn from_settings(given: Settings) -> Result<Self, ConfigError> {
        let mut faults = Faults::default();
        let mut resolved = given;

        let listen = fill(&mut resolved.listen, "127.0.0.1:8000".to_owned());
        if let Err(fault) = host_port(&listen) {
            faults.add(format!("--listen {listen}: {fault}"));
        }
        let admin_listen = resolved.admin_listen.clone();
        if let Some(admin) = &admin_listen {
            if let Err(fault) = host_port(admin) {
                faults.add(format!("--admin-listen {admin}: {fault}"));
            }
            if *admin == listen && !admin.ends_with(":0") {
                faults.add(format!(
                    "--admin-listen {admin}: is --listen too; clients must not reach administration"
                ));
            }
        }
        let name = fill(
            &mut resolved.connector,
            connectors::ALL[0].name().to_owned(),
        );
        let known = connectors::by_name(&name);
        if known.is_none() {
            let names = connectors::names();
            faults.add(format!("--connector {name}: unknown; one of {names}"));
        }
        let prefill = faults.workers("--prefill", resolved.prefill.as_deref());
        let decode = faults.workers("--decode", resolved.decode.as_deref());
        if let Some(connector) = known {
            faults.peers(connector, Role::Prefill, &prefill);
            faults.peers(connector, Role::Decode, &decode);
        }
        let connector = known.unwrap_or(connectors::ALL[0]);
        let alone = connector.order() == Order::DecodeAlone;
        let none = |given: &Option<Vec<String>>| given.as_ref().is_none_or(Vec::is_empty);
        let admin_keys = faults.admin_keys(&mut resolved);
        let api_keys = faults.api_keys(&resolved);
        let forwards = &mut resolved.forward_authorization;
        let forward_authorization = *forwards.get_or_insert(api_keys.is_none());
        let zmq_listen = faults.zmq(&resolved, connector);
        let needed = |flag| format!("{flag}: at least one instance is needed, or --admin-listen");
        let may_register = admin_listen.is_some() || zmq_listen.is_some();
        if alone && !none(&resolved.prefill) {
            faults.add(format!(
                "--prefill: --connector {name} sends no prefill leg; give decode only"
            ));
        }
        if !alone && !may_register && none(&resolved.prefill) {
            faults.add(needed("--prefill"));
        }
        if !may_register && none(&resolved.decode) {
            faults.add(needed("--decode"));
        }

        let policy = resolved.policy.clone();
        let is_auto = policy.as_deref() == Some(AUTO);
        let [prefill_default, decode_default] = match policy.as_deref() {
            // Decode's legs are long and of unlike length: turns alone would leave some engines full
            // and others idle.
            None => ["round-robin", "least-loaded"],
            Some(AUTO) => ["round-robin", "prefix-aware"],
            Some(policy) => [policy; 2],
        };
        if is_auto && alone {
            faults.add(format!(
                "--policy auto: --connector {name} sends no prefill leg; there is nothing to decide"
            ));
        }
        fill(&mut resolved.policy, "round-robin".to_owned());
        if let Some(policy) = policy.as_deref().filter(|_| !is_auto) {
            faults.policy("--policy", policy);
        }
        let prefill_policy = fill(&mut resolved.prefill_policy, prefill_default.to_owned());
        let decode_policy = fill(&mut resolved.decode_policy, decode_default.to_owned());
        let prefill_policy = faults.policy("--prefill-policy", &prefill_policy);
        let decode_policy = faults.policy("--decode-policy", &decode_policy);
        let hash_header = faults.header("--hash-header", &mut resolved.hash_header, "x-session-id");
        let allow_prefill_endpoint = *resolved.allow_prefill_endpoint.get_or_insert(false);
        let revision_weights = faults.weights(resolved.revision_weights.as_deref());
        let require_kv = *resolved.require_kv.get_or_insert(true);
        let on_no_prefill = match fill(&mut resolved.on_no_prefill, "fail".to_owned()).as_str() {
            "fail" => OnNoPrefill::Fail,
            "decode-only" => OnNoPrefill::DecodeOnly,
            other => {
                faults.add(format!(
                    "--on-no-prefill {other}: must be fail or decode-only"
                ));
                OnNoPrefill::Fail
            }
        };
        let log_format = match fill(&mut resolved.log_format, "text".to_owned()).as_str() {
            "text" => LogFormat::Text,
            "json" => LogFormat::Json,
            other => {
                faults.add(format!("--log-format {other}: must be text or json"));
                LogFormat::Text
            }
        };
        let log_level = fill(&mut resolved.log_level, "info".to_owned());
        if let Err(error) = log_level.parse::<tracing_subscriber::EnvFilter>() {
            faults.add(format!("--log-level {log_level}: {error}"));
        }

        let r = &mut resolved;
        let mut ms = |flag: &str, slot: &mut Option<u64>, default, low| {
            Duration::from_millis(faults.range(flag, slot, default, low, 1_000 * DAY_S))
        };
        let connect_timeout = ms("--connect-timeout-ms", &mut r.connect_timeout_ms, 5_000, 1);
        let pool_idle_timeout = ms(
            "--pool-idle-timeout-ms",
            &mut r.pool_idle_timeout_ms,
            4_000,
            0,
        );
        let scrape_interval = ms("--scrape-interval-ms", &mut r.scrape_interval_ms, 1_000, 0);
        let handover_grace = ms("--handover-grace-ms", &mut r.handover_grace_ms, 1000, 0);
        let health_interval = ms("--health-interval-ms", &mut r.health_interval_ms, 2_000, 10);
        let health_timeout = ms("--health-timeout-ms", &mut r.health_timeout_ms, 5_000, 10);
        let zmq_ttl = ms(
            "--zmq-ttl-ms",
            &mut r.zmq_ttl_ms,
            15_000,
            access::ZMQ_TTL_MS_MIN,
        );
        let mut seconds = |flag: &str, slot: &mut Option<u64>, default, low| {
            Duration::from_secs(faults.range(flag, slot, default, low, DAY_S))
        };
        let request_timeout = seconds("--request-timeout-s", &mut r.request_timeout_s, 600, 1);
        let stream_idle_timeout = seconds(
            "--stream-idle-timeout-s",
            &mut r.stream_idle_timeout_s,
            300,
            1,
        );
        let header_read_timeout = seconds(
            "--header-read-timeout-s",
            &mut r.header_read_timeout_s,
            30,
            1,
        );
        let body_read_timeout = seconds("--body-read-timeout-s", &mut r.body_read_timeout_s, 30, 1);
        let client_write_timeout = seconds(
            "--client-write-timeout-s",
            &mut r.client_write_timeout_s,
            60,
            1,
        );
        let queue_timeout = seconds("--queue-timeout-s", &mut r.queue_timeout_s, 30, 1);
        let breaker_open = seconds("--breaker-open-s", &mut r.breaker_open_s, 5, 1);
        let drain_timeout = seconds("--drain-timeout-s", &mut r.drain_timeout_s, 30, 0);
        const BODY: u64 = 64 << 20;
        let body_bytes_max =
            faults.range("--body-bytes-max", &mut r.body_bytes_max, BODY, 2, 4 << 30);
        let prefill_answer_bytes_max = faults.range(
            "--prefill-answer-bytes-max",
            &mut r.prefill_answer_bytes_max,
            BODY,
            2,
            4 << 30,
        );
        let requests_max = faults.range("--requests-max", &mut r.requests_max, 4_096, 1, 1_000_000);
        let worker_max = faults.range(
            "--worker-requests-max",
            &mut r.worker_requests_max,
            0,
            0,
            1_000_000,
        );
        let mut legs_max = |flag: &str, slot: &mut Option<u32>| {
            let max = faults.range(flag, slot, worker_max, 0, 1_000_000);
            (max > 0).then_some(max)
        };
        let prefill_requests_max = legs_max("--prefill-requests-max", &mut r.prefill_requests_max);
        let decode_requests_max = legs_max("--decode-requests-max", &mut r.decode_requests_max);
        let queue_max = faults.range("--queue-max", &mut r.queue_max, 1_024, 0, 1_000_000);
        let connections_max = faults.range(
            "--connections-max",
            &mut r.connections_max,
            16_384,
            1,
            1_000_000,
        );
        let pool_idle_max =
            faults.range("--pool-idle-max", &mut r.pool_idle_max, 1_024, 0, 1_000_000);
        let health_failures_max = faults.range(
            "--health-failures-max",
            &mut r.health_failures_max,
            3,
            1,
            1_000,
        );
        let retries_max = faults.range("--retries-max", &mut r.retries_max, 2, 0, 16);
        let breaker_failures_max = faults.range(
            "--breaker-failures-max",
            &mut r.breaker_failures_max,
            5,
            0,
            1_000,
        );
        let hash_prompt_bytes = faults.range(
            "--hash-prompt-bytes",
            &mut r.hash_prompt_bytes,
            256,
            0,
            1 << 20,
        );
        let auto_prompt_bytes_min = faults.range(
            "--auto-prompt-bytes-min",
            &mut r.auto_prompt_bytes_min,
            2_048,
            0,
            1 << 30,
        );
        let auto = is_auto.then_some(AutoRules {
            prompt_bytes_min: auto_prompt_bytes_min,
        });
        let trace_requests_max = faults.range(
            "--trace-requests-max",
            &mut r.trace_requests_max,
            256,
            0,
            100_000,
        );
        let trace_sample = faults.range("--trace-sample", &mut r.trace_sample, 0.0, 0.0, 1.0);
        let threads = faults.range("--threads", &mut r.threads, 0, 0, 1_024);

        if !faults.0.is_empty() {
            return Err(ConfigError(faults.0));
        }
        Ok(Self {
            listen,
            admin_listen,
            admin_keys,
            api_keys,
            forward_authorization,
            zmq_listen,
            zmq_ttl,
            connector,
            prefill,
            decode,
            prefill_policy,
            decode_policy,
            auto,
            hash_header,
            hash_prompt_bytes,
            scrape_interval,
            allow_prefill_endpoint,
            revision_weights,
            require_kv,
            on_no_prefill,
            connect_timeout,
            request_timeout,
            stream_idle_timeout,
            header_read_timeout,
            body_read_timeout,
            client_write_timeout,
            body_bytes_max,
            prefill_answer_bytes_max,
            requests_max,
            prefill_requests_max,
            decode_requests_max,
            queue_max,
            queue_timeout,
            connections_max,
            pool_idle_max,
            pool_idle_timeout,
            handover_grace,
            health_interval,
            health_timeout,
            health_failures_max,
            retries_max,
            breaker_failures_max,
            breaker_open,
            drain_timeout,
            trace_requests_max,
            trace_sample,
            threads,
            log_level,
            log_format,
            source: Invocation {
                config: None,
                settings: resolved.clone(),
            },
            resolved,
        })
    }

    /// The configuration as a TOML file that `--config` takes.
    ///
    /// # Errors
    /// A value that TOML cannot hold: none of the settings' types is one.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(&self.resolved)
    }
}

fn read_file(path: &std::path::Path) -> Result<Settings, String> {
    let at = path.display();
    let size = std::fs::metadata(path)
        .map_err(|error| format!("--config {at}: {error}"))?
        .len();
    if size > CONFIG_FILE_BYTES_MAX {
        return Err(format!(
            "--config {at}: {size} bytes; at most {CONFIG_FILE_BYTES_MAX}"
        ));
    }
    let text = std::fs::read_to_string(path).map_err(|error| format!("--config {at}: {error}"))?;
    toml::from_str(&text).map_err(|error| format!("--config {at}: {}", error.to_string().trim()))
}

fn fill(slot: &mut Option<String>, default: String) -> String {
    slot.get_or_insert(default).clone()
}

#[derive(Default)]
struct Faults(Vec<String>);

impl Faults {
    fn add(&mut self, fault: String) {
        self.0.push(fault);
    }

    fn range<T: Copy + PartialOrd + Display>(
        &mut self,
        flag: &str,
        slot: &mut Option<T>,
        default: T,
        low: T,
        high: T,
    ) -> T {
        let value = *slot.get_or_insert(default);
        // Also what is no number.
        if !(low..=high).contains(&value) {
            self.add(format!("{flag} {value}: must be {low} to {high}"));
        }
        value
    }

    fn policy(&mut self, flag: &str, name: &str) -> PolicyKind {
        if let Some(kind) = PolicyKind::ALL.into_iter().find(|kind| kind.name() == name) {
            return kind;
        }
        let built = PolicyKind::ALL.map(PolicyKind::name).join(", ");
        let fault = match (flag, name) {
            ("--policy", _) => format!("{flag} {name}: unknown; one of {built}, {AUTO}"),
            (_, AUTO) => {
                format!("{flag} {name}: decides for both legs at once; say --policy auto")
            }
            _ => format!("{flag} {name}: unknown; one of {built}"),
        };
        // The overrides default to --policy: its fault is told once.
        let told = self.0.iter().any(|known| {
            known
                .split_once(": ")
                .is_some_and(|(head, _)| head == format!("--policy {name}"))
        });
        if !told {
            self.add(fault);
        }
        PolicyKind::RoundRobin
    }

    /// The name of a header of the client's; `None` for an empty one.
    fn header(
        &mut self,
        flag: &str,
        slot: &mut Option<String>,
        default: &str,
    ) -> Option<HeaderName> {
        let name = fill(slot, default.to_owned());
        if name.is_empty() {
            return None;
        }
        let header = name.parse().ok();
        if header.is_none() {
            self.add(format!(
                "{flag} {name}: must be the name of a header, or empty"
            ));
        }
        header
    }

    /// Shares of revisions.
    fn weights(&mut self, given: Option<&str>) -> Option<Weights> {
        let parsed = Weights::parse(given.unwrap_or_default());
        parsed.unwrap_or_else(|fault| {
            self.add(format!(
                "--revision-weights {}: {fault}",
                given.unwrap_or_default()
            ));
            None
        })
    }

    fn workers(&mut self, flag: &str, given: Option<&[String]>) -> Vec<Worker> {
        let mut workers: Vec<Worker> = Vec::new();
        for text in given.unwrap_or_default() {
            match address::worker(text) {
                Ok(worker) => {
                    if workers
                        .iter()
                        .any(|known| known.base.is_same_place(&worker.base))
                    {
                        self.add(format!("{flag} {text}: this instance is given twice"));
                    }
                    workers.push(worker);
                }
                Err(fault) => self.add(format!("{flag} {text}: {fault}")),
            }
        }
        workers
    }

    /// What the connector cannot serve, or would not look at.
    fn peers(&mut self, connector: &dyn Connector, role: Role, workers: &[Worker]) {
        for worker in workers {
            for fault in worker_faults(connector, role, worker) {
                let at = format!("--{} {}", role.name(), worker.spec.url);
                self.add(format!("{at}: {}", fault.text));
            }
        }
    }
}

/// Why a worker cannot be served in a role, whoever names it: a flag or the worker itself.
pub(crate) fn worker_faults(
    connector: &dyn Connector,
    role: Role,
    worker: &Worker,
) -> Vec<WorkerFault> {
    let name = connector.name();
    let unused = |key: &&&'static str| !connector.worker_keys().contains(key);
    let unused = worker.peer.given.iter().filter(unused);
    let mut faults: Vec<WorkerFault> = unused
        .map(|key| WorkerFault {
            key: Some(key),
            text: format!("`{key}` has no use with --connector {name}"),
        })
        .collect();
    if let Err(text) = connector.check(role, &worker.peer) {
        faults.push(WorkerFault { key: None, text });
    }
    faults
}

#[cfg(test)]
mod tests;
