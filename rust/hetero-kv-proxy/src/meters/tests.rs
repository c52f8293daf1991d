use std::sync::Arc;
use std::time::Duration;

use crate::app::App;
use crate::cli::Settings;
use crate::config::Config;
use crate::instance::Instance;
use crate::routing::Role;

/// A proxy that serves nothing, with so many workers of each role.
fn app(prefill: usize, decode: usize) -> Arc<App> {
    let urls = |name: &str, count: usize| {
        let each = (0..count).map(|at| format!("http://{name}{at}:1"));
        Some(each.collect())
    };
    let config = Config::from_settings(Settings {
        prefill: urls("p", prefill),
        decode: urls("d", decode),
        ..Settings::default()
    });
    App::new(config.expect("valid settings")).expect("valid URLs")
}

fn workers(app: &App, role: Role) -> Vec<Arc<Instance>> {
    app.snapshot(role).to_vec()
}

/// The lines of one metric.
fn lines(app: &App, name: &str) -> Vec<String> {
    let text = app.metrics.encode().expect("a string");
    let of_it = |line: &&str| line.starts_with(&format!("hetero_kv_proxy_{name}{{"));
    text.lines().filter(of_it).map(str::to_owned).collect()
}

#[test]
fn pairs_have_a_limit_and_make_room_when_a_worker_goes() {
    let app = app(17, 16);
    let (prefill, decode) = (workers(&app, Role::Prefill), workers(&app, Role::Decode));
    let meet = || {
        for p in &prefill {
            for d in &decode {
                app.metrics.pairs.took(p, d, Duration::from_millis(7));
                app.metrics.pairs.failed(p, d);
            }
        }
    };
    meet();
    let counts = |name| lines(&app, name);
    assert_eq!(counts("handover_seconds_count").len(), 256 + 1);
    let failures = counts("handover_failures_total");
    let line = |prefill: &str, decode: &str, count: u32| {
        format!(
            "hetero_kv_proxy_handover_failures_total{{prefill=\"{prefill}\",decode=\"{decode}\"}} {count}"
        )
    };
    assert!(failures.contains(&line("http://p0:1", "http://d15:1", 1)));
    assert!(failures.contains(&line("other", "other", 16)));

    app.remove(&prefill[0]);
    app.remove(&decode[3]);
    let left = counts("handover_failures_total");
    assert_eq!(left.len(), 15 * 15 + 1);
    assert!(
        !left
            .iter()
            .any(|line| line.contains("p0:") || line.contains("d3:"))
    );
    // A leg that outlives its worker brings none back; others have room again.
    meet();
    let met = counts("handover_failures_total");
    assert_eq!(met.len(), 16 * 15 + 1);
    assert!(met.contains(&line("http://p16:1", "http://d15:1", 1)));
    assert!(met.contains(&line("http://p1:1", "http://d0:1", 2)));
}

#[test]
fn a_worker_that_is_removed_leaves_no_line_and_its_late_legs_bring_none_back() {
    let app = app(1, 2);
    let text = || app.metrics.encode().expect("a string");
    let decode = workers(&app, Role::Decode);
    for outcome in ["ok", "status_5xx", "no such outcome"] {
        decode[0].meters.count_leg(outcome);
    }
    let ok = "leg_requests_total{role=\"decode\",instance=\"http://d0:1\",outcome=\"ok\"} 1";
    assert!(text().contains(ok), "{}", text());
    assert!(text().contains("ttft_seconds_count{instance=\"http://d0:1\"} 0"));
    app.remove(&decode[0]);
    decode[0].meters.count_leg("ok");
    let meters = decode[0].meters.decode.as_ref().expect("of decode");
    meters.ttft.observe(Duration::from_secs(1));
    assert!(!text().contains("http://d0:1"), "{}", text());
    assert!(text().contains("http://d1:1"));
    app.remove(&workers(&app, Role::Prefill)[0]);
    assert!(!text().contains("http://p0:1"), "{}", text());
}

#[test]
fn two_starts_of_one_engine_share_their_lines_until_the_last_has_gone() {
    let app = app(1, 1);
    let old = Arc::clone(&workers(&app, Role::Decode)[0]);
    let prefill = Arc::clone(&workers(&app, Role::Prefill)[0]);
    let again = app.instance(Role::Decode, old.worker.clone(), old.registration);
    let new = app.take_in(again.expect("a URL"), crate::routing::Standing::Serving);
    for instance in [&old, &new] {
        instance.meters.count_leg("ok");
        app.metrics.pairs.failed(&prefill, instance);
    }
    let ok = |count| {
        let line = "leg_requests_total{role=\"decode\",instance=\"http://d0:1\",outcome=\"ok\"}";
        app.metrics
            .encode()
            .expect("a string")
            .contains(&format!("{line} {count}\n"))
    };
    assert!(ok(2));
    app.remove(&old);
    assert!(ok(2));
    assert_eq!(lines(&app, "handover_failures_total").len(), 1);
    app.remove(&new);
    assert!(!ok(2));
    assert!(lines(&app, "handover_failures_total").is_empty());
}
