//! The reference model's view of a step's orders: nothing is read that was not granted, nor longer.

use std::time::Duration;

use hetero_kv_core::step::StepOrders;

use crate::book::Invariant;
use crate::scenario::BLOCK_TOKENS;
use crate::world::World;

impl World {
    /// What D's workers are told, against the grants as they crossed the wire.
    pub(crate) fn check_orders(&mut self, d: usize, orders: &StepOrders) {
        let now = self.decode[d].clock.local(self.now);
        let Some(engine) = &mut self.decode[d].engine else {
            return;
        };
        for load in &orders.loads {
            if let Some(request) = engine.requests.get_mut(&load.request_id) {
                request.peer = Some(load.peer);
            }
        }
        let book = &mut self.book;
        for card in &orders.peers {
            let address = engine.addresses.get(&card.peer);
            let meant = address.is_some_and(|address| {
                address.engine == card.layout.from.engine
                    && address.incarnation == card.layout.from.incarnation
            });
            if !meant {
                book.broken(
                    Invariant::PairedWithWrongStart,
                    format!("decode {d}: {:?} for {address:?}", card.layout.from),
                );
            }
        }
        for load in &orders.loads {
            let id = load.request_id.as_str();
            let request = engine.requests.get(id);
            let leg = self.legs.get(id);
            let grant = engine.grants.get(&(load.peer, load.transfer_id));
            let right = match (request, leg, grant) {
                (Some(request), Some(leg), Some(grant)) => {
                    let first = (request.computed / BLOCK_TOKENS) as usize;
                    let past = request.external + request.computed;
                    let past = past.div_ceil(BLOCK_TOKENS) as usize;
                    let address = engine.addresses.get(&load.peer);
                    leg.transfer == Some(load.transfer_id)
                        && grant.fence == load.lease
                        && grant.blocks.get(first..past) == Some(&load.source_blocks)
                        && request.blocks.get(first..past) == Some(&load.dest_blocks)
                        && address.map(|a| a.incarnation) == leg.incarnation
                }
                (None, _, _) | (_, None, _) | (_, _, None) => false,
            };
            if !right {
                book.broken(
                    Invariant::ReadWithoutGrant,
                    format!("decode {d}: {load:?}, granted {grant:?}"),
                );
            }
        }
        let mut beyond = |what: &str, id: &str, left_ms: u64| {
            let transfer = self.legs.get(id).and_then(|leg| leg.transfer);
            let grant = engine
                .requests
                .get(id)
                .and_then(|request| engine.grants.get(&(request.peer?, transfer?)));
            let until = now + Duration::from_millis(left_ms);
            if left_ms > 0 && grant.is_none_or(|grant| grant.until < until) {
                let granted = grant.map(|grant| grant.until.since(now));
                book.broken(
                    Invariant::ReadBeyondGrant,
                    format!("decode {d}: {what} of {id} for {left_ms} ms, granted {granted:?}"),
                );
            }
        };
        for load in &orders.loads {
            beyond("load", &load.request_id, load.deadline_ms);
        }
        for extension in &orders.extensions {
            beyond("extension", &extension.request_id, extension.deadline_ms);
        }
        for load in &orders.loads {
            book.count("loads ordered");
            book.trace(|| format!("decode {d} orders {load:?}"));
        }
        for fail in &orders.fails {
            book.trace(|| format!("decode {d} orders {fail:?}"));
        }
        for cancel in &orders.cancels {
            book.trace(|| format!("decode {d} orders {cancel:?}"));
        }
        for extension in &orders.extensions {
            book.count("extensions");
            book.trace(|| format!("decode {d} orders {extension:?}"));
        }
    }
}
