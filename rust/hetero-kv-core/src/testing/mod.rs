//! What the tests of both machines share: small valid values, and a [`Pair`] of machines on a
//! virtual network.

mod network;
mod pair;
mod workers;

use std::num::NonZeroU32;
use std::time::Duration;

pub(crate) use network::{Direction, Fate};
pub(crate) use pair::{CONTROL_PORT, Pair};
pub(crate) use workers::Workers;

use crate::auth::{NONCE_BYTES, Nonce};
use crate::consumer::ConsumerOptions;
use crate::digest::PromptHasher;
use crate::ids::{DpRank, EngineId, Incarnation, PpRank, PromptDigest, TpRank, TransferId};
use crate::layout::{CompatFields, KvHeads, LayerCache, Part, RankCache};
use crate::memory::MemoryRegion;
use crate::plan::SourcePolicy;
use crate::producer::LeaseTimes;
use crate::time::Time;
use crate::wire::card::{Endpoints, TcpEndpoint, WorkerCard};
use crate::wire::message::EngineIdentity;

pub(crate) const BLOCK_SIZE: u32 = 16;

/// For connections of machines without keys, which use none.
pub(crate) const NONCE: Nonce = Nonce([0; NONCE_BYTES]);

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A point `after` the clock's origin.
pub(crate) fn at(after: Duration) -> Time {
    Time::from_origin(after)
}

/// The defaults of the settings.
pub(crate) fn lease_times() -> LeaseTimes {
    LeaseTimes {
        lease: secs(30),
        renewal: secs(30),
        grace: ms(500),
    }
}

/// The defaults of the settings.
pub(crate) fn options() -> ConsumerOptions {
    ConsumerOptions {
        block_size: BLOCK_SIZE,
        require_kv: false,
        claim_timeout: secs(10),
        load_timeout: secs(30),
        margin: ms(500),
        sibling_linger: ms(100),
        heartbeat: secs(5),
        peer_silence: secs(15),
        backoff: ms(250),
        source_policy: SourcePolicy::Hash,
    }
}

pub(crate) fn heads(total: u32) -> KvHeads {
    KvHeads::Grouped(NonZeroU32::new(total).expect("tests count from 1"))
}

pub(crate) fn fields(pairs: &[(&str, &str)]) -> CompatFields {
    let mut fields = CompatFields::new();
    for (name, value) in pairs {
        fields.insert(name, value).expect("valid in tests");
    }
    fields
}

pub(crate) fn common_fields() -> CompatFields {
    fields(&[("dtype", "float32"), ("model", "tiny")])
}

pub(crate) fn identity(engine: &str, incarnation: u64, tp_size: u32) -> EngineIdentity {
    EngineIdentity {
        engine: EngineId::new(engine).expect("valid in tests"),
        incarnation: Incarnation(incarnation),
        dp_rank: DpRank(0),
        tp_size,
        pp_size: 1,
        dp_size: 1,
    }
}

/// The cards of an engine of `tp_size` ranks that hold four heads between them: one layer of 64
/// blocks in one page per head.
pub(crate) fn cards(tp_size: u32) -> Vec<WorkerCard> {
    (0..tp_size)
        .map(|tp| card(tp, 4 / tp_size.min(4)))
        .collect()
}

pub(crate) fn card(tp_rank: u32, heads_held: u32) -> WorkerCard {
    let page_bytes = 256;
    let block_bytes = page_bytes * u64::from(heads_held);
    let layer = LayerCache {
        name: "model.layers.0.self_attn.attn".into(),
        region: 0,
        parts: vec![Part {
            offset_bytes: 0,
            block_stride_bytes: block_bytes,
            head_stride_bytes: page_bytes,
            rows: 1,
            row_stride_bytes: page_bytes,
            row_bytes: page_bytes,
            block_tokens: 0,
        }],
        group: 0,
    };
    let region = MemoryRegion {
        base: 0x7f00_0000_0000,
        bytes: 64 * block_bytes,
    };
    WorkerCard {
        dp_rank: DpRank(0),
        tp_rank: TpRank(tp_rank),
        pp_rank: PpRank(0),
        cache: RankCache::new(64, heads_held, vec![region], vec![layer]).expect("valid in tests"),
        endpoints: Endpoints {
            process: None,
            tcp: Some(TcpEndpoint {
                host: "10.0.0.1".into(),
                port: 5000,
            }),
            verbs: None,
            mori: None,
        },
    }
}

pub(crate) fn transfer(number: u8) -> TransferId {
    TransferId([number; 16])
}

/// The digest of some prompt; other seeds are other prompts.
pub(crate) fn prompt(seed: u32) -> PromptDigest {
    PromptHasher::new(&[seed]).finish()
}
