//! What is told of a file that cannot be read: the line, and the way out.

use super::*;

fn told(text: &str) -> String {
    let error = toml::from_str::<Settings>(text).expect_err(text);
    fault(text, &error)
}

#[test]
fn a_fault_shows_its_line_and_the_way_out() {
    for (text, line, parts) in [
        (
            "threads = 2\n\nrequests_maxx = 1\n",
            "line 3: `requests_maxx = 1`: ",
            &["no setting is named `requests_maxx`; did you mean `requests_max`?"][..],
        ),
        (
            "requests-max = 1",
            "line 1: `requests-max = 1`: ",
            &["write it with `_` for `-`: `requests_max`"],
        ),
        (
            "colour = 1",
            "line 1: `colour = 1`: ",
            &["no setting is named `colour`; `hetero-kv-proxy serve --help`"],
        ),
        (
            "threads = 2\nlisten = 127.0.0.1:8000\n",
            "line 2: `listen = 127.0.0.1:8000`: ",
            &["texts stand in quotes: listen = \"...\""],
        ),
        (
            "connector = hetero\n",
            "line 1: `connector = hetero`: ",
            &["texts stand in quotes: connector = \"...\""],
        ),
        (
            "requests_max = \"1\"",
            "line 1: `requests_max = \"1\"`: ",
            &["`requests_max` is a number without quotes, 1 to 1000000"],
        ),
        (
            "# é\nqueue_max = -1",
            "line 2: `queue_max = -1`: ",
            &["`queue_max` is a number without quotes, 0 to 1000000"],
        ),
        (
            "[serve]\nlisten = \"h:1\"",
            "line 1: `[serve]`: ",
            &["settings stand in no table"],
        ),
        (
            "threads = 1\nthreads = 2",
            "line 2: `threads = 2`: ",
            &["duplicate key"],
        ),
    ] {
        let found = told(text);
        assert!(found.starts_with(line), "{found}");
        for part in parts {
            assert!(found.contains(part), "{part} in {found}");
        }
        assert!(!found.contains('\n'), "{found}");
    }
}

#[test]
fn a_long_line_is_cut() {
    let found = told(&format!("colour = \"{}\"", "ü".repeat(10_000)));
    assert!(found.len() < 500, "{} bytes", found.len());
}
