//! Which transports a lab goes by, and that its report says why.

use serde_json::{Value, json};

use crate::lab::{assert_clean, lab, parsed};
use crate::run::{Run, hetero_kv, without_process_memory};

/// Two prefill ranks, both read by each of two decode ranks: four pairs.
const PAIRS: &str = "--prefill dp=1,tp=2 --decode dp=2,tp=1 --kv gqa:4:16 --requests 40";

/// By the only transport taken: its reasons, pairs of ranks by text. All reads and all bytes are its.
fn reasons(found: &(Run, Value), name: &str) -> Vec<(String, u64)> {
    assert_clean(found);
    let json = &found.1;
    assert_eq!(json["requests"]["ok"], 40, "{json}");
    let transports = json["transports"].as_object().expect("an object");
    assert_eq!(transports.keys().collect::<Vec<_>>(), [name], "{json}");
    let taken = &transports[name];
    assert_eq!(taken["bytes"], json["bytes_moved"], "{json}");
    assert!(taken["bytes"].as_u64() > Some(0), "{json}");
    let sources = json["reads_by_source"].as_object().expect("an object");
    let reads: u64 = sources.values().filter_map(Value::as_u64).sum();
    assert_eq!(taken["reads"], reads, "{json}");
    let why = taken["why"].as_object().expect("an object");
    why.iter()
        .map(|(text, pairs)| (text.clone(), pairs.as_u64().expect("a count")))
        .collect()
}

#[test]
fn auto_takes_process_memory_on_one_host() {
    let found = lab(&format!("{PAIRS} --transport auto"));
    assert_eq!(found.1["transport"], "auto");
    assert_eq!(
        reasons(&found, "process"),
        [("best offered, probe passed".to_owned(), 4)]
    );
}

#[test]
fn auto_goes_by_sockets_where_process_memory_is_forbidden_and_says_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace.jsonl");
    let run = |words: &str| {
        let mut command = without_process_memory();
        command.args(format!("lab {PAIRS} {words}").split_whitespace());
        command
    };
    let traced = format!("--transport auto --json --trace {}", trace.display());
    if let Err(error) = run(&traced).output() {
        eprintln!("skipped: python3: {error}");
        return;
    }
    let by_json = Run::of(&mut run(&traced));
    if by_json.stderr.starts_with("prctl: ") {
        eprintln!("skipped: no seccomp filters here: {}", by_json.stderr);
        return;
    }
    let found = parsed(by_json);
    let reasons = reasons(&found, "tcp");
    let [(why, 4)] = reasons.as_slice() else {
        panic!("not one reason of four pairs: {reasons:?}");
    };
    assert!(
        why.starts_with("process: ") && why.contains("process_vm_readv: not permitted"),
        "{why}"
    );
    // What sessions say of themselves is what they dialled.
    let lines = std::fs::read_to_string(&trace).expect("the trace");
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        assert_eq!(
            (&line["transport"], &line["agree"]),
            (&json!("tcp"), &json!(true)),
            "{line}"
        );
    }
    let table = Run::of(&mut run("--transport auto")).stdout;
    assert!(table.contains("moved by tcp ("), "{table}");
    assert!(table.contains("\ntransport   auto: "), "{table}");
    assert!(
        table.contains(&format!("  4 pairs of ranks by tcp: {why}\n")),
        "{table}"
    );
    // Where it is set nothing else is taken instead.
    // A prompt of one token needs nothing from prefill, and would be served.
    let words = "--transport process --prompt-tokens 16-64 --json";
    let set = parsed(Run::of(&mut run(words)));
    assert_eq!(set.1["requests"]["ok"], 0, "{}", set.1);
    assert_eq!(set.1["transports"], json!({}));
}

#[test]
fn a_set_transport_is_the_one_that_the_report_shows() {
    for name in ["process", "tcp"] {
        let words = format!("{PAIRS} --transport {name}");
        let found = lab(&words);
        assert_eq!(found.1["transport"], name);
        assert_eq!(reasons(&found, name), [("set by choice".to_owned(), 4)]);
    }
    let table = hetero_kv(&format!("lab {PAIRS} --transport tcp")).stdout;
    assert!(
        table.contains("pairs of ranks by tcp: set by choice"),
        "{table}"
    );
}
