//! What the tests of the two sides and of the control plane share: small valid engines.

use std::num::NonZeroU32;
use std::time::Duration;

use hetero_kv_core::consumer::ConsumerOptions;
use hetero_kv_core::digest::PromptHasher;
use hetero_kv_core::ids::{DpRank, EngineId, Incarnation, PpRank, PromptDigest, TpRank};
use hetero_kv_core::layout::{CompatFields, KvHeads, LayerCache, Part, RankCache};
use hetero_kv_core::memory::MemoryRegion;
use hetero_kv_core::producer::LeaseTimes;
use hetero_kv_core::wire::card::{Endpoints, WorkerCard};
use hetero_kv_core::wire::message::EngineIdentity;

use crate::net::listen::ListenAddress;
use hetero_kv_core::plan::SourcePolicy;

/// Longest wait for something that has to come; only a hang uses it up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) const BLOCK_SIZE: u32 = 4;
pub(crate) const NUM_BLOCKS: u32 = 16;
pub(crate) const PAGE_BYTES: u64 = 48;

pub(crate) fn engine(name: &str) -> EngineId {
    EngineId::new(name).expect("valid in tests")
}

pub(crate) fn identity(name: &str, incarnation: u64) -> EngineIdentity {
    EngineIdentity {
        engine: engine(name),
        incarnation: Incarnation(incarnation),
        dp_rank: DpRank(0),
        tp_size: 1,
        pp_size: 1,
        dp_size: 1,
    }
}

pub(crate) fn fields() -> CompatFields {
    let mut fields = CompatFields::new();
    fields.insert("model", "tiny").expect("valid in tests");
    fields
}

pub(crate) fn heads() -> KvHeads {
    KvHeads::Grouped(NonZeroU32::MIN)
}

pub(crate) fn lease_times() -> LeaseTimes {
    LeaseTimes {
        lease: Duration::from_secs(20),
        renewal: Duration::from_secs(20),
        grace: Duration::from_millis(20),
    }
}

pub(crate) fn consumer_options() -> ConsumerOptions {
    ConsumerOptions {
        block_size: BLOCK_SIZE,
        require_kv: false,
        claim_timeout: Duration::from_secs(10),
        load_timeout: Duration::from_secs(30),
        margin: Duration::from_millis(50),
        sibling_linger: Duration::ZERO,
        heartbeat: Duration::from_secs(5),
        peer_silence: Duration::from_secs(15),
        backoff: Duration::from_millis(250),
        source_policy: SourcePolicy::Hash,
    }
}

/// One layer of [`NUM_BLOCKS`] pages of one head, at this address.
pub(crate) fn cache(base: u64) -> RankCache {
    let part = Part {
        offset_bytes: 0,
        block_stride_bytes: PAGE_BYTES,
        head_stride_bytes: PAGE_BYTES,
        rows: 1,
        row_stride_bytes: PAGE_BYTES,
        row_bytes: PAGE_BYTES,
        block_tokens: 0,
    };
    let layer = LayerCache {
        name: "model.layers.0.self_attn.attn".into(),
        region: 0,
        parts: vec![part],
        group: 0,
    };
    let region = MemoryRegion {
        base,
        bytes: u64::from(NUM_BLOCKS) * PAGE_BYTES,
    };
    RankCache::new(NUM_BLOCKS, 1, vec![region], vec![layer]).expect("valid in tests")
}

/// A rank that nobody reads.
pub(crate) fn card() -> WorkerCard {
    WorkerCard {
        dp_rank: DpRank(0),
        tp_rank: TpRank(0),
        pp_rank: PpRank(0),
        cache: cache(0x1000),
        endpoints: Endpoints::default(),
    }
}

pub(crate) fn prompt() -> PromptDigest {
    PromptHasher::new(&[1, 2, 3]).finish()
}

pub(crate) fn address(host: &str) -> ListenAddress {
    ListenAddress {
        host: host.into(),
        bind_host: None,
        port_range: None,
        ports_needed: 2,
    }
}
