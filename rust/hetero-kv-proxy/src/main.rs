//! The executable: parse, log, run. Exit 0 done, 1 could not serve or a measured request failed,
//! 2 usage or configuration.

use std::process::ExitCode;

use clap::Parser;
use hetero_kv_proxy::cli::{self, Cli, Command, Invocation};
use hetero_kv_proxy::config::{Config, LogFormat};
use hetero_kv_proxy::reload::SetLogLevel;
use hetero_kv_proxy::run;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Requests are many small allocations that are freed soon, at times by another thread than the one
/// that made them; what a burst took goes back to the system.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let parsed = Cli::try_parse().unwrap_or_else(|error| match cli::number_fault(&error) {
        Some(fault) => {
            hetero_kv_proxy::tell::line(format_args!("hetero-kv-proxy: {fault}"));
            std::process::exit(2)
        }
        None => error.exit(),
    });
    match parsed.command {
        Command::Serve(invocation) => with_config(*invocation, serve),
        Command::Check(invocation) => with_config(*invocation, check),
        Command::Sign(args) => match hetero_kv_proxy::auth::cli::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                hetero_kv_proxy::tell::line(format_args!("hetero-kv-proxy: {error:#}"));
                ExitCode::FAILURE
            }
        },
        Command::Trace(args) => block_on(1, async {
            hetero_kv_proxy::timeline::cli::run(args)
                .await
                .map(|()| true)
        }),
        Command::Bench(args) => {
            let threads = args.threads;
            block_on(threads, hetero_kv_proxy::bench::run(*args))
        }
        Command::Mock(args) => {
            run::raise_open_files();
            let threads = args.threads;
            block_on(threads, async {
                hetero_kv_proxy::mock::run(*args).await.map(|()| true)
            })
        }
    }
}

/// Runs one of the tools; exit 1 where it fails or says no.
fn block_on(threads: usize, tool: impl Future<Output = anyhow::Result<bool>>) -> ExitCode {
    let ended = runtime(threads).and_then(|runtime| {
        let ended = runtime.block_on(tool);
        runtime.shutdown_background();
        ended
    });
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            hetero_kv_proxy::tell::line(format_args!("hetero-kv-proxy: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// `threads` of 0 is one for each core that this process may use.
fn runtime(threads: usize) -> anyhow::Result<tokio::runtime::Runtime> {
    use std::thread::available_parallelism;
    let threads = match threads {
        0 => available_parallelism().map_or(1, std::num::NonZero::get),
        some => some,
    };
    // One thread alone needs no queues that others could take from.
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    Ok(builder.enable_all().build()?)
}

fn with_config(
    invocation: Invocation,
    then: impl FnOnce(Config) -> anyhow::Result<()>,
) -> ExitCode {
    let mut faults = cli::environment::faults(std::env::vars_os().map(|(name, _)| name));
    let resolved = Config::resolve(invocation).map_err(|error| faults.extend(error.0));
    let config = match resolved {
        Ok(config) if faults.is_empty() => config,
        Ok(_) | Err(()) => {
            for fault in faults {
                hetero_kv_proxy::tell::line(format_args!("hetero-kv-proxy: {fault}"));
            }
            return ExitCode::from(2);
        }
    };
    match then(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            hetero_kv_proxy::tell::line(format_args!("hetero-kv-proxy: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn check(config: Config) -> anyhow::Result<()> {
    hetero_kv_proxy::tell::answer(&config.to_toml()?)
}

fn serve(config: Config) -> anyhow::Result<()> {
    let set_log_level = start_log(&config);
    // One descriptor for the client and one for the engine, and some to spare.
    let needed = 2 * config.connections_max.min(config.requests_max) as u64 + 64;
    if let Some(open_files) = run::raise_open_files()
        && open_files < needed
    {
        tracing::warn!(
            open_files,
            needed,
            "the limit of open files is below --requests-max"
        );
    }
    let runtime = runtime(config.threads)?;
    let served = runtime.block_on(run::serve(config, set_log_level));
    // What is left after the drain is not waited for.
    runtime.shutdown_background();
    served
}

/// Starts the log, and returns what changes its filter.
fn start_log(config: &Config) -> SetLogLevel {
    let filter = tracing_subscriber::EnvFilter::new(&config.log_level);
    let (filter, handle) = tracing_subscriber::reload::Layer::new(filter);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false);
    let log = tracing_subscriber::registry().with(filter);
    match config.log_format {
        LogFormat::Text => log.with(lines.with_ansi(false)).init(),
        LogFormat::Json => log.with(lines.json()).init(),
    }
    Box::new(move |level| {
        let filter: tracing_subscriber::EnvFilter =
            level.parse().map_err(|error| format!("{error}"))?;
        handle.reload(filter).map_err(|error| error.to_string())
    })
}
