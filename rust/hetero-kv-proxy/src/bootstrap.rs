//! Mooncake's bootstrap servers: which engine id is at which DP rank of a prefill instance.
//!
//! `GET /query` answers with `{"<dp rank>": {"engine_id": ..., "worker_addr": ...}, ...}`. An
//! engine id is new at each start of the engine, so an answer is believed for one health interval
//! and forgotten when the instance cannot be reached.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{HeaderMap, Method};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use tokio::time::{Instant, timeout};

use crate::config::{Config, base_url};
use crate::lease::SlotLease;
use crate::sync::lock;
use crate::upstream::{LegBody, PoolLimits, SendError, Upstream};

/// 1,024 DP ranks with many TP ranks each stay far below it.
const ANSWER_BYTES_MAX: usize = 4 << 20;

type EngineIds = Arc<BTreeMap<u32, Arc<str>>>;

/// The bootstrap server of one prefill instance.
#[derive(Debug)]
pub(crate) struct Bootstrap {
    upstream: Arc<Upstream>,
    known: Mutex<Option<(Instant, EngineIds)>>,
    /// Held while asking, so that a burst of requests asks once.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Deserialize)]
struct Entry {
    engine_id: Arc<str>,
}

impl Bootstrap {
    /// The server at `url`, not asked yet.
    pub(crate) fn new(url: &str, limits: PoolLimits) -> Result<Self, http::Error> {
        // The configuration has made this URL of a host and a port.
        let base = base_url(url).unwrap_or_else(|_| crate::config::BaseUrl {
            host: String::new(),
            port: 0,
            authority: String::new(),
            path: String::new(),
        });
        Ok(Self {
            upstream: Upstream::new(base, limits)?,
            known: Mutex::new(None),
            asking: tokio::sync::Mutex::new(()),
        })
    }

    /// The next leg asks anew.
    pub(crate) fn forget(&self) {
        *lock(&self.known) = None;
    }

    fn known(&self, age_max: Duration) -> Option<EngineIds> {
        let known = lock(&self.known);
        let (since, ids) = known.as_ref()?;
        (since.elapsed() < age_max).then(|| Arc::clone(ids))
    }

    async fn ask(&self) -> Result<EngineIds, String> {
        let mut last = String::new();
        // A kept connection may be stale; the second try opens its own.
        for fresh in [false, true] {
            let body = LegBody::default();
            let sent = self
                .upstream
                .send(&Method::GET, "/query", &HeaderMap::new(), &[], body, fresh)
                .await;
            let answer = match sent {
                Ok(answer) => answer,
                Err(error) => {
                    last = error.to_string();
                    continue;
                }
            };
            let status = answer.head.status;
            let body = Limited::new(answer.body, ANSWER_BYTES_MAX)
                .collect()
                .await
                .map_err(|error| format!("/query: {error}"))?
                .to_bytes();
            if !status.is_success() {
                return Err(format!("/query answered {status}"));
            }
            let entries: BTreeMap<u32, Entry> =
                serde_json::from_slice(&body).map_err(|error| format!("/query: {error}"))?;
            let ids = entries
                .into_iter()
                .map(|(rank, entry)| (rank, entry.engine_id));
            return Ok(Arc::new(ids.collect()));
        }
        Err(last)
    }
}

/// The engine id at the slot of a prefill leg.
///
/// # Errors
/// [`SendError::Bootstrap`] when the server cannot be reached, answers otherwise than Mooncake's, or
/// does not know the rank.
pub(crate) async fn engine_id(config: &Config, lease: &SlotLease) -> Result<Arc<str>, SendError> {
    let picked = lease.picked;
    let Some(server) = &lease.instance().bootstrap else {
        return Err(SendError::Bootstrap("none is known".to_owned()));
    };
    let age_max = config.health_interval;
    let ids = match server.known(age_max) {
        Some(ids) => ids,
        None => {
            let asking = server.asking.lock().await;
            // Another request may have asked meanwhile.
            let ids = match server.known(age_max) {
                Some(ids) => ids,
                None => {
                    let ids = timeout(config.health_timeout, server.ask())
                        .await
                        .map_err(|_| SendError::Bootstrap("no answer in time".to_owned()))?
                        .map_err(SendError::Bootstrap)?;
                    *lock(&server.known) = Some((Instant::now(), Arc::clone(&ids)));
                    ids
                }
            };
            drop(asking);
            ids
        }
    };
    let id = ids.get(&picked.rank).cloned();
    id.ok_or_else(|| {
        server.forget();
        let ranks: Vec<String> = ids.keys().map(u32::to_string).collect();
        let ranks = ranks.join(", ");
        SendError::Bootstrap(format!("DP rank {} is not among [{ranks}]", picked.rank))
    })
}
