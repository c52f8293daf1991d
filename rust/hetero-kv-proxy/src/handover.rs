//! From a finished prefill to the head of the decode answer, also when the client leaves.
//!
//! Prefill has pinned the blocks of the prompt by the time its answer is there, and only the decode
//! engine's connector frees them before the lease ends. So from the head of the prefill answer on,
//! this part of the request is finished whether or not anyone waits for it: dropped, it moves to
//! the background, sends the decode leg, and closes it when the engine has taken the request.
//!
//! An HTTP server such as vLLM's drops a request whose connection closes before the body was read
//! and handed to the engine, and gives no sign of that moment. The first byte of an answer's body
//! proves it; failing that, `handover_grace` after the last byte of the leg was written stands in
//! for it. An engine slower than that keeps the blocks until the lease ends, and no longer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::DropGuard;

use crate::app::App;
use crate::instance::Instance;
use crate::lease::{KeptBlocks, SlotLease};
use crate::openai::usage::Cached;
use crate::upstream::{Answer, Written};

/// Longest life of a leg without a client, whatever state it is in.
const SETTLE_MAX: Duration = Duration::from_secs(30);

/// Legs that live without a client. Each holds a connection and its request's body, and has left its
/// place among those that run: without a bound, clients that leave early would have any number of
/// them. As many may live as requests may run.
#[derive(Debug, Default)]
pub(crate) struct Settling(Arc<AtomicUsize>);

/// One of them, until dropped.
struct Settled(Arc<AtomicUsize>);

impl Settling {
    fn enter(&self, max: usize) -> Option<Settled> {
        let more = |count| (count < max).then_some(count + 1);
        let entered = self.0.fetch_update(Relaxed, Relaxed, more);
        entered.ok().map(|_| Settled(Arc::clone(&self.0)))
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The head of a decode answer and the slot it came from.
#[derive(Debug)]
pub struct DecodeHead {
    /// Status, headers, and the body to come.
    pub answer: Box<Answer>,
    /// In flight until the body has ended.
    pub lease: Box<SlotLease>,
    /// Data of the body that was read already.
    pub early: Option<Bytes>,
    /// Whether prefill's blocks wait for this leg, which then outlives its client.
    pub claims_blocks: bool,
    /// What prefill keeps for this leg, until the body's first byte.
    pub kept: Option<KeptBlocks>,
    /// The instance whose KV this leg reads or is given.
    pub source: Option<Arc<Instance>>,
    /// Prefill's count of cached tokens, to be told in the answer.
    pub cached: Option<Cached>,
    /// Closes a prefill leg that still runs, when dropped.
    pub prefill: Option<DropGuard>,
}

impl DecodeHead {
    /// The answer of a leg without params.
    pub fn alone(answer: Box<Answer>, lease: Box<SlotLease>) -> Self {
        Self {
            answer,
            lease,
            early: None,
            claims_blocks: false,
            kept: None,
            source: None,
            cached: None,
            prefill: None,
        }
    }

    /// The answer of a leg with params.
    pub fn claiming(answer: Box<Answer>, lease: Box<SlotLease>) -> Self {
        Self {
            claims_blocks: true,
            ..Self::alone(answer, lease)
        }
    }

    /// Waits until the engine has begun its answer's body, or ended.
    async fn spoken(&mut self) {
        if self.early.is_none() && self.claims_blocks {
            // Any frame, the end or an error: the engine has spoken.
            let spoken = self.answer.body.frame().await;
            if let Some(Ok(_)) = spoken
                && self.answer.head.status.is_success()
                && let Some(kept) = self.kept.take()
            {
                kept.taken();
            }
        }
    }
}

type Pending<E> = Pin<Box<dyn Future<Output = Result<DecodeHead, E>> + Send>>;

/// A hand-over that is finished in the background when it is dropped.
pub struct HandOver<E: Send + 'static> {
    app: Arc<App>,
    pending: Option<Pending<E>>,
    written: Written,
}

impl<E: Send + 'static> HandOver<E> {
    /// Guards `pending`, which notes in `written` when the decode leg was written.
    pub fn new(
        app: Arc<App>,
        written: Written,
        pending: impl Future<Output = Result<DecodeHead, E>> + Send + 'static,
    ) -> Self {
        Self {
            app,
            pending: Some(Box::pin(pending)),
            written,
        }
    }

    /// The head of the decode answer.
    ///
    /// # Errors
    /// Whatever the guarded future failed with; `None` after it has ended.
    pub async fn head(&mut self) -> Option<Result<DecodeHead, E>> {
        let ended = self.pending.as_mut()?.await;
        self.pending = None;
        Some(ended)
    }
}

impl<E: Send + 'static> Drop for HandOver<E> {
    fn drop(&mut self) {
        let Some(pending) = self.pending.take() else {
            return;
        };
        let first_byte = async move {
            if let Ok(mut decode) = pending.await {
                decode.spoken().await;
            }
        };
        settle(&self.app, first_byte, self.written.clone());
    }
}

/// As a dropped [`HandOver`], for a decode leg whose head has come and whose body has not begun.
pub fn settle_stream(app: &Arc<App>, mut decode: DecodeHead, written: Written) {
    let first_byte = async move {
        decode.spoken().await;
    };
    settle(app, first_byte, written);
}

/// Runs `leg` until it ends, or the grace after its writing has passed; then drops it, which closes
/// its connection. With too many of them it is dropped right away, and its blocks stay until their
/// lease ends.
fn settle(app: &Arc<App>, leg: impl Future<Output = ()> + Send + 'static, written: Written) {
    let config = app.config();
    let Some(settled) = app.settling.enter(config.requests_max) else {
        app.metrics.settles_refused.inc();
        return;
    };
    let grace = config.handover_grace;
    app.metrics.settles.inc();
    let task = async move {
        let _settled = settled;
        let ended = async {
            tokio::select! {
                () = leg => {}
                () = written_for(&written, grace) => {}
            }
        };
        // It has ended, or its time is over.
        let _ended = timeout(SETTLE_MAX, ended).await;
    };
    // Without a runtime the process is ending, and every connection with it.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        app.tasks.spawn_on(task, &runtime);
    }
}

/// Waits until the leg has been written for `grace`. A leg that is sent again starts anew.
async fn written_for(written: &Written, grace: Duration) {
    loop {
        let at: Instant = written.wait().await;
        sleep_until(at + grace).await;
        if written.at() == Some(at) {
            return;
        }
    }
}
