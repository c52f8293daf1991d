//! `hetero-kv lab` as users run it: real processes, real sockets, every byte compared.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::run::{Run, hetero_kv};

const GQA: &str = "--kv gqa:4:16";
const MLA: &str = "--kv mla:64";

/// Runs with `--json` and parses it.
pub(crate) fn lab(words: &str) -> (Run, Value) {
    parsed(hetero_kv(&format!("lab {words} --json")))
}

/// What a run with `--json` printed.
pub(crate) fn parsed(run: Run) -> (Run, Value) {
    let json = serde_json::from_str(&run.stdout)
        .unwrap_or_else(|error| panic!("{error}: {:?}\n{}", run.stdout, run.stderr));
    (run, json)
}

fn number(json: &Value, key: &str) -> u64 {
    json[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key}: {json}"))
}

fn requests(json: &Value) -> [u64; 4] {
    ["ok", "failed", "recomputed", "cancelled"].map(|key| number(&json["requests"], key))
}

/// Nothing wrong: exit 0, no byte unequal, nothing held.
pub(crate) fn assert_clean((run, json): &(Run, Value)) {
    assert_eq!(run.code, 0, "{json}\n{}", run.stderr);
    assert_eq!(number(json, "bytes_mismatched"), 0);
    assert_eq!(number(json, "blocks_held"), 0);
}

#[test]
fn pairs_of_unlike_layouts_are_exact() {
    for (shapes, kv, more) in [
        (
            "--prefill dp=1,tp=2 --decode dp=2,tp=1",
            GQA,
            "--transport process",
        ),
        (
            "--prefill dp=1,tp=2 --decode dp=2,tp=1",
            GQA,
            "--transport tcp --layout mixed",
        ),
        (
            "--prefill dp=2,tp=1 --decode dp=1,tp=4",
            GQA,
            "--block-size 4 --layout nhd",
        ),
        (
            "--prefill dp=1,tp=4 --decode dp=4,tp=1",
            MLA,
            "--dtype fp32",
        ),
        (
            "--prefill 2xdp=1,tp=2 --decode dp=2,tp=1",
            MLA,
            "--transport tcp",
        ),
        (
            "--prefill dp=1,tp=4 --decode dp=2,tp=1",
            MLA,
            "--policy round_robin",
        ),
        (
            "--prefill dp=1,tp=4 --decode dp=1,tp=2",
            "--kv gqa:2:16",
            "--stripe-bytes-min 1 --transport tcp",
        ),
    ] {
        let found = lab(&format!(
            "{shapes} {kv} {more} --requests 40 --concurrency 8"
        ));
        assert_clean(&found);
        let json = &found.1;
        assert_eq!(requests(json), [40, 0, 0, 0], "{shapes}");
        let reads = json["reads_by_source"].as_object().expect("an object");
        assert!(
            reads.values().all(|reads| reads.as_u64() > Some(0)),
            "{shapes}: a source is never read: {json}"
        );
        assert!(number(json, "bytes_moved") > 0);
    }
}

/// 1,000 requests over two prefill instances of eight ranks, read by eight decode engines: the key of
/// each session, the address that it dialled, the rank that was read and the engine that heard the
/// acknowledgement are one and the same.
#[test]
fn a_thousand_requests_name_one_source_four_times() {
    let folder = tempfile::tempdir().expect("a folder");
    for transport in ["process", "tcp"] {
        let path = folder.path().join(transport);
        let found = lab(&format!(
            "--prefill 2xdp=1,tp=8 --decode dp=8,tp=1 {MLA} --layers 2 --requests 1000 \
             --concurrency 64 --prompt-tokens 2-40 --transport {transport} --trace {}",
            path.display()
        ));
        assert_clean(&found);
        let text = std::fs::read_to_string(&path).expect("the trace");
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("a line of JSON"))
            .collect();
        let (mut requests, mut sources) = (BTreeSet::new(), BTreeSet::new());
        for line in &lines {
            let part = |key: &str| {
                line[key]
                    .as_str()
                    .unwrap_or_else(|| panic!("{key}: {line}"))
            };
            let read = part("read");
            assert_eq!(part("session"), read, "{line}");
            assert_eq!(part("dialled_rank"), read, "{line}");
            assert!(
                read.starts_with(&format!("{}.", part("acknowledged"))),
                "{line}"
            );
            let address = part("dialled");
            assert!(
                address.starts_with(if transport == "tcp" {
                    "127.0.0.1:"
                } else {
                    "pid "
                }),
                "{line}"
            );
            assert_eq!(line["agree"], true);
            requests.insert(line["request"].as_u64());
            sources.insert(read.to_owned());
        }
        // One line each, since one latent is read from one rank; the prompts have two tokens at
        // least, so each request reads.
        assert_eq!((lines.len(), requests.len()), (1000, 1000));
        assert_eq!(sources.len(), 16);
    }
}

