//! The shares of revisions, and the draws of requests.

mod unheard;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use http::{HeaderMap, HeaderValue};

use crate::app::App;
use crate::connectors::Order;
use crate::metrics::RevisionLabels;
use crate::routing::policy::draw_of_session;
use crate::routing::{Draw, Drawn, Field, Role, Weights, draw_of_turn};
use crate::sync::lock;
use unheard::{Question, Told};

/// The shares as they are.
#[derive(Debug)]
pub(crate) struct Revisions {
    weights: Mutex<Option<Arc<Weights>>>,
    turn: AtomicU64,
    /// Whether some worker tells each of them.
    heard: Mutex<Question>,
}

/// By what the revision of one request is drawn: the same for all of its legs.
pub(crate) struct Drawing {
    weights: Arc<Weights>,
    number: u64,
}

impl Drawing {
    pub(crate) fn draw(&self) -> Draw<'_> {
        Draw {
            weights: &self.weights,
            number: self.number,
        }
    }
}

impl Revisions {
    pub(crate) fn new(weights: Option<Weights>) -> Self {
        Self {
            weights: Mutex::new(weights.map(Arc::new)),
            turn: AtomicU64::new(0),
            heard: Mutex::default(),
        }
    }

    pub(crate) fn weights(&self) -> Option<Arc<Weights>> {
        lock(&self.weights).clone()
    }
}

impl App {
    /// The draw of a request, where revisions have weights. Requests of one session fall on one
    /// revision.
    pub(crate) fn drawing(&self, headers: &HeaderMap) -> Option<Drawing> {
        let weights = self.revisions.weights()?;
        let config = self.config();
        let name = config.hash_header.as_ref();
        let session = name.and_then(|name| headers.get(name));
        let number = match session.map(HeaderValue::as_bytes) {
            Some(session) => draw_of_session(session),
            None => draw_of_turn(self.revisions.turn.fetch_add(1, Ordering::Relaxed)),
        };
        Some(Drawing { weights, number })
    }

    /// Counts where a request went.
    pub(crate) fn count_drawn(&self, drawing: &Drawing, drawn: Drawn) {
        let labels = |at: usize| RevisionLabels {
            revision: Arc::from(&*drawing.weights.entries()[at].0),
        };
        let metrics = &self.metrics;
        let served = labels(drawn.revision);
        metrics.revision_requests.get_or_create(&served).inc();
        if let Some(away) = drawn.instead_of {
            metrics.revision_moves.get_or_create(&labels(away)).inc();
        }
    }

    /// Changes the shares, for requests that begin from then on.
    pub(crate) fn set_weights(&self, weights: Option<Weights>) {
        let now = weights.map(Arc::new);
        let before = std::mem::replace(&mut *lock(&self.revisions.weights), now.clone());
        let has = |weights: &Option<Arc<Weights>>, revision: &str| {
            let mut entries = weights.iter().flat_map(|weights| weights.entries());
            entries.any(|(known, _)| **known == *revision)
        };
        for (revision, _) in before.iter().flat_map(|weights| weights.entries()) {
            if !has(&now, revision) {
                // Revisions come and go; their counters must not pile up.
                let labels = RevisionLabels {
                    revision: Arc::from(&**revision),
                };
                self.metrics.revision_requests.remove(&labels);
                self.metrics.revision_moves.remove(&labels);
            }
        }
        let shown = now
            .as_ref()
            .map(|weights| format!("{:?}", weights.entries()));
        tracing::info!(weights = shown.as_deref().unwrap_or("none"), "revisions");
        self.ask_for_revisions();
    }

    /// Has the workers looked through anew for the revisions that have a share.
    pub(crate) fn ask_for_revisions(&self) {
        *lock(&self.revisions.heard) = Question::default();
    }

    /// Warns once of shares of revisions that no worker tells, at a time when those that are there
    /// can have told theirs.
    pub(crate) fn tell_unheard_revisions(&self) {
        if !lock(&self.revisions.heard).is_open() {
            return;
        }
        let config = self.config();
        let roles: &[Role] = match config.connector.order() {
            Order::DecodeAlone => &[Role::Decode],
            Order::PrefillFirst | Order::Together => &[Role::Prefill, Role::Decode],
        };
        let told: Told = roles
            .iter()
            .map(|role| {
                let here = self.snapshot(*role);
                let here = here.iter().filter(|known| known.leave().is_none());
                let revision = |traits: &crate::routing::Traits| {
                    traits.get(Field::Revision).map(str::to_owned)
                };
                let told = here.map(|known| revision(&known.worker.traits));
                (role.name(), told.collect())
            })
            .collect();
        let may_come = config.admin_listen.is_some() || config.zmq_listen.is_some();
        let weights = self.revisions.weights();
        let mut heard = lock(&self.revisions.heard);
        let found = heard.look(weights.as_deref(), &told, may_come, self.now_ms());
        drop(heard);
        if let Some(found) = found {
            let (unheard, known) = (found.unheard, found.known);
            let outcome = match found.is_any_served {
                true => "the others get its share",
                false => {
                    "none of the others is told in every role, so that each request is refused \
                          (503 no_revision)"
                }
            };
            tracing::warn!(
                unheard,
                known,
                "no worker tells this revision of --revision-weights; {outcome}"
            );
        }
    }
}
