//! Where output goes that cannot be written.

use std::fs::File;
use std::process::{Command, Output};

const TOPOLOGY: &str = "--prefill dp=1,tp=1 --decode dp=1,tp=1 --kv mla:64";

fn with_full(stream: fn(&mut Command, File) -> &mut Command, words: &str) -> Output {
    let full = File::options()
        .write(true)
        .open("/dev/full")
        .expect("Linux has it");
    let mut command = Command::new(env!("CARGO_BIN_EXE_hetero-kv"));
    command.args(words.split_whitespace());
    stream(&mut command, full);
    command.output().expect("the executable under test starts")
}

#[test]
fn a_full_stderr_changes_neither_the_answer_nor_the_exit_code() {
    let lab = with_full(
        Command::stderr,
        &format!("lab {TOPOLOGY} --requests 4 --json"),
    );
    assert_eq!(lab.status.code(), Some(0));
    let json: serde_json::Value = serde_json::from_slice(&lab.stdout).expect("an answer");
    assert_eq!(json["requests"]["ok"], 4);
    let refused = "plan --prefill dp=1,tp=3 --decode dp=1,tp=2 --kv gqa:8:64";
    let refused = with_full(Command::stderr, refused);
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn a_full_stdout_is_said_and_exits_2() {
    for words in [
        format!("plan {TOPOLOGY}"),
        format!("lab {TOPOLOGY} --requests 4"),
    ] {
        let run = with_full(Command::stdout, &words);
        let stderr = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(2), "{words}: {stderr}");
        assert!(
            stderr.contains("writing to stdout: No space left"),
            "{stderr}"
        );
    }
}
