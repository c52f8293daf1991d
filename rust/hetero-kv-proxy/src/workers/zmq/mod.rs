//! MoRI-IO workers that register as vLLM has them do it: frames over ZeroMQ, from a DEALER to this
//! ROUTER, which never answers. What they say goes the way of a registration over HTTP.

mod frame;
mod zmtp;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::frame::{Announced, announced};
use self::zmtp::{Fault, Limits, Peer};
use super::body::{Told, refused};
use super::{Facts, change};
use crate::app::App;
use crate::config::{Worker, WorkerFault, assemble_worker};
use crate::connectors::Connector;
use crate::lines::Lines;
use crate::listener::{self, Acceptor, until_stopped};
use crate::metrics::OutcomeLabels;
use crate::openai::error::ApiError;
use crate::server::ADMIN_CONNECTIONS_MAX;
use crate::sync::lock;

/// A registration is 200 bytes.
const FRAME_BYTES_MAX: usize = 8 << 10;
/// A DEALER sends one; a REQ puts an empty one in front.
const FRAMES_MAX: usize = 2;
/// For a handshake, and for a message that has begun.
const WITHIN: Duration = Duration::from_secs(10);
/// Senders whose last refusal is remembered, so that each is logged once and not every 3 s.
const REFUSALS_MAX: usize = 1_024;
/// Lines of one address in a minute: the workers of a host may each have a reason of their own.
const LINES_MAX: u32 = 8;

/// The name of a listening socket's use in logs.
struct Desk {
    app: Arc<App>,
    ttl: Duration,
    /// The last refusal of each sender.
    refusals: Mutex<HashMap<String, String>>,
    /// Lines that peers may still cause.
    lines: Mutex<Lines<IpAddr>>,
}

/// Why a frame registers nobody.
struct Refusal {
    outcome: &'static str,
    text: String,
}

/// Accepts and registers until the proxy stops. A worker is good for `ttl` from each frame.
pub(crate) async fn run(app: Arc<App>, listener: TcpListener, ttl: Duration) {
    let stop = app.stop.subscribe();
    let acceptor = Acceptor {
        listener,
        connections: Arc::new(Semaphore::new(ADMIN_CONNECTIONS_MAX)),
        tasks: app.tasks.clone(),
        stop: stop.clone(),
    };
    let desk = Arc::new(Desk {
        app,
        ttl,
        refusals: Mutex::default(),
        lines: Mutex::new(Lines::new(LINES_MAX)),
    });
    let serve = |stream, from: SocketAddr| {
        let (desk, stop) = (Arc::clone(&desk), stop.clone());
        async move { until_stopped(stop, desk.serve(stream, from)).await }
    };
    acceptor.run(serve, listener::log_failure).await;
}

impl Desk {
    async fn serve(&self, stream: TcpStream, from: SocketAddr) {
        let limits = Limits {
            frame_bytes_max: FRAME_BYTES_MAX,
            frames_max: FRAMES_MAX,
            within: WITHIN,
            // Whoever is silent for longer has expired; ZeroMQ dials again by itself.
            idle: self.ttl,
        };
        let mut peer = match Peer::accept(stream, limits).await {
            Ok(peer) => peer,
            Err(fault) => return self.ended(from, &fault, "handshake"),
        };
        loop {
            match peer.message().await {
                Ok(frames) => self.hear(&frames, from),
                Err(fault) => return self.ended(from, &fault, "broken"),
            }
        }
    }

    fn ended(&self, from: SocketAddr, fault: &Fault, outcome: &'static str) {
        let outcome = match fault {
            Fault::Closed | Fault::Idle(_) => {
                tracing::debug!(%from, %fault, "ZeroMQ connection ended");
                return;
            }
            Fault::TooLarge(_) => "too_large",
            Fault::Slow(_) | Fault::Protocol(_) | Fault::Io(_) => outcome,
        };
        self.count(outcome);
        if let Some(unlogged) = self.line(from) {
            tracing::warn!(%from, %fault, unlogged, "ZeroMQ connection closed");
        }
    }

    /// Whether a line about this peer is due, and how many were not since the last: whoever reaches
    /// the port could fill the log.
    fn line(&self, from: SocketAddr) -> Option<u64> {
        lock(&self.lines).due(from.ip(), Instant::now())
    }

