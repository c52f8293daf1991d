//! `hetero-kv doctor listen`: listens where an engine would, says what it would advertise, and
//! lets `doctor check` send and receive.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hetero_kv_transport::net::listen::{ListenAddress, ListenError, listen_on};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::ports::{PortRange, parse_range};
use super::rdma::between::{Holder, at_listener};
use super::rdma::roles::Site as RdmaSite;
use super::report::{Finding, Report, one_line};
use super::stream::{Deadline, receive_line, receive_stream, send_line, send_stream};
use super::versions::{VERSION, WIRE};
use super::wire::{Answer, Ask, Endpoint, Question, Seen, boot_id, parse_endpoint};
use super::{COUNT_MAX, Use, machine, rdma};
use crate::output::{Verdict, print};

/// Connections at once: one checker has one, and a burst of strangers must not take threads
/// without end.
const CONNECTIONS_MAX: usize = 16;

/// For the question, and beyond a stream's own time.
const SLACK: Duration = Duration::from_secs(10);

/// Longest stream.
const STREAM_TIME_MAX: Duration = Duration::from_secs(60);

/// Data listeners that are announced: enough to tell whether a firewall lets the range in, few
/// enough that the answer fits the smallest packet.
const DATA_PORTS_MAX: u32 = 16;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to listen, as an engine's control listener would; port 0: the system assigns one
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_endpoint)]
    listen: Endpoint,
    /// What to tell others to dial instead, where that is a translated address; port 0: the one
    /// that is listened on
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_endpoint)]
    advertise: Option<Endpoint>,
    /// Ports for the data listeners (the connector's `port_range`) [default: the system assigns
    /// them]
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_range)]
    port_range: Option<PortRange>,
    /// Data listeners, one for each worker (16 at most)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=COUNT_MAX))]
    tp: u32,
    #[command(flatten)]
    rdma: rdma::Flags,
    /// Seconds after which to end by itself
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

/// What each connection is told.
struct Site {
    run: String,
    advertise: Endpoint,
    data_ports: Vec<u16>,
    rdma: Holder,
}

/// Ends when its time is over; exit 1 when it cannot listen.
pub(super) fn run(args: &Args) -> Result<Verdict> {
    let opened = open(args);
    let (listeners, site) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            let mut report = Report::new(args.json);
            report.add(not_opened(&error))?;
            return report.end();
        }
    };
    let required = args.rdma.rdma == Use::Require;
    let rdma = at_listener(&site.rdma.site, required);
    if rdma.failed() {
        let mut report = Report::new(args.json);
        report.add(rdma)?;
        return report.end();
    }
    let control = listeners[0].local_addr().context("control listener")?;
    let ports: Vec<String> = site.data_ports.iter().map(u16::to_string).collect();
    print(&if args.json {
        let line = serde_json::json!({
            "listening": control.to_string(),
            "advertise": site.advertise,
            "data_ports": site.data_ports,
            "rdma": rdma,
        });
        format!("{line}\n")
    } else {
        format!(
            "listening on {control}, data ports {}, for {} s\n{}on the decode host: hetero-kv doctor \
             check {}\n",
            ports.join(", "),
            args.seconds,
            rdma.line(),
            site.advertise
        )
    })?;
    serve(
        &listeners,
        &Arc::new(site),
        Instant::now() + Duration::from_secs(args.seconds.into()),
        args.json,
    )?;
    Ok(Verdict::Right)
}

fn open(args: &Args) -> Result<(Vec<TcpListener>, Site), ListenError> {
    let address = |port_range, ports_needed| ListenAddress {
        host: match &args.advertise {
            Some(advertise) => advertise.host.clone(),
            None => args.listen.host.clone(),
        },
        bind_host: args.advertise.as_ref().map(|_| args.listen.host.clone()),
        port_range,
        ports_needed,
    };
    let port = args.listen.port;
    let control = listen_on(&address((port != 0).then_some(port..=port), 1))?;
    let data_count = args.tp.min(DATA_PORTS_MAX);
    let mut listeners = vec![control];
    for _ in 0..data_count {
        listeners.push(listen_on(&address(args.port_range.clone(), data_count))?);
    }
    let ports: Vec<u16> = listeners
        .iter()
        .filter_map(|listener| Some(listener.local_addr().ok()?.port()))
        .collect();
    let mut advertise = args
        .advertise
        .clone()
        .unwrap_or_else(|| args.listen.clone());
    if advertise.port == 0 {
        advertise.port = ports[0];
    }
    let bind_host = args.advertise.as_ref().map(|_| args.listen.host.as_str());
    let rdma = Holder::start(
        &args.rdma,
        &advertise.host,
        bind_host,
        args.port_range.as_ref(),
    );
    let site = Site {
        run: getrandom::u64().map_or_else(|_| boot_id(), |word| format!("{word:016x}")),
        advertise,
        data_ports: ports[1..].to_vec(),
        rdma,
    };
    Ok((listeners, site))
}

