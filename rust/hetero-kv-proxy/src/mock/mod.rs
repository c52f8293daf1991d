//! `hetero-kv-proxy mock`: scripted workers that speak OpenAI's API and our connector's params, so
//! that any P/D proxy can be tested and measured without an engine.
//!
//! A worker does what a vLLM engine with our connector does where a proxy can see it: it refuses a
//! prefill leg that an engine would refuse, pins the prompt's blocks under a lease and answers with
//! params; a decode leg has to bring those params back unchanged, and frees the blocks. It computes
//! nothing.

pub mod answer;
pub mod body;
pub mod cli;
pub mod counters;
pub mod fault;
pub mod leg;
pub mod serve;
pub mod transfers;

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;

use crate::listener::{self, Acceptor, until_stopped};
use crate::tell;
use cli::{MockArgs, Role};
use counters::Counters;
use fault::Faults;
use transfers::Transfers;

/// How long running answers may take to end once the process is told to stop.
const DRAIN: Duration = Duration::from_secs(2);

/// Workers that are serving.
#[derive(Debug)]
pub struct Mock {
    /// In the order of the command line.
    pub workers: Vec<Arc<Worker>>,
    /// What prefill workers of this process have pinned.
    pub transfers: Arc<Transfers>,
    stop: watch::Sender<bool>,
    tasks: TaskTracker,
}

/// One worker.
#[derive(Debug)]
pub struct Worker {
    /// Where it listens.
    pub address: SocketAddr,
    /// The legs it takes.
    pub role: Role,
    /// What it has counted.
    pub counters: Counters,
    pub(crate) faults: Faults,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) args: Arc<MockArgs>,
}

impl Mock {
    /// Binds every worker and starts serving.
    ///
    /// # Errors
    /// An address that cannot be bound; it is named.
    pub async fn start(args: MockArgs) -> anyhow::Result<Self> {
        let args = Arc::new(args);
        let transfers = Arc::new(Transfers::new(Duration::from_secs(args.lease_s)));
        let connections = Arc::new(Semaphore::new(args.connections_max));
        let (stop, stopped) = watch::channel(false);
        let tasks = TaskTracker::new();
        let mut bound: Vec<(TcpListener, Arc<Worker>)> = Vec::new();
        for listen in &args.listen {
            for place in 0..listen.workers {
                let port = listen.port_of(place)?;
                let listener = listener::bind(&listen.host, port)
                    .await
                    .with_context(|| format!("listening on {}:{port}", listen.host))?;
                let worker = Arc::new(Worker {
                    address: listener.local_addr().context("the listener's address")?,
                    role: listen.role,
                    counters: Counters::default(),
                    faults: Faults::new(&args.fail),
                    transfers: Arc::clone(&transfers),
                    args: Arc::clone(&args),
                });
                bound.push((listener, worker));
            }
        }
        let mut workers = Vec::new();
        for (listener, worker) in bound {
            workers.push(Arc::clone(&worker));
            let acceptor = Acceptor {
                listener,
                connections: Arc::clone(&connections),
                tasks: tasks.clone(),
                stop: stopped.clone(),
            };
            let stopped = stopped.clone();
            tasks.spawn(acceptor.run(
                move |stream, _| {
                    let served = serve::connection(Arc::clone(&worker), stream);
                    until_stopped(stopped.clone(), served)
                },
                |error, _untold| {
                    tell::line(format_args!("hetero-kv-proxy mock: accept failed: {error}"));
                },
            ));
        }
        Ok(Self {
            workers,
            transfers,
            stop,
            tasks,
        })
    }

    /// Stops accepting and waits at most `limit` for what runs.
    pub async fn stop(&self, limit: Duration) {
        self.stop.send_replace(true);
        self.tasks.close();
        let _ended = tokio::time::timeout(limit, self.tasks.wait()).await;
    }
}

/// Serves until SIGTERM or SIGINT. Prints one line `URL ROLE` for each worker on stdout once all
/// of them listen.
///
/// # Errors
/// An address that cannot be bound, signals that cannot be caught, or a closed stdout.
pub async fn run(args: MockArgs) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("catching SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
    let mock = Mock::start(args).await?;
    {
        let mut out = std::io::stdout().lock();
        for worker in &mock.workers {
            writeln!(out, "http://{} {}", worker.address, worker.role.name())?;
        }
        out.flush()?;
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    mock.stop(DRAIN).await;
    Ok(())
}