/// Bytes by the model's own numbers: 40 prompts of 33 tokens, of which 32 are moved.
#[test]
fn bytes_are_those_of_the_prompts() {
    let found = lab(&format!(
        "--prefill dp=1,tp=2 --decode dp=1,tp=1 {GQA} --requests 40 --prompt-tokens 33-33"
    ));
    assert_clean(&found);
    let token_bytes = 4 * 2 * 16 * 2 * 4; // heads, key and value, head_dim, bf16, layers
    assert_eq!(number(&found.1, "bytes_moved"), 40 * 32 * token_bytes);
    assert_eq!(found.1["reads_by_source"]["0.0.0"], 40);
    assert_eq!(found.1["reads_by_source"]["0.0.1"], 40);
}

#[test]
fn json_has_the_documented_keys_and_stdout_nothing_else() {
    let (_, json) = lab(&format!(
        "--prefill dp=1,tp=1 --decode dp=1,tp=1 {MLA} --requests 3"
    ));
    let keys = |json: &Value| -> BTreeSet<String> {
        json.as_object()
            .expect("an object")
            .keys()
            .cloned()
            .collect()
    };
    let set =
        |keys: &[&str]| -> BTreeSet<String> { keys.iter().map(|key| (*key).to_owned()).collect() };
    let expected: BTreeSet<String> = set(&[
        "requests",
        "bytes_moved",
        "bytes_mismatched",
        "reads_by_source",
        "transport",
        "transports",
        "blocks_held",
        "gb_per_s",
        "read_s",
        "read_gb_per_s",
        "load_ms",
        "cpu_s",
    ]);
    assert_eq!(keys(&json), expected);
    let expected: BTreeSet<String> = set(&["ok", "failed", "recomputed", "cancelled"]);
    assert_eq!(keys(&json["requests"]), expected);
    assert_eq!(keys(&json["load_ms"]), set(&["p50", "p90", "p99", "max"]));
    assert!(json["gb_per_s"].as_f64() > Some(0.0));
    assert!(json["cpu_s"].as_f64() > Some(0.0));
}

/// Rows of 8 bytes make filling and comparing ten times as slow as reading them by sockets: of such a
/// run the reads are a small part, and any pass over the bytes that counted as reading would be more.
#[test]
fn filling_and_comparing_are_no_reading() {
    let found = lab(
        "--prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mla:4 --block-size 2048 --layers 64 \
         --transport tcp --requests 6 --concurrency 1 --prompt-tokens 65536-65536",
    );
    assert_clean(&found);
    let json = &found.1;
    let figure = |key: &str| json[key].as_f64().expect("a number");
    let bytes = number(json, "bytes_moved") as f64;
    let whole_s = bytes / 1e9 / figure("gb_per_s");
    let share = figure("read_s") / whole_s;
    assert!(share < 0.16, "{share} of {whole_s} s: {json}");
    // One read at a time, so that the loads' times add up to it.
    let times = &json["load_ms"];
    let (p50, max) = (times["p50"].as_f64(), times["max"].as_f64());
    assert!(p50 > Some(0.0) && p50 <= max, "{json}");
    assert!(
        figure("read_s") <= 6.0 * max.expect("a number") / 1e3,
        "{json}"
    );
    let rate = bytes / 1e9 / figure("read_s");
    assert!(
        (figure("read_gb_per_s") / rate - 1.0).abs() < 1e-6,
        "{json}"
    );
}

