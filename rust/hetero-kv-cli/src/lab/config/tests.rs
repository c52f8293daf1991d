use clap::Parser;

use super::Plan;
use crate::lab::Args;
use crate::lab::fault::{Kind, Role};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn plan(words: &str) -> anyhow::Result<Plan> {
    let words = std::iter::once("lab").chain(words.split_whitespace());
    Plan::new(&Cli::try_parse_from(words)?.args)
}

const PAIR: &str = "--prefill dp=1,tp=2 --decode dp=2,tp=1 --kv mla:64 --requests 10";

#[test]
fn a_preset_is_overridden_by_flags_that_follow() {
    let plan = plan("--preset rfc46107 --layers 2 --block-size 1 --concurrency 8").expect("fits");
    assert_eq!((plan.prefill.len(), plan.decode.len()), (2, 1));
    assert_eq!(plan.engines(Role::Decode).len(), 8);
    assert_eq!(plan.ranks(), 24);
    assert_eq!((plan.model.layers, plan.model.block_size), (2, 1));
    assert_eq!((plan.requests, plan.concurrency), (2000, 8));
}

#[test]
fn pools_hold_what_is_under_way_and_shrink_to_the_host() {
    let small = plan(&format!("{PAIR} --concurrency 10 --prompt-tokens 1-32")).expect("fits");
    assert_eq!(small.blocks, (20, 10));
    let large = plan("--preset rfc46107 --concurrency 65536").expect("fits by shrinking");
    assert!(large.blocks.0 < 65_536 / 2 * 4);
    assert!(large.blocks.0 >= 8, "two prompts at least");
}

#[test]
fn random_faults_are_of_the_seed_and_name_engines_that_exist() {
    let words = format!("{PAIR} --random-faults 40");
    let (one, same) = (plan(&words).expect("fits"), plan(&words).expect("fits"));
    let other = plan(&format!("{words} --seed 2")).expect("fits");
    assert_eq!(one.faults, same.faults);
    assert_ne!(one.faults, other.faults);
    assert_eq!(one.faults.len(), 40);
    for fault in &one.faults {
        assert_eq!(fault.instance, 0);
        assert!(fault.dp < Some(if fault.role == Role::Prefill { 1 } else { 2 }));
        assert!(matches!(
            fault.kind,
            Kind::Abort | Kind::Stop(_) | Kind::Restart
        ));
    }
}
