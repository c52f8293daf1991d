//! `hetero-kv doctor`: what would go wrong, found before a model is loaded, and how to mend it.
//!
//! Each check is a file of its own and ends in one [`report::Finding`]; it looks at the real thing
//! (binds the port, reads another process's memory, loads the connector in the environment's own
//! vLLM, dials what the peer advertises) and has a deadline.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Subcommand, ValueEnum};

use crate::output::Verdict;
use report::Report;

mod address;
mod dial;
mod listen;
mod loopback;
mod machine;
mod mori;
mod peer;
mod port_owner;
mod ports;
mod process_memory;
mod process_roles;
mod rdma;
mod report;
mod resources;
mod segments;
mod stream;
mod subprocess;
mod versions;
mod vllm;
mod wire;

/// Most ranks of an engine, engines of a host and peers of an engine: far above any that exist,
/// and what they need in ports, descriptors and threads stays within 32 bits.
const COUNT_MAX: i64 = 4096;

/// Longest measurement of throughput.
const SECONDS_MAX: i64 = 60;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    host: HostArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Between two hosts, on the prefill one: stands in for an engine, for --seconds or until Ctrl-C
    Listen(listen::Args),
    /// Between two hosts, on the decode one: dials what `listen` advertises, as an engine would
    Check(peer::Args),
    /// The process whose memory is read.
    #[command(hide = true)]
    Holder(process_roles::HolderArgs),
    /// The process that reads it.
    #[command(hide = true)]
    Reader,
    /// Says what the verbs library finds.
    #[command(hide = true)]
    RdmaLook(rdma::roles::LookArgs),
    /// The process whose memory is read by RDMA.
    #[command(hide = true)]
    RdmaHolder(rdma::roles::HolderArgs),
    /// The process that reads it.
    #[command(hide = true)]
    RdmaReader(rdma::roles::ReaderArgs),
}

/// Whether something is to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Use {
    /// Where it is there.
    Auto,
    /// Never.
    Off,
    /// Without it nothing is to start.
    Require,
}

/// The connector's setting `transport`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransportChoice {
    /// The best that works.
    Auto,
    /// Process memory only.
    Process,
    /// RDMA only.
    Verbs,
    /// TCP only.
    Tcp,
    /// AMD's MoRI-IO only.
    Mori,
}

/// The engines that are to run on this host.
#[derive(clap::Args)]
struct HostArgs {
    /// Address or name that other engines reach this host by (the connector's `host`) [default:
    /// VLLM_HOST_IP, else the first network address]
    #[arg(long)]
    host: Option<String>,
    /// Address to bind instead (the connector's `bind_host`)
    #[arg(long, value_name = "HOST")]
    bind_host: Option<String>,
    /// Ports for the listeners (the connector's `port_range`) [default: the system assigns them]
    #[arg(long, value_name = "FIRST-LAST", value_parser = ports::parse_range)]
    port_range: Option<ports::PortRange>,
    /// Workers of one engine on this host (tensor times pipeline parallel ranks)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=COUNT_MAX))]
    tp: u32,
    /// Engines on this host (data parallel ranks)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=COUNT_MAX))]
    dp: u32,
    /// Ranks of other engines that each worker talks to
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=COUNT_MAX))]
    peers: u32,
    /// Interpreter of the environment that has vLLM [default: HETERO_KV_VLLM_PYTHON, else the one
    /// beside this executable, else python3]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// The connector's `transport`: what one set by name needs and is missing is a FAIL
    #[arg(long, value_enum, default_value = "auto")]
    transport: TransportChoice,
    /// The connector's `allow_ptracer`
    #[arg(long)]
    allow_ptracer: bool,
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
pub(crate) fn run(args: &Args) -> Result<Verdict> {
    match &args.command {
        None => check_host(&args.host),
        Some(Command::Listen(listen)) => listen::run(listen),
        Some(Command::Check(check)) => peer::run(check),
        Some(Command::Holder(holder)) => process_roles::hold(holder),
        Some(Command::Reader) => process_roles::read(),
        Some(Command::RdmaLook(look)) => rdma::roles::look(look),
        Some(Command::RdmaHolder(holder)) => rdma::roles::hold(holder),
        Some(Command::RdmaReader(reader)) => rdma::roles::read(reader),
    }
}

fn check_host(args: &HostArgs) -> Result<Verdict> {
    let mut report = Report::new(args.json);
    report.add(versions::ours())?;
    let (finding, bound) = address::check(args.host.as_deref(), args.bind_host.as_deref());
    report.add(finding)?;
    if let Some(bound) = bound {
        report.add(ports::check(
            bound,
            args.port_range.as_ref(),
            args.dp,
            args.tp,
        ))?;
    }
    report.add(resources::descriptors(args.tp, args.peers))?;
    report.add(resources::threads(args.dp, args.tp, args.peers))?;
    let reads_memory = match args.transport {
        TransportChoice::Auto | TransportChoice::Process => true,
        TransportChoice::Verbs | TransportChoice::Tcp | TransportChoice::Mori => false,
    };
    if reads_memory {
        let wanted = process_memory::Wanted {
            required: args.transport == TransportChoice::Process,
            allow_ptracer: args.allow_ptracer,
            seconds: args.seconds,
        };
        for finding in process_memory::check(&wanted) {
            report.add(finding)?;
        }
    }
    if args.seconds > 0 {
        let address = bound.map_or(IpAddr::from([127, 0, 0, 1]), machine::dialled_here);
        report.add(loopback::check(address, args.seconds))?;
    }
    let rdma_alone = match args.transport {
        TransportChoice::Verbs | TransportChoice::Mori => true,
        TransportChoice::Auto | TransportChoice::Process | TransportChoice::Tcp => false,
    };
    let host = bound.map(|bound| bound.to_string());
    for finding in rdma::check(&args.rdma, rdma_alone, host.as_deref()) {
        report.add(finding)?;
    }
    let python = args.python.clone().unwrap_or_else(crate::demo::python);
    for finding in vllm::check(&python) {
        report.add(finding)?;
    }
    match args.transport {
        TransportChoice::Auto => report.add(mori::check(&python, false))?,
        TransportChoice::Mori => report.add(mori::check(&python, true))?,
        TransportChoice::Process | TransportChoice::Verbs | TransportChoice::Tcp => {}
    }
    report.end()
}