/// The reads' rate is that of the links, never more, whatever is done between reads; one read over four
/// holders has more than one link gives. How much more is a bench's matter: here other tests run.
#[test]
fn limited_links_show_as_their_rate() {
    const LINK_GB_PER_S: f64 = 0.04;
    // A pause of up to 20 ms between reads, of 944 ms and 236, is made up for as lateness is.
    for (holders, least, most) in [(1, 0.5, 1.03), (4, 1.1, 4.4)] {
        let mut best = 0.0_f64;
        for _ in 0..5 {
            let found = lab(&format!(
                "--prefill dp=1,tp={holders} --decode dp=1,tp=1 --kv mla:576 --layers 16 \
                 --transport tcp --requests 3 --concurrency 1 --prompt-tokens 2048-2048 \
                 --stripe-bytes-min 1 --fault slow-prefill@0=40"
            ));
            assert_clean(&found);
            let rate = found.1["read_gb_per_s"].as_f64().expect("a number") / LINK_GB_PER_S;
            assert!(rate < most, "{holders}: {}", found.1);
            best = best.max(rate);
            if best > least {
                break;
            }
        }
        assert!(best > least, "{holders}: {best} links");
    }
}

/// `docs/lab.md` against the help and against what `--json` prints.
#[test]
fn the_page_has_every_flag_and_every_key() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/lab.md");
    let page = std::fs::read_to_string(page).expect("the page is in the repository");
    let on_page = |start: &str| -> BTreeSet<String> {
        page.split('`')
            .skip(1)
            .step_by(2)
            .filter_map(|code| code.split_whitespace().next())
            .filter(|word| word.starts_with(start))
            .map(str::to_owned)
            .collect()
    };
    let help = hetero_kv("lab --help").stdout;
    let options = help
        .lines()
        .filter_map(|line| line.trim_start().split(' ').next());
    let mut flags: BTreeSet<String> = options
        .filter(|word| word.starts_with("--"))
        .map(str::to_owned)
        .collect();
    assert!(flags.remove("--prefill") && flags.len() > 15, "{help}");
    flags.insert("--prefill".to_owned());
    assert_eq!(
        flags.difference(&on_page("--")).next(),
        None,
        "not on the page"
    );
    assert_eq!(
        on_page("--").difference(&flags).next(),
        None,
        "no such flag"
    );
    let (_, json) = lab(&format!(
        "--prefill dp=1,tp=1 --decode dp=1,tp=1 {MLA} --requests 1"
    ));
    let taken = &json["transports"]["process"];
    for object in [&json, &json["requests"], &json["load_ms"], taken] {
        for key in object.as_object().expect("an object").keys() {
            assert!(
                page.contains(&format!("`{key}`")),
                "{key} is not on the page"
            );
        }
    }
    for code in ["Exit 0:", "1: a byte differed", "2: wrong usage"] {
        assert!(page.contains(code), "{code}");
    }
}

#[test]
fn the_table_ends_with_what_is_held() {
    let run = hetero_kv(&format!(
        "lab --prefill dp=1,tp=2 --decode dp=1,tp=1 {MLA} --requests 10"
    ));
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(
        run.stdout
            .contains("10 ok, 0 failed, 0 recomputed, 0 cancelled"),
        "{}",
        run.stdout
    );
    assert!(run.stdout.contains("0.0.1"), "{}", run.stdout);
    assert!(run.stdout.contains("one was under way"), "{}", run.stdout);
    assert_eq!(run.stdout.lines().last(), Some("blocks still held: 0"));
}

