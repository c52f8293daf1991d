//! A job that ends early is reported when nothing writes its destination any more.

use std::thread;
use std::time::Duration;

use hetero_kv_core::memory::Run;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::reader::{ReadJob, ReadPiece};
use hetero_kv_transport::transport::TransportName;

use super::buffer::{Buffer, check_exact};
use super::holder::{
    Holder, HolderConfig, each_transport, failure_kind, job, lease, reader, wait_all, wait_one,
};
use super::relay::Relay;

each_transport! {
    nothing_is_written_after_a_cancelled_job_is_reported;
    a_job_whose_deadline_has_passed_writes_nothing;
    a_failing_piece_stops_the_others;
    a_cancelled_job_does_not_disturb_its_neighbours;
}

const BYTES: usize = 96 << 20;

fn whole(bytes: u64) -> Run {
    Run {
        source_region: 0,
        source_offset: 0,
        dest_region: 0,
        dest_offset: 0,
        bytes,
    }
}

fn holder() -> Holder {
    Holder::start(HolderConfig {
        region_bytes: vec![BYTES],
        ..HolderConfig::default()
    })
}

fn nothing_is_written_after_a_cancelled_job_is_reported(transport: TransportName) {
    const REFILL: u8 = 0x5a;
    let holder = holder();
    let relay = Relay::start(holder.tcp_port());
    relay.set_rate(16 << 20);
    let source = holder.via(relay.port);
    let buffers = [Buffer::new(BYTES, 0)];
    let reader = reader(&buffers, transport);
    let mut stopped_midway = 0;
    for attempt in 0..10 {
        buffers[0].fill_with(|_| 0);
        reader
            .submit(job(attempt, &source, &[whole(BYTES as u64)]))
            .expect("taken");
        thread::sleep(Duration::from_millis(attempt * 3));
        reader.cancel(attempt);
        let done = wait_one(&reader);
        buffers[0].fill_with(|_| REFILL);
        if done.outcome.is_ok() {
            // Faster than the cancel: nothing to see.
            continue;
        }
        assert_eq!(
            failure_kind(&done),
            ReadFailureKind::Cancelled,
            "attempt {attempt}: {:?}",
            done.outcome
        );
        assert!(done.elapsed < Duration::from_secs(5), "{:?}", done.elapsed);
        if done.reads[0].bytes > 0 {
            stopped_midway += 1;
        }
        thread::sleep(Duration::from_millis(100));
        let touched = buffers[0].copied().iter().any(|&byte| byte != REFILL);
        assert!(!touched, "attempt {attempt} wrote after its report");
    }
    // The relay slows what goes over the socket; what is one-sided passes by it.
    if transport == TransportName::Tcp {
        assert!(relay.bytes() > 0, "no cancel hit a read in its middle");
    } else {
        assert!(stopped_midway > 0, "no cancel hit a read in its middle");
    }
}

fn a_job_whose_deadline_has_passed_writes_nothing(transport: TransportName) {
    let holder = holder();
    let buffers = [Buffer::new(4096, 7)];
    let reader = reader(&buffers, transport);
    let mut job = job(1, &holder.source, &[whole(4096)]);
    job.deadline = now();
    reader.submit(job).expect("taken");
    assert_eq!(failure_kind(&wait_one(&reader)), ReadFailureKind::Deadline);
    assert_eq!(buffers[0].copied(), [7; 4096]);
}

