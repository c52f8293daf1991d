//! The lines of a probe that ends early; `tests/mori_io/test_doctor.py` runs it on AMD's package.

use super::*;

fn line(stages: Vec<Stage>, required: bool) -> String {
    finding("/bin/py", stages.into_iter(), required, "signal: 6").line()
}

fn loaded() -> Stage {
    Stage::Loaded {
        version: "1.2.4".into(),
    }
}

#[test]
fn a_process_that_the_package_ends_is_told_by_the_step_that_ended_it() {
    let told = |stages| line(stages, true);
    assert!(told(vec![]).contains("importing hetero_kv did not end well, signal: 6"));
    let told_loading = told(vec![Stage::Package]);
    assert!(told_loading.starts_with("FAIL  mori "), "{told_loading}");
    assert!(told_loading.contains("loading amd-mori and ROCm did not end well"));
    assert!(told(vec![Stage::Package, loaded()]).contains("asking ROCm for its GPUs did not end"));
}

#[test]
fn a_lack_is_a_failure_only_where_the_transport_is_asked_for() {
    let lacks = || {
        let what = "the package amd-mori is not installed".into();
        vec![Stage::Package, Stage::Lacks { what }]
    };
    let optional = line(lacks(), false);
    assert!(optional.starts_with("ok    mori "), "{optional}");
    assert!(optional.contains("only transport mori needs it: /bin/py: the package"));
    assert!(line(lacks(), true).starts_with("FAIL  mori "));
}
