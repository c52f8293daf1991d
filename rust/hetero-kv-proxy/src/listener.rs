//! A listening socket: binding it, and accepting connections, of which so many may be open at once.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::lines::Lines;

/// Connections that the kernel holds for us; a burst of as many connects is not refused. The
/// system's `somaxconn` may be lower and then counts.
const BACKLOG: u32 = 4_096;
/// Pause after a failed accept, such as one for want of descriptors, which ends when a connection
/// closes.
const FAILED_PAUSE: Duration = Duration::from_millis(50);
/// Lines about each kind of failure in a minute: the want of descriptors may last.
const FAILED_LINES_MAX: u32 = 1;

/// Binds the first address of `host` that can be bound.
///
/// # Errors
/// The error of the last address tried, or that of the name.
pub(crate) async fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in tokio::net::lookup_host((host, port)).await? {
        match bind_one(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bind_one(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A restart finds connections of the last run in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts connections, and has each served in a task of its own.
pub(crate) struct Acceptor {
    pub(crate) listener: TcpListener,
    /// A permit for each connection. Without one left, connections wait in the kernel's queue.
    pub(crate) connections: Arc<Semaphore>,
    /// Where the tasks are.
    pub(crate) tasks: TaskTracker,
    /// Ends accepting, once it is true.
    pub(crate) stop: watch::Receiver<bool>,
}

impl Acceptor {
    /// Accepts until `stop` turns true, then closes the listener. What `serve` makes of a
    /// connection runs to its own end, whatever `stop` says; see [`until_stopped`]. `failed` hears
    /// of a failed accept and of how many of its kind it was not told, once a minute.
    pub(crate) async fn run<Served>(
        self,
        serve: impl Fn(TcpStream, SocketAddr) -> Served,
        failed: impl Fn(&io::Error, u64),
    ) where
        Served: Future<Output = ()> + Send + 'static,
    {
        let Self {
            listener,
            connections,
            tasks,
            mut stop,
        } = self;
        let mut lines = Lines::new(FAILED_LINES_MAX);
        loop {
            let accept = async {
                // The semaphore is never closed.
                let permit = Arc::clone(&connections).acquire_owned().await.ok()?;
                Some((listener.accept().await, permit))
            };
            let accepted = tokio::select! {
                accepted = accept => accepted,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            match accepted {
                Some((Ok((stream, from)), permit)) => {
                    let served = serve(stream, from);
                    tasks.spawn(async move {
                        served.await;
                        drop(permit);
                    });
                }
                Some((Err(error), _)) => {
                    if let Some(untold) = lines.due(error.raw_os_error(), Instant::now()) {
                        failed(&error, untold);
                    }
                    tokio::time::sleep(FAILED_PAUSE).await;
                }
                None => return,
            }
        }
    }
}

/// Logs an accept that failed, and how many were not logged.
pub(crate) fn log_failure(error: &io::Error, unlogged: u64) {
    tracing::warn!(%error, unlogged, "accept failed; connections wait");
}

/// Serves a connection until it ends or `stop` turns true, where it may be cut at any point.
pub(crate) async fn until_stopped(
    mut stop: watch::Receiver<bool>,
    served: impl Future<Output = ()>,
) {
    tokio::select! {
        () = served => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

#[cfg(test)]
mod tests;
