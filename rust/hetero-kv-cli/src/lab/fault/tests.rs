use std::time::Duration;

use super::{Fault, Kind, Role, When};

fn parsed(text: &str) -> Fault {
    text.parse().expect("in the grammar")
}

#[test]
fn every_part_is_read() {
    let fault = parsed("stop-decode:3.2.1@0.4=5");
    assert_eq!(fault.kind, Kind::Stop(Duration::from_secs(5)));
    assert_eq!(fault.role, Role::Decode);
    assert_eq!((fault.instance, fault.dp, fault.tp), (3, Some(2), Some(1)));
    assert_eq!(fault.when, When::Share(0.4));
}

#[test]
fn what_is_left_out_is_instance_0_and_all_its_ranks() {
    let fault = parsed("drop-acks-prefill@2.5s");
    assert_eq!(fault.kind, Kind::DropAcks);
    assert_eq!((fault.instance, fault.dp, fault.tp), (0, None, None));
    assert_eq!(fault.when, When::After(Duration::from_millis(2500)));
    assert_eq!(parsed("kill-prefill:1@0").dp, None);
}

#[test]
fn a_rate_is_in_megabytes() {
    assert_eq!(parsed("slow-prefill@0=0.5").kind, Kind::Slow(500_000));
}

#[test]
fn what_is_printed_is_read_back() {
    for text in [
        "kill-prefill:0.1.2@0.5000",
        "stop-decode:0@2s=1.5",
        "slow-prefill:1@0.0000=50",
        "drop-acks-decode:0.3@0.2500",
    ] {
        assert_eq!(parsed(text).to_string(), text);
    }
}

#[test]
fn texts_outside_the_grammar_say_what_is_wrong() {
    for (text, problem) in [
        ("kill-prefill", "has no @WHEN"),
        ("kill@0.5", "is not KIND-ROLE"),
        ("burn-prefill@0.5", "unknown kind \"burn\""),
        ("kill-proxy@0.5", "neither prefill nor decode"),
        ("kill-prefill@1.5", "from 0 to 1"),
        ("kill-prefill@nan", "from 0 to 1"),
        ("kill-prefill@-1s", "from 0 to 3600"),
        ("kill-prefill@0.5=3", "takes no argument"),
        ("stop-prefill@0.5", "needs an argument"),
        ("slow-prefill@0.5=0", "not above 0"),
        ("slow-prefill@0.5=inf", "from 0 to"),
        ("kill-prefill:a@0.5", "INSTANCE \"a\""),
        ("kill-prefill:0.0.0.0@0.5", "more than INSTANCE.DP.TP"),
        ("abort-decode:0.0.1@0.5", "takes no TP"),
        ("kill-prefill:99999999999@0.5", "INSTANCE"),
    ] {
        let error = text.parse::<Fault>().expect_err(text).to_string();
        assert!(error.contains(problem), "{text}: {error}");
        assert!(error.contains("KIND-ROLE[:INSTANCE"), "{error}");
    }
    assert!("x".repeat(10_000).parse::<Fault>().is_err());
}
