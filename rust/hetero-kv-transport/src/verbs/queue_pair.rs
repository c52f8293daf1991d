//! Queue pairs. Their states are types: what a state forbids does not compile.
//!
//! ```text
//! Reset --init--> Init --ready_to_receive--> ReadyToReceive --ready_to_send--> ReadyToSend
//!    any of them --fail--> Failed --(drained, dropped)
//! ```
//!
//! A device moves a queue pair to its error state by itself when a request fails. The type stays
//! behind then: what is posted ends as flushed, and [`QueuePair::fail`] is still the way out.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::completion::{CompletionQueue, missing};
use super::device::{Port, checked};
use super::error::{Verb, VerbsError};
use super::memory::{Access, ProtectionDomain};
use super::sys;

/// A packet that nobody acknowledges is sent again after 4.096 us x 2^16 = 268 ms.
const TIMEOUT_EXPONENT: u8 = 16;

/// Repetitions: with the timeout about two seconds until a peer counts as gone. 7 would be the
/// most, but Soft-RoCE takes that to mean for ever.
const RETRIES: u8 = 6;

/// Repetitions while the peer has no receive request ready; 7 would mean for ever.
const RECEIVER_RETRIES: u8 = 6;

/// Code of the pause that a receiver without a request asks for: 12 means 0.64 ms.
const RECEIVER_PAUSE_CODE: u8 = 12;

/// Routers that a packet may pass.
const HOPS_MAX: u8 = 64;

/// Packet sequence numbers have 24 bits.
pub(super) const PACKET_NUMBER_MASK: u32 = 0x00ff_ffff;

/// Made, and good for nothing yet.
pub(super) struct Reset(());
/// Bound to a port; receive requests may be posted.
pub(super) struct Init(());
/// Connected; answers the peer's requests.
pub(super) struct ReadyToReceive(());
/// Connected; requests may be posted.
pub(super) struct ReadyToSend(());
/// Carries out nothing any more; what is left on it ends as flushed.
pub(super) struct Failed(());

/// States in which receive requests may be posted.
pub(super) trait TakesReceives {}
impl TakesReceives for Init {}
impl TakesReceives for ReadyToReceive {}
impl TakesReceives for ReadyToSend {}

/// Room of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Depth {
    /// Work requests posted and not completed.
    pub(super) sends: u32,
    /// Receive requests posted and not completed.
    pub(super) receives: u32,
    /// Local pieces of one work request.
    pub(super) pieces: u32,
}

/// The peer's end, as it was announced, and what both sides agree on.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerEnd {
    pub(super) number: u32,
    pub(super) packet_number: u32,
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    pub(super) mtu: sys::ibv_mtu,
    /// Reads of the peer that this end answers at once.
    pub(super) reads_in_flight: u8,
}

/// One work request: a piece of the peer's memory, and the local pieces that it goes to or comes
/// from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) verb: Verb,
    pub(super) id: u64,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
    pub(super) pieces: &'a [sys::ibv_sge],
    /// Whether its good end is told too; a bad one always is.
    pub(super) signalled: bool,
    /// Whether it begins only after every read before it has arrived.
    pub(super) fenced: bool,
    /// For [`Verb::WriteWithImmediate`].
    pub(super) immediate: u32,
}

/// What every state has. Destroyed when dropped; afterwards no request of it touches memory.
struct Raw {
    raw: NonNull<sys::ibv_qp>,
    number: u32,
    destroyed: bool,
    _queue: Arc<CompletionQueue>,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: libibverbs is thread-safe; the pointer is freed only by `drop`.
unsafe impl Send for Raw {}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            tracing::error!(%error, number = self.number, "a queue pair stays");
        }
    }
}

impl Raw {
    /// Ends it, once; the call returns when the device is done with it.
    fn destroy(&mut self) -> Result<(), VerbsError> {
        let context = &self.domain.context;
        if self.destroyed || !context.is_ours() {
            return Ok(());
        }
        // SAFETY: created by `new` and, by the flag, not destroyed yet.
        let status = unsafe { (context.library.ibv_destroy_qp)(self.raw.as_ptr()) };
        checked("ibv_destroy_qp", status)?;
        self.destroyed = true;
        Ok(())
    }

    fn modify(&mut self, attributes: &mut sys::ibv_qp_attr, mask: u32) -> Result<(), VerbsError> {
        let library = self.domain.context.library;
        // SAFETY: the queue pair is alive; the structure is whole, and the mask says which of its
        // members count.
        let status =
            unsafe { (library.ibv_modify_qp)(self.raw.as_ptr(), attributes, mask as c_int) };
        checked("ibv_modify_qp", status)
    }
}

