//! When two spellings mean one place: an engine that is known by two of them is still one engine.

use std::net::{IpAddr, Ipv4Addr};

use super::{BaseUrl, Worker, host_port};

/// Hosts that are told apart.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Address(IpAddr),
    Name(String),
}

/// Names are compared as they are written, in lower case: what they resolve to changes, and is not
/// asked. But for `localhost`, which is taken for the IPv4 loopback address.
fn place(host: &str) -> Place {
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    if name == "localhost" {
        return Place::Address(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    match name.parse::<IpAddr>() {
        Ok(address) => Place::Address(address.to_canonical()),
        Err(_) => Place::Name(name),
    }
}

impl BaseUrl {
    /// Whether both mean one server: as spelled, but for case, forms of an address, `localhost`, a
    /// slash at the end and a port that goes without saying.
    pub(crate) fn is_same_place(&self, other: &Self) -> bool {
        place(&self.host) == place(&other.host)
            && (self.port, &self.path) == (other.port, &other.path)
    }

    /// Whether this host reaches its own listener on `host` and `port` by it, as far as the spelling
    /// tells: names are not resolved, and of the addresses that a wildcard stands for only the
    /// loopback ones are known.
    pub(crate) fn is_listener(&self, host: &str, port: u16) -> bool {
        let (listener, there) = (place(host), place(&self.host));
        let wildcard = match (&listener, &there) {
            (Place::Address(listener), Place::Address(there)) => {
                // Linux serves IPv4 on an IPv6 wildcard too.
                let serves = listener.is_ipv6() || there.is_ipv4();
                listener.is_unspecified() && there.is_loopback() && serves
            }
            (Place::Address(_) | Place::Name(_), _) => false,
        };
        self.port == port && (listener == there || wildcard)
    }
}

impl Worker {
    /// Whether both say the same of one engine, whichever way its address is spelled and whichever
    /// of its keys were given rather than filled in. Its weight is no part of what it is.
    pub(crate) fn says_the_same(&self, other: &Self) -> bool {
        let sizes = |worker: &Self| {
            let (spec, peer) = (&worker.spec, &worker.peer);
            let ranks = (peer.dp_size, peer.dp_rank0, peer.tp);
            (spec.dp, spec.rank0, ranks)
        };
        let zmq = |worker: &Self| {
            let zmq = &worker.peer.zmq;
            (place(&zmq.host), zmq.handshake, zmq.notify)
        };
        let bootstrap = |worker: &Self| {
            let url = &worker.peer.bootstrap;
            let address = host_port(url.trim_start_matches("http://")).ok();
            address.map(|(host, port)| (place(&host), port))
        };
        self.base.is_same_place(&other.base)
            && sizes(self) == sizes(other)
            && zmq(self) == zmq(other)
            && bootstrap(self) == bootstrap(other)
            && (&self.traits, &self.control) == (&other.traits, &other.control)
    }
}

/// What is wrong with a worker at `base` that is one of this proxy's own listeners, each given by its
/// setting, host and port.
pub(crate) fn own_listener<'a>(
    base: &BaseUrl,
    listeners: impl IntoIterator<Item = (&'static str, &'a str, u16)>,
) -> Option<String> {
    let mut listeners = listeners.into_iter();
    let (setting, ..) = listeners.find(|(_, host, port)| base.is_listener(host, *port))?;
    Some(format!(
        "is this proxy's own {setting}, to which its legs would come back; give the address and port \
         of the engine"
    ))
}

#[cfg(test)]
mod tests;
