use super::*;
use crate::layout::{LayerCache, Part, RankCache};
use crate::testing::{cards, identity};
use crate::wire::card::{Endpoints, MoriEndpoint, WorkerCard};
use crate::wire::message::EngineIdentity;

/// A card whose layers have, and have not, what may be left out.
fn staged_card() -> WorkerCard {
    let plain = cards(1).remove(0);
    let page = plain.cache.layers()[0].parts[0];
    let row_bytes = page.rows as u64 * page.row_bytes;
    let layer = |name: &str, group, block_tokens| LayerCache {
        name: name.into(),
        region: 0,
        parts: vec![Part {
            rows: 1,
            row_stride_bytes: row_bytes,
            row_bytes,
            block_tokens,
            ..page
        }],
        group,
    };
    let layers = vec![
        layer("a", 0, 0),
        layer("b", 1, 0),
        layer("c", 0, 16),
        layer("d", 2, 16),
    ];
    let regions = plain.cache.regions().to_vec();
    let cache = RankCache::new(
        plain.cache.num_blocks(),
        plain.cache.heads_held(),
        regions,
        layers,
    )
    .expect("a cache");
    WorkerCard { cache, ..plain }
}

/// A card that offers the last way to read it and not the ones before.
fn offering_mori_alone(notifications: bool) -> WorkerCard {
    let endpoints = Endpoints {
        mori: Some(MoriEndpoint {
            version: "1.2.4".into(),
            host: "10.0.0.1".into(),
            port: 7000,
            engine: vec![1, 2],
            memories: Vec::new(),
            lease_page: vec![3],
            lease_slots: 4,
            lease_page_nonce: 5,
            notifications,
        }),
        ..Endpoints::default()
    };
    WorkerCard {
        endpoints,
        ..cards(1).remove(0)
    }
}

#[test]
fn orders_come_out_as_they_went_in_whatever_of_them_was_left_out() {
    for dp_size in [1, 4] {
        let from = EngineIdentity {
            dp_size,
            ..identity("prefill", 1, 1)
        };
        let orders = StepOrders {
            peers: vec![PeerCard {
                peer: PeerId(7),
                layout: Layout {
                    from,
                    workers: vec![
                        staged_card(),
                        offering_mori_alone(false),
                        offering_mori_alone(true),
                        cards(1).remove(0),
                    ],
                },
            }],
            pending: 3,
            ..StepOrders::default()
        };
        let bytes = orders.encode().expect("encodes");
        assert_eq!(StepOrders::decode(&bytes), Ok(orders));
    }
}
