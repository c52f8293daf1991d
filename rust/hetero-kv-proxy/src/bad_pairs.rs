//! Which prefill and decode engines are not paired for a time: what requests tell, and who asks.

use crate::app::App;
use crate::instance::Instance;
use crate::routing::{InstanceIndex, Role};
use crate::sync::lock;

impl App {
    /// A decode leg was served, with KV of `prefill` or without.
    pub(crate) fn note_pair_served(&self, prefill: Option<&Instance>, decode: &Instance) {
        let source = prefill.map(|prefill| prefill.index);
        lock(&self.bad_pairs).on_served(source, decode.index, self.now_ms());
    }

    /// A decode leg with KV of `prefill` failed.
    pub(crate) fn note_pair_failed(&self, prefill: &Instance, decode: &Instance, names_kv: bool) {
        let now_ms = self.now_ms();
        let avoided =
            lock(&self.bad_pairs).on_failed(prefill.index, decode.index, names_kv, now_ms);
        if avoided {
            self.metrics.pair_quarantines.inc();
            let (prefill, decode) = (&*prefill.label, &*decode.label);
            tracing::warn!(prefill, decode, "KV does not get over; the pair is avoided");
        }
    }

    /// The instances of `role` that are not to be chosen: those that do not go with the one that was
    /// chosen for the other leg, or are the same engine, or else those that go with none of
    /// `others`.
    pub(crate) fn shunned(
        &self,
        role: Role,
        partner: Option<InstanceIndex>,
        others: impl FnOnce() -> Vec<InstanceIndex>,
    ) -> Vec<InstanceIndex> {
        let none_avoided = lock(&self.bad_pairs).is_empty();
        if none_avoided && self.twins.is_empty() {
            return Vec::new();
        }
        let now_ms = self.now_ms();
        match (role, partner) {
            (_, Some(partner)) => {
                let shunned = lock(&self.bad_pairs).with(role.other(), partner, now_ms);
                let shunned = shunned.into_iter().map(|(instance, _)| instance);
                shunned.chain(self.twins.of(role, partner)).collect()
            }
            (Role::Prefill, None) => {
                // Asked for first: it may lock decode's side.
                let others = others();
                let mut shunned = lock(&self.bad_pairs).hopeless(&others, now_ms);
                if let [only] = others[..] {
                    shunned.extend(self.twins.of(Role::Prefill, only));
                }
                shunned
            }
            (Role::Decode, None) => Vec::new(),
        }
    }

    /// The ids of the instances that one is not to be paired with, and for how many milliseconds.
    pub(crate) fn avoided_pairs(&self, instance: &Instance) -> Vec<(String, u64)> {
        let pairs = lock(&self.bad_pairs).with(instance.role, instance.index, self.now_ms());
        let other = instance.role.other();
        let name = |index: InstanceIndex| format!("{}-{}", other.name(), index.0);
        let named = pairs.into_iter().map(|(index, left)| (name(index), left));
        named.collect()
    }
}
