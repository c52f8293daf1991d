//! `hetero-kv doctor check`: dials a `doctor listen` as a decode engine would dial a prefill one.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::Result;

use super::dial::{DialError, dial_host};
use super::rdma::roles::Site;
use super::report::{Finding, Report};
use super::segments;
use super::stream::{
    Deadline, Moved, receive_line, receive_stream, send_line, send_stream, timed_out,
};
use super::versions::{self, VERSION};
use super::wire::{Answer, Ask, Endpoint, Question, Seen, boot_id, parse_endpoint};
use super::{SECONDS_MAX, rdma};
use crate::output::Verdict;

/// For the listener's line.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Beyond a measurement itself.
const SLACK: Duration = Duration::from_secs(5);

/// Data ports that are dialled; a listener announces no more.
const DATA_PORTS_MAX: usize = 16;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where `hetero-kv doctor listen` listens
    #[arg(value_name = "HOST:PORT", value_parser = parse_endpoint)]
    target: Endpoint,
    #[command(flatten)]
    rdma: rdma::Flags,
    /// Seconds of each throughput measurement; 0: none
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=SECONDS_MAX))]
    seconds: u32,
    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// Exit 0 when no check failed, 1 when one did.
pub(super) fn run(args: &Args) -> Result<Verdict> {
    let mut report = Report::new(args.json);
    let target = &args.target;
    let (stream, address) = match dial_host(&target.host, target.port) {
        Ok(dialled) => dialled,
        Err(error) => {
            report.add(not_dialled("reach", target, &error))?;
            return report.end();
        }
    };
    let answer = match hello(&stream) {
        Ok(answer) => answer,
        Err(error) => {
            report.add(no_doctor(target, &error))?;
            return report.end();
        }
    };
    drop(stream);
    report.add(Finding::ok("reach", format!("{target} answers")))?;
    report.add(versions::compare(&answer.version, answer.wire))?;
    let (finding, address) = advertised(&answer, target, address);
    report.add(finding)?;
    report.add(data_ports(&answer))?;
    if !answer.boot_id.is_empty() && answer.boot_id == boot_id() {
        report.add(Finding::ok(
            "host",
            "both ends are on one host; `hetero-kv doctor` tells whether process memory works",
        ))?;
    }
    if answer.knows_rdma {
        report.add(rdma_between(address, &args.rdma))?;
    }
    let large = segments::check(address);
    let passes = !large.failed();
    report.add(large)?;
    if passes && args.seconds > 0 {
        for direction in [Direction::Up, Direction::Down] {
            report.add(throughput(address, direction, args.seconds))?;
        }
    }
    report.end()
}

fn not_dialled(check: &'static str, target: &Endpoint, error: &DialError) -> Finding {
    Finding::fail(
        check,
        format!("{target}: {error}"),
        error.mend(&target.host, target.port),
    )
}

fn no_doctor(target: &Endpoint, error: &io::Error) -> Finding {
    let (what, mend) = if timed_out(error) {
        (
            format!(
                "{target} takes the connection and says nothing within {} s",
                ANSWER_TIMEOUT.as_secs()
            ),
            "another program listens there, or a proxy or load balancer stands in front: dial the \
             host itself, with `hetero-kv doctor listen` on it",
        )
    } else {
        (
            format!("what answers at {target} is not `hetero-kv doctor listen` ({error})"),
            "start `hetero-kv doctor listen --listen HOST:PORT` there, on a port that no engine \
             or proxy has",
        )
    };
    Finding::fail("reach", what, mend)
}

