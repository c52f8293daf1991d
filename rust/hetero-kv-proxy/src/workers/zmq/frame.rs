//! What a MoRI-IO worker of vLLM says of itself, in the two forms that it has had: one msgpack map,
//! sent again and again.

use serde::Deserialize;
use serde_json::Value;

use super::super::body::Members;
use crate::config::base_url;
use crate::connectors::ZmqAddress;
use crate::routing::Role;

/// A map in a map in a frame is deeper than any registration.
const DEPTH_MAX: usize = 4;
/// Longest string: a name is at most 253 bytes, and two ports with their words follow.
const TEXT_BYTES_MAX: usize = 512;

/// One registration or heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) role: Role,
    /// Base URL of the engine's API.
    pub(super) url: String,
    pub(super) zmq: ZmqAddress,
    /// DP ranks of the whole engine.
    pub(super) dp_size: u64,
    pub(super) tp_size: u64,
    /// `READ` or `WRITE`.
    pub(super) mode: &'static str,
}

/// Takes a frame apart. Members that are not known here are passed over: vLLM may add some.
///
/// # Errors
/// A sentence that names the member at fault.
pub(super) fn announced(frame: &[u8]) -> Result<Announced, String> {
    let mut rest = frame;
    let mut decoder = rmp_serde::Deserializer::new(&mut rest);
    decoder.set_max_depth(DEPTH_MAX);
    let members = Members::deserialize(&mut decoder)
        .map_err(|error| format!("not one msgpack map of plain members: {error}"))?;
    if !rest.is_empty() {
        return Err(format!("{} bytes after the msgpack map", rest.len()));
    }
    let told = Told(&members);
    match told.text("type")? {
        "P" => told.recent(Role::Prefill),
        "D" => told.recent(Role::Decode),
        "register" => match told.text("role")? {
            "P" => told.older(Role::Prefill),
            "D" => told.older(Role::Decode),
            role => Err(format!("`role` must be \"P\" or \"D\", not {role:?}")),
        },
        kind => Err(format!(
            "`type` must be \"P\" or \"D\", or \"register\" in the older form, not {kind:?}"
        )),
    }
}

struct Told<'a>(&'a Members);

impl<'a> Told<'a> {
    fn get(&self, name: &str) -> Result<&'a Value, String> {
        let found = self.0.get(name);
        found.ok_or_else(|| format!("`{name}` is missing"))
    }

    fn text(&self, name: &str) -> Result<&'a str, String> {
        let value = self.get(name)?.as_str();
        value
            .filter(|text| text.len() <= TEXT_BYTES_MAX && text.is_ascii())
            .ok_or_else(|| {
                format!("`{name}` must be a string of up to {TEXT_BYTES_MAX} ASCII bytes")
            })
    }

    fn number(&self, name: &str) -> Result<u64, String> {
        let value = self.get(name)?;
        value
            .as_u64()
            .ok_or_else(|| format!("`{name}` must be a whole number"))
    }

    fn port(&self, name: &str) -> Result<u16, String> {
        port(name, &self.number(name)?.to_string())
    }

    fn mode(&self) -> Result<&'static str, String> {
        let mode = self.text("transfer_mode")?;
        let known = ["READ", "WRITE"].into_iter();
        known
            .into_iter()
            .find(|known| mode.eq_ignore_ascii_case(known))
            .ok_or_else(|| format!("`transfer_mode` must be READ or WRITE, not {mode:?}"))
    }

    /// `http_address` is `IP:PORT`; `zmq_address` has the host and both ports.
    fn recent(&self, role: Role) -> Result<Announced, String> {
        Ok(Announced {
            role,
            url: base_of("http_address", self.text("http_address")?)?,
            zmq: zmq_address(self.text("zmq_address")?)?,
            dp_size: self.number("dp_size")?,
            tp_size: self.number("tp_size")?,
            mode: self.mode()?,
        })
    }

    /// `request_address` is the URL of one path, whose host is that of the ports too.
    fn older(&self, role: Role) -> Result<Announced, String> {
        let address = self.text("request_address")?;
        let scheme = address.strip_prefix("http://").unwrap_or(address);
        let authority = scheme.split('/').next().unwrap_or_default();
        let url = base_of("request_address", authority)?;
        let host = base_url(&url).map_err(|fault| format!("`request_address`: {fault}"))?;
        Ok(Announced {
            role,
            url,
            zmq: ZmqAddress {
                host: host.host,
                handshake: self.port("handshake_port")?,
                notify: self.port("notify_port")?,
            },
            dp_size: self.number("dp_size")?,
            tp_size: self.number("tp_size")?,
            mode: self.mode()?,
        })
    }
}

fn port(name: &str, text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|port| *port != 0);
    port.ok_or_else(|| format!("`{name}` must be a port, not {text:?}"))
}

/// The URL of `HOST:PORT`; vLLM puts no brackets around an IPv6 address.
fn base_of(name: &str, address: &str) -> Result<String, String> {
    let (host, text) = address
        .rsplit_once(':')
        .ok_or_else(|| format!("`{name}` must be HOST:PORT, not {address:?}"))?;
    let port = port(name, text)?;
    let bare = host.contains(':') && !host.starts_with('[');
    let host = match bare {
        true => format!("[{host}]"),
        false => host.to_owned(),
    };
    Ok(format!("http://{host}:{port}"))
}

/// Takes `host:IP,handshake:PORT,notify:PORT` apart. A host may have colons of its own.
fn zmq_address(text: &str) -> Result<ZmqAddress, String> {
    let part = |wanted: &str| {
        let mut parts = text.split(',').filter_map(|part| part.split_once(':'));
        parts
            .find(|(name, _)| *name == wanted)
            .map(|(_, value)| value)
            .filter(|value| !value.is_empty())
            .ok_or_else(|| format!("`zmq_address` has no `{wanted}`: {text:?}"))
    };
    let port_of = |wanted| port(&format!("zmq_address.{wanted}"), part(wanted)?);
    Ok(ZmqAddress {
        host: part("host")?.to_owned(),
        handshake: port_of("handshake")?,
        notify: port_of("notify")?,
    })
}

#[cfg(test)]
mod tests;
