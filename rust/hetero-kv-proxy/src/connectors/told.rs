//! What a worker says of its own connector, held against the one that the proxy serves.
//!
//! Legs of one kind sent to engines of another hang, or are computed without KV, one by one: a
//! worker that names its kind is refused when it comes.

use super::{ALL, Connector};

/// Why a worker that tells this `mode` cannot be served, as the end of a sentence that begins with
/// the worker; `None` where it can.
///
/// Only a connector that serves one of several modes knows what they mean: of any other, `mode` is
/// for the two workers of a pair to agree on.
pub(crate) fn other_mode(connector: &dyn Connector, told: &str) -> Option<String> {
    let served = connector.moriio_mode()?;
    if served.eq_ignore_ascii_case(told) {
        return None;
    }
    let serves = |other: &&dyn Connector| {
        let mode = other.moriio_mode();
        mode.is_some_and(|mode| mode.eq_ignore_ascii_case(told))
    };
    let way_out = match ALL.iter().copied().find(serves) {
        Some(other) => format!(
            "start the proxy with --connector {}, or the engine with the other read_mode in its \
             kv_connector_extra_config",
            other.name(),
        ),
        None => "tell read (with --connector moriio-read) or write (with moriio-write)".to_owned(),
    };
    Some(format!(
        "`mode` is `{told}`, and --connector {} serves `{}`; {way_out}",
        connector.name(),
        served.to_ascii_lowercase()
    ))
}

/// Why a worker that tells this `kv.connector` cannot be served, as the end of a sentence that
/// begins with the worker; `None` where it can, or where the name is that of no kind here: an
/// engine may have ours inside another (`MultiConnector`).
pub(crate) fn other_connector(connector: &dyn Connector, told: &str) -> Option<String> {
    let goes = |kind: &dyn Connector| kind.name() == told || kind.engine_names().contains(&told);
    // Without a leg that carries params it does not matter what an engine could do with them.
    if connector.engine_names().is_empty() || goes(connector) {
        return None;
    }
    let kinds: Vec<&str> = ALL
        .into_iter()
        .filter(|kind| !kind.engine_names().is_empty() && goes(*kind))
        .map(Connector::name)
        .collect();
    if kinds.is_empty() {
        return None;
    }
    Some(format!(
        "`kv.connector` is `{told}`, and --connector {} serves {}; start the proxy with --connector \
         {}, or the engine with the other connector",
        connector.name(),
        connector.engine_names().join(", "),
        kinds.join(" or ")
    ))
}
