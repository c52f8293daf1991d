//! The reading process: orders come by line, each is carried out and timed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::error::Error;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use hetero_kv_core::memory::Run;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::transport::Source;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::bare::{self, Lists};
use super::cases::Case;
use super::hold::Card;
use super::memory::{Pool, pattern};
use super::ours::{self, ByHand, ByReader, Ours};

/// How bytes are to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    /// Our `process`, through the reader's thread.
    Process,
    /// Our `tcp`, through the reader's thread.
    Tcp,
    /// Our `process`, driven by this thread.
    ProcessByHand,
    /// Our `tcp`, driven by this thread.
    TcpByHand,
    /// Connect and prove a `process` source, no bytes.
    ProcessConnect,
    /// Connect and prove a `tcp` source, no bytes.
    TcpConnect,
    /// Our `process` from two source ranks, so by two threads, a half each.
    ProcessTwo,
    /// `process_vm_readv` and nothing else.
    Bare,
    /// The same by two threads, a half each.
    BareTwo,
    /// A socket and nothing else.
    Socket,
    /// A copy inside this process.
    Memcpy,
}

/// One order.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    way: Way,
    case: String,
    /// Times in a row, all inside of one measurement: for what one clock reading cannot resolve.
    #[serde(default = "once")]
    times: u32,
    /// Every byte is compared afterwards.
    #[serde(default)]
    check: bool,
}

fn once() -> u32 {
    1
}

/// The answer to an order.
#[derive(Debug, Serialize)]
struct Measured {
    wall_s: f64,
    /// Of all threads of this process.
    cpu_s: f64,
    /// Of the caller's thread until the transfer was handed over.
    post_s: f64,
}

struct Desk {
    card: Card,
    /// The holder as one source rank.
    source: Arc<Source>,
    dest: Pool,
    /// What the holder has, for the copy inside this process.
    copy: Option<Pool>,
    /// By transport and number of source ranks.
    by_reader: BTreeMap<(Ours, u32), ByReader>,
    by_hand: BTreeMap<Ours, ByHand>,
    socket: Option<TcpStream>,
}

