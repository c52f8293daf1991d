//! When a revision that no worker tells is told of, and that it is once.

use super::*;

fn weights(text: &str) -> Option<Weights> {
    Weights::parse(text).expect("weights")
}

fn told(prefill: &[&str], decode: &[&str]) -> Told {
    let all = |names: &[&str]| {
        let names = names.iter();
        let names = names.map(|name| (!name.is_empty()).then(|| (*name).to_owned()));
        names.collect()
    };
    Vec::from([("prefill", all(prefill)), ("decode", all(decode))])
}

#[test]
fn where_nobody_can_come_it_is_told_at_once_and_once() {
    let weights = weights("v1=90,vv2=10,v3=0");
    let told = told(&["v1", "v2", ""], &["v1", "v2"]);
    let mut question = Question::default();
    let found = question.look(weights.as_ref(), &told, false, 0);
    let want = Unheard {
        unheard: "vv2 (prefill, decode)".to_owned(),
        known: "v1, v2".to_owned(),
        is_any_served: true,
    };
    assert_eq!(found, Some(want));
    assert!(!question.is_open());
}

#[test]
fn who_may_register_has_time_from_the_first_one_on() {
    let weights = weights("v1=1,v2=1");
    let mut question = Question::default();
    let mut look = |prefill: &[&str], decode: &[&str], now_ms| {
        let found = question.look(weights.as_ref(), &told(prefill, decode), true, now_ms);
        (found, question.is_open())
    };
    assert_eq!(look(&[], &[], 3_600_000), (None, true));
    assert_eq!(look(&["v1"], &[], 3_600_100), (None, true));
    assert_eq!(look(&["v1"], &["v1", "v2"], 3_610_099), (None, true));
    let (found, open) = look(&["v1"], &["v1", "v2"], 3_610_100);
    assert_eq!(found.expect("the time is over").unheard, "v2 (prefill)");
    assert!(!open);
}

#[test]
fn shares_that_are_all_heard_of_and_none_at_all_are_not_told_of() {
    for weights in [weights("v1=1"), weights("")] {
        let mut question = Question::default();
        let told = told(&["v1"], &["v1"]);
        assert_eq!(question.look(weights.as_ref(), &told, false, 0), None);
        assert!(!question.is_open());
    }
}

#[test]
fn no_worker_that_tells_any_is_said_so() {
    let weights = weights("v1=1");
    let told = told(&[""], &[""]);
    let found = Question::default().look(weights.as_ref(), &told, false, 0);
    let found = found.expect("unheard of");
    assert_eq!(found.known, "none");
    assert!(!found.is_any_served);
}

#[test]
fn a_revision_that_one_role_lacks_serves_nobody() {
    let weights = weights("v1=1,v2=1");
    let told = told(&["v1"], &["v2"]);
    let found = Question::default().look(weights.as_ref(), &told, false, 0);
    assert!(!found.expect("unheard of").is_any_served);
}
