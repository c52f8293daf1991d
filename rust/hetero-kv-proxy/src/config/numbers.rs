//! Every number among the settings: its flag, its default, and the least and the most that it may
//! be. What each of them means is said in [`crate::cli`].

use std::fmt::Display;

/// A setting that is a number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Number<T> {
    pub(super) flag: &'static str,
    pub(super) default: T,
    pub(super) low: T,
    pub(super) high: T,
}

const fn number<T: Copy>(flag: &'static str, default: T, low: T, high: T) -> Number<T> {
    Number {
        flag,
        default,
        low,
        high,
    }
}

const fn ms(flag: &'static str, default: u64, low: u64) -> Number<u64> {
    number(flag, default, low, 1_000 * DAY_S)
}

const fn seconds(flag: &'static str, default: u64, low: u64) -> Number<u64> {
    number(flag, default, low, DAY_S)
}

const DAY_S: u64 = 86_400;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// More of anything is a slip of the hand.
const MANY: usize = 1_000_000;
/// Three heartbeats of a MoRI-IO worker, one of which may be lost and one late.
const ZMQ_TTL_MS_MIN: u64 = 9_000;

// Times.
pub(super) const CONNECT_TIMEOUT_MS: Number<u64> = ms("--connect-timeout-ms", 5_000, 1);
/// Below the 5 s of vLLM's own server, so that it is not the engine that closes first.
pub(super) const POOL_IDLE_TIMEOUT_MS: Number<u64> = ms("--pool-idle-timeout-ms", 4_000, 0);
pub(super) const SCRAPE_INTERVAL_MS: Number<u64> = ms("--scrape-interval-ms", 1_000, 0);
pub(super) const HANDOVER_GRACE_MS: Number<u64> = ms("--handover-grace-ms", 1_000, 0);
pub(super) const HEALTH_INTERVAL_MS: Number<u64> = ms("--health-interval-ms", 2_000, 10);
pub(super) const HEALTH_TIMEOUT_MS: Number<u64> = ms("--health-timeout-ms", 5_000, 10);
pub(super) const ZMQ_TTL_MS: Number<u64> = ms("--zmq-ttl-ms", 15_000, ZMQ_TTL_MS_MIN);
pub(super) const REQUEST_TIMEOUT_S: Number<u64> = seconds("--request-timeout-s", 600, 1);
pub(super) const STREAM_IDLE_TIMEOUT_S: Number<u64> = seconds("--stream-idle-timeout-s", 300, 1);
pub(super) const HEADER_READ_TIMEOUT_S: Number<u64> = seconds("--header-read-timeout-s", 30, 1);
pub(super) const BODY_READ_TIMEOUT_S: Number<u64> = seconds("--body-read-timeout-s", 30, 1);
pub(super) const CLIENT_WRITE_TIMEOUT_S: Number<u64> = seconds("--client-write-timeout-s", 60, 1);
pub(super) const QUEUE_TIMEOUT_S: Number<u64> = seconds("--queue-timeout-s", 30, 1);
pub(super) const BREAKER_OPEN_S: Number<u64> = seconds("--breaker-open-s", 5, 1);
pub(super) const LEASE_S: Number<u64> = seconds("--lease-s", 31, 0);
pub(super) const DRAIN_TIMEOUT_S: Number<u64> = seconds("--drain-timeout-s", 30, 0);

// Bytes.
pub(super) const BODY_BYTES_MAX: Number<u64> = number("--body-bytes-max", 64 * MIB, 2, 4 * GIB);
pub(super) const PREFILL_ANSWER_BYTES_MAX: Number<u64> =
    number("--prefill-answer-bytes-max", 64 * MIB, 2, 4 * GIB);
pub(super) const HASH_PROMPT_BYTES: Number<usize> = number("--hash-prompt-bytes", 256, 0, 1 << 20);
pub(super) const AUTO_PROMPT_BYTES_MIN: Number<usize> =
    number("--auto-prompt-bytes-min", 2_048, 0, 1 << 30);

// Requests and connections at once. Of legs, 0 is no limit.
pub(super) const REQUESTS_MAX: Number<usize> = number("--requests-max", 4_096, 1, MANY);
pub(super) const WORKER_REQUESTS_MAX: Number<u32> = legs("--worker-requests-max", 0);
pub(super) const QUEUE_MAX: Number<usize> = number("--queue-max", 1_024, 0, MANY);
pub(super) const CONNECTIONS_MAX: Number<usize> = number("--connections-max", 16_384, 1, MANY);
pub(super) const POOL_IDLE_MAX: Number<usize> = number("--pool-idle-max", 1_024, 0, MANY);

/// Legs in flight for each slot. For one role, the number for all workers is the default.
pub(super) const fn legs(flag: &'static str, default: u32) -> Number<u32> {
    number(flag, default, 0, MANY as u32)
}

// Times that something is done or fails.
pub(super) const HEALTH_FAILURES_MAX: Number<u32> = number("--health-failures-max", 3, 1, 1_000);
pub(super) const RETRIES_MAX: Number<u32> = number("--retries-max", 2, 0, 16);
pub(super) const BREAKER_FAILURES_MAX: Number<u32> = number("--breaker-failures-max", 5, 0, 1_000);

// What is seen of the proxy, and its threads.
pub(super) const TRACE_REQUESTS_MAX: Number<usize> =
    number("--trace-requests-max", 256, 0, 100_000);
pub(super) const TRACE_SAMPLE: Number<f64> = number("--trace-sample", 0.0, 0.0, 1.0);
pub(super) const THREADS: Number<usize> = number("--threads", 0, 0, 1_024);

/// What a number of these settings may be, by its flag: `0 to 16`.
pub(crate) fn limits(flag: &str) -> Option<String> {
    fn of<T: Display>(number: Number<T>) -> (&'static str, String) {
        let Number {
            flag, low, high, ..
        } = number;
        (flag, format!("{low} to {high}"))
    }
    let all = [
        of(CONNECT_TIMEOUT_MS),
        of(POOL_IDLE_TIMEOUT_MS),
        of(SCRAPE_INTERVAL_MS),
        of(HANDOVER_GRACE_MS),
        of(HEALTH_INTERVAL_MS),
        of(HEALTH_TIMEOUT_MS),
        of(ZMQ_TTL_MS),
        of(REQUEST_TIMEOUT_S),
        of(STREAM_IDLE_TIMEOUT_S),
        of(HEADER_READ_TIMEOUT_S),
        of(BODY_READ_TIMEOUT_S),
        of(CLIENT_WRITE_TIMEOUT_S),
        of(QUEUE_TIMEOUT_S),
        of(BREAKER_OPEN_S),
        of(LEASE_S),
        of(DRAIN_TIMEOUT_S),
        of(BODY_BYTES_MAX),
        of(PREFILL_ANSWER_BYTES_MAX),
        of(HASH_PROMPT_BYTES),
        of(AUTO_PROMPT_BYTES_MIN),
        of(REQUESTS_MAX),
        of(WORKER_REQUESTS_MAX),
        of(legs("--prefill-requests-max", 0)),
        of(legs("--decode-requests-max", 0)),
        of(QUEUE_MAX),
        of(CONNECTIONS_MAX),
        of(POOL_IDLE_MAX),
        of(HEALTH_FAILURES_MAX),
        of(RETRIES_MAX),
        of(BREAKER_FAILURES_MAX),
        of(TRACE_REQUESTS_MAX),
        of(TRACE_SAMPLE),
        of(THREADS),
    ];
    let found = all.into_iter().find(|(known, _)| *known == flag);
    found.map(|(_, limits)| limits)
}