/// A stalled source: the job ends by its deadline, one that is extended in time does not.
#[test]
fn a_stalled_read_ends_at_its_deadline_unless_it_is_extended() {
    let holder = holder();
    let relay = Relay::start(holder.tcp_port());
    let source = holder.via(relay.port);
    let buffers = [Buffer::new(BYTES, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    // Connected and half-way, then stalled.
    relay.set_rate(8 << 20);
    for id in [1, 2] {
        reader
            .submit(job(id, &source, &[whole(BYTES as u64)]))
            .expect("taken");
    }
    while relay.bytes() < 1 << 20 {
        assert!(!reader.wait(Duration::from_millis(5)), "it takes longer");
    }
    relay.pause(true);
    let deadline = now() + Duration::from_secs(1);
    assert!(reader.extend(1, deadline));
    assert!(reader.extend(2, now() + Duration::from_secs(60)));
    assert!(!reader.extend(3, now()), "there is no job 3");
    let done = wait_one(&reader);
    let late = now().since(deadline);
    assert_eq!(
        (done.id, failure_kind(&done)),
        (1, ReadFailureKind::Deadline)
    );
    assert!(now() >= deadline, "before its time");
    assert!(late < Duration::from_secs(5), "late by {late:?}");
    relay.set_rate(0);
    relay.pause(false);
    let done = wait_one(&reader);
    assert_eq!((done.id, done.outcome), (2, Ok(())));
    check_exact(&buffers, &[whole(BYTES as u64)], holder.config.seed, 0);
}

fn a_failing_piece_stops_the_others(transport: TransportName) {
    let holder = holder();
    let mut broken = Holder::start(HolderConfig {
        tp_rank: 1,
        ..HolderConfig::default()
    });
    let relay = Relay::start(holder.tcp_port());
    relay.set_rate(1 << 20);
    let buffers = [Buffer::new(BYTES + (1 << 20), 0)];
    let reader = reader(&buffers, transport);
    broken.kill();
    let job = ReadJob {
        id: 1,
        lease: lease(0, 1),
        deadline: now() + Duration::from_secs(60),
        pieces: vec![
            ReadPiece {
                source: holder.via(relay.port),
                runs: vec![whole(BYTES as u64)].into(),
            },
            ReadPiece {
                source: broken.source.clone(),
                runs: vec![Run {
                    dest_offset: BYTES as u64,
                    ..whole(1 << 20)
                }]
                .into(),
            },
        ],
    };
    reader.submit(job).expect("taken");
    let done = wait_one(&reader);
    let kind = failure_kind(&done);
    assert!(
        matches!(
            kind,
            ReadFailureKind::PeerLost | ReadFailureKind::Unreachable
        ),
        "{kind}"
    );
    assert_eq!(done.reads.len(), 2);
    assert!(done.elapsed < Duration::from_secs(20), "{:?}", done.elapsed);
    // At its rate the healthy piece would have taken more than a minute over tcp.
    buffers[0].fill_with(|_| 9);
    thread::sleep(Duration::from_millis(200));
    assert!(buffers[0].copied().iter().all(|&byte| byte == 9));
}

fn a_cancelled_job_does_not_disturb_its_neighbours(transport: TransportName) {
    const PART: u64 = 16 << 20;
    let holder = holder();
    let buffers = [Buffer::new(BYTES, 0)];
    let reader = reader(&buffers, transport);
    let parts: Vec<Run> = (0..6)
        .map(|at| Run {
            source_offset: at * PART,
            dest_offset: at * PART,
            ..whole(PART)
        })
        .collect();
    for (id, part) in parts.iter().enumerate() {
        reader
            .submit(job(id as u64, &holder.source, &[*part]))
            .expect("taken");
    }
    thread::sleep(Duration::from_millis(3));
    for id in [1, 4] {
        reader.cancel(id);
    }
    let done = wait_all(&reader, 6);
    let well = |id: u64| done.iter().any(|job| job.id == id && job.outcome.is_ok());
    for id in [0, 2, 3, 5] {
        assert!(well(id), "job {id}");
    }
    let found = buffers[0].copied();
    for part in [0, 2, 3, 5].map(|id| parts[id]) {
        let range = part.dest_offset as usize..(part.dest_offset + part.bytes) as usize;
        let right = range
            .clone()
            .all(|at| found[at] == super::buffer::pattern(holder.config.seed, 0, at));
        assert!(right, "bytes {range:?}");
    }
    assert!(!reader.cancel(0), "a job that is done cannot be cancelled");
}
