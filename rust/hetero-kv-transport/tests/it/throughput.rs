//! Prints what a read costs beside the bare system call, in the same run. Nothing is asserted on
//! time: a shared machine is no place for that.
#![allow(unsafe_code)]

use std::time::Duration;

use hetero_kv_core::memory::Run;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::transport::TransportName;
use rustix::time::{ClockId, clock_gettime};

use super::buffer::{Buffer, check_exact};
use super::holder::{Holder, HolderConfig, job, reader, wait_one};

const BYTES: usize = 64 << 20;
const ROUNDS: usize = 7;

fn cpu() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

/// One copy of the runs by bare calls of 256 pieces.
fn bare(pid: i32, source: u64, dest: u64, runs: &[Run]) {
    let list = |base: u64, offset: fn(&Run) -> u64, runs: &[Run]| -> Vec<libc::iovec> {
        let piece = |run: &Run| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut((base + offset(run)) as usize),
            iov_len: run.bytes as usize,
        };
        runs.iter().map(piece).collect()
    };
    for runs in runs.chunks(256) {
        let local = list(dest, |run| run.dest_offset, runs);
        let remote = list(source, |run| run.source_offset, runs);
        let count = runs.len() as libc::c_ulong;
        // SAFETY: the local pieces lie in a buffer of this test that nothing borrows.
        let copied = unsafe {
            libc::process_vm_readv(pid, local.as_ptr(), count, remote.as_ptr(), count, 0)
        };
        let bytes: u64 = runs.iter().map(|run| run.bytes).sum();
        assert_eq!(copied as u64, bytes);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "a measurement: run it by name with --nocapture"]
fn gigabytes_per_second() {
    let holder = Holder::start(HolderConfig {
        region_bytes: vec![BYTES],
        ..HolderConfig::default()
    });
    let buffers = [Buffer::new(BYTES, 0)];
    let process = reader(&buffers, TransportName::Process);
    let tcp = reader(&buffers, TransportName::Tcp);
    let endpoint = holder.source.endpoints.process.as_ref().expect("offered");
    for piece_bytes in [4_u64 << 10, 16 << 10, 18 << 10, 64 << 10, BYTES as u64] {
        let count = BYTES as u64 / piece_bytes;
        // Backwards at the destination, so that nothing merges.
        let runs: Vec<Run> = (0..count)
            .map(|at| Run {
                source_region: 0,
                source_offset: at * piece_bytes,
                dest_region: 0,
                dest_offset: (count - 1 - at) * piece_bytes,
                bytes: piece_bytes,
            })
            .collect();
        let bytes = (count * piece_bytes) as f64;
        buffers[0].fill_with(|_| 0);
        let mut per_cpu = [const { Vec::new() }; 3];
        let mut per_wall = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            for way in 0..3 {
                let (began, spent) = (now(), cpu());
                match way {
                    0 => bare(
                        endpoint.pid as i32,
                        holder.source.regions[0].base,
                        buffers[0].region().base,
                        &runs,
                    ),
                    way => {
                        let reader = if way == 1 { &process } else { &tcp };
                        reader.submit(job(1, &holder.source, &runs)).expect("taken");
                        wait_one(reader).outcome.expect("read");
                    }
                }
                per_wall[way].push(bytes / now().since(began).as_secs_f64() / 1e9);
                per_cpu[way].push(bytes / (cpu() - spent).as_secs_f64() / 1e9);
            }
        }
        check_exact(&buffers, &runs, holder.config.seed, 0);
        let [bare, process, tcp] = per_cpu.map(median);
        let [bare_wall, process_wall, tcp_wall] = per_wall.map(median);
        println!(
            "{count:>5} x {piece_bytes:>8} B: GB per CPU-s of the reader: bare {bare:.2} process \
             {process:.2} ({:.2}x) tcp {tcp:.2}; GB/s: bare {bare_wall:.2} process \
             {process_wall:.2} tcp {tcp_wall:.2}",
            process / bare
        );
    }
}