#[test]
fn a_stop_costs_no_request() {
    for fault in [
        "stop-prefill:0.0.1@0.3=1",
        "stop-prefill@0.3=1",
        "stop-decode:0.0@0.3=1",
    ] {
        let found = lab(&format!(
            "--prefill dp=1,tp=2 --decode dp=2,tp=1 {GQA} --requests 60 --transport tcp --fault {fault}"
        ));
        assert_clean(&found);
        assert_eq!(requests(&found.1), [60, 0, 0, 0], "{fault}");
    }
}

#[test]
fn a_killed_prefill_rank_fails_some_and_harms_nothing() {
    let found = lab(&format!(
        "--prefill 2xdp=1,tp=2 --decode dp=2,tp=1 {GQA} --requests 300 --concurrency 32 \
         --lease-s 2 --transport tcp --fault kill-prefill:1.0.1@0.5"
    ));
    assert_clean(&found);
    let [ok, failed, recomputed, cancelled] = requests(&found.1);
    assert!(failed > 0 && ok > 200, "{:?}", requests(&found.1));
    assert_eq!((ok + failed, recomputed, cancelled), (300, 0, 0));
}

/// Nobody acknowledges what it had claimed, so those leases run out.
#[test]
fn without_decode_the_rest_fails_and_prefill_holds_nothing() {
    let found = lab(&format!(
        "--prefill dp=1,tp=2 --decode dp=1,tp=1 {GQA} --requests 100 --lease-s 2 \
         --fault kill-decode@0.5"
    ));
    assert_clean(&found);
    let [ok, failed, recomputed, cancelled] = requests(&found.1);
    assert!(ok >= 30 && failed >= 50, "{:?}", requests(&found.1));
    assert_eq!((ok + failed, recomputed, cancelled), (100, 0, 0));
}

#[test]
fn a_failed_load_is_recomputed_where_that_is_the_policy() {
    let found = lab(&format!(
        "--prefill 2xdp=1,tp=1 --decode dp=1,tp=1 {GQA} --requests 300 --concurrency 64 \
         --lease-s 2 --transport tcp --load-failure recompute \
         --fault slow-prefill:1@0=0.05 --fault kill-prefill:1@0.6"
    ));
    assert_clean(&found);
    let [ok, failed, recomputed, cancelled] = requests(&found.1);
    assert!(recomputed > 0, "{:?}", requests(&found.1));
    assert_eq!((ok + failed + recomputed, cancelled), (300, 0));
}

/// The negative control: lab has to see what it says is not there.
#[test]
fn corrupted_bytes_are_counted_and_exit_1() {
    for fault in ["corrupt-prefill@0.5", "corrupt-decode@0.5"] {
        let (run, json) = lab(&format!(
            "--prefill dp=1,tp=1 --decode dp=1,tp=1 {MLA} --requests 20 --fault {fault}"
        ));
        assert_eq!(run.code, 1, "{fault}: {json}\n{}", run.stderr);
        assert!(number(&json, "bytes_mismatched") > 0, "{fault}: {json}");
        assert_eq!(
            requests(&json),
            [20, 0, 0, 0],
            "nothing but the bytes tells"
        );
    }
}

#[test]
fn a_negative_control_that_was_never_planted_does_not_pass() {
    let (run, _) = lab(&format!(
        "--prefill dp=1,tp=1 --decode dp=1,tp=1 {MLA} --requests 5 --fault corrupt-prefill@600s"
    ));
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(
        run.stderr
            .contains("corrupt-prefill:0@600s was not planted")
    );
}

#[test]
fn without_acknowledgements_leases_end_by_time() {
    let begun = Instant::now();
    let found = lab(&format!(
        "--prefill dp=1,tp=2 --decode dp=2,tp=1 {MLA} --requests 40 --concurrency 8 --lease-s 2 \
         --fault drop-acks-decode@0.5"
    ));
    assert_clean(&found);
    assert_eq!(requests(&found.1), [40, 0, 0, 0]);
    assert!(
        begun.elapsed() > Duration::from_secs(2),
        "nobody waited for the leases"
    );
}

