//! The right bytes at the right place, and nothing else written.

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

each_transport! {
    scattered_runs_arrive_exactly;
    a_run_larger_than_a_fetch_arrives_exactly;
    many_small_runs_arrive_exactly;
    all_runs_of_a_large_model_arrive_exactly;
    a_job_from_several_sources_is_done_once;
    sixty_four_jobs_at_once_all_arrive;
    runs_out_of_bounds_fail_their_job_only;
    an_empty_job_is_done_at_once;
}

const FILLER: u8 = 0xee;

fn run(source: (u32, u64), dest: (u32, u64), bytes: u64) -> Run {
    Run {
        source_region: source.0,
        source_offset: source.1,
        dest_region: dest.0,
        dest_offset: dest.1,
        bytes,
    }
}

fn buffers(lengths: &[usize]) -> Vec<Buffer> {
    lengths
        .iter()
        .map(|&bytes| Buffer::new(bytes, FILLER))
        .collect()
}

fn scattered_runs_arrive_exactly(transport: TransportName) {
    let holder = Holder::start(HolderConfig::default());
    let buffers = buffers(&[200_003, 70_001]);
    let reader = reader(&buffers, transport);
    let runs = [
        run((0, 1), (0, 3), 1),
        run((0, 4097), (1, 0), 4096),
        run((1, 299_000), (0, 17), 1001),
        run((1, 0), (1, 70_000), 1),
        run((0, (1 << 20) - 7), (0, 199_996), 7),
        // These two follow on each other at the source only, the next two at the destination.
        run((0, 9000), (0, 50_000), 100),
        run((0, 9100), (0, 40_000), 100),
        run((1, 500), (0, 60_000), 33),
        run((0, 500), (0, 60_033), 33),
    ];
    reader.submit(job(1, &holder.source, &runs)).expect("taken");
    let done = wait_one(&reader);
    done.outcome.expect("read");
    assert_eq!(done.id, 1);
    let bytes: u64 = runs.iter().map(|run| run.bytes).sum();
    assert_eq!(done.reads.len(), 1);
    assert_eq!(done.reads[0].bytes, bytes);
    assert_eq!(done.reads[0].transport, Some(transport));
    assert_eq!(done.reads[0].route, holder.source.route);
    check_exact(&buffers, &runs, holder.config.seed, FILLER);
}

fn a_run_larger_than_a_fetch_arrives_exactly(transport: TransportName) {
    const BYTES: u64 = (19 << 20) + 13;
    let holder = Holder::start(HolderConfig {
        region_bytes: vec![BYTES as usize + 100],
        ..HolderConfig::default()
    });
    let buffers = buffers(&[BYTES as usize + 9]);
    let reader = reader(&buffers, transport);
    let runs = [run((0, 77), (0, 5), BYTES)];
    reader.submit(job(1, &holder.source, &runs)).expect("taken");
    let done = wait_one(&reader);
    done.outcome.expect("read");
    assert_eq!(done.reads[0].bytes, BYTES);
    check_exact(&buffers, &runs, holder.config.seed, FILLER);
}

fn many_small_runs_arrive_exactly(transport: TransportName) {
    const RUNS: u64 = 10_000;
    let holder = Holder::start(HolderConfig::default());
    let buffers = buffers(&[RUNS as usize * 120]);
    let reader = reader(&buffers, transport);
    // A stride that walks through the source out of order.
    let runs: Vec<Run> = (0..RUNS)
        .map(|at| {
            run(
                (0, at * 7919 % 10_000 * 104),
                (0, at * 120 + 1),
                97 + at % 7,
            )
        })
        .collect();
    reader.submit(job(1, &holder.source, &runs)).expect("taken");
    wait_one(&reader).outcome.expect("read");
    check_exact(&buffers, &runs, holder.config.seed, FILLER);
}

/// 80 layers of 256 blocks, none beside another on either side.
fn all_runs_of_a_large_model_arrive_exactly(transport: TransportName) {
    const RUNS: u64 = 20_480;
    const BYTES: u64 = 512;
    let holder = Holder::start(HolderConfig {
        region_bytes: vec![(RUNS * BYTES) as usize],
        ..HolderConfig::default()
    });
    let buffers = buffers(&[(RUNS * (BYTES + 8)) as usize]);
    let reader = reader(&buffers, transport);
    let runs: Vec<Run> = (0..RUNS)
        .map(|at| run((0, at * 7919 % RUNS * BYTES), (0, at * (BYTES + 8)), BYTES))
        .collect();
    reader.submit(job(1, &holder.source, &runs)).expect("taken");
    wait_one(&reader).outcome.expect("read");
    check_exact(&buffers, &runs, holder.config.seed, FILLER);
}

