//! Mixed load on the executable while workers are killed, restarted, drained, removed, registered
//! anew and given another role.
//!
//! 200 requests a second for `HETERO_KV_SOAK_S` seconds (60). Every answer is known from its prompt,
//! and every transfer is read once, by a request with its prompt, or runs out: whatever else is seen
//! is listed and fails the run. `make soak` runs it for half an hour.

#[path = "../it/client.rs"]
#[allow(
    dead_code,
    reason = "what a soak needs of the client is less than the tests do"
)]
mod client;
mod engines;
mod load;
mod operator;
mod proxy;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use engines::{Engines, LEASE};
use load::Tally;
use proxy::Proxy;

const SECONDS_DEFAULT: u64 = 60;
/// Requests that may fail for no reason that is counted, per thousand.
const UNEXPLAINED_PER_MILLE_MAX: u64 = 10;
/// What the proxy may grow by from the middle of the run to its end.
const GROWTH_KIB_MAX: u64 = 6 << 10;
const GROWTH_FDS_MAX: u64 = 64;

fn seconds() -> u64 {
    let told = std::env::var("HETERO_KV_SOAK_S").ok();
    told.map_or(SECONDS_DEFAULT, |text| {
        text.parse().expect("HETERO_KV_SOAK_S in seconds")
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak() {
    let seconds = seconds();
    let seed = std::env::var("HETERO_KV_SOAK_SEED").ok();
    let seed = seed.map_or(1, |text| {
        text.parse().expect("HETERO_KV_SOAK_SEED, a number")
    });
    let engines = Arc::new(Engines::start(6).await);
    let proxy = Proxy::start();
    engines.register_all(&proxy).await;
    proxy.ready().await;

    let tally = Arc::new(Tally::default());
    let end = Instant::now() + Duration::from_secs(seconds);
    let operator = tokio::spawn(operator::run(
        Arc::clone(&engines),
        proxy.admin,
        end,
        seed ^ 0x5eed,
    ));
    let load = tokio::spawn(load::run(proxy.client, Arc::clone(&tally), end, seed));
    let mut middle = proxy.size();
    let begun = Instant::now();
    while Instant::now() < end {
        sleep(Duration::from_secs(10).min(end - Instant::now())).await;
        let size = proxy.size();
        if begun.elapsed().as_secs() <= seconds / 2 + 1 {
            middle = size;
        }
        eprintln!(
            "{:5.0} s  {tally}; {} transfers held; proxy {} MiB, {} descriptors",
            begun.elapsed().as_secs_f64(),
            engines.held(),
            size.rss_kib >> 10,
            size.fds
        );
        if operator.is_finished() || load.is_finished() {
            // Before its time: it has panicked, and the rest would be no soak.
            break;
        }
    }
    let actions = operator.await.expect("the operator ends");
    load.await.expect("the load ends");
    // Whoever left some transfer behind: its lease ends.
    let settled = async {
        while engines.held() > 0 || proxy.in_flight().await > 0 {
            sleep(Duration::from_millis(100)).await;
        }
    };
    let settled = timeout(LEASE + Duration::from_secs(10), settled).await;
    let (held, in_flight, size) = (engines.held(), proxy.in_flight().await, proxy.size());
    let counts = tally.counts();
    eprintln!("{tally}\n{actions}\n{}", engines.told());

    assert!(
        settled.is_ok(),
        "{held} transfers held, {in_flight} legs in flight"
    );
    assert_eq!(counts.sent, counts.completed + counts.failed + counts.left);
    assert_eq!(tally.wrong(), Vec::<String>::new(), "wrong answers");
    assert_eq!(engines.wrong(), Vec::<String>::new(), "wrong legs");
    let cut = engines.cut_by_kills();
    let unexplained = counts.failed.saturating_sub(cut);
    assert!(
        unexplained * 1_000 <= UNEXPLAINED_PER_MILLE_MAX * counts.sent,
        "{} failed, of which kills cut {cut} legs: {:?}",
        counts.failed,
        tally.failures()
    );
    // A client that leaves at the moment in which prefill's answer is on the wire.
    assert!(
        engines.expired() <= cut + counts.left / 4,
        "{} transfers ran out, with {cut} legs cut and {} clients that left",
        engines.expired(),
        counts.left
    );
    assert!(
        size.rss_kib <= middle.rss_kib + GROWTH_KIB_MAX,
        "{} KiB in the middle, {} at the end",
        middle.rss_kib,
        size.rss_kib
    );
    assert!(size.fds <= middle.fds + GROWTH_FDS_MAX);
    assert!(actions.total() > seconds / 6, "{actions}");
    assert!(proxy.stop().await, "the proxy drains and ends with 0");
}
