use super::*;
use crate::routing::policy::{PolicyKind, RequestKey};
use crate::routing::{
    Ask, BreakerRules, Field, HealthRules, InstanceIndex, InstanceSpec, Standing, Trust,
};

const RULES: HealthRules = HealthRules {
    failures_max: 3,
    fresh_ms: 9_000,
    breaker: BreakerRules {
        failures_max: 5,
        open_ms: 5_000,
    },
};

/// One role of a proxy: a pool whose workers tell these fields.
struct Setup {
    kinds: Kinds,
    prefill: Pool,
    decode: Pool,
}

type Fields<'a> = &'a [(Field, &'a str)];

impl Setup {
    fn new(prefill: &[Fields<'_>], decode: &[Fields<'_>]) -> Self {
        let mut kinds = Kinds::default();
        let mut pool = |role, workers: &[Fields<'_>]| {
            let mut pool = Pool::new(role, Vec::new(), PolicyKind::RoundRobin, RULES);
            for (at, fields) in workers.iter().enumerate() {
                let told =
                    |traits: Traits, (field, value): &(Field, &str)| traits.with(*field, value);
                let traits = fields.iter().fold(Traits::default(), told);
                let spec = InstanceSpec {
                    url: format!("http://h:{at}"),
                    dp: 1,
                    rank0: 0,
                };
                let index = pool.add(spec, Trust::Given, Standing::Serving);
                pool.set_kind(index, kinds.enter(&traits));
            }
            pool
        };
        let prefill = pool(Role::Prefill, prefill);
        let decode = pool(Role::Decode, decode);
        Self {
            kinds,
            prefill,
            decode,
        }
    }

    fn pair(&self, model: Option<&str>) -> Result<Fit, NoSlot> {
        let bound = Bound {
            model,
            ..Bound::default()
        };
        self.bound(&bound)
    }

    fn bound(&self, bound: &Bound<'_>) -> Result<Fit, NoSlot> {
        Fit::pair(&self.kinds, &self.prefill, &self.decode, bound, 0)
    }

    fn alone(&self, bound: &Bound<'_>) -> Result<Fit, NoSlot> {
        Fit::decode(&self.kinds, &self.decode, bound, 0)
    }

    /// Which instances of a role are among these kinds.
    fn among(pool: &Pool, count: usize, kinds: &KindSet) -> Vec<usize> {
        let inside = |at: &usize| {
            pool.kind(InstanceIndex(*at))
                .is_some_and(|kind| kinds.contains(kind))
        };
        (0..count).filter(inside).collect()
    }
}

const BF16: (Field, &str) = (Field::Dtype, "bfloat16");
const FP8: (Field, &str) = (Field::Dtype, "fp8");
const M: (Field, &str) = (Field::Model, "m");
const N: (Field, &str) = (Field::Model, "n");

#[test]
fn prefill_is_chosen_among_those_with_a_partner_and_decode_among_its_partners() {
    let setup = Setup::new(&[&[BF16], &[FP8], &[]], &[&[BF16], &[BF16, M]]);
    let fit = setup.pair(None).expect("a pair");
    assert_eq!(Setup::among(&setup.prefill, 3, &fit.prefill), [0, 2]);
    for prefill in [0, 2] {
        let kind = setup
            .prefill
            .kind(InstanceIndex(prefill))
            .expect("it is there");
        let decodes = fit.decode_for(&setup.kinds, kind);
        assert_eq!(Setup::among(&setup.decode, 2, &decodes), [0, 1]);
    }
    // The pool itself takes only those.
    let mut pool = setup.prefill;
    let key = RequestKey::default();
    let ask = Ask {
        key: &key,
        avoid: &[],
        shun: &[],
        among: Some(&fit.prefill),
        now_ms: 0,
    };
    let picked: Vec<usize> = (0..4)
        .map(|_| pool.pick(&ask).expect("a slot").instance.0)
        .collect();
    assert_eq!(picked, [0, 2, 0, 2]);
    // One that failed is avoided only while another of them is there.
    let only: KindSet = pool.kind(InstanceIndex(0)).into_iter().collect();
    let again = pool.pick(&Ask {
        avoid: &[InstanceIndex(0)],
        among: Some(&only),
        ..ask
    });
    assert_eq!(again.expect("the only one").instance.0, 0);
}

#[test]
fn without_a_pair_the_field_and_both_values_are_named() {
    let mut setup = Setup::new(&[&[BF16], &[FP8]], &[&[FP8], &[BF16]]);
    let drain = |pool: &mut Pool, at| pool.set_standing(InstanceIndex(at), Standing::Drained);
    drain(&mut setup.prefill, 1);
    assert!(setup.pair(None).is_ok());
    drain(&mut setup.decode, 1);
    let Err(NoSlot::NoPair(unlike)) = setup.pair(None) else {
        panic!("no pair is left");
    };
    assert_eq!(
        (&*unlike.field, &*unlike.prefill, &*unlike.decode),
        ("dtype", "bfloat16", "fp8")
    );
    drain(&mut setup.decode, 0);
    assert_eq!(
        setup.pair(None).expect_err("no decode"),
        NoSlot::NoEngine(Role::Decode)
    );
}

#[test]
fn a_decode_leg_goes_with_the_prefill_worker_that_ran_also_when_that_has_gone() {
    let setup = Setup::new(&[], &[&[BF16], &[FP8], &[]]);
    let ran = Traits::default().with(Field::Dtype, "fp8");
    let bound = Bound {
        peer: Some(&ran),
        ..Bound::default()
    };
    let fit = setup.alone(&bound).expect("partners");
    assert_eq!(Setup::among(&setup.decode, 3, &fit.decode), [1, 2]);
    let alone = setup.alone(&Bound::default()).expect("all");
    assert_eq!(Setup::among(&setup.decode, 3, &alone.decode), [0, 1, 2]);
    let ran = Traits::default().with(Field::Dtype, "int8");
    let setup = Setup::new(&[], &[&[BF16], &[FP8]]);
    let bound = Bound {
        peer: Some(&ran),
        ..Bound::default()
    };
    let none = setup.alone(&bound).expect_err("no partner");
    assert!(matches!(none, NoSlot::NoPair(_)));
}

#[test]
fn a_model_goes_to_who_tells_it_or_else_to_who_tells_none() {
    let setup = Setup::new(&[&[M], &[N], &[]], &[&[M], &[N], &[]]);
    for (model, at) in [("m", 0), ("n", 1), ("x", 2)] {
        let fit = setup.pair(Some(model)).expect("a pair");
        assert_eq!(
            Setup::among(&setup.prefill, 3, &fit.prefill),
            [at],
            "{model}"
        );
        assert_eq!(Setup::among(&setup.decode, 3, &fit.decode), [at], "{model}");
    }
    // Without a name, any.
    let fit = setup.pair(None).expect("a pair");
    assert_eq!(Setup::among(&setup.prefill, 3, &fit.prefill), [0, 1, 2]);
    // All of one role tell theirs.
    let setup = Setup::new(&[&[M], &[]], &[&[M], &[N]]);
    assert!(setup.pair(Some("m")).is_ok());
    assert!(setup.pair(Some("n")).is_ok(), "prefill's second tells none");
    assert_eq!(setup.pair(Some("x")).expect_err("no such"), NoSlot::NoModel);
    // None is there at all: that is another fault.
    let setup = Setup::new(&[&[M]], &[]);
    assert_eq!(
        setup.pair(Some("m")).expect_err("no decode"),
        NoSlot::NoEngine(Role::Decode)
    );
}

const A: (Field, &str) = (Field::Revision, "a");
const B: (Field, &str) = (Field::Revision, "b");

/// The prefill and decode instances of each of many draws.
fn draws(setup: &Setup, weights: &Weights, count: u64) -> Vec<(Vec<usize>, Vec<usize>)> {
    let mut seen: Vec<(Vec<usize>, Vec<usize>)> = (0..count)
        .map(|turn| {
            let bound = Bound {
                draw: Some(Draw {
                    weights,
                    number: crate::routing::draw_of_turn(turn),
                }),
                ..Bound::default()
            };
            let fit = setup.bound(&bound).expect("a pair");
            (
                Setup::among(&setup.prefill, 8, &fit.prefill),
                Setup::among(&setup.decode, 8, &fit.decode),
            )
        })
        .collect();
    seen.sort();
    seen.dedup();
    seen
}

#[test]
fn both_legs_are_of_the_revision_that_was_drawn() {
    let weights = Weights::parse("a=1,b=1").expect("valid").expect("some");
    let (p, d): ([Fields<'_>; 4], [Fields<'_>; 4]) =
        ([&[A], &[B], &[], &[A]], [&[B], &[A], &[], &[B]]);
    let mut setup = Setup::new(&p, &d);
    // Those that tell none serve none.
    assert_eq!(
        draws(&setup, &weights, 64),
        [(vec![0, 3], vec![1]), (vec![1], vec![0, 3])]
    );
    // One role of a revision is away: all of it moves.
    setup
        .decode
        .set_standing(InstanceIndex(1), Standing::Drained);
    assert_eq!(draws(&setup, &weights, 64), [(vec![1], vec![0, 3])]);
    // Failing is as bad as away, while the other is well.
    setup
        .decode
        .set_standing(InstanceIndex(1), Standing::Serving);
    setup.prefill.on_connect_failed(InstanceIndex(1));
    assert_eq!(draws(&setup, &weights, 64), [(vec![0, 3], vec![1])]);
    // A leg that is sent again stays in it, also where its revision has no weight any more.
    let ran = Traits::default().with(Field::Revision, "b");
    let only_a = Weights::parse("a=1").expect("valid").expect("some");
    let bound = Bound {
        peer: Some(&ran),
        draw: Some(Draw {
            weights: &only_a,
            number: 0,
        }),
        ..Bound::default()
    };
    let fit = setup.alone(&bound).expect("its revision");
    assert_eq!(Setup::among(&setup.decode, 4, &fit.decode), [0, 3]);
    assert_eq!(fit.drawn, None);
    let fit = setup.bound(&bound).expect("its revision");
    assert_eq!(Setup::among(&setup.prefill, 4, &fit.prefill), [1]);
    // None that has a weight is there.
    let other = Weights::parse("c=1").expect("valid").expect("some");
    let bound = Bound {
        draw: Some(Draw {
            weights: &other,
            number: 0,
        }),
        ..Bound::default()
    };
    assert_eq!(setup.bound(&bound).expect_err("no c"), NoSlot::NoRevision);
    assert_eq!(setup.alone(&bound).expect_err("no c"), NoSlot::NoRevision);
}
