//! The product's scheduler side with the settings of a lab.

use std::time::Duration;

use anyhow::{Context, Result};
use hetero_kv_core::consumer::ConsumerOptions;
use hetero_kv_core::ids::{DpRank, EngineId, Incarnation};
use hetero_kv_core::layout::CompatFields;
use hetero_kv_core::producer::LeaseTimes;
use hetero_kv_core::wire::card::WorkerCard;
use hetero_kv_core::wire::message::EngineIdentity;
use hetero_kv_transport::control::ControlLimits;
use hetero_kv_transport::net::listen::ListenAddress;
use hetero_kv_transport::scheduler::{Roles, SchedulerOptions, SchedulerSide};

use super::{EngineConfig, Role, host};

/// Between the end of a lease and its release.
const GRACE: Duration = Duration::from_millis(250);
/// Readers stop so long before their lease ends.
const MARGIN: Duration = Duration::from_millis(250);

/// At the port of the start before this one, where it is still free.
pub(super) fn start(
    config: &EngineConfig,
    incarnation: u64,
    workers: Vec<WorkerCard>,
) -> Result<SchedulerSide> {
    let mut fields = CompatFields::new();
    let model = &config.model;
    fields.insert("model", "lab")?;
    fields.insert("kv_heads", model.kv_heads)?;
    fields.insert("block_size", model.block_size)?;
    fields.insert("layers", model.layers)?;
    let lease = Duration::from_millis(config.lease_ms);
    let options = |port: Option<u16>| SchedulerOptions {
        identity: EngineIdentity {
            engine: EngineId::new(&config.engine_id).expect("ids of the lab are short texts"),
            incarnation: Incarnation(incarnation),
            dp_rank: DpRank(config.dp),
            tp_size: config.tp_size,
            pp_size: config.pp_size,
            dp_size: config.dp_size,
        },
        fields: fields.clone(),
        heads: model.heads(),
        workers: workers.clone(),
        roles: Roles {
            producer: config.role == Role::Prefill,
            consumer: config.role == Role::Decode,
        },
        address: ListenAddress {
            host: host::LOCALHOST.to_owned(),
            bind_host: None,
            port_range: port.map(|port| port..=port),
            ports_needed: 1,
        },
        limits: ControlLimits::default(),
        leases: LeaseTimes {
            lease,
            renewal: lease,
            grace: GRACE,
        },
        lease_slots: config.lease_slots,
        keys: None,
        consumer: ConsumerOptions {
            block_size: model.block_size,
            require_kv: true,
            claim_timeout: Duration::from_secs(15),
            load_timeout: Duration::from_secs(120),
            margin: MARGIN.min(lease / 4),
            sibling_linger: Duration::from_millis(20),
            heartbeat: Duration::from_secs(1),
            peer_silence: Duration::from_secs(15),
            backoff: Duration::from_millis(250),
            source_policy: config.source_policy,
        },
    };
    if config.port.is_some()
        && let Ok(side) = SchedulerSide::start(options(config.port))
    {
        return Ok(side);
    }
    // The old port may have gone to a connection of somebody else meanwhile.
    SchedulerSide::start(options(None)).context("scheduler side")
}