    fn count(&self, outcome: &'static str) {
        let frames = &self.app.metrics.zmq_frames;
        frames.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    fn hear(&self, frames: &[Vec<u8>], from: SocketAddr) {
        let payload = match frames {
            [payload] => payload,
            [delimiter, payload] if delimiter.is_empty() => payload,
            _ => {
                let text = format!("a message of {} frames; one registers", frames.len());
                return self.refuse(from, None, &malformed(text));
            }
        };
        let announced = match announced(payload) {
            Ok(announced) => announced,
            Err(text) => return self.refuse(from, None, &malformed(text)),
        };
        let who = announced.url.clone();
        match self.register(announced) {
            Ok(created) => {
                lock(&self.refusals).remove(&who);
                self.count(match created {
                    true => "registered",
                    false => "heartbeat",
                });
            }
            Err(refusal) => self.refuse(from, Some(&who), &refusal),
        }
    }

    fn register(&self, announced: Announced) -> Result<bool, Refusal> {
        let connector = self.app.config().connector;
        fits(connector, announced.mode)?;
        let told = self.told(announced).map_err(|error| refusal(&error))?;
        let registered = change::register(&self.app, told);
        let (_, created) = registered.map_err(|error| refusal(&error))?;
        Ok(created)
    }

    fn told(&self, announced: Announced) -> Result<Told, ApiError> {
        let role = announced.role;
        let part = change::known_part(&self.app, role, &announced.url);
        let worker = worker(&announced, part.as_ref()).map_err(|fault| refused(&fault))?;
        Ok(Told {
            role,
            worker,
            engine_id: None,
            ttl_ms: self.ttl.as_millis() as u64,
            facts: Facts::default(),
        })
    }

    /// Counts a refusal, and logs it unless it is the worker's last one again; without a worker, the
    /// peer's.
    fn refuse(&self, from: SocketAddr, worker: Option<&str>, refusal: &Refusal) {
        self.count(refusal.outcome);
        // Another connection is another port.
        let who = worker.map_or_else(|| from.ip().to_string(), str::to_owned);
        let mut refusals = lock(&self.refusals);
        let again = refusals.get(&who).is_some_and(|last| *last == refusal.text);
        if again {
            return;
        }
        let Some(unlogged) = self.line(from) else {
            return;
        };
        if refusals.len() >= REFUSALS_MAX {
            refusals.clear();
        }
        refusals.insert(who.clone(), refusal.text.clone());
        drop(refusals);
        let reason = &*refusal.text;
        tracing::warn!(worker = who, %from, reason, unlogged, "registration over ZeroMQ refused");
    }
}

fn malformed(text: String) -> Refusal {
    Refusal {
        outcome: "malformed",
        text,
    }
}

fn refusal(error: &ApiError) -> Refusal {
    Refusal {
        outcome: "refused",
        text: error.message.clone(),
    }
}

/// Whether workers of this mode are what the proxy was started for: their legs differ.
fn fits(connector: &dyn Connector, mode: &'static str) -> Result<(), Refusal> {
    let wanted = match connector.moriio_mode() {
        Some(wanted) if wanted != mode => wanted,
        Some(_) | None => return Ok(()),
    };
    Err(Refusal {
        outcome: "mode_mismatch",
        text: format!(
            "the worker's transfer_mode is {mode} and --connector {} serves {wanted}; set read_mode in \
             the engine's kv_connector_extra_config, or start the proxy with the other connector",
            connector.name()
        ),
    })
}

/// The worker that was announced. `part` is what an operator has said of it: which ranks of the
/// whole engine are behind its URL does not stand in a frame, and is taken over where the sizes
/// agree.
fn worker(announced: &Announced, part: Option<&Worker>) -> Result<Worker, WorkerFault> {
    let size = announced.dp_size;
    // Nor do its model and what else peers agree on.
    let told = part.map(|known| (known.traits.clone(), known.control.clone()));
    let part = part.filter(|known| u64::from(known.peer.dp_size) == size);
    let (dp, dp_rank0, rank0) = match part {
        Some(known) => (
            u64::from(known.peer.dp),
            known.peer.dp_rank0,
            known.spec.rank0,
        ),
        None => (size, 0, 0),
    };
    let zmq = &announced.zmq;
    let given = [
        ("dp", dp.to_string()),
        ("rank0", rank0.to_string()),
        ("dp-size", size.to_string()),
        ("dp-rank0", dp_rank0.to_string()),
        ("tp", announced.tp_size.to_string()),
        ("kv-host", zmq.host.clone()),
        ("handshake", zmq.handshake.to_string()),
        ("notify", zmq.notify.to_string()),
    ];
    let given: Vec<(&'static str, &str)> = given
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect();
    let mut worker = assemble_worker(&announced.url, &given)?;
    if let Some((traits, control)) = told {
        (worker.traits, worker.control) = (traits, control);
    }
    Ok(worker)
}
