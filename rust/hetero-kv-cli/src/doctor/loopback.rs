//! Throughput of TCP within this host: what engines that do not read each other's memory have.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::thread;
use std::time::Duration;

use super::dial::{DIAL_TIMEOUT, dial};
use super::report::Finding;
use super::stream::{Deadline, Moved, receive_stream, send_stream};

pub(super) use super::stream::cpu_time;

const CHECK: &str = "tcp here";

/// Beyond the measurement itself.
const SLACK: Duration = Duration::from_secs(5);

/// For so many seconds over `address`.
pub(super) fn check(address: IpAddr, seconds: u32) -> Finding {
    match measure(address, Duration::from_secs(seconds.into())) {
        Ok((received, sent)) => Finding::ok(
            CHECK,
            format!(
                "{:.0} MB/s over {address}, CPU seconds: {:.2} of the sender, {:.2} of the \
                 receiver for {:.1} GB",
                received.megabytes_per_s(),
                sent.cpu.as_secs_f64(),
                received.cpu.as_secs_f64(),
                received.bytes as f64 / 1e9
            ),
        ),
        Err(error) => Finding::fail(
            CHECK,
            format!("no TCP connection of this host to itself over {address}: {error}"),
            format!("see `ip route get {address}` and the firewall's rules for local traffic"),
        ),
    }
}

fn measure(address: IpAddr, time: Duration) -> io::Result<(Moved, Moved)> {
    let listener = TcpListener::bind((address, 0))?;
    let stream = dial(listener.local_addr()?, DIAL_TIMEOUT, None)
        .map_err(|error| io::Error::other(error.to_string()))?;
    let (accepted, _) = listener.accept()?;
    let deadline = Deadline::after(time + SLACK);
    let sender = thread::spawn(move || send_stream(&stream, u64::MAX, time, deadline));
    let received = receive_stream(&accepted, deadline)?;
    let sent = sender
        .join()
        .map_err(|_| io::Error::other("the sender ended early"))??;
    Ok((received, sent))
}