#[test]
fn aborted_requests_are_cancelled_and_hold_nothing() {
    // Slow enough that loads are under way when the clients leave.
    for fault in ["abort-decode@0.5", "abort-prefill@0.5"] {
        let found = lab(&format!(
            "--prefill dp=1,tp=2 --decode dp=2,tp=1 {GQA} --requests 60 --concurrency 30 \
             --transport tcp --fault slow-prefill@0=0.5 --fault {fault} --blocks 16"
        ));
        assert_clean(&found);
        let [ok, failed, recomputed, cancelled] = requests(&found.1);
        assert!(cancelled > 0, "{fault}: {:?}", requests(&found.1));
        assert_eq!((ok + cancelled, failed, recomputed), (60, 0, 0), "{fault}");
    }
}

#[test]
fn a_restarted_engine_serves_again() {
    for fault in ["restart-prefill@0.3", "restart-decode:0.0@0.3"] {
        let found = lab(&format!(
            "--prefill dp=1,tp=2 --decode dp=2,tp=1 {MLA} --requests 200 --concurrency 8 \
             --lease-s 2 --fault {fault}"
        ));
        assert_clean(&found);
        let [ok, failed, ..] = requests(&found.1);
        // At most what was under way.
        assert!(
            failed <= 8 && ok >= 192,
            "{fault}: {:?}",
            requests(&found.1)
        );
    }
}

/// One prefill engine with two holders, each at 2 MB/s: reading both is faster than reading one.
#[test]
fn a_rate_bounds_the_source_and_spreading_doubles_it() {
    let rate = |policy: &str| {
        let found = lab(&format!(
            "--prefill dp=1,tp=2 --decode dp=2,tp=1 {MLA} --layers 8 --requests 120 \
             --concurrency 16 --prompt-tokens 33-33 --transport tcp --fault slow-prefill@0=2 \
             --policy {policy}"
        ));
        assert_clean(&found);
        let bytes_per_s = found.1["gb_per_s"].as_f64().expect("a number") * 1e9;
        (bytes_per_s, found.1["reads_by_source"]["0.0.1"].as_u64())
    };
    let (fixed, second_holder) = rate("fixed");
    assert_eq!(second_holder, Some(0));
    assert!(fixed < 2.1e6, "{fixed} bytes/s from one holder of 2 MB/s");
    let (spread, second_holder) = rate("hash");
    assert!(second_holder > Some(0));
    assert!(spread > 1.3 * fixed, "{spread} against {fixed}");
}

