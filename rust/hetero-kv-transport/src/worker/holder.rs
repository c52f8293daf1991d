//! The producer half of one rank: its lease page, its data listener, the nonce that readers probe.

use std::sync::Arc;

use hetero_kv_core::ids::LeaseRef;

use crate::lease_page::LeasePage;
use crate::mori::MoriHolder;
use crate::process::ProcessHolder;
use crate::tcp::{DataServer, HolderPlace};

pub(super) struct Holder {
    pub(super) page: Arc<LeasePage>,
    pub(super) server: Option<DataServer>,
    /// Keeps the nonce that readers probe.
    pub(super) _process: Option<ProcessHolder>,
    /// Keeps the memory registered.
    pub(super) _mori: Option<MoriHolder>,
    pub(super) named: bool,
}

impl Holder {
    pub(super) fn name(&mut self, place: HolderPlace) {
        if self.named {
            return;
        }
        if let Some(server) = &self.server {
            server.serve_as(place);
        }
        self.named = true;
    }

    /// Fences every later read of the lease. Runs before the report that frees its blocks.
    pub(super) fn end(&self, lease: LeaseRef) {
        if let Err(error) = self.page.bump(lease.slot, lease.epoch.next()) {
            // Slots are handed out below the page's size, which both sides take from one setting.
            tracing::error!("lease page: {error}");
        }
    }
}
