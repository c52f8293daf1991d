//! Completion queues, and the descriptor that sleeps until one has something.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::device::{Context, checked};
use super::error::{VerbsError, WorkFailure};
use super::sys;

/// Completions taken by one call.
const POLL_MAX: usize = 32;

/// The end of one work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkCompletion {
    /// The request's number.
    pub(super) id: u64,
    /// How it ended.
    pub(super) outcome: Result<(), WorkFailure>,
    /// What a write with immediate carried, on the side that received it.
    pub(super) immediate: Option<u32>,
}

/// A completion queue with a channel of its own.
pub(super) struct CompletionQueue {
    context: Arc<Context>,
    raw: NonNull<sys::ibv_cq>,
    channel: NonNull<sys::ibv_comp_channel>,
}

// SAFETY: libibverbs is thread-safe; the pointers are freed only by `drop`.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue with room for `entries` completions. Overrunning it breaks every queue pair on it,
    /// so it has to hold all that can be outstanding at once.
    pub(super) fn new(context: &Arc<Context>, entries: usize) -> Result<Arc<Self>, VerbsError> {
        let most = context.limits()?.max_cqe;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        if entries > most {
            return Err(VerbsError::Mismatch(format!(
                "{} completions are over the {most} that a queue of {} holds: lower \
                 verbs_queue_pairs",
                entries, context.name
            )));
        }
        let library = context.library;
        // SAFETY: the context is open.
        let channel = unsafe { (library.ibv_create_comp_channel)(context.raw()) };
        let channel =
            NonNull::new(channel).ok_or_else(|| VerbsError::last("ibv_create_comp_channel"))?;
        // SAFETY: context and channel are open; vector 0 exists on every device.
        let raw = unsafe {
            (library.ibv_create_cq)(context.raw(), entries, ptr::null_mut(), channel.as_ptr(), 0)
        };
        let Some(raw) = NonNull::new(raw) else {
            let error = VerbsError::last("ibv_create_cq");
            // SAFETY: made above, and used by nothing.
            unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let queue = Self {
            context: Arc::clone(context),
            raw,
            channel,
        };
        rustix::io::ioctl_fionbio(queue.channel(), true)
            .map_err(|error| VerbsError::call("ioctl", &error.into()))?;
        Ok(Arc::new(queue))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw.as_ptr()
    }

    /// Readable after [`Self::arm`] once a completion has come.
    pub(super) fn channel(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's own and stays open as long as `self`.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    /// Takes what has completed, at most a few dozen; how many.
    pub(super) fn poll(&self, completions: &mut Vec<WorkCompletion>) -> Result<usize, VerbsError> {
        let poll_cq = self.context.ops().poll_cq.ok_or_else(missing("poll_cq"))?;
        // SAFETY: integers and unions of integers, for which zeros are valid.
        let mut entries: [sys::ibv_wc; POLL_MAX] = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is alive, and the array has as many entries as is said.
        let count = unsafe { poll_cq(self.raw(), POLL_MAX as c_int, entries.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| VerbsError::last("ibv_poll_cq"))?;
        completions.extend(entries[..count.min(POLL_MAX)].iter().map(|entry| {
            let outcome = WorkFailure::of(entry.status).map_or(Ok(()), Err);
            // Only a receive carries one, whatever the flags of a request's own completion say.
            let with_immediate = outcome.is_ok()
                && entry.opcode == sys::IBV_WC_RECV_RDMA_WITH_IMM
                && entry.wc_flags & sys::IBV_WC_WITH_IMM != 0;
            WorkCompletion {
                id: entry.wr_id,
                outcome,
                // SAFETY: code and flag say that this member of the union was written.
                immediate: with_immediate
                    .then(|| u32::from_be(unsafe { entry.__bindgen_anon_1.imm_data })),
            }
        }));
        Ok(count)
    }

    /// Makes the channel readable at the next completion. What came before this call may not, so
    /// the queue has to be polled once more after it.
    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        let arm = self
            .context
            .ops()
            .req_notify_cq
            .ok_or_else(missing("req_notify_cq"))?;
        // SAFETY: the queue is alive.
        checked("ibv_req_notify_cq", unsafe { arm(self.raw(), 0) })
    }

    /// Takes the channel's events, so that it is not readable any more.
    pub(super) fn take_events(&self) -> Result<(), VerbsError> {
        loop {
            let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is open and does not block; both results are written on success.
            let status = unsafe {
                (self.context.library.ibv_get_cq_event)(
                    self.channel.as_ptr(),
                    &raw mut queue,
                    &raw mut context,
                )
            };
            if status != 0 {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                if error.kind() == io::ErrorKind::WouldBlock {
                    return Ok(());
                }
                return Err(VerbsError::call("ibv_get_cq_event", &error));
            }
            // Each event has to be acknowledged before the queue can be destroyed.
            // SAFETY: the channel has no other queue than this one, which is alive.
            unsafe { (self.context.library.ibv_ack_cq_events)(self.raw(), 1) };
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        if !self.context.is_ours() {
            return;
        }
        let library = self.context.library;
        // SAFETY: queue pairs on it hold it by an `Arc` and have ended, and its events are
        // acknowledged; destroyed once, queue before channel.
        let (queue, channel) = unsafe {
            (
                (library.ibv_destroy_cq)(self.raw()),
                (library.ibv_destroy_comp_channel)(self.channel.as_ptr()),
            )
        };
        for (verb, status) in [
            ("ibv_destroy_cq", queue),
            ("ibv_destroy_comp_channel", channel),
        ] {
            if let Err(error) = checked(verb, status) {
                tracing::error!(%error, "a completion queue stays");
            }
        }
    }
}

/// A call that the device's driver does not have.
pub(super) fn missing(verb: &'static str) -> impl Fn() -> VerbsError {
    move || VerbsError::Call {
        verb,
        problem: "the device's driver does not have it".into(),
    }
}
