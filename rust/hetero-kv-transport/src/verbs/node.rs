//! What one process has of one device: its port, its memory registered once, and a thread that
//! sleeps until the device says that something happened to it.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hetero_kv_core::wire::card::{TcpEndpoint, VerbsEndpoint};
use hetero_kv_core::wire::data::QUEUE_PAIRS_MAX;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::device::{self, Context, DeviceChoice, Port};
use super::error::VerbsError;
use super::gid::Gid;
use super::memory::{Access, ProtectionDomain, Region};
use super::queue_pair::Depth;
use super::sys;
use super::work::RequestLimits;
use crate::lease_page::LeasePage;
use crate::memory::LocalMemory;
use crate::waker::Waker;
use hetero_kv_core::lease_page::page_bytes;

/// Work requests of a queue pair that are posted and not completed: room for two full batches, so
/// that the device has the next one when it ends the one before.
const SENDS_MAX: u32 = 512;

/// Fewer places than any device has: a request, two that read the lease page, one that drains.
const SENDS_MIN: i32 = 4;

/// Work requests of data posted with one call, before the two that read the lease page. Each place
/// of a send queue is memory of the driver, up to a KiB of it.
pub(super) const BATCH_REQUESTS_MAX: usize = 254;

/// Local pieces of a work request. Each takes 16 bytes of every place of a send queue.
const PIECES_MAX: u32 = 32;

/// Reads that a queue pair has under way: what today's NICs take.
const READS_IN_FLIGHT_MAX: i32 = 16;

/// How this process uses RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Which device, port and GID.
    pub choice: DeviceChoice,
    /// Queue pairs to each source, 1 to 16.
    pub queue_pairs: usize,
    /// Longest time that a reading thread looks for completions before it sleeps; zero: it sleeps
    /// at once.
    pub busy_poll: Duration,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
            choice: DeviceChoice::default(),
            queue_pairs: 2,
            busy_poll: Duration::ZERO,
        }
    }
}

/// Set when the device has failed as a whole.
#[derive(Debug)]
pub(super) struct Fault {
    failed: AtomicBool,
    /// Set with it and never cleared.
    pub(super) waker: Waker,
}

