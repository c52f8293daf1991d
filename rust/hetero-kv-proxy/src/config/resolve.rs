//! From settings to a configuration: each setting is filled in and checked, one after the other.

use super::faults::Faults;
use super::numbers as n;
use super::{Config, ConfigError, LogFormat, OnNoPrefill, file};
use crate::cli::{Invocation, Settings};
use crate::connectors;
use crate::routing::Role;

impl Config {
    /// Flags over environment over file over defaults, checked.
    ///
    /// # Errors
    /// [`ConfigError`] with one line for each fault.
    pub fn resolve(invocation: Invocation) -> Result<Self, ConfigError> {
        let file = match &invocation.config {
            Some(path) => file::read(path).map_err(|fault| ConfigError(vec![fault]))?,
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
        let mut s = given;
        let mut faults = Faults::default();

        let listen = faults.listen(&mut s);
        let admin_listen = faults.admin_listen(&s, &listen);
        let connector = faults.connector(&mut s);
        let prefill = faults.workers("--prefill", s.prefill.as_deref());
        let decode = faults.workers("--decode", s.decode.as_deref());
        if let Some(connector) = connector {
            faults.peers(connector, Role::Prefill, &prefill);
            faults.peers(connector, Role::Decode, &decode);
        }
        let connector = connector.unwrap_or(connectors::ALL[0]);
        let admin_keys = faults.admin_keys(&mut s);
        let api_keys = faults.api_keys(&s);
        let zmq_listen = faults.zmq(&s, connector);
        let listeners = [
            ("--listen", Some(&*listen)),
            ("--admin-listen", admin_listen.as_deref()),
            ("--zmq-listen", zmq_listen.as_deref()),
        ];
        faults.own_listeners(&listeners, Role::Prefill, &prefill);
        faults.own_listeners(&listeners, Role::Decode, &decode);
        let may_register = admin_listen.is_some() || zmq_listen.is_some();
        faults.each_role_has_one(&s, connector, may_register);
        let policies = faults.policies(&mut s, connector);

        let worker_max = faults.number(n::WORKER_REQUESTS_MAX, &mut s.worker_requests_max);
        let of_prefill = n::legs("--prefill-requests-max", worker_max);
        let prefill_max = faults.number(of_prefill, &mut s.prefill_requests_max);
        let of_decode = n::legs("--decode-requests-max", worker_max);
        let decode_max = faults.number(of_decode, &mut s.decode_requests_max);
        let legs_max = |max: u32| (max > 0).then_some(max);

        // Field by field as written here: faults are told in this order.
        let config = Self {
            listen,
            admin_listen,
            connector,
            prefill,
            decode,
            forward_authorization: *s.forward_authorization.get_or_insert(api_keys.is_none()),
            admin_keys,
            api_keys,
            zmq_listen,
            prefill_policy: policies.prefill,
            decode_policy: policies.decode,
            hash_header: faults.header("--hash-header", &mut s.hash_header, "x-session-id"),
            allow_prefill_endpoint: *s.allow_prefill_endpoint.get_or_insert(false),
            revision_weights: faults.weights(s.revision_weights.as_deref()),
            require_kv: *s.require_kv.get_or_insert(true),
            on_no_prefill: faults.choice(
                "--on-no-prefill",
                &mut s.on_no_prefill,
                [
                    ("fail", OnNoPrefill::Fail),
                    ("decode-only", OnNoPrefill::DecodeOnly),
                ],
            ),
            log_format: faults.choice(
                "--log-format",
                &mut s.log_format,
                [("text", LogFormat::Text), ("json", LogFormat::Json)],
            ),
            log_level: faults.log_filter(&mut s.log_level),
            connect_timeout: faults.ms(n::CONNECT_TIMEOUT_MS, &mut s.connect_timeout_ms),
            pool_idle_timeout: faults.ms(n::POOL_IDLE_TIMEOUT_MS, &mut s.pool_idle_timeout_ms),
            scrape_interval: faults.ms(n::SCRAPE_INTERVAL_MS, &mut s.scrape_interval_ms),
            handover_grace: faults.ms(n::HANDOVER_GRACE_MS, &mut s.handover_grace_ms),
            health_interval: faults.ms(n::HEALTH_INTERVAL_MS, &mut s.health_interval_ms),
            health_timeout: faults.ms(n::HEALTH_TIMEOUT_MS, &mut s.health_timeout_ms),
            zmq_ttl: faults.ms(n::ZMQ_TTL_MS, &mut s.zmq_ttl_ms),
            request_timeout: faults.seconds(n::REQUEST_TIMEOUT_S, &mut s.request_timeout_s),
            stream_idle_timeout: faults
                .seconds(n::STREAM_IDLE_TIMEOUT_S, &mut s.stream_idle_timeout_s),
            header_read_timeout: faults
                .seconds(n::HEADER_READ_TIMEOUT_S, &mut s.header_read_timeout_s),
            body_read_timeout: faults.seconds(n::BODY_READ_TIMEOUT_S, &mut s.body_read_timeout_s),
            client_write_timeout: faults
                .seconds(n::CLIENT_WRITE_TIMEOUT_S, &mut s.client_write_timeout_s),
            queue_timeout: faults.seconds(n::QUEUE_TIMEOUT_S, &mut s.queue_timeout_s),
            breaker_open: faults.seconds(n::BREAKER_OPEN_S, &mut s.breaker_open_s),
            lease: faults.seconds(n::LEASE_S, &mut s.lease_s),
            drain_timeout: faults.seconds(n::DRAIN_TIMEOUT_S, &mut s.drain_timeout_s),
            body_bytes_max: faults.number(n::BODY_BYTES_MAX, &mut s.body_bytes_max),
            prefill_answer_bytes_max: faults
                .number(n::PREFILL_ANSWER_BYTES_MAX, &mut s.prefill_answer_bytes_max),
            requests_max: faults.number(n::REQUESTS_MAX, &mut s.requests_max),
            prefill_requests_max: legs_max(prefill_max),
            decode_requests_max: legs_max(decode_max),
            queue_max: faults.number(n::QUEUE_MAX, &mut s.queue_max),
            connections_max: faults.number(n::CONNECTIONS_MAX, &mut s.connections_max),
            pool_idle_max: faults.number(n::POOL_IDLE_MAX, &mut s.pool_idle_max),
            health_failures_max: faults.number(n::HEALTH_FAILURES_MAX, &mut s.health_failures_max),
            retries_max: faults.number(n::RETRIES_MAX, &mut s.retries_max),
            breaker_failures_max: faults
                .number(n::BREAKER_FAILURES_MAX, &mut s.breaker_failures_max),
            hash_prompt_bytes: faults.number(n::HASH_PROMPT_BYTES, &mut s.hash_prompt_bytes),
            auto: faults.auto(&mut s, &policies),
            trace_requests_max: faults.number(n::TRACE_REQUESTS_MAX, &mut s.trace_requests_max),
            trace_sample: faults.number(n::TRACE_SAMPLE, &mut s.trace_sample),
            threads: faults.number(n::THREADS, &mut s.threads),
            source: Invocation {
                config: None,
                settings: s.clone(),
            },
            resolved: s,
        };
        faults.unless_any(config)
    }
}
