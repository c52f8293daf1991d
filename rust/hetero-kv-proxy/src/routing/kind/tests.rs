use super::*;
use proptest::prelude::*;

fn told(fields: &[(Field, &str)]) -> Traits {
    fields
        .iter()
        .fold(Traits::default(), |traits, (field, value)| {
            traits.with(*field, value)
        })
}

#[test]
fn a_field_that_both_tell_and_differ_in_keeps_a_pair_apart() {
    for field in Field::ALL {
        let (one, other) = match field {
            Field::Control => (LOOPBACK, NETWORK),
            Field::Model
            | Field::Revision
            | Field::Dtype
            | Field::KvHeads
            | Field::Layout
            | Field::Mode => ("one", "other"),
        };
        let prefill = told(&[(field, one)]);
        let unlike = prefill.unlike(&told(&[(field, other)])).expect("no pair");
        assert_eq!(
            (&*unlike.field, &*unlike.prefill, &*unlike.decode),
            (field.key(), one, other)
        );
        assert_eq!(prefill.unlike(&told(&[(field, one)])), None);
        // What one side does not tell may be anything.
        assert_eq!(prefill.unlike(&Traits::default()), None);
        assert_eq!(Traits::default().unlike(&prefill), None);
    }
    // Decode dials prefill, and not the other way.
    let (near, far) = (
        told(&[(Field::Control, LOOPBACK)]),
        told(&[(Field::Control, NETWORK)]),
    );
    assert_eq!(far.unlike(&near), None);
}

#[test]
fn a_model_has_all_of_its_names_and_no_part_of_one() {
    let traits = told(&[(Field::Model, "org/base|alias|lora-a")]);
    for name in ["org/base", "alias", "lora-a"] {
        assert_eq!(traits.serves(name), Some(true), "{name}");
    }
    for name in ["org", "base|alias", "", "lora"] {
        assert_eq!(traits.serves(name), Some(false), "{name}");
    }
    assert_eq!(Traits::default().serves("any"), None);
}

fn some_traits() -> impl Strategy<Value = Traits> {
    let value = |names: [&'static str; 3]| {
        prop::option::of(prop::sample::select(names.to_vec()).prop_map(str::to_owned))
    };
    let fields = (
        value(["m", "n", "o"]),
        value(["r", "s", "t"]),
        prop::option::of(prop::bool::ANY),
    );
    fields.prop_map(|(model, revision, near)| {
        let mut traits = Traits::default();
        if let Some(model) = model {
            traits = traits.with(Field::Model, &model);
        }
        if let Some(revision) = revision {
            traits = traits.with(Field::Revision, &revision);
        }
        if let Some(near) = near {
            traits = traits.with(Field::Control, if near { LOOPBACK } else { NETWORK });
        }
        traits
    })
}

proptest! {
    /// Whoever comes and goes: who goes with whom is what their fields say, and there are never more
    /// kinds than workers.
    #[test]
    fn kinds_say_what_the_fields_say(steps in prop::collection::vec((some_traits(), any::<prop::sample::Index>(), prop::bool::ANY), 1..60)) {
        let mut kinds = Kinds::default();
        let mut here: Vec<(KindId, Traits)> = Vec::new();
        let mut most = 0;
        for (traits, leaver, leaves) in steps {
            if leaves && !here.is_empty() {
                let (kind, _) = here.swap_remove(leaver.index(here.len()));
                kinds.leave(kind);
            } else {
                here.push((kinds.enter(&traits), traits));
            }
            most = most.max(here.len());
            let all: KindSet = here.iter().map(|(kind, _)| *kind).collect();
            for (prefill, own) in &here {
                prop_assert_eq!(kinds.traits(*prefill), own);
                for (decode, other) in &here {
                    let goes = own.unlike(other).is_none();
                    prop_assert_eq!(kinds.decodes(*prefill).contains(*decode), goes);
                    prop_assert_eq!(kinds.going_with(own, &all).contains(*decode), goes);
                    prop_assert_eq!(prefill == decode, own == other);
                }
            }
        }
        prop_assert!(kinds.0.len() <= most + 1);
    }
}

