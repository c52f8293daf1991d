//! What is done to the workers meanwhile.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::sleep;

use crate::engines::Engines;
use crate::proxy::admin;

/// A small generator of numbers (SplitMix64): a run is told again by its seed.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

#[derive(Debug, Default)]
pub(crate) struct Actions {
    kills: u64,
    drains: u64,
    removals: u64,
    roles: u64,
    roles_refused: u64,
}

impl Actions {
    pub(crate) fn total(&self) -> u64 {
        self.kills + self.drains + self.removals + self.roles + self.roles_refused
    }
}

impl fmt::Display for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} engines killed and restarted, {} drained and taken back, {} removed and registered \
             anew, {} given another role, {} not since they were busy",
            self.kills, self.drains, self.removals, self.roles, self.roles_refused
        )
    }
}

/// Workers come back from all that is done to them: there is always one to do something to.
const STANDSTILL_MAX: Duration = Duration::from_secs(60);

/// A worker as the proxy shows it.
#[derive(Debug)]
struct Shown {
    id: String,
    url: String,
    role: String,
    routable: bool,
}

async fn workers(proxy: SocketAddr) -> Vec<Shown> {
    let (status, text) = admin(proxy, "GET", "/v1/workers", "").await;
    assert_eq!(status, 200, "{text}");
    let list: Value = serde_json::from_str(&text).expect("JSON");
    let list = list["workers"].as_array().or_else(|| list.as_array());
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    list.expect("a list")
        .iter()
        .map(|known| Shown {
            id: text(&known["id"]),
            url: text(&known["url"]),
            role: text(&known["role"]),
            routable: known["routable"] == Value::Bool(true),
        })
        .collect()
}

/// One thing after the other until the end, then everything is put right again.
pub(crate) async fn run(
    engines: Arc<Engines>,
    proxy: SocketAddr,
    end: Instant,
    seed: u64,
) -> Actions {
    let mut draw = Draw::new(seed);
    let mut actions = Actions::default();
    let (mut total, mut since) = (0, Instant::now());
    while Instant::now() < end {
        sleep(Duration::from_millis(100 + draw.below(300))).await;
        let shown = workers(proxy).await;
        let usable: Vec<&Shown> = shown.iter().filter(|known| known.routable).collect();
        if actions.total() > total {
            (total, since) = (actions.total(), Instant::now());
        }
        assert!(
            since.elapsed() < STANDSTILL_MAX,
            "nothing could be done to a worker for {STANDSTILL_MAX:?}: {shown:?}"
        );
        if usable.is_empty() {
            continue;
        }
        let chosen = usable[draw.below(usable.len() as u64) as usize];
        let same = usable.iter().filter(|known| known.role == chosen.role);
        // An operator leaves two of each role: one may be killed by accident.
        if same.count() < 3 && usable.len() > 3 || usable.len() <= 3 {
            // Too few of this role: another one becomes one.
            let other = usable.iter().find(|known| known.role != chosen.role);
            if let (Some(other), true) = (other, usable.len() > 4) {
                change_role(proxy, other, &chosen.role, &mut actions).await;
            }
            continue;
        }
        let at = (0..engines.count()).find(|at| engines.url(*at) == chosen.url);
        let Some(at) = at else { continue };
        match draw.below(4) {
            0 => {
                engines.kill(at).await;
                sleep(Duration::from_millis(200 + draw.below(1_500))).await;
                engines.restart(at).await;
                actions.kills += 1;
            }
            1 => {
                let path = format!("/v1/workers/{}/drain?wait_s=5", chosen.id);
                let drained = done(admin(proxy, "POST", &path, "").await);
                sleep(Duration::from_millis(draw.below(500))).await;
                // Also one whose legs took longer than that, and one that has started anew meanwhile:
                // under its new id it is kept from legs as it was before.
                let mut back = false;
                for known in workers(proxy).await {
                    if known.url == chosen.url {
                        let path = format!("/v1/workers/{}/undrain", known.id);
                        back |= done(admin(proxy, "POST", &path, "").await);
                    }
                }
                if back && drained {
                    actions.drains += 1;
                }
            }
            2 => {
                engines.set_beats(at, false);
                let force = ["", "&force=true"][draw.below(2) as usize];
                let path = format!("/v1/workers/{}?wait_s=5{force}", chosen.id);
                let (status, text) = admin(proxy, "DELETE", &path, "").await;
                // A heartbeat that was under way may have been first.
                assert!(matches!(status, 200 | 202 | 404), "{status} {text}");
                sleep(Duration::from_millis(draw.below(500))).await;
                engines.set_beats(at, true);
                actions.removals += 1;
            }
            _ => {
                let role = match chosen.role.as_str() {
                    "prefill" => "decode",
                    _ => "prefill",
                };
                change_role(proxy, chosen, role, &mut actions).await;
            }
        }
    }
    for at in 0..engines.count() {
        engines.set_beats(at, true);
        if !engines.lives(at) {
            engines.restart(at).await;
        }
    }
    actions
}

/// Whether an order was carried out. On a busy host a worker's heartbeats may be late, and it leaves
/// meanwhile: then not.
fn done((status, text): (u16, String)) -> bool {
    assert!(matches!(status, 200 | 404 | 409), "{status} {text}");
    status == 200
}

async fn change_role(proxy: SocketAddr, worker: &Shown, role: &str, actions: &mut Actions) {
    let path = format!("/v1/workers/{}/role?wait_s=5", worker.id);
    let body = format!(r#"{{"role":"{role}"}}"#);
    let (status, text) = admin(proxy, "POST", &path, &body).await;
    match status {
        200 => actions.roles += 1,
        409 => actions.roles_refused += 1,
        // It has left meanwhile.
        404 => {}
        _ => panic!("role of {}: {status} {text}", worker.id),
    }
}