fn ask(stream: &TcpStream, ask: Ask) -> io::Result<Answer> {
    let question = Question {
        version: VERSION.into(),
        ask,
    };
    let deadline = Deadline::after(ANSWER_TIMEOUT);
    send_line(stream, &question, deadline)?;
    let answer: Answer = receive_line(stream, deadline)?;
    if !answer.hetero_kv_doctor {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(answer)
}

fn hello(stream: &TcpStream) -> io::Result<Answer> {
    ask(stream, Ask::Hello)
}

/// Dials what the listener advertises, which is all that an engine would know of it. Also where
/// further checks are to go: the advertised address, or the one given where that cannot be reached.
fn advertised(answer: &Answer, given: &Endpoint, address: SocketAddr) -> (Finding, SocketAddr) {
    let check = "advertised";
    let advertised = &answer.advertise;
    if advertised == given {
        return (
            Finding::ok(check, format!("{advertised}, as dialled")),
            address,
        );
    }
    let mend = format!(
        "set host on that side to an address that this host reaches ({} is one)",
        given.host
    );
    let (stream, found) = match dial_host(&advertised.host, advertised.port) {
        Ok(dialled) => dialled,
        Err(error) => {
            return (
                Finding::fail(
                    check,
                    format!(
                        "{advertised} is advertised and cannot be reached from here: {error} \
                         ({given} can)"
                    ),
                    mend,
                ),
                address,
            );
        }
    };
    match hello(&stream) {
        Ok(other) if other.run == answer.run => (
            Finding::ok(check, format!("{advertised} is reached ({found})")),
            found,
        ),
        Ok(_) | Err(_) => (
            Finding::fail(
                check,
                format!("{advertised} is advertised, and another program answers there ({found})"),
                mend,
            ),
            address,
        ),
    }
}

fn data_ports(answer: &Answer) -> Finding {
    let check = "data ports";
    let host = &answer.advertise.host;
    let ports: Vec<u16> = answer
        .data_ports
        .iter()
        .copied()
        .take(DATA_PORTS_MAX)
        .collect();
    for &port in &ports {
        let at = Endpoint {
            host: host.clone(),
            port,
        };
        // The first that fails is told: the next would wait as long for the same.
        let error = match dial_host(host, port) {
            Err(error) => error.to_string(),
            Ok((stream, _)) => match hello(&stream) {
                Ok(other) if other.run == answer.run => continue,
                Ok(_) => "another program answers".into(),
                Err(error) => format!("no answer ({error})"),
            },
        };
        return Finding::fail(
            check,
            format!("{at}, one of {} data ports: {error}", ports.len()),
            "set port_range on that side and open all of it in the firewall, not the control port \
             alone",
        );
    }
    let shown: Vec<String> = ports.iter().map(u16::to_string).collect();
    Finding::ok(check, format!("{host} {}", shown.join(", ")))
}

/// Asks what the listener has for RDMA, and tries it.
fn rdma_between(address: SocketAddr, flags: &rdma::Flags) -> Finding {
    let asked = super::dial::dial(address, SLACK, None)
        .map_err(|error| io::Error::other(error.to_string()))
        .and_then(|stream| {
            ask(&stream, Ask::Rdma)?;
            let site: Site = receive_line(&stream, Deadline::after(ANSWER_TIMEOUT))?;
            Ok((site, stream.local_addr().ok()))
        });
    match asked {
        Ok((site, from)) => rdma::between::check(&site, flags, from),
        Err(error) => Finding::fail(
            "rdma",
            format!("the listener does not say what it has for RDMA: {error}"),
            "start `hetero-kv doctor listen` there again, of the same version",
        ),
    }
}

/// Which way a stream goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// To the listener.
    Up,
    /// From the listener.
    Down,
}

/// A stream to be moved.
pub(super) struct Transfer {
    pub(super) direction: Direction,
    /// Ends at so many bytes,
    pub(super) bytes_max: u64,
    /// or after so much time.
    pub(super) time_max: Duration,
    /// The whole of it, with the other end's word.
    pub(super) limit: Duration,
}

/// Moves a stream over a fresh connection; this end and the other.
pub(super) fn transfer(stream: &TcpStream, wanted: &Transfer) -> io::Result<(Moved, Seen)> {
    let deadline = Deadline::after(wanted.limit);
    let ms = u64::try_from(wanted.time_max.as_millis()).unwrap_or(u64::MAX);
    let moved = match wanted.direction {
        Direction::Up => {
            ask(stream, Ask::Upload { ms })?;
            send_stream(stream, wanted.bytes_max, wanted.time_max, deadline)?
        }
        Direction::Down => {
            let bytes = wanted.bytes_max;
            ask(stream, Ask::Download { bytes, ms })?;
            receive_stream(stream, deadline)?
        }
    };
    let seen: Seen = receive_line(stream, deadline)?;
    if seen.bytes != moved.bytes {
        return Err(io::Error::other(format!(
            "{} bytes here, {} there",
            moved.bytes, seen.bytes
        )));
    }
    Ok((moved, seen))
}

fn throughput(address: SocketAddr, direction: Direction, seconds: u32) -> Finding {
    let check = "throughput";
    let way = match direction {
        Direction::Up => "to the listener",
        Direction::Down => "from the listener",
    };
    let time_max = Duration::from_secs(seconds.into());
    let wanted = Transfer {
        direction,
        bytes_max: u64::MAX,
        time_max,
        limit: time_max + SLACK,
    };
    let moved = super::dial::dial(address, SLACK, None)
        .map_err(|error| io::Error::other(error.to_string()))
        .and_then(|stream| transfer(&stream, &wanted));
    match moved {
        Ok((moved, seen)) => Finding::ok(
            check,
            format!(
                "{way} {:.0} MB/s, CPU seconds: {:.2} here, {:.2} there for {:.2} GB",
                moved.megabytes_per_s(),
                moved.cpu.as_secs_f64(),
                seen.cpu_s,
                moved.bytes as f64 / 1e9
            ),
        ),
        Err(error) => Finding::fail(
            check,
            format!("{way}: {error}"),
            "see `ip -s link` and `nstat -az TcpRetransSegs` on both hosts",
        ),
    }
}
