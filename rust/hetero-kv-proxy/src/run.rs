//! One proxy from configuration to its end.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::app::App;
use crate::config::{Config, host_port};
use crate::reload::SetLogLevel;
use crate::routing::Role;
use crate::server::Door;
use crate::{listener, probe, reload, server, workers};

/// Serves until SIGTERM or SIGINT, then drains. SIGHUP reads the files again, for which
/// `set_log_level` changes what is logged.
///
/// # Errors
/// The address cannot be bound, or signals cannot be caught.
pub async fn serve(config: Config, set_log_level: SetLogLevel) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("catching SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
    let mut stop_signal = async move || {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    };
    let listener = listen(&config.listen, "clients").await?;
    let admin = match &config.admin_listen {
        Some(address) => Some(listen(address, "administrators").await?),
        None => None,
    };
    let zmq = match &config.zmq_listen {
        Some(address) => Some(listen(address, "ZeroMQ").await?),
        None => None,
    };
    let proxy = Proxy::start_all(config, listener, admin, zmq)?;

    let mut hangup = signal(SignalKind::hangup()).context("catching SIGHUP")?;
    let name = loop {
        tokio::select! {
            name = stop_signal() => break name,
            _ = hangup.recv() => reload::run(&proxy.app, Some(&set_log_level)).await,
        }
    };
    let drain = proxy.app.config().drain_timeout;
    tracing::info!(signal = name, drain_s = drain.as_secs(), "draining");
    tokio::select! {
        complete = proxy.drain(drain) => {
            if !complete {
                tracing::warn!("requests were still running when the drain time was over");
            }
        }
        name = stop_signal() => tracing::warn!(signal = name, "second signal: not waiting"),
    }
    Ok(())
}

/// Listens on an address of the settings.
async fn listen(address: &str, whom: &str) -> anyhow::Result<TcpListener> {
    let (host, port) = host_port(address).map_err(anyhow::Error::msg)?;
    let bound = listener::bind(&host, port).await;
    bound.with_context(|| format!("listening on {address} for {whom}"))
}

/// A proxy that is serving.
#[derive(Debug)]
pub struct Proxy {
    /// What its requests share.
    pub app: Arc<App>,
    /// Where it listens.
    pub address: std::net::SocketAddr,
    /// Where it listens for administrators.
    pub admin_address: Option<std::net::SocketAddr>,
}

impl Proxy {
    /// Starts probing and serving on `listener`, and administrators on `admin`.
    ///
    /// # Errors
    /// A URL that cannot be a `Host` header, or a listener without an address.
    pub fn start(
        config: Config,
        listener: TcpListener,
        admin: Option<TcpListener>,
    ) -> anyhow::Result<Self> {
        Self::start_all(config, listener, admin, None)
    }

    /// As [`Proxy::start`], and listens for MoRI-IO's workers on `zmq`.
    ///
    /// # Errors
    /// As [`Proxy::start`].
    pub fn start_all(
        config: Config,
        listener: TcpListener,
        admin: Option<TcpListener>,
        zmq: Option<TcpListener>,
    ) -> anyhow::Result<Self> {
        let app = App::new(config)?;
        let config = app.config();
        let address = listener.local_addr().context("the listener's address")?;
        for role in [Role::Prefill, Role::Decode] {
            for instance in app.snapshot(role).iter() {
                probe::start(&app, instance);
            }
        }
        let mut admin_address = None;
        for (door, listener) in [
            (Door::Clients, Some(listener)),
            (Door::Administrators, admin),
        ] {
            let Some(listener) = listener else { continue };
            if door == Door::Administrators {
                let bound = listener
                    .local_addr()
                    .context("the admin listener's address")?;
                tracing::info!(listen = %bound, "serving administrators");
                admin_address = Some(bound);
            }
            tokio::spawn(server::run(Arc::clone(&app), door, listener));
        }
        tokio::spawn(workers::sweep(Arc::clone(&app)));
        if let Some(listener) = zmq {
            let bound = listener.local_addr().context("ZeroMQ's address")?;
            tracing::info!(listen = %bound, "registering over ZeroMQ");
            let ttl = app.config().zmq_ttl;
            tokio::spawn(workers::zmq::run(Arc::clone(&app), listener, ttl));
        }
        tracing::info!(
            listen = %address,
            connector = config.connector.name(),
            prefill = slots(&config.prefill),
            decode = slots(&config.decode),
            prefill_policy = config.prefill_policy.name(),
            decode_policy = config.decode_policy.name(),
            "serving"
        );
        Ok(Self {
            app,
            address,
            admin_address,
        })
    }

    /// Stops accepting, lets what runs end, and waits for it at most `limit`. Returns whether all
    /// of it ended.
    pub async fn drain(&self, limit: Duration) -> bool {
        self.app.stop.send_replace(true);
        self.app.tasks.close();
        tokio::time::timeout(limit, self.app.tasks.wait())
            .await
            .is_ok()
    }
}

/// `URL x ranks` of each instance.
fn slots(workers: &[crate::config::Worker]) -> String {
    let each: Vec<String> = workers
        .iter()
        .map(|worker| format!("{} x{}", worker.spec.url, worker.spec.dp))
        .collect();
    each.join(" ")
}

/// Raises the soft limit of open files to the hard one, and returns it.
pub fn raise_open_files() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if setrlimit(Resource::Nofile, raised).is_err() {
        return limit.current;
    }
    limit.maximum
}
