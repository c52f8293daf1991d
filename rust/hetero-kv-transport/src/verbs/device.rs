//! RDMA devices, their ports and addresses.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::VerbsError;
use super::gid::{self, Gid};
use super::library::{self, Library};
use super::sys;

/// An opened device. Closed with its last user, but never by a forked child: the descriptor behind
/// it is shared with the parent, whose objects a call of the child would end.
pub(super) struct Context {
    pub(super) library: &'static Library,
    raw: NonNull<sys::ibv_context>,
    pub(super) name: String,
    pid: u32,
}

// SAFETY: libibverbs may be called from any thread (its manual: "fully thread-safe"); the pointer
// is freed only by `drop`.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.raw.as_ptr()
    }

    /// The calls that the header makes inline.
    pub(super) fn ops(&self) -> sys::ibv_context_ops {
        // SAFETY: the context lives as long as `self`, and its table of calls is filled by
        // `ibv_open_device` and not changed afterwards.
        unsafe { (*self.raw.as_ptr()).ops }
    }

    /// Where the device's asynchronous events come.
    pub(super) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the context's own and stays open as long as `self`.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }

    /// Whether this process opened it.
    pub(super) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    pub(super) fn limits(&self) -> Result<sys::ibv_device_attr, VerbsError> {
        // SAFETY: integers and arrays of them, for which zeros are valid.
        let mut found: sys::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the call writes one structure of this type.
        let status = unsafe { (self.library.ibv_query_device)(self.raw(), &raw mut found) };
        checked("ibv_query_device", status)?;
        Ok(found)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // SAFETY: everything that was made of the context holds it by an `Arc` and has ended.
        let status = unsafe { (self.library.ibv_close_device)(self.raw()) };
        if status != 0 {
            tracing::error!(device = self.name, status, "ibv_close_device failed");
        }
    }
}

/// The result of a call that gives an error number.
pub(super) fn checked(verb: &'static str, status: c_int) -> Result<(), VerbsError> {
    match status {
        0 => Ok(()),
        // Some drivers give -1 and set errno, some a negative error number.
        -1 => Err(VerbsError::last(verb)),
        status => Err(VerbsError::call(
            verb,
            &io::Error::from_raw_os_error(status.abs()),
        )),
    }
}

/// One port, and the GIDs of it that can be used.
#[derive(Clone, Debug)]
pub(super) struct Port {
    pub(super) number: u8,
    pub(super) lid: u16,
    pub(super) ethernet: bool,
    pub(super) mtu: sys::ibv_mtu,
    pub(super) message_bytes_max: u32,
    gids: Vec<Gid>,
}

impl Port {
    /// The GID to announce: that of the advertised address where the port has it.
    pub(super) fn own_gid(&self, advertised: Option<IpAddr>) -> Gid {
        let wanted = advertised.map(|address| match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        });
        let rank = |gid: &&Gid| (Some(gid.address()) != wanted, gid.family(), gid.index);
        // `probe` gives no port without one.
        self.gids.iter().min_by_key(rank).copied().unwrap_or(Gid {
            index: 0,
            raw: [0; 16],
        })
    }

    /// Device, port and GID, for people.
    pub(super) fn describe(&self, device: &str, gid: Gid) -> String {
        format!(
            "{device} port {} GID {} ({})",
            self.number,
            gid.index,
            gid.address()
        )
    }

    /// The GID to reach a peer's by, `own` where it does.
    pub(super) fn gid_towards(&self, peer: [u8; 16], own: Gid) -> Option<Gid> {
        let family = Gid {
            index: 0,
            raw: peer,
        }
        .family();
        if !self.ethernet || own.family() == family {
            return Some(own);
        }
        self.gids.iter().find(|gid| gid.family() == family).copied()
    }
}

/// Which device and port to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceChoice {
    /// Name as `rdma link` shows it; `None`: the first that can be used.
    pub device: Option<String>,
    /// Port; `None`: the first that is active.
    pub port: Option<u8>,
    /// Place in the port's table of GIDs; `None`: by the kind of address.
    pub gid_index: Option<u8>,
}

/// Opens the device and port of the choice.
pub(super) fn open(choice: &DeviceChoice) -> Result<(Arc<Context>, Port), VerbsError> {
    let library = library::load()?;
    let list = DeviceList::get(library)?;
    let devices = list.devices();
    let names: Vec<String> = devices.iter().map(|device| list.name(*device)).collect();
    if let Some(wanted) = &choice.device {
        let at = names.iter().position(|name| name == wanted);
        let at = at.ok_or_else(|| VerbsError::NoSuchDevice {
            wanted: wanted.clone(),
            have: names.clone(),
        })?;
        return open_one(library, devices[at], &names[at], choice);
    }
    let mut reasons = Vec::new();
    for (device, name) in devices.into_iter().zip(&names) {
        match open_one(library, device, name, choice) {
            Ok(opened) => return Ok(opened),
            Err(error) => reasons.push((name.clone(), error)),
        }
    }
    Err(VerbsError::NoneUsable(reasons))
}

/// Every device with its ports, in the library's order; one that cannot be opened has none.
pub(super) fn each<T>(
    mut look: impl FnMut(&str, Result<&Arc<Context>, VerbsError>) -> T,
) -> Result<Vec<T>, VerbsError> {
    let library = library::load()?;
    let list = DeviceList::get(library)?;
    let found = list.devices().into_iter().map(|device| {
        let name = list.name(device);
        look(
            &name,
            open_context(library, device, &name)
                .as_ref()
                .map_err(Clone::clone),
        )
    });
    Ok(found.collect())
}