impl Fault {
    pub(super) fn happened(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Tells every connection of the device; there is no way back but another start.
    pub(super) fn happen(&self) {
        self.failed.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// An opened device with this process's KV memory registered.
pub struct Node {
    pub(super) port: Port,
    pub(super) gid: Gid,
    pub(super) options: VerbsOptions,
    pub(super) fault: Arc<Fault>,
    regions: Vec<Region>,
    page: Option<(Region, Arc<LeasePage>)>,
    /// Dropped after the regions of it.
    pub(super) memory: Arc<LocalMemory>,
    limits: sys::ibv_device_attr,
    stop: Arc<Waker>,
    events: Mutex<Option<JoinHandle<()>>>,
    pub(super) domain: Arc<ProtectionDomain>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node({})", self.describe())
    }
}

impl Node {
    /// Opens the device and registers `memory` once per region. With a lease `page` peers may read
    /// it and the memory; without one they may not.
    ///
    /// `advertised` is the address that peers know this process by; the port's GID of the same
    /// address is taken where there is one.
    ///
    /// # Errors
    /// [`VerbsError`], whose text says what is missing and how to mend it.
    pub fn open(
        options: VerbsOptions,
        advertised: Option<IpAddr>,
        memory: Arc<LocalMemory>,
        page: Option<Arc<LeasePage>>,
    ) -> Result<Arc<Self>, VerbsError> {
        if !(1..=QUEUE_PAIRS_MAX).contains(&options.queue_pairs) {
            return Err(VerbsError::Mismatch(format!(
                "verbs_queue_pairs is {}; it has to be 1 to {QUEUE_PAIRS_MAX}",
                options.queue_pairs
            )));
        }
        let (context, port) = device::open(&options.choice)?;
        let limits = context.limits()?;
        if limits.max_qp_wr < SENDS_MIN {
            return Err(VerbsError::Mismatch(format!(
                "{} has {} places in a send queue; {SENDS_MIN} are needed",
                context.name, limits.max_qp_wr
            )));
        }
        let domain = ProtectionDomain::new(Arc::clone(&context))?;
        let access = if page.is_some() {
            Access::RemoteRead
        } else {
            Access::Local
        };
        let mut regions = Vec::with_capacity(memory.regions().len());
        for region in memory.regions() {
            if region.bytes > limits.max_mr_size {
                return Err(VerbsError::Mismatch(format!(
                    "a KV region of {} bytes is over the {} that {} registers at once",
                    region.bytes, limits.max_mr_size, context.name
                )));
            }
            // SAFETY: `LocalMemory::new` makes its caller keep the region mapped, and free of
            // references while it is read into, until `memory` is dropped; it is held beside.
            regions.push(unsafe { Region::register(&domain, region.base, region.bytes, access) }?);
        }
        let page = page
            .map(|page| {
                let bytes = page_bytes(page.slots()) as u64;
                // SAFETY: the page stays mapped as long as the `Arc` beside the region, and is
                // only touched as atomics; peers only read it.
                unsafe { Region::register(&domain, page.address(), bytes, Access::RemoteRead) }
                    .map(|region| (region, page))
            })
            .transpose()?;
        let waker = |error: io::Error| VerbsError::call("eventfd", &error);
        let fault = Arc::new(Fault {
            failed: AtomicBool::new(false),
            waker: Waker::new().map_err(waker)?,
        });
        let stop = Arc::new(Waker::new().map_err(waker)?);
        let thread = {
            let (context, port) = (Arc::clone(&context), port.number);
            let (fault, stop) = (Arc::clone(&fault), Arc::clone(&stop));
            thread::Builder::new()
                .name("hkv-verbs".into())
                .spawn(move || watch(&context, port, &fault, &stop))
                .map_err(|error| VerbsError::call("clone", &error))?
        };
        let gid = port.own_gid(advertised);
        let node = Self {
            port,
            gid,
            options,
            fault,
            regions,
            page,
            memory,
            limits,
            stop,
            events: Mutex::new(Some(thread)),
            domain,
        };
        tracing::info!(device = %node.describe(), "RDMA device opened");
        Ok(Arc::new(node))
    }

    /// Device, port and GID, for logs.
    pub fn describe(&self) -> String {
        self.port.describe(&self.domain.context.name, self.gid)
    }

    /// Largest payload of a packet of the port, in bytes.
    pub fn mtu_bytes(&self) -> u32 {
        super::path::mtu_bytes(self.port.mtu)
    }

    /// What to announce, when queue pairs are made through the listener at `listener`; `None` for
    /// memory that no peer may read.
    pub fn endpoint(&self, listener: &TcpEndpoint) -> Option<VerbsEndpoint> {
        let (region, page) = self.page.as_ref()?;
        Some(VerbsEndpoint {
            host: listener.host.clone(),
            port: listener.port,
            gid: self.gid.raw.to_vec(),
            region_keys: self.regions.iter().map(|region| region.rkey).collect(),
            lease_page_address: page.address(),
            lease_page_key: region.rkey,
            lease_slots: page.slots(),
            lease_page_nonce: page.nonce(),
        })
    }

    /// Local key of a region of [`Self::memory`].
    pub(super) fn lkey(&self, region: u32) -> Option<u32> {
        Some(self.regions.get(region as usize)?.lkey)
    }

    /// Room of a reading queue pair, one place of it kept for its last request.
    pub(super) fn depth(&self) -> Depth {
        let most = u32::try_from(self.limits.max_qp_wr).unwrap_or(SENDS_MAX + 1);
        Depth {
            sends: (SENDS_MAX + 1).min(most),
            receives: 0,
            pieces: self.pieces_max(),
        }
    }

    fn pieces_max(&self) -> u32 {
        // 0 is what drivers say that have no limit of their own for reads.
        let reads = match self.limits.max_sge_rd {
            0 => self.limits.max_sge,
            reads => reads.min(self.limits.max_sge),
        };
        u32::try_from(reads).unwrap_or(1).clamp(1, PIECES_MAX)
    }

    pub(super) fn request_limits(&self) -> RequestLimits {
        RequestLimits {
            pieces_max: self.pieces_max() as usize,
            bytes_max: self.port.message_bytes_max.max(1),
        }
    }

    /// Reads of a queue pair at once: those it may start, and those it may answer.
    pub(super) fn reads_in_flight(&self) -> (u8, u8) {
        let bounded = |limit: i32| limit.clamp(1, READS_IN_FLIGHT_MAX) as u8;
        (
            bounded(self.limits.max_qp_init_rd_atom),
            bounded(self.limits.max_qp_rd_atom),
        )
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !self.domain.context.is_ours() {
            return;
        }
        self.stop.wake();
        let thread = self
            .events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the thread of the device's events panicked");
        }
    }
}

/// The thread's life: logs the device's events until it is stopped.
fn watch(context: &Context, port: u8, fault: &Fault, stop: &Waker) {
    if let Err(error) = rustix::io::ioctl_fionbio(context.events(), true) {
        tracing::error!(%error, "cannot watch the device's events");
        return;
    }
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(context.events(), PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) if !fds[1].revents().is_empty() => return,
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "cannot watch the device's events");
                return;
            }
        }
        match take_event(context) {
            Ok(None) => {}
            Ok(Some(event)) => {
                if event.log(&context.name, port) {
                    fault.happen();
                }
            }
            Err(error) => {
                // The device is gone: its descriptor stays readable and gives errors only.
                tracing::error!(%error, device = context.name, "RDMA device lost");
                fault.happen();
                return;
            }
        }
    }
}