fn not_opened(error: &ListenError) -> Finding {
    let mend = match error {
        ListenError::Unspecified { .. } => format!(
            "--listen with {}, or say with --advertise what others are to dial",
            machine::candidates()
        ),
        ListenError::Address { .. } => format!("--listen with {}", machine::candidates()),
        ListenError::PortRangeExhausted { .. } => {
            "choose another port, or end what listens there (`ss -ltnp`)".to_owned()
        }
    };
    Finding::fail("listen", error.to_string(), mend)
}

fn serve(listeners: &[TcpListener], site: &Arc<Site>, end: Instant, json: bool) -> Result<()> {
    let connections = Arc::new(AtomicUsize::new(0));
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        let mut ready: Vec<PollFd<'_>> = listeners
            .iter()
            .map(|listener| PollFd::new(listener, PollFlags::IN))
            .collect();
        match poll(&mut ready, Some(&Timespec::try_from(left)?)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error)).context("poll"),
        }
        let waiting: Vec<bool> = ready.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (listener, _) in listeners.iter().zip(waiting).filter(|(_, waits)| *waits) {
            // A connection that was cut before it is taken is as if it had never come.
            let Ok((stream, from)) = listener.accept() else {
                continue;
            };
            if connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
                connections.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let (site, counted) = (site.clone(), Counted(connections.clone()));
            thread::spawn(move || {
                let _counted = counted;
                let told = match answer(&stream, &site) {
                    Ok(done) => done,
                    Err(error) => error.to_string(),
                };
                if !json {
                    // Whoever reads the output may have gone; the checks go on.
                    let _ = print(&format!("{from}: {}\n", one_line(&told)));
                }
            });
        }
    }
}

/// Counts one connection for as long as it lives.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Answers one question; what was done, in words.
fn answer(stream: &TcpStream, site: &Site) -> io::Result<String> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let question: Question = receive_line(stream, Deadline::after(SLACK))?;
    send_line(
        stream,
        &Answer {
            hetero_kv_doctor: true,
            version: VERSION.into(),
            wire: WIRE,
            run: site.run.clone(),
            boot_id: boot_id(),
            advertise: site.advertise.clone(),
            data_ports: site.data_ports.clone(),
            knows_rdma: true,
        },
        Deadline::after(SLACK),
    )?;
    let time = |ms| Duration::from_millis(ms).min(STREAM_TIME_MAX);
    let (moved, what) = match question.ask {
        Ask::Hello => return Ok(format!("hello of {}", question.version)),
        Ask::Rdma => {
            send_line(stream, &site.rdma.site, Deadline::after(SLACK))?;
            return Ok(match &site.rdma.site {
                RdmaSite::Off => "told that RDMA is off".into(),
                RdmaSite::Lacks(_) => "told that there is no RDMA".into(),
                RdmaSite::Here(held) => format!("told of {}", held.device),
            });
        }
        Ask::Upload { ms } => {
            let deadline = Deadline::after(time(ms) + SLACK);
            (receive_stream(stream, deadline)?, "received")
        }
        Ask::Download { bytes, ms } => {
            let deadline = Deadline::after(time(ms) + SLACK);
            (send_stream(stream, bytes, time(ms), deadline)?, "sent")
        }
    };
    let seen = Seen {
        bytes: moved.bytes,
        cpu_s: moved.cpu.as_secs_f64(),
    };
    send_line(stream, &seen, Deadline::after(SLACK))?;
    Ok(format!(
        "{what} {} bytes, {:.0} MB/s",
        moved.bytes,
        moved.megabytes_per_s()
    ))
}