#[test]
fn sets_hold_what_was_put_in() {
    let of = |kinds: &[usize]| -> KindSet { kinds.iter().map(|kind| KindId(*kind)).collect() };
    let mut set = of(&[0, 63, 64, 200]);
    set.remove(KindId(63));
    set.remove(KindId(900));
    let inside: Vec<usize> = set.iter().map(|kind| kind.0).collect();
    assert_eq!(inside, [0, 64, 200]);
    assert!(set.contains(KindId(64)) && !set.contains(KindId(63)) && !set.contains(KindId(900)));
    assert!(set.meets(&of(&[64])) && !set.meets(&of(&[1, 65])));
    let both: Vec<usize> = set
        .and(&of(&[1, 64, 900]))
        .iter()
        .map(|kind| kind.0)
        .collect();
    assert_eq!(both, [64]);
    assert!(of(&[]).is_empty() && set.and(&of(&[5])).is_empty() && !set.is_empty());
}

fn handshake(fields: &[(&str, &str)]) -> Traits {
    let fields = fields
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Traits::default().with_compat(Some(Arc::new(fields.collect())))
}

#[test]
fn pairs_that_a_handshake_would_refuse_are_none() {
    let own = handshake(&[("block_size", "16"), ("revision", "abc")]);
    let unlike = |other: &Traits| {
        let unlike = own.unlike(other)?;
        Some([unlike.field, unlike.prefill, unlike.decode].map(String::from))
    };
    let named = |field: &str, prefill: &str, decode: &str| {
        Some([field, prefill, decode].map(str::to_owned))
    };
    assert_eq!(unlike(&own.clone()), None);
    assert_eq!(
        unlike(&handshake(&[("block_size", "32"), ("revision", "abc")])),
        named("block_size", "16", "32")
    );
    // It lists all that it compares.
    assert_eq!(
        unlike(&handshake(&[("revision", "abc")])),
        named("block_size", "16", "(not told)")
    );
    assert_eq!(
        unlike(&handshake(&[
            ("block_size", "16"),
            ("mla", "true"),
            ("revision", "abc")
        ])),
        named("mla", "(not told)", "true")
    );
    // Who tells no handshake may have any.
    assert_eq!(unlike(&Traits::default()), None);
    // Its revision is the worker's, unless that is told otherwise.
    assert_eq!(own.get(Field::Revision), Some("abc"));
    assert_eq!(
        unlike(&told(&[(Field::Revision, "abd")])),
        named("revision", "abc", "abd")
    );
    let renamed = own.clone().with(Field::Revision, "v1");
    assert_eq!(renamed.get(Field::Revision), Some("v1"));
    let unnamed = handshake(&[("revision", "none")]);
    assert_eq!(unnamed.get(Field::Revision), None);
    // What only a flag tells stays, but for a handshake.
    let flag = told(&[(Field::Revision, "v0"), (Field::Model, "m")]).with_compat(None);
    let both = renamed.clone().or(&flag);
    assert_eq!(
        (both.get(Field::Revision), both.get(Field::Model)),
        (Some("v1"), Some("m"))
    );
    assert_eq!(Traits::default().or(&own), Traits::default());
}

#[test]
fn requests_have_a_lane_where_their_workers_serve_no_other_model() {
    let told = |names: &str| Traits::default().with(Field::Model, names);
    let mut kinds = Kinds::default();
    let a = kinds.enter(&told("a|a-lora"));
    kinds.enter(&told("b").with(Field::Revision, "1"));
    kinds.enter(&told("b").with(Field::Revision, "2"));
    let lane = kinds.lane("a").expect("its own");
    assert_eq!(kinds.lane("a-lora"), Some(lane));
    assert!(kinds.lane("b").is_some_and(|other| other != lane));
    // It waits behind nobody, and nobody behind it.
    assert_eq!(kinds.lane("unheard"), Some(Lane::NOBODYS));
    // Names that overlap share workers.
    let wide = kinds.enter(&told("c|a-lora"));
    for name in ["a", "a-lora", "c"] {
        assert_eq!(kinds.lane(name), None, "{name}");
    }
    assert!(kinds.lane("b").is_some());
    kinds.leave(wide);
    assert_eq!(kinds.lane("a"), Some(lane));
    // One that tells none may serve all.
    let silent = kinds.enter(&Traits::default());
    assert_eq!((kinds.lane("a"), kinds.lane("b")), (None, None));
    kinds.leave(silent);
    kinds.leave(a);
    assert_eq!(kinds.lane("a"), Some(Lane::NOBODYS));
    assert!(kinds.lane("b").is_some());
}
