//! Versions of this build and of a peer.

use hetero_kv_core::wire::WIRE_VERSION;

use super::report::Finding;

/// This package's version.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Lowest and highest wire version that this build speaks: N and N-1, and 1 is the first.
pub(super) const WIRE: (u8, u8) = (
    if WIRE_VERSION > 1 {
        WIRE_VERSION - 1
    } else {
        1
    },
    WIRE_VERSION,
);

/// A range of wire versions in words.
fn wire_text((low, high): (u8, u8)) -> String {
    if low == high {
        format!("wire {high}")
    } else {
        format!("wire {low} to {high}")
    }
}

/// This build.
pub(super) fn ours() -> Finding {
    Finding::ok(
        "version",
        format!("hetero_kv {VERSION}, {}", wire_text(WIRE)),
    )
}

/// This build beside a peer.
pub(super) fn compare(version: &str, wire: (u8, u8)) -> Finding {
    let both = format!(
        "hetero_kv {VERSION} ({}) here, {version} ({}) there",
        wire_text(WIRE),
        wire_text(wire)
    );
    if wire.0 > WIRE.1 || WIRE.0 > wire.1 {
        let older = if wire.1 < WIRE.0 { "there" } else { "here" };
        return Finding::fail(
            "version",
            format!("{both}: no wire version in common, every pair would be refused"),
            format!("install the newer hetero_kv {older}"),
        );
    }
    Finding::ok("version", both)
}
