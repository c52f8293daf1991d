//! GIDs: the addresses of a port, and which of them can be used.
#![allow(unsafe_code)]

use std::fmt;
use std::fs;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use super::device::Context;
use super::sys;

/// GIDs looked at: no device known has more.
const GIDS_MAX: i32 = 1024;

/// GIDs of a port that are told one by one: a table has up to 256, those of one address in a row.
const SHOWN_MAX: usize = 8;

/// A GID with its place in the port's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gid {
    pub(super) index: u8,
    pub(super) raw: [u8; 16],
}

impl Gid {
    pub(super) fn address(self) -> Ipv6Addr {
        Ipv6Addr::from(self.raw)
    }

    /// Which kind of network it is of; both ends of a queue pair have to be of one.
    pub(super) fn family(self) -> Family {
        let address = self.address();
        if address.to_ipv4_mapped().is_some() {
            Family::V4
        } else if address.is_unicast_link_local() {
            Family::LinkLocal
        } else {
            Family::V6
        }
    }
}

/// Best first, where nothing else decides: a link-local address reaches no further than its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Family {
    V4,
    V6,
    LinkLocal,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
            Self::LinkLocal => "link-local",
        })
    }
}

/// What a GID is for, as the kernel says; both names of the first are one to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GidType {
    InfiniBandOrRoceV1,
    RoceV2,
    Unsaid,
}

/// One entry of the table, before it is known to be of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) gid: Gid,
    pub(super) kind: GidType,
}

impl Found {
    /// Index, address, and of what kind it is.
    fn shown(&self, ethernet: bool) -> String {
        let (index, address) = (self.gid.index, self.gid.address());
        if !ethernet {
            return format!("{index} {address}");
        }
        let kind = match self.kind {
            GidType::InfiniBandOrRoceV1 => "RoCE v1, ",
            GidType::RoceV2 => "RoCE v2, ",
            GidType::Unsaid => "",
        };
        format!("{index} {address} ({kind}{})", self.gid.family())
    }
}

/// A table in words, its first entries one by one.
pub(super) fn listed(all: &[Found], ethernet: bool) -> String {
    if all.is_empty() {
        return "none".into();
    }
    let shown = all.iter().take(SHOWN_MAX).map(|gid| gid.shown(ethernet));
    let mut shown: Vec<String> = shown.collect();
    if let Some(more @ 1..) = all.len().checked_sub(SHOWN_MAX) {
        shown.push(format!("{more} more"));
    }
    shown.join(", ")
}

/// The GIDs to use, `None` when there is none.
pub(super) fn usable(all: &[Found], ethernet: bool, gid_index: Option<u8>) -> Option<Vec<Gid>> {
    let chosen: Vec<Gid> = all
        .iter()
        .filter(|found| match gid_index {
            Some(index) => found.gid.index == index,
            // RoCE v1 does not leave its link, and rxe does not speak it.
            None => !(ethernet && found.kind == GidType::InfiniBandOrRoceV1),
        })
        .map(|found| found.gid)
        .collect();
    (!chosen.is_empty()).then_some(chosen)
}

/// The port's table, empty places left out.
pub(super) fn gids(context: &Context, port: u8, count: i32) -> Vec<Found> {
    let mut found = Vec::new();
    for index in 0..count.clamp(0, GIDS_MAX) {
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open; the call writes one GID.
        let status =
            unsafe { (context.library.ibv_query_gid)(context.raw(), port, index, &raw mut gid) };
        // SAFETY: `raw` covers the whole union, and every bit pattern is an array of bytes.
        let raw = unsafe { gid.raw };
        let Ok(index) = u8::try_from(index) else {
            break;
        };
        if status == 0 && raw != [0; 16] {
            found.push(Found {
                gid: Gid { index, raw },
                kind: gid_type(&context.name, port, index),
            });
        }
    }
    found
}

fn gid_type(device: &str, port: u8, index: u8) -> GidType {
    let path: PathBuf = [
        "/sys/class/infiniband",
        device,
        "ports",
        &port.to_string(),
        "gid_attrs/types",
        &index.to_string(),
    ]
    .iter()
    .collect();
    match fs::read_to_string(path).unwrap_or_default().trim() {
        "IB/RoCE v1" => GidType::InfiniBandOrRoceV1,
        "RoCE v2" => GidType::RoceV2,
        _ => GidType::Unsaid,
    }
}