fn a_job_from_several_sources_is_done_once(transport: TransportName) {
    let holders: Vec<Holder> = (0..3)
        .map(|tp_rank| {
            Holder::start(HolderConfig {
                tp_rank,
                ..HolderConfig::default()
            })
        })
        .collect();
    let buffers = buffers(&[3 << 20]);
    let reader = reader(&buffers, transport);
    let runs: Vec<Run> = (0..3)
        .map(|at| run((0, 0), (0, at << 20), 1 << 20))
        .collect();
    let pieces = holders.iter().zip(&runs).map(|(holder, run)| ReadPiece {
        source: holder.source.clone(),
        runs: vec![*run].into(),
    });
    let job = ReadJob {
        id: 9,
        lease: lease(0, 1),
        deadline: now() + Duration::from_secs(30),
        pieces: pieces.collect(),
    };
    reader.submit(job).expect("taken");
    let done = wait_one(&reader);
    done.outcome.expect("read");
    let mut routes: Vec<u32> = done
        .reads
        .iter()
        .map(|read| read.route.tp_rank().0)
        .collect();
    routes.sort_unstable();
    assert_eq!(routes, [0, 1, 2]);
    check_exact(&buffers, &runs, 1, FILLER);
    assert!(!reader.wait(Duration::from_millis(50)), "no second report");
    assert_eq!(reader.stats().peers.len(), 3);
}

fn sixty_four_jobs_at_once_all_arrive(transport: TransportName) {
    const JOBS: u64 = 64;
    const BYTES: u64 = 60_000;
    let holder = Holder::start(HolderConfig::default());
    let buffers = buffers(&[(JOBS * BYTES) as usize]);
    let reader = reader(&buffers, transport);
    let runs: Vec<Run> = (0..JOBS)
        .map(|at| run((0, at * 1234), (0, at * BYTES), BYTES))
        .collect();
    for (id, run) in runs.iter().enumerate() {
        reader
            .submit(job(id as u64, &holder.source, &[*run]))
            .expect("taken");
    }
    let mut ids: Vec<u64> = wait_all(&reader, JOBS as usize)
        .into_iter()
        .map(|done| {
            done.outcome.expect("read");
            done.id
        })
        .collect();
    ids.sort_unstable();
    assert!(ids.into_iter().eq(0..JOBS), "each job once");
    check_exact(&buffers, &runs, holder.config.seed, FILLER);
    let stats = reader.stats();
    assert_eq!((stats.jobs_in_flight, stats.sessions), (0, 1));
    assert_eq!(stats.peers[0].bytes, JOBS * BYTES);
}

fn runs_out_of_bounds_fail_their_job_only(transport: TransportName) {
    let holder = Holder::start(HolderConfig::default());
    let buffers = buffers(&[4096]);
    let reader = reader(&buffers, transport);
    let bad = [
        run((0, (1 << 20) - 9), (0, 0), 10),
        run((2, 0), (0, 0), 1),
        run((0, u64::MAX), (0, 0), 2),
        run((0, 0), (0, 4090), 7),
        run((0, 0), (1, 0), 1),
        run((0, 0), (0, 2), u64::MAX),
        run((0, 0), (0, 0), 0),
    ];
    for (id, bad) in bad.iter().enumerate() {
        let runs = [run((0, 0), (0, 0), 100), *bad];
        reader
            .submit(job(id as u64, &holder.source, &runs))
            .expect("taken");
    }
    let good = [run((0, 10), (0, 1000), 500)];
    reader
        .submit(job(100, &holder.source, &good))
        .expect("taken");
    for done in wait_all(&reader, bad.len() + 1) {
        if done.id == 100 {
            done.outcome.expect("read");
        } else {
            assert_eq!(failure_kind(&done), ReadFailureKind::OutOfBounds);
        }
    }
    check_exact(&buffers, &good, holder.config.seed, FILLER);
}

fn an_empty_job_is_done_at_once(transport: TransportName) {
    let holder = Holder::start(HolderConfig::default());
    let buffers = buffers(&[16]);
    let reader = reader(&buffers, transport);
    reader.submit(job(3, &holder.source, &[])).expect("taken");
    let done = reader.drain();
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].outcome, Ok(()));
    assert_eq!(reader.stats().sessions, 0, "nothing was started for it");
}