fn open_context(
    library: &'static Library,
    device: *mut sys::ibv_device,
    name: &str,
) -> Result<Arc<Context>, VerbsError> {
    // SAFETY: the device is of a list that the caller holds; what it gives lives on when the list
    // is freed.
    let raw = unsafe { (library.ibv_open_device)(device) };
    let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_open_device"))?;
    Ok(Arc::new(Context {
        library,
        raw,
        name: name.to_owned(),
        pid: std::process::id(),
    }))
}

fn open_one(
    library: &'static Library,
    device: *mut sys::ibv_device,
    name: &str,
    choice: &DeviceChoice,
) -> Result<(Arc<Context>, Port), VerbsError> {
    // SAFETY: the device is of the list that the caller holds.
    let transport = unsafe { (*device).transport_type };
    if transport == sys::IBV_TRANSPORT_IWARP {
        return Err(VerbsError::Mismatch(format!(
            "{name} is an iWARP device; queue pairs are made by hand here, which needs InfiniBand \
             or RoCE"
        )));
    }
    let context = open_context(library, device, name)?;
    let ports = context.limits()?.phys_port_cnt;
    if let Some(wanted) = choice.port {
        if wanted == 0 || wanted > ports {
            return Err(VerbsError::NoSuchPort {
                device: name.to_owned(),
                wanted,
                ports,
            });
        }
        let port = probe(&context, wanted, choice.gid_index)?;
        return Ok((context, port));
    }
    let mut first_error = None;
    for number in 1..=ports {
        match probe(&context, number, choice.gid_index) {
            Ok(port) => return Ok((context, port)),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or_else(|| VerbsError::NoDevice(format!("{name} has no port"))))
}

/// What the device says of a port.
pub(super) fn query_port(context: &Context, number: u8) -> Result<sys::ibv_port_attr, VerbsError> {
    // SAFETY: integers, for which zeros are valid.
    let mut found: sys::ibv_port_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open; the call writes at most one structure of this type.
    let status = unsafe { (context.library.ibv_query_port)(context.raw(), number, &raw mut found) };
    checked("ibv_query_port", status)?;
    Ok(found)
}

/// A port's state in words; `Ok` where it carries packets.
pub(super) fn port_state(state: sys::ibv_port_state) -> Result<&'static str, &'static str> {
    match state {
        sys::IBV_PORT_ACTIVE | sys::IBV_PORT_ACTIVE_DEFER => Ok("ACTIVE"),
        sys::IBV_PORT_DOWN => Err("DOWN"),
        sys::IBV_PORT_INIT => Err("INIT (no subnet manager?)"),
        sys::IBV_PORT_ARMED => Err("ARMED"),
        _ => Err("in no known state"),
    }
}

pub(super) fn is_ethernet(port: &sys::ibv_port_attr) -> bool {
    u32::from(port.link_layer) == sys::IBV_LINK_LAYER_ETHERNET
}

fn probe(context: &Context, number: u8, gid_index: Option<u8>) -> Result<Port, VerbsError> {
    let found = query_port(context, number)?;
    port_state(found.state).map_err(|state| VerbsError::PortDown {
        device: context.name.clone(),
        port: number,
        state,
    })?;
    let ethernet = is_ethernet(&found);
    let all = gid::gids(context, number, found.gid_tbl_len);
    let gids = gid::usable(&all, ethernet, gid_index).ok_or_else(|| VerbsError::NoGid {
        device: context.name.clone(),
        port: number,
        wanted: match (gid_index, ethernet) {
            (Some(index), _) => format!("GID of index {index}"),
            (None, true) => "RoCE v2 GID".into(),
            (None, false) => "GID".into(),
        },
        found: format!("its GIDs: {}", gid::listed(&all, ethernet)),
    })?;
    Ok(Port {
        number,
        lid: found.lid,
        ethernet,
        mtu: found.active_mtu,
        message_bytes_max: found.max_msg_sz,
        gids,
    })
}

/// The library's list of devices, freed when dropped.
struct DeviceList {
    library: &'static Library,
    raw: NonNull<*mut sys::ibv_device>,
    count: usize,
}

impl DeviceList {
    fn get(library: &'static Library) -> Result<Self, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: the call writes the count and gives an array of so many pointers, or NULL.
        let raw = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| VerbsError::NoDevice(io::Error::last_os_error().to_string()))?;
        let list = Self {
            library,
            raw,
            count: usize::try_from(count).unwrap_or(0),
        };
        if list.count == 0 {
            return Err(VerbsError::NoDevice("its list is empty".into()));
        }
        Ok(list)
    }

    fn devices(&self) -> Vec<*mut sys::ibv_device> {
        (0..self.count)
            // SAFETY: the array has `count` pointers and lives as long as `self`.
            .map(|at| unsafe { *self.raw.as_ptr().add(at) })
            .collect()
    }

    fn name(&self, device: *mut sys::ibv_device) -> String {
        // SAFETY: the device is of this list; the name is a C string inside it.
        unsafe {
            let name = (self.library.ibv_get_device_name)(device);
            if name.is_null() {
                String::new()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            }
        }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: given by `ibv_get_device_list` and freed once.
        unsafe { (self.library.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests;
