//! Dialling, in a short-lived thread, because neither the resolver nor connect may stop the loop.

use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use hetero_kv_core::consumer::PeerAddress;
use hetero_kv_core::step::PeerId;

use super::event_loop::{DialNumber, DialResult};
use crate::net::resolve::resolve;
use crate::waker::Waker;

/// For the name and for each of its addresses; the machine's own deadline is over both.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Connects in the background and sends the outcome under the dial's number.
pub(super) fn start(
    peer: PeerId,
    number: DialNumber,
    address: PeerAddress,
    results: Sender<DialResult>,
    waker: Arc<Waker>,
) -> io::Result<()> {
    thread::Builder::new()
        .name("hkv-dial".into())
        .spawn(move || {
            let result = connect(&address);
            // The loop may have stopped meanwhile.
            let _ = results.send((peer, number, result));
            waker.wake();
        })
        .map(|_| ())
}

fn connect(address: &PeerAddress) -> io::Result<OwnedFd> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no address");
    for candidate in resolve(&address.host, address.port, TIMEOUT)? {
        match TcpStream::connect_timeout(&candidate, TIMEOUT) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                return Ok(stream.into());
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}