/// An event of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeviceEvent {
    kind: sys::ibv_event_type,
    /// For events of a port.
    port: Option<u8>,
}

impl DeviceEvent {
    /// Says it; whether nothing of the device can be trusted to end any more.
    fn log(self, device: &str, own_port: u8) -> bool {
        let (text, fatal) = match self.kind {
            sys::IBV_EVENT_DEVICE_FATAL => ("the device failed", true),
            sys::IBV_EVENT_CQ_ERR => ("a completion queue overran", true),
            sys::IBV_EVENT_QP_FATAL => ("a queue pair failed", false),
            sys::IBV_EVENT_QP_REQ_ERR => ("a peer sent an invalid request", false),
            sys::IBV_EVENT_QP_ACCESS_ERR => ("a peer asked for memory that it may not read", false),
            sys::IBV_EVENT_PORT_ERR => ("the port went down", false),
            sys::IBV_EVENT_PORT_ACTIVE => ("the port came up", false),
            sys::IBV_EVENT_GID_CHANGE => ("addresses of the port changed", false),
            sys::IBV_EVENT_LID_CHANGE => ("the port's LID changed", false),
            // Of no account here: migration, shared receive queues, the subnet's manager.
            kind => {
                tracing::debug!(device, kind, "event of the RDMA device");
                return false;
            }
        };
        if self.port.is_some_and(|port| port != own_port) {
            tracing::debug!(device, port = ?self.port, text, "event of another port");
        } else if self.kind == sys::IBV_EVENT_PORT_ACTIVE {
            tracing::info!(device, text, "event of the RDMA device");
        } else {
            tracing::warn!(device, text, "event of the RDMA device");
        }
        fatal
    }
}

/// The next event; `None` when there is none.
fn take_event(context: &Context) -> Result<Option<DeviceEvent>, VerbsError> {
    // SAFETY: a union of pointers and an integer, for which zeros are valid.
    let mut event: sys::ibv_async_event = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open and its descriptor does not block; the call writes one event.
    let status = unsafe { (context.library.ibv_get_async_event)(context.raw(), &raw mut event) };
    if status != 0 {
        let error = io::Error::last_os_error();
        if matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
        ) {
            return Ok(None);
        }
        return Err(VerbsError::call("ibv_get_async_event", &error));
    }
    let port = match event.event_type {
        sys::IBV_EVENT_PORT_ERR
        | sys::IBV_EVENT_PORT_ACTIVE
        | sys::IBV_EVENT_LID_CHANGE
        | sys::IBV_EVENT_PKEY_CHANGE
        | sys::IBV_EVENT_SM_CHANGE
        | sys::IBV_EVENT_GID_CHANGE
        | sys::IBV_EVENT_CLIENT_REREGISTER => {
            // SAFETY: events of a port carry its number.
            u8::try_from(unsafe { event.element.port_num }).ok()
        }
        _ => None,
    };
    let kind = event.event_type;
    // SAFETY: given by `ibv_get_async_event`, acknowledged once.
    unsafe { (context.library.ibv_ack_async_event)(&raw mut event) };
    Ok(Some(DeviceEvent { kind, port }))
}
