//! The two processes of the check of process memory: one holds bytes, the other reads them.
//!
//! They are siblings, as a prefill and a decode worker are: the kernel may let a parent read its
//! child where it forbids siblings (Yama).

use std::io::{self, IoSliceMut, Read};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hetero_kv_transport::lease_page::LeasePage;
use hetero_kv_transport::process::of_this_process;
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::loopback::cpu_time;
use crate::output::{Verdict, print};

/// Bytes that are read over and over: more than a processor's caches hold.
pub(super) const DATA_BYTES: usize = 64 << 20;

/// Bytes of one system call.
const CALL_BYTES: usize = 4 << 20;

/// A holder whose reader never comes ends by itself.
const HOLD_TIMEOUT: Duration = Duration::from_secs(120);

/// Longest order to the reader.
const ORDER_BYTES_MAX: u64 = 4096;

#[derive(clap::Args)]
pub(crate) struct HolderArgs {
    /// As the connector's `allow_ptracer`.
    #[arg(long)]
    allow_ptracer: bool,
}

/// Where the holder's bytes lie.
#[derive(Serialize, Deserialize)]
pub(super) struct Held {
    pid: u32,
    nonce_address: u64,
    nonce: String,
    data_address: u64,
    /// Whether the kernel lets others look at it at all (prctl(2), PR_GET_DUMPABLE).
    pub(super) dumpable: bool,
}

/// What the reader is to do.
#[derive(Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) held: Held,
    pub(super) seconds: u32,
}

/// What became of it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// The system refused the call.
    Errno(i32),
    /// What was read is not what the holder has.
    Differs(String),
    /// Read for as long as was asked.
    Read { bytes: u64, wall_s: f64, cpu_s: f64 },
}

/// A byte of the holder's data.
fn pattern(at: usize) -> u8 {
    let word = (at as u64 / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> (8 * (at % 8))) as u8
}

/// Says where its bytes are, and holds them until its input ends.
pub(crate) fn hold(args: &HolderArgs) -> Result<Verdict> {
    let page = Arc::new(LeasePage::new(4).context("lease page")?);
    let holder = of_this_process(page, args.allow_ptracer).context("process endpoint")?;
    let endpoint = holder.endpoint();
    let data: Vec<u8> = (0..DATA_BYTES).map(pattern).collect();
    let dumpable = rustix::process::dumpable_behavior()
        .is_ok_and(|behavior| behavior == rustix::process::DumpableBehavior::Dumpable);
    let held = Held {
        pid: endpoint.pid,
        nonce_address: endpoint.nonce_address,
        nonce: hex::encode(&endpoint.nonce),
        data_address: data.as_ptr().expose_provenance() as u64,
        dumpable,
    };
    print(&format!("{}\n", serde_json::to_string(&held)?))?;
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        let _ = sender.send(());
    });
    let _ = receiver.recv_timeout(HOLD_TIMEOUT);
    // Both stay where they are until here.
    drop((data, holder));
    Ok(Verdict::Right)
}

/// Reads as ordered on standard input, and says what became of it.
pub(crate) fn read() -> Result<Verdict> {
    let mut order = String::new();
    io::stdin()
        .lock()
        .take(ORDER_BYTES_MAX)
        .read_to_string(&mut order)?;
    let order: Order = serde_json::from_str(&order).context("order on standard input")?;
    print(&format!(
        "{}\n",
        serde_json::to_string(&carry_out(&order)?)?
    ))?;
    Ok(Verdict::Right)
}

fn carry_out(order: &Order) -> Result<Outcome> {
    let held = &order.held;
    let nonce = hex::decode(&held.nonce).context("nonce")?;
    let mut found = vec![0; nonce.len()];
    if let Err(errno) = copy(held.pid, held.nonce_address, &mut found)? {
        return Ok(Outcome::Errno(errno as i32));
    }
    if found != nonce {
        return Ok(Outcome::Differs("the nonce".into()));
    }
    let mut data = vec![0; DATA_BYTES];
    let (begun, cpu_begun) = (Instant::now(), cpu_time());
    let limit = Duration::from_secs(order.seconds.into());
    let mut bytes = 0;
    loop {
        for (index, piece) in data.chunks_mut(CALL_BYTES).enumerate() {
            let address = held.data_address + (index * CALL_BYTES) as u64;
            if let Err(errno) = copy(held.pid, address, piece)? {
                return Ok(Outcome::Errno(errno as i32));
            }
            bytes += piece.len() as u64;
        }
        if begun.elapsed() >= limit {
            break;
        }
    }
    let (wall, cpu) = (begun.elapsed(), cpu_time().saturating_sub(cpu_begun));
    if let Some(at) = (0..data.len()).find(|&at| data[at] != pattern(at)) {
        return Ok(Outcome::Differs(format!("byte {at}")));
    }
    Ok(Outcome::Read {
        bytes,
        wall_s: wall.as_secs_f64(),
        cpu_s: cpu.as_secs_f64(),
    })
}

/// Copies all of `dest`; the inner error is the system call's.
fn copy(pid: u32, address: u64, dest: &mut [u8]) -> Result<Result<(), Errno>> {
    let pid = Pid::from_raw(i32::try_from(pid).context("pid")?);
    let mut done = 0;
    while done < dest.len() {
        let remote = RemoteIoVec {
            base: usize::try_from(address).context("address")? + done,
            len: dest.len() - done,
        };
        let mut local = [IoSliceMut::new(&mut dest[done..])];
        match process_vm_readv(pid, &mut local, &[remote]) {
            Ok(0) => bail!("process_vm_readv copied nothing"),
            Ok(copied) => done += copied,
            Err(Errno::EINTR) => {}
            Err(errno) => return Ok(Err(errno)),
        }
    }
    Ok(Ok(()))
}
