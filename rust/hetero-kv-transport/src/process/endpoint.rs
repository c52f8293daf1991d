//! The holder's side: what it announces so that others can read its memory.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use hetero_kv_core::wire::card::ProcessEndpoint;

use super::probe;
use crate::lease_page::LeasePage;

/// Bytes of the nonce that proves the permission to read.
pub(super) const NONCE_BYTES: usize = 16;

/// What keeps a process readable: the nonce and the lease page stay where the endpoint says for as
/// long as this lives.
#[derive(Debug)]
pub struct ProcessHolder {
    endpoint: ProcessEndpoint,
    _nonce: Box<[u8; NONCE_BYTES]>,
    _page: Arc<LeasePage>,
}

impl ProcessHolder {
    /// What to announce.
    pub fn endpoint(&self) -> &ProcessEndpoint {
        &self.endpoint
    }
}

/// Offers this process's memory to readers on the same host that fence by `page`.
///
/// `allow_ptracer` lets any process of the same user trace this one
/// (`prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)`), which is what Yama's `ptrace_scope=1` asks for;
/// without Yama it changes nothing. The kernel's own rules (same user, dumpable) stay.
pub fn of_this_process(page: Arc<LeasePage>, allow_ptracer: bool) -> io::Result<ProcessHolder> {
    if allow_ptracer {
        let_others_trace();
    }
    let mut nonce = Box::new([0; NONCE_BYTES]);
    getrandom::fill(nonce.as_mut_slice()).map_err(io::Error::other)?;
    let pid = std::process::id();
    Ok(ProcessHolder {
        endpoint: ProcessEndpoint {
            boot_id: probe::boot_id()?,
            pid_namespace: probe::pid_namespace()?,
            pid,
            start_ticks: probe::start_ticks(pid)?,
            nonce_address: nonce.as_ptr().expose_provenance() as u64,
            nonce: nonce.to_vec(),
            lease_page_address: page.address(),
            lease_slots: page.slots(),
            lease_page_nonce: page.nonce(),
        },
        _nonce: nonce,
        _page: page,
    })
}

fn let_others_trace() {
    let [unused, any] = [0, libc::PR_SET_PTRACER_ANY];
    // SAFETY: PR_SET_PTRACER takes a pid or PR_SET_PTRACER_ANY by value and touches no memory.
    let result = unsafe { libc::prctl(libc::PR_SET_PTRACER, any, unused, unused, unused) };
    if result != 0 {
        // EINVAL is the answer of a kernel without Yama, where there is nothing to lift.
        let error = io::Error::last_os_error();
        tracing::debug!(%error, "prctl(PR_SET_PTRACER) has no effect");
    }
}
