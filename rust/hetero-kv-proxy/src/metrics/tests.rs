use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::*;

/// Gives every family a series: one without any is not written out.
fn touch(metrics: &Metrics) {
    let instance: Arc<str> = Arc::from("http://p:1");
    let role = "prefill";
    let worker = WorkerLabels {
        instance: Arc::clone(&instance),
    };
    let member = InstanceLabels {
        role,
        instance: Arc::clone(&instance),
    };
    let pair = PairLabels {
        prefill: Arc::clone(&instance),
        decode: Arc::clone(&instance),
    };
    let revision = RevisionLabels {
        revision: Arc::from("v1"),
    };
    let (reason, outcome) = (ReasonLabels { reason: "r" }, OutcomeLabels { outcome: "o" });
    let route = "/v1/*";

    metrics
        .requests
        .get_or_create_owned(&RequestLabels { route, status: 200 });
    metrics.legs.get_or_create_owned(&LegLabels {
        role,
        instance: Arc::clone(&instance),
        outcome: "ok",
    });
    metrics.in_flight.get_or_create_owned(&SlotLabels {
        role,
        instance,
        rank: 0,
    });
    metrics
        .request_seconds
        .get_or_create_owned(&RouteLabels { route });
    metrics
        .client_disconnects
        .get_or_create_owned(&PhaseLabels { phase: "admit" });
    metrics
        .queue_length
        .get_or_create_owned(&WaitLabels { wait: "slots" });
    metrics.ready.get_or_create_owned(&member);
    metrics.breaker_open.get_or_create_owned(&member);
    metrics.queue_seconds.get_or_create_owned(&member);
    metrics.kept_transfers.get_or_create_owned(&worker);
    metrics.transfers_left.get_or_create_owned(&worker);
    for seconds in [
        &metrics.ttft_seconds,
        &metrics.inter_token_seconds,
        &metrics.prefill_leg_seconds,
        &metrics.decode_head_seconds,
        &metrics.decode_leg_seconds,
    ] {
        seconds.get_or_create_owned(&worker);
    }
    metrics.pairs.seconds.get_or_create_owned(&pair);
    metrics.pairs.failures.get_or_create_owned(&pair);
    for by_role in [&metrics.retries, &metrics.breaker_opens] {
        by_role.get_or_create_owned(&RoleLabels { role });
    }
    for by_reason in [
        &metrics.fallbacks,
        &metrics.trace_faults,
        &metrics.stream_breaks,
        &metrics.queue_rejects,
        &metrics.unauthorized,
    ] {
        by_reason.get_or_create_owned(&reason);
    }
    for by_outcome in [&metrics.engine_scrapes, &metrics.zmq_frames] {
        by_outcome.get_or_create_owned(&outcome);
    }
    for by_revision in [&metrics.revision_requests, &metrics.revision_moves] {
        by_revision.get_or_create_owned(&revision);
    }
}

/// What the lines that begin with `word` name, and the rest of each.
fn told<'a>(text: &'a str, word: &str) -> Vec<(&'a str, &'a str)> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(word));
    lines.filter_map(|line| line.split_once(' ')).collect()
}

fn names<'a>(told: &[(&'a str, &'a str)]) -> BTreeSet<&'a str> {
    told.iter().map(|(name, _)| *name).collect()
}

/// The names of the labels of a metric's first series.
fn labels<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let series = text.lines().find(|line| line.starts_with(name));
    let within = series.and_then(|line| Some(line.split_once('{')?.1.split_once('}')?.0));
    let each = within.unwrap_or("").split(',');
    let names = each.filter_map(|label| Some(label.split_once('=')?.0));
    names.filter(|label| *label != "le").collect()
}

#[test]
fn every_metric_has_help_a_unit_where_it_is_a_time_and_a_row_in_the_docs() {
    let metrics = Metrics::default();
    touch(&metrics);
    let text = metrics.encode().expect("a string");
    let (types, helps) = (told(&text, "# TYPE "), told(&text, "# HELP "));
    // The registry does not list what is in it, but for this.
    let registered = format!("{:?}", metrics.registry)
        .matches("Descriptor {")
        .count();
    assert!(registered > 0, "the registry's debug text has another form");
    assert_eq!(types.len(), registered, "`touch` leaves some family out");
    assert_eq!(names(&types).len(), registered, "two metrics of one name");

    for (name, help) in &helps {
        assert!(help.split(' ').count() >= 2, "{name} has no help: {help}");
    }
    let times: BTreeSet<&str> = types
        .iter()
        .filter(|(name, kind)| name.ends_with("_seconds") || *kind == "histogram")
        .map(|(name, _)| *name)
        .collect();
    assert_eq!(names(&told(&text, "# UNIT ")), times);

    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/proxy.md");
    let page = std::fs::read_to_string(page).expect("docs/proxy.md");
    let section = page.split("\n## ").find(|it| it.starts_with("Metrics\n"));
    let section = section.expect("a section on metrics");
    let rows: Vec<&str> = section.lines().filter(|it| it.starts_with("| `")).collect();
    for (full, kind) in &types {
        let name = full.strip_prefix("hetero_kv_proxy_").expect("our prefix");
        let suffix = if *kind == "counter" { "_total" } else { "" };
        let begin = format!("| `{name}{suffix}` |");
        let row = rows.iter().find(|row| row.starts_with(&begin));
        let row = row.unwrap_or_else(|| panic!("docs/proxy.md has no row {begin}"));
        for label in labels(&text, full) {
            assert!(row.contains(&format!("`{label}`")), "{row} lacks {label}");
        }
    }
    assert_eq!(
        rows.len(),
        registered,
        "a row of a metric that is not there"
    );
}
