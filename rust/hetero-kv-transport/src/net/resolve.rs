//! Host names to addresses, with a deadline that the system's resolver does not have.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Addresses of a host, IPv6 without brackets. A name whose resolver does not answer within
/// `timeout` is an error; its look-up then ends by itself in a thread of its own.
pub(crate) fn resolve(host: &str, port: u16, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    thread::Builder::new()
        .name("hkv-resolve".into())
        .spawn(move || {
            let found = (name.as_str(), port)
                .to_socket_addrs()
                .map(|addresses| addresses.collect::<Vec<_>>());
            // Nobody listens any more after the timeout.
            let _ = sender.send(found);
        })?;
    let found = receiver.recv_timeout(timeout).map_err(|_| {
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the resolver did not answer for {host} within {timeout:?}"),
        )
    })??;
    if found.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("{host} has no address"),
        ));
    }
    Ok(found)
}