/// Two sources, and a reader that takes no more than 2 MB/s from both together.
#[test]
fn a_rate_bounds_the_reader() {
    let found = lab(&format!(
        "--prefill dp=1,tp=2 --decode dp=1,tp=1 {GQA} --layers 8 --requests 60 \
         --prompt-tokens 33-33 --transport tcp --fault slow-decode@0=2"
    ));
    assert_clean(&found);
    assert_eq!(requests(&found.1), [60, 0, 0, 0]);
    let bytes_per_s = found.1["gb_per_s"].as_f64().expect("a number") * 1e9;
    assert!(bytes_per_s < 2.1e6, "{bytes_per_s}");
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    let pair = "--prefill dp=1,tp=2 --decode dp=2,tp=1";
    for (words, parts) in [
        (
            format!("--decode dp=1,tp=1 {MLA} --requests 1"),
            &["--prefill is missing"][..],
        ),
        (format!("{pair} --requests 1"), &["--kv is missing"]),
        (format!("{pair} {MLA}"), &["--requests is missing"]),
        (format!("{pair} {MLA} --requests 0"), &["--requests", "1.."]),
        (
            format!("--prefill dp=1,tp=3 --decode dp=1,tp=2 {MLA} --requests 1"),
            &["refused", "3", "2"],
        ),
        (
            format!("--prefill dp=1,tp=3 --decode dp=1,tp=3 {GQA} --requests 1"),
            &["refused", "3", "4"],
        ),
        (
            format!("--prefill dp=8,tp=8 --decode dp=1,tp=1 {MLA} --requests 1"),
            &["65 ranks", "64", "--prefill"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --transport mori"),
            &[
                "mori runs inside Python engines",
                "hetero-kv doctor --transport mori",
                "kv_connector_extra_config",
            ],
        ),
        (
            format!("{pair} {MLA} --requests 1 --fault slow-prefill@0=5"),
            &["slow-prefill", "--transport tcp", "not on process"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --transport auto --fault slow-decode@0=5"),
            &["slow-decode", "--transport tcp", "not on auto"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --fault kill-prefill:1@0.5"),
            &["kill-prefill:1", "1 prefill instances"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --fault kill-prefill:0.0.2@0.5"),
            &["kill-prefill:0.0.2", "dp=1,tp=2"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --fault nonsense"),
            &["has no @WHEN", "KIND-ROLE"],
        ),
        (
            format!("{pair} --kv mla:3 --requests 1"),
            &["--kv mla:3", "words of 8"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --blocks 1 --prompt-tokens 1-64"),
            &["--blocks 1", "needs 4"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --blocks 16000000 --layers 4096"),
            &["GiB", "lower --blocks"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --prompt-tokens 5-2"),
            &["MIN <= MAX"],
        ),
        (
            format!("{pair} {MLA} --requests 1 --trace /nowhere/trace.jsonl"),
            &["--trace /nowhere/trace.jsonl", "No such file"],
        ),
    ] {
        let run = hetero_kv(&format!("lab {words}"));
        assert_eq!(run.code, 2, "{words}: {}", run.stderr);
        assert!(run.stdout.is_empty(), "{words}: {}", run.stdout);
        for part in parts {
            assert!(
                run.stderr.contains(part),
                "{words}: no {part:?} in {}",
                run.stderr
            );
        }
    }
}

/// With a device, `make test-rdma` runs labs of this transport.
#[test]
fn rdma_that_is_not_there_is_told_before_anything_starts() {
    let devices = std::fs::read_dir("/sys/class/infiniband");
    if devices.is_ok_and(|mut devices| devices.next().is_some()) {
        eprintln!("skipped: this host has an RDMA device");
        return;
    }
    let words = "--prefill dp=1,tp=2 --decode dp=2,tp=1 --kv mla:64 --requests 1";
    let run = hetero_kv(&format!("lab {words} --transport verbs"));
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(
        run.stderr.contains("--transport verbs") && run.stderr.contains("no RDMA: libibverbs"),
        "{}",
        run.stderr
    );
}

/// Whatever ends a lab ends its processes.
#[test]
fn a_killed_lab_leaves_no_process_behind() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hetero-kv"))
        .args(
            format!(
                "lab --prefill dp=1,tp=2 --decode dp=1,tp=2 {MLA} --requests 1000000 \
                 --fault stop-decode@0.00001=600"
            )
            .split_whitespace(),
        )
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the executable under test starts");
    let lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let fault = lines
        .map_while(Result::ok)
        .find(|line| line.contains("fault stop-decode"));
    assert!(fault.is_some(), "the fault is told");
    let descendants = descendants(child.id());
    assert_eq!(descendants.iter().filter(|pid| runs(**pid)).count(), 6);
    child.kill().expect("it runs");
    child.wait().expect("a child");
    let deadline = Instant::now() + Duration::from_secs(20);
    while descendants.iter().any(|pid| runs(*pid)) {
        assert!(Instant::now() < deadline, "{descendants:?} are left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn descendants(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut to_ask = vec![pid];
    while let Some(pid) = to_ask.pop() {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
            continue;
        };
        for task in tasks.map_while(Result::ok) {
            let children =
                std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for child in children
                .split_whitespace()
                .filter_map(|pid| pid.parse().ok())
            {
                found.push(child);
                to_ask.push(child);
            }
        }
    }
    found
}

/// A zombie has ended, and has no words.
fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|words| words.contains("lab-"))
}