pub(crate) fn run(card: &str) -> Result<(), Box<dyn Error>> {
    let card: Card = serde_json::from_str(card)?;
    let mut desk = Desk {
        source: ours::sources(&card, 1)?.remove(0),
        dest: Pool::new(usize::try_from(card.region.bytes)?)?,
        card,
        copy: None,
        by_reader: BTreeMap::new(),
        by_hand: BTreeMap::new(),
        socket: None,
    };
    for line in std::io::stdin().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let measured = desk.carry_out(&order)?;
        println!("{}", serde_json::to_string(&measured)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}

impl Desk {
    fn carry_out(&mut self, order: &Order) -> Result<Measured, Box<dyn Error>> {
        let case = Case::named(&order.case).ok_or_else(|| format!("no case {}", order.case))?;
        if case.pool_bytes() > self.card.region.bytes {
            return Err(format!(
                "case {} takes {} bytes, the holder has {}",
                case.name,
                case.pool_bytes(),
                self.card.region.bytes
            )
            .into());
        }
        let runs = case.list();
        if order.check {
            self.dest.fill(|_| 0);
        }
        let measured = match order.way {
            Way::Process => self.by_reader((Ours::Process, 1), &runs, order.times)?,
            Way::Tcp => self.by_reader((Ours::Tcp, 1), &runs, order.times)?,
            Way::ProcessTwo => self.by_reader((Ours::Process, 2), &runs, order.times)?,
            Way::ProcessByHand => self.by_hand(Ours::Process, &runs, order.times)?,
            Way::TcpByHand => self.by_hand(Ours::Tcp, &runs, order.times)?,
            Way::ProcessConnect => self.connect(Ours::Process, order.times)?,
            Way::TcpConnect => self.connect(Ours::Tcp, order.times)?,
            Way::Bare => {
                let lists = Lists::new(&runs, self.dest, self.card.region);
                let pid = self.card.pid;
                timed(order.times, || Ok(lists.process_vm_readv(pid)?))?
            }
            Way::BareTwo => {
                let halves: Vec<Lists> = runs
                    .chunks(runs.len().div_ceil(2))
                    .map(|half| Lists::new(half, self.dest, self.card.region))
                    .collect();
                let pid = self.card.pid;
                timed(order.times, || Ok(bare::by_threads(&halves, pid)?))?
            }
            Way::Socket => {
                let lists = Lists::new(&runs, self.dest, self.card.region);
                let mut stream = match self.socket.take() {
                    Some(stream) => stream,
                    None => {
                        let stream = TcpStream::connect(("127.0.0.1", self.card.bare_port))?;
                        stream.set_nodelay(true)?;
                        stream
                    }
                };
                let region = self.card.region;
                let measured = timed(order.times, || Ok(lists.socket(&mut stream, region)?))?;
                self.socket = Some(stream);
                measured
            }
            Way::Memcpy => {
                let copy = match self.copy {
                    Some(copy) => copy,
                    None => {
                        let copy = Pool::new(usize::try_from(self.card.region.bytes)?)?;
                        copy.fill(pattern);
                        *self.copy.insert(copy)
                    }
                };
                let lists = Lists::new(&runs, self.dest, self.card.region);
                let region = self.card.region;
                timed(order.times, || {
                    lists.memcpy(region, copy);
                    Ok(())
                })?
            }
        };
        if order.check {
            check(self.dest, &runs)?;
        }
        Ok(measured)
    }

    fn by_reader(
        &mut self,
        (name, ranks): (Ours, u32),
        runs: &[Run],
        times: u32,
    ) -> Result<Measured, Box<dyn Error>> {
        let reader = match self.by_reader.entry((name, ranks)) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(empty) => {
                let sources = ours::sources(&self.card, ranks)?;
                empty.insert(ByReader::new(name, sources, self.dest))
            }
        };
        let mut posted = Duration::ZERO;
        let measured = timed(times, || {
            posted += reader.read(runs)?;
            Ok(())
        })?;
        Ok(Measured {
            post_s: posted.as_secs_f64(),
            ..measured
        })
    }

    fn by_hand(
        &mut self,
        name: Ours,
        runs: &[Run],
        times: u32,
    ) -> Result<Measured, Box<dyn Error>> {
        if !self.by_hand.contains_key(&name) {
            let made = ByHand::new(name, &self.source, self.dest)?;
            self.by_hand.insert(name, made);
        }
        let connection = self.by_hand.get_mut(&name).ok_or("just made")?;
        let batches = connection.batches(runs);
        let mut posting = Duration::ZERO;
        let measured = timed(times, || {
            posting += connection.read(&batches)?;
            Ok(())
        })?;
        Ok(Measured {
            post_s: posting.as_secs_f64(),
            ..measured
        })
    }

    fn connect(&self, name: Ours, times: u32) -> Result<Measured, Box<dyn Error>> {
        timed(times, || ours::connect(name, &self.source, self.dest))
    }
}

/// Wall and processor time of `times` rounds together.
fn timed(
    times: u32,
    mut round: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<Measured, Box<dyn Error>> {
    let (begun, spent) = (now(), cpu());
    for _ in 0..times {
        round()?;
    }
    Ok(Measured {
        wall_s: now().since(begun).as_secs_f64(),
        cpu_s: (cpu() - spent).as_secs_f64(),
        post_s: 0.0,
    })
}

fn cpu() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        spent.tv_sec.unsigned_abs(),
        spent.tv_nsec.unsigned_abs() as u32,
    )
}

/// Whether every run has the holder's bytes.
fn check(dest: Pool, runs: &[Run]) -> Result<(), Box<dyn Error>> {
    for run in runs {
        for at in (0..run.bytes).step_by(8) {
            let (found, wanted) = (
                dest.word(run.dest_offset + at),
                pattern((run.source_offset + at) / 8),
            );
            if found != wanted {
                return Err(format!(
                    "byte {} of the destination is {found:#018x} instead of {wanted:#018x}",
                    run.dest_offset + at
                )
                .into());
            }
        }
    }
    Ok(())
}
