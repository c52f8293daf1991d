//! Bodies are JSON of the sizes that were asked for, and differ where they should.

use clap::Parser;
use serde_json::Value;

use super::*;
use crate::cli::{Cli, Command};

fn bodies(flags: &[&str]) -> Bodies {
    let line = ["hetero-kv-proxy", "bench", "--url", "http://h:1"];
    match Cli::try_parse_from(line.iter().chain(flags))
        .expect("flags")
        .command
    {
        Command::Bench(args) => Bodies::new(&args, "a \"model\""),
        Command::Serve(_)
        | Command::Check(_)
        | Command::Sign(_)
        | Command::Trace(_)
        | Command::Mock(_) => {
            unreachable!("bench was parsed")
        }
    }
}

fn json(bodies: &Bodies, index: u64) -> Value {
    serde_json::from_slice(&bodies.make(index)).expect("JSON")
}

#[test]
fn prompts_have_their_size_and_begin_differently() {
    for size in [1_usize, 15, 16, 17, 36_000] {
        let bodies = bodies(&["--prompt-bytes", &size.to_string()]);
        let (first, second) = (json(&bodies, 0), json(&bodies, 1));
        assert_eq!(first["prompt"].as_str().expect("a text").len(), size);
        assert_eq!(first["model"], "a \"model\"");
        assert_eq!(first["stream"], true);
        assert_eq!(first["max_tokens"], 16);
        assert_eq!(first["ignore_eos"], true);
        assert_eq!(first["stream_options"]["include_usage"], true);
        if size >= 15 {
            assert_ne!(first["prompt"], second["prompt"]);
        }
        assert_eq!(json(&bodies, 0), first);
    }
}

#[test]
fn token_ids_have_their_count() {
    for count in [1_usize, 16, 17, 8_192] {
        let bodies = bodies(&["--prompt-tokens", &count.to_string(), "--no-stream"]);
        let (first, second) = (json(&bodies, 7), json(&bodies, 8));
        assert_eq!(first["prompt"].as_array().expect("a list").len(), count);
        assert!(first.get("stream").is_none() && first.get("stream_options").is_none());
        if count >= 16 {
            assert_ne!(first["prompt"], second["prompt"]);
        }
    }
}

#[test]
fn the_same_prompt_is_the_same() {
    let bodies = bodies(&["--same-prompt", "--chat", "--prompt-bytes", "40"]);
    assert_eq!(bodies.make(1), bodies.make(2));
    let content = &json(&bodies, 1)["messages"][0]["content"];
    assert_eq!(content.as_str().expect("a text").len(), 40);
}