/// One reliable connected queue pair.
pub(super) struct QueuePair<State> {
    raw: Raw,
    _state: State,
}

impl<State> QueuePair<State> {
    /// Its number, for the peer.
    pub(super) fn number(&self) -> u32 {
        self.raw.number
    }

    fn into_state<Next>(self, state: Next) -> QueuePair<Next> {
        QueuePair {
            raw: self.raw,
            _state: state,
        }
    }

    /// Ends it for good. After `Ok` the device reaches no memory by it any more.
    pub(super) fn destroy(mut self) -> Result<(), (Self, VerbsError)> {
        match self.raw.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    /// Ends its work: nothing new is carried out, and all that is outstanding ends as flushed.
    pub(super) fn fail(mut self) -> Result<QueuePair<Failed>, (Self, VerbsError)> {
        let mut attributes = no_attributes();
        attributes.qp_state = sys::IBV_QPS_ERR;
        match self.raw.modify(&mut attributes, sys::IBV_QP_STATE) {
            Ok(()) => Ok(self.into_state(Failed(()))),
            Err(error) => Err((self, error)),
        }
    }
}

impl QueuePair<Reset> {
    /// Makes one whose requests and receives complete on `queue`.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depth: Depth,
    ) -> Result<Self, VerbsError> {
        // SAFETY: pointers and integers, for which zeros are valid.
        let mut attributes: sys::ibv_qp_init_attr = unsafe { mem::zeroed() };
        attributes.send_cq = queue.raw();
        attributes.recv_cq = queue.raw();
        attributes.qp_type = sys::IBV_QPT_RC;
        attributes.cap = sys::ibv_qp_cap {
            max_send_wr: depth.sends,
            max_recv_wr: depth.receives,
            max_send_sge: depth.pieces,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let library = domain.context.library;
        // SAFETY: domain and queue are alive and stay so as long as the queue pair.
        let raw = unsafe { (library.ibv_create_qp)(domain.raw(), &raw mut attributes) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_create_qp"))?;
        Ok(Self {
            raw: Raw {
                raw,
                // SAFETY: the library filled the structure, whose number does not change.
                number: unsafe { (*raw.as_ptr()).qp_num },
                destroyed: false,
                _queue: Arc::clone(queue),
                domain: Arc::clone(domain),
            },
            _state: Reset(()),
        })
    }

    /// Binds it to a port and says what the peer's requests may do.
    pub(super) fn init(
        mut self,
        port: &Port,
        access: Access,
    ) -> Result<QueuePair<Init>, VerbsError> {
        let mut attributes = no_attributes();
        attributes.qp_state = sys::IBV_QPS_INIT;
        attributes.port_num = port.number;
        attributes.qp_access_flags = access.flags() as u32;
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_PKEY_INDEX
            | sys::IBV_QP_PORT
            | sys::IBV_QP_ACCESS_FLAGS;
        self.raw.modify(&mut attributes, mask)?;
        Ok(self.into_state(Init(())))
    }
}

impl QueuePair<Init> {
    /// Connects it to the peer's end, from the port's GID of index `gid_index`.
    pub(super) fn ready_to_receive(
        mut self,
        port: &Port,
        gid_index: u8,
        peer: &PeerEnd,
    ) -> Result<QueuePair<ReadyToReceive>, VerbsError> {
        let mut attributes = no_attributes();
        attributes.qp_state = sys::IBV_QPS_RTR;
        attributes.path_mtu = peer.mtu;
        attributes.dest_qp_num = peer.number;
        attributes.rq_psn = peer.packet_number;
        attributes.max_dest_rd_atomic = peer.reads_in_flight;
        attributes.min_rnr_timer = RECEIVER_PAUSE_CODE;
        attributes.ah_attr.port_num = port.number;
        attributes.ah_attr.dlid = peer.lid;
        if port.ethernet {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh.dgid = sys::ibv_gid { raw: peer.gid };
            attributes.ah_attr.grh.sgid_index = gid_index;
            attributes.ah_attr.grh.hop_limit = HOPS_MAX;
        }
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.raw.modify(&mut attributes, mask)?;
        Ok(self.into_state(ReadyToReceive(())))
    }
}

impl QueuePair<ReadyToReceive> {
    /// Lets it send, beginning with this packet number, and with so many reads at once.
    pub(super) fn ready_to_send(
        mut self,
        packet_number: u32,
        reads_in_flight: u8,
    ) -> Result<QueuePair<ReadyToSend>, VerbsError> {
        let mut attributes = no_attributes();
        attributes.qp_state = sys::IBV_QPS_RTS;
        attributes.sq_psn = packet_number;
        attributes.timeout = TIMEOUT_EXPONENT;
        attributes.retry_cnt = RETRIES;
        attributes.rnr_retry = RECEIVER_RETRIES;
        attributes.max_rd_atomic = reads_in_flight;
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.raw.modify(&mut attributes, mask)?;
        Ok(self.into_state(ReadyToSend(())))
    }
}

impl QueuePair<ReadyToSend> {
    /// Posts requests, which are carried out in their order. On an error none or some of them were
    /// taken: the queue pair is then to be failed.
    ///
    /// # Safety
    /// Until each request has completed, or this queue pair is dropped, the local pieces of reads
    /// may be written and those of writes stay mapped; no Rust reference covers them.
    pub(super) unsafe fn post(&mut self, requests: &[Request<'_>]) -> Result<(), VerbsError> {
        // SAFETY: as the caller promises.
        unsafe { self.raw.post(requests) }
    }
}

impl QueuePair<Failed> {
    /// Posts a request that can only be flushed. Completions come in order, so when its own comes,
    /// every request before it has ended.
    pub(super) fn post_last(&mut self, id: u64) -> Result<(), VerbsError> {
        let last = Request {
            verb: Verb::Write,
            id,
            remote_address: 0,
            remote_key: 0,
            pieces: &[],
            signalled: true,
            fenced: false,
            immediate: 0,
        };
        // SAFETY: it has no local pieces.
        unsafe { self.raw.post(&[last]) }
    }
}

#[cfg_attr(
    not(test),
    expect(dead_code, reason = "what push mode stands on; the suite drives it")
)]
impl<State: TakesReceives> QueuePair<State> {
    /// Posts a receive request without memory: for writes with immediate, which bring none.
    pub(super) fn post_receive(&mut self, id: u64) -> Result<(), VerbsError> {
        let post = self
            .raw
            .domain
            .context
            .ops()
            .post_recv
            .ok_or_else(missing("post_recv"))?;
        let mut request = sys::ibv_recv_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair is alive; the request is read before the call returns, and names
        // no memory.
        let status = unsafe { post(self.raw.raw.as_ptr(), &raw mut request, &raw mut refused) };
        checked("ibv_post_recv", status)
    }
}

impl Raw {
    /// See [`QueuePair::post`].
    ///
    /// # Safety
    /// As there.
    unsafe fn post(&mut self, requests: &[Request<'_>]) -> Result<(), VerbsError> {
        let post = self
            .domain
            .context
            .ops()
            .post_send
            .ok_or_else(missing("post_send"))?;
        let mut list: Vec<sys::ibv_send_wr> = requests.iter().map(work_request).collect();
        let start = list.as_mut_ptr();
        for at in 1..list.len() {
            // SAFETY: both places are inside the list, which is not moved any more.
            unsafe { (*start.add(at - 1)).next = start.add(at) };
        }
        if list.is_empty() {
            return Ok(());
        }
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair is alive. The list and the pieces that it points to are read
        // before the call returns; for the memory that they name, the caller vouches.
        let status = unsafe { post(self.raw.as_ptr(), start, &raw mut refused) };
        checked("ibv_post_send", status)
    }
}

fn work_request(request: &Request<'_>) -> sys::ibv_send_wr {
    // SAFETY: pointers, integers and unions of them, for which zeros are valid.
    let mut work: sys::ibv_send_wr = unsafe { mem::zeroed() };
    work.wr_id = request.id;
    work.sg_list = request.pieces.as_ptr().cast_mut();
    // At most `Depth::pieces`, which is a small number.
    work.num_sge = c_int::try_from(request.pieces.len()).unwrap_or(c_int::MAX);
    work.opcode = match request.verb {
        Verb::Read => sys::IBV_WR_RDMA_READ,
        Verb::WriteWithImmediate => sys::IBV_WR_RDMA_WRITE_WITH_IMM,
        Verb::Write => sys::IBV_WR_RDMA_WRITE,
    };
    if request.signalled {
        work.send_flags |= sys::IBV_SEND_SIGNALED;
    }
    if request.fenced {
        work.send_flags |= sys::IBV_SEND_FENCE;
    }
    work.wr.rdma.remote_addr = request.remote_address;
    work.wr.rdma.rkey = request.remote_key;
    work.__bindgen_anon_1.imm_data = request.immediate.to_be();
    work
}

fn no_attributes() -> sys::ibv_qp_attr {
    // SAFETY: integers and unions of integers, for which zeros are valid.
    unsafe { mem::zeroed() }
}
