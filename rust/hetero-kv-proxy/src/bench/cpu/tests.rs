//! Readings of processes that this test starts.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::*;

#[test]
fn the_time_of_a_child_is_counted_with_its_parent() {
    // A shell that keeps a busy child: the shell itself takes next to nothing.
    let mut shell = Command::new("sh")
        .args(["-c", "(while :; do :; done) & wait"])
        .process_group(0)
        .stdout(Stdio::null())
        .spawn()
        .expect("a shell");
    let watched = Watched::new(&[shell.id()]).expect("it is there");
    let begun = Instant::now();
    let mut used = 0.0;
    while used < 0.2 && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(50));
        used = watched.read().expect("it is there").cpu_s;
    }
    let reading = watched.read().expect("it is there");
    let group = rustix::process::Pid::from_child(&shell);
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).expect("the group");
    shell.wait().expect("it ends");
    assert!(used >= 0.2, "{used} s in {:?}", begun.elapsed());
    assert!(used <= begun.elapsed().as_secs_f64() + 0.1, "{used} s");
    assert!(reading.rss_bytes > 100_000 && reading.rss_peak_bytes >= reading.rss_bytes);
    let error = watched.read().expect_err("it is gone").to_string();
    assert!(error.contains(&format!("--pid {}", shell.id())), "{error}");
}

#[test]
fn a_process_that_is_not_there_is_named() {
    let error = Watched::new(&[u32::MAX]).expect_err("no such process");
    assert!(error.to_string().contains("4294967295"), "{error}");
}
