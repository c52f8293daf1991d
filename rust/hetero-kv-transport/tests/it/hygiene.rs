//! Nothing is left behind, nothing spins, nothing survives a fork. Each check runs in a process of
//! its own, where no other test opens descriptors or uses the processor.
#![allow(unsafe_code)]

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use hetero_kv_core::memory::Run;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::lease_page::LeasePage;
use hetero_kv_transport::reader::{SubmitError, TransportChoice};
use hetero_kv_transport::tcp::{DataServer, ServerOptions};
use hetero_kv_transport::transport::TransportName;
use rustix::time::{ClockId, clock_gettime};

use super::buffer::{Buffer, register};
use super::holder::{Holder, HolderConfig, job, rdma_here, reader, reader_with, wait_one};

const RUN: Run = Run {
    source_region: 0,
    source_offset: 0,
    dest_region: 0,
    dest_offset: 0,
    bytes: 4096,
};

/// Those that work on this host.
fn transports() -> Vec<TransportName> {
    let mut names = vec![TransportName::Process, TransportName::Tcp];
    if rdma_here() {
        names.push(TransportName::Verbs);
    }
    names
}

/// Runs an ignored test of this binary as a process, with variables of its environment set.
pub(crate) fn in_own_process(name: &str, variables: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().expect("this binary"))
        .envs(variables.iter().copied())
        .args([name, "--exact", "--ignored", "--nocapture"])
        .output()
        .expect("this binary starts again");
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn readers_and_servers_leave_nothing_behind() {
    in_own_process("hygiene::leaks", &[]);
}

#[test]
fn an_idle_reader_and_server_use_no_processor() {
    in_own_process("hygiene::idle_cost", &[]);
}

#[test]
fn a_forked_child_gets_a_clear_error() {
    in_own_process("hygiene::fork", &[]);
}

#[test]
fn another_user_is_told_what_forbids_the_read() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    in_own_process("hygiene::as_another_user", &[]);
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").expect("procfs").count()
}

#[test]
#[ignore = "a process that another test starts"]
fn leaks() {
    let holder = Holder::start(HolderConfig::default());
    let transports = transports();
    let cycle = || {
        for &transport in &transports {
            let buffers = [Buffer::new(4096, 0)];
            let server = DataServer::start(
                register(&buffers),
                LeasePage::new(8).expect("mapped").into(),
                ServerOptions::default(),
            )
            .expect("listening");
            let reader = reader(&buffers, transport);
            for id in 0..3 {
                reader
                    .submit(job(id, &holder.source, &[RUN]))
                    .expect("taken");
                wait_one(&reader).outcome.expect("read");
            }
            reader
                .submit(job(9, &holder.source, &[RUN]))
                .expect("taken");
            reader.cancel(9);
            reader
                .shutdown(now() + Duration::from_secs(5))
                .expect("quiescent");
            assert!(matches!(
                reader.submit(job(10, &holder.source, &[RUN])),
                Err(SubmitError::ShutDown)
            ));
            server.shutdown();
        }
    };
    cycle();
    // A thread that has ended may stand in procfs for a moment longer.
    thread::sleep(Duration::from_secs(1));
    let before = (descriptors(), threads());
    for _ in 0..20 {
        cycle();
    }
    let settled = (0..100).any(|_| {
        thread::sleep(Duration::from_millis(100));
        descriptors() <= before.0 && threads() <= before.1
    });
    let after = (descriptors(), threads());
    assert!(
        settled,
        "(descriptors, threads): {before:?}, then {after:?}"
    );
}

#[test]
#[ignore = "a process that another test starts"]
fn idle_cost() {
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 0)];
    let _server = DataServer::start(
        register(&buffers),
        LeasePage::new(8).expect("mapped").into(),
        ServerOptions::default(),
    )
    .expect("listening");
    let readers: Vec<_> = transports()
        .into_iter()
        .map(|transport| reader(&buffers, transport))
        .collect();
    for reader in &readers {
        reader
            .submit(job(1, &holder.source, &[RUN]))
            .expect("taken");
        wait_one(reader).outcome.expect("read");
        assert_eq!(reader.stats().sessions, 1, "its session stays open");
    }
    let spent = || {
        let spent = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
    };
    let before = spent();
    thread::sleep(Duration::from_secs(2));
    let used = spent() - before;
    assert!(
        used < Duration::from_millis(5),
        "{used:?} in two idle seconds"
    );

    // A session without jobs ends by itself.
    let brief = reader_with(&buffers, TransportName::Tcp, |options| {
        options.session_idle_timeout = Duration::from_millis(200);
    });
    brief.submit(job(1, &holder.source, &[RUN])).expect("taken");
    wait_one(&brief).outcome.expect("read");
    let ended = (0..100).any(|_| {
        thread::sleep(Duration::from_millis(100));
        brief.stats().sessions == 0
    });
    assert!(ended, "the session stays");
    brief.submit(job(2, &holder.source, &[RUN])).expect("taken");
    wait_one(&brief).outcome.expect("read by a new session");
}

#[test]
#[ignore = "a process that another test starts"]
fn as_another_user() {
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 0)];
    let nobody: libc::uid_t = 65_534;
    // SAFETY: the call changes this process's ids and touches no memory.
    assert_eq!(unsafe { libc::setresuid(nobody, nobody, 0) }, 0);
    let only = reader(&buffers, TransportName::Process);
    only.submit(job(1, &holder.source, &[RUN])).expect("taken");
    let failure = wait_one(&only).outcome.expect_err("not permitted");
    assert_eq!(failure.kind, ReadFailureKind::Unreachable, "{failure}");
    assert!(
        failure.text.contains("of uid 0, this one of uid 65534"),
        "{failure}"
    );
    let either = reader_with(&buffers, TransportName::Tcp, |options| {
        options.choice = TransportChoice::Auto;
    });
    either
        .submit(job(1, &holder.source, &[RUN]))
        .expect("taken");
    let done = wait_one(&either);
    done.outcome.expect("read by tcp");
    assert_eq!(done.reads[0].transport, Some(TransportName::Tcp));
    let why = either.stats().peers.remove(0).why;
    assert!(why.contains("run both as one user"), "{why}");
    // The holder is root's and can be ended by root only.
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setresuid(0, 0, 0) }, 0);
}

#[test]
#[ignore = "a process that another test starts"]
fn fork() {
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 0)];
    let server = DataServer::start(
        register(&buffers),
        LeasePage::new(8).expect("mapped").into(),
        ServerOptions::default(),
    )
    .expect("listening");
    let reader = reader(&buffers, TransportName::Process);
    reader
        .submit(job(1, &holder.source, &[RUN]))
        .expect("taken");
    wait_one(&reader).outcome.expect("read");
    let job = job(2, &holder.source, &[RUN]);
    // SAFETY: the child only calls functions that take no lock another thread may hold (each of
    // them looks at the pid first), allocates nothing before that, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(reader.submit(job), Err(SubmitError::Forked { .. }));
        let silent = !reader.wait(Duration::ZERO) && !reader.cancel(1);
        server.shutdown();
        drop((reader, server));
        // SAFETY: ends the child without running what the parent's test run would do at exit.
        unsafe { libc::_exit(if refused && silent { 0 } else { 1 }) };
    }
    let pid = rustix::process::Pid::from_raw(child).expect("forked");
    let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
        .expect("our child")
        .expect("ended");
    assert_eq!(status.exit_status(), Some(0));
    reader.submit(job).expect("the parent goes on");
    wait_one(&reader).outcome.expect("read");
}
