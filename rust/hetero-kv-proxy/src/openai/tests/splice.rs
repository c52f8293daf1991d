//! Changes of members, against a reference that edits parsed values.

use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::Value;

use super::{space, value};
use crate::openai::splice::{Change, Object};

#[test]
fn removal_takes_one_comma_wherever_the_member_stands() {
    for (body, want) in [
        (r#"{"r":1}"#, "{}"),
        (r#"{ "r" : 1 }"#, "{  }"),
        (r#"{"r":1,"a":2}"#, r#"{"a":2}"#),
        (r#"{"a":2,"r":1}"#, r#"{"a":2}"#),
        (r#"{"a":2 , "r":1 , "b":3}"#, r#"{"a":2 , "b":3}"#),
        (r#"{"a":2,"r":1,"s":1}"#, r#"{"a":2}"#),
        (r#"{"r":1,"s":1,"a":2}"#, r#"{"a":2}"#),
        (r#"{"r":1,"a":2,"s":1}"#, r#"{"a":2}"#),
        (r#"{"s":1,"r":1}"#, "{}"),
    ] {
        let object = Object::parse(body.as_bytes()).expect("object");
        let text = Bytes::from_static(body.as_bytes());
        for shared_min in [1, usize::MAX] {
            let changes = [Change::Remove("r"), Change::Remove("s")];
            let out = object.apply(&text, &changes, shared_min).concat();
            assert_eq!(String::from_utf8_lossy(&out), want, "{body}");
        }
    }
}

proptest! {
    /// Splicing equals editing the parsed object, and members that are not named keep their bytes.
    #[test]
    fn splicing_equals_editing_parsed_values(
        members in prop::collection::btree_map("[a-f]|.{0,4}", (value(), space(), space()), 0..8),
        order in any::<prop::sample::Index>(),
        set in prop::collection::btree_map("[a-f]", value(), 0..4),
        remove in prop::collection::btree_set("[a-f]", 0..4),
        shared_min in prop::sample::select(vec![1, 4, 16, usize::MAX]),
    ) {
        let mut parts: Vec<(String, String)> = members
            .iter()
            .map(|(name, (value, before, after))| {
                let raw = format!(
                    "{before}{}{after}:{before}{value}{after}",
                    Value::from(name.as_str()),
                );
                (name.clone(), raw)
            })
            .collect();
        if !parts.is_empty() {
            let at = order.index(parts.len());
            parts.rotate_left(at);
        }
        let text = format!(
            "{{{}}}",
            parts.iter().map(|(_, raw)| raw.as_str()).collect::<Vec<_>>().join(",")
        );
        let set: BTreeMap<String, String> = set
            .into_iter()
            .filter(|(name, _)| !remove.contains(name))
            .map(|(name, value)| (name, value.to_string()))
            .collect();
        let changes: Vec<Change<'_>> = set
            .iter()
            .map(|(name, value)| Change::Set(name, value))
            .chain(remove.iter().map(|name| Change::Remove(name)))
            .collect();
        let object = Object::parse(text.as_bytes()).expect("generated JSON");
        let text = Bytes::from(text);
        let pieces = object.apply(&text, &changes, shared_min);
        // What is long enough and not changed is the client's bytes themselves.
        let shared = |piece: &Bytes| text.as_ptr_range().contains(&piece.as_ptr());
        prop_assert!(pieces.iter().all(|piece| !shared(piece) || piece.len() >= shared_min));
        if changes.is_empty() && text.len() > 1 {
            prop_assert!(pieces.iter().any(shared) == (text.len() > shared_min));
        }
        let out = String::from_utf8(pieces.concat()).expect("UTF-8");

        let mut want: BTreeMap<String, Value> =
            members.iter().map(|(name, (value, _, _))| (name.clone(), value.clone())).collect();
        for name in &remove {
            want.remove(name);
        }
        for (name, value) in &set {
            want.insert(name.clone(), serde_json::from_str(value).expect("JSON"));
        }
        let got: BTreeMap<String, Value> = serde_json::from_str(&out).expect("spliced JSON");
        prop_assert_eq!(got, want);
        for (name, raw) in &parts {
            if !set.contains_key(name) && !remove.contains(name) {
                prop_assert!(out.contains(raw.trim()), "{raw} in {out}");
            }
        }
        if changes.is_empty() {
            prop_assert_eq!(out.as_bytes(), &text[..]);
        }
    }
}
