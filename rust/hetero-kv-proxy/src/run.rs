//! One proxy from configuration to its end.

use std::io::ErrorKind;
use std::net::SocketAddr;
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
    let listener = listen(&config.listen, Listen::Clients).await?;
    let admin = match &config.admin_listen {
        Some(address) => Some(listen(address, Listen::Administrators).await?),
        None => None,
    };
    let zmq = match &config.zmq_listen {
        Some(address) => Some(listen(address, Listen::Zmq).await?),
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

/// For whom a listener is.
#[derive(Clone, Copy)]
enum Listen {
    Clients,
    Administrators,
    Zmq,
}

impl Listen {
    /// The setting that names its address.
    fn setting(self) -> &'static str {
        match self {
            Self::Clients => "--listen",
            Self::Administrators => "--admin-listen",
            Self::Zmq => "--zmq-listen",
        }
    }
}

/// Listens on an address of the settings.
async fn listen(address: &str, whom: Listen) -> anyhow::Result<TcpListener> {
    let (host, port) = host_port(address).map_err(anyhow::Error::msg)?;
    let bound = listener::bind(&host, port).await;
    bound.map_err(|error| {
        let way_outs = [
            (
                ErrorKind::AddrInUse,
                "; another process listens there, and takes the requests: end it or choose another \
                 port",
            ),
            (
                ErrorKind::AddrNotAvailable,
                "; it is no address of this host: 0.0.0.0 serves on all",
            ),
            (
                ErrorKind::PermissionDenied,
                "; ports below 1024 are for privileged processes",
            ),
        ];
        let known = way_outs.into_iter().find(|(kind, _)| *kind == error.kind());
        let way_out = known.map_or("", |(_, text)| text);
        anyhow::anyhow!("{} {address}: {error}{way_out}", whom.setting())
    })
}

/// The address that a listener got.
fn bound_at(
    listener: Option<&TcpListener>,
    what: &'static str,
) -> anyhow::Result<Option<SocketAddr>> {
    let at = listener.map(TcpListener::local_addr).transpose();
    at.context(what)
}

/// A proxy that is serving.
#[derive(Debug)]
pub struct Proxy {
    /// What its requests share.
    pub app: Arc<App>,
    /// Where it listens.
    pub address: SocketAddr,
    /// Where it listens for administrators.
    pub admin_address: Option<SocketAddr>,
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
        let admin_address = bound_at(admin.as_ref(), "the admin listener's address")?;
        let zmq_address = bound_at(zmq.as_ref(), "ZeroMQ's address")?;
        let listeners = [
            (Listen::Clients, Some(address)),
            (Listen::Administrators, admin_address),
            (Listen::Zmq, zmq_address),
        ];
        let listeners = listeners.into_iter();
        let listeners = listeners.filter_map(|(whom, at)| Some((whom.setting(), at?)));
        // Nobody else sets them.
        let _set = app.listeners.set(listeners.collect());
        for (door, listener) in [
            (Door::Clients, Some(listener)),
            (Door::Administrators, admin),
        ] {
            let Some(listener) = listener else { continue };
            if door == Door::Administrators
                && let Some(bound) = admin_address
            {
                tracing::info!(listen = %bound, "serving administrators");
                warn_unless_signed(&config, bound);
            }
            tokio::spawn(server::run(Arc::clone(&app), door, listener));
        }
        tokio::spawn(workers::sweep(Arc::clone(&app)));
        if let (Some(listener), Some(bound)) = (zmq, zmq_address) {
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

/// Whoever reaches an admin listener that asks for no signature may change the workers, and a worker
/// gets the prompts.
fn warn_unless_signed(config: &Config, bound: SocketAddr) {
    if config.admin_keys.is_none() && !bound.ip().to_canonical().is_loopback() {
        tracing::warn!(
            listen = %bound,
            "--admin-listen is open to whoever reaches it: without --admin-key-file nothing is signed, \
             and any worker that registers gets requests; give one, or listen on 127.0.0.1"
        );
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
