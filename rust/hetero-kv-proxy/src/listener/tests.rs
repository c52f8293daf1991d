//! Loopback sockets; what happens without descriptors is in `tests/it/command.rs`, since it takes a
//! process of its own.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::*;

/// Long enough for what has to happen, and to see that something does not.
const AT_MOST: Duration = Duration::from_secs(5);
const QUIET: Duration = Duration::from_millis(150);

struct Running {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    tasks: TaskTracker,
    accepting: tokio::task::JoinHandle<()>,
}

/// Greets whoever comes in with a byte, and ends with the connection.
async fn greeting(connections: usize, cut: bool) -> Running {
    let listener = bind("127.0.0.1", 0).await.expect("loopback");
    let address = listener.local_addr().expect("an address");
    let (stop, stopped) = watch::channel(false);
    let tasks = TaskTracker::new();
    let acceptor = Acceptor {
        listener,
        connections: Arc::new(Semaphore::new(connections)),
        tasks: tasks.clone(),
        stop: stopped.clone(),
    };
    let accepting = tokio::spawn(async move {
        let greet = |mut stream: TcpStream, _| {
            let stopped = stopped.clone();
            let served = async move {
                stream.write_all(b"!").await.expect("a greeting");
                let _end = stream.read(&mut [0]).await;
            };
            async move {
                match cut {
                    true => until_stopped(stopped, served).await,
                    false => served.await,
                }
            }
        };
        acceptor.run(greet, |error, _| panic!("{error}")).await;
    });
    Running {
        address,
        stop,
        tasks,
        accepting,
    }
}

impl Running {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }
}

async fn is_greeted(stream: &mut TcpStream, within: Duration) -> bool {
    let mut greeting = [0];
    match timeout(within, stream.read_exact(&mut greeting)).await {
        Ok(read) => read.is_ok(),
        Err(_) => false,
    }
}

#[tokio::test]
async fn one_connection_too_many_waits_until_another_ends() {
    let running = greeting(2, false).await;
    let mut first = running.connect().await;
    let mut second = running.connect().await;
    let mut third = running.connect().await;
    assert!(is_greeted(&mut first, AT_MOST).await && is_greeted(&mut second, AT_MOST).await);
    assert!(!is_greeted(&mut third, QUIET).await, "two are allowed");
    drop(first);
    assert!(is_greeted(&mut third, AT_MOST).await, "there is room");
}

#[tokio::test]
async fn stop_ends_accepting_and_leaves_connections_to_end_by_themselves() {
    let running = greeting(8, false).await;
    let mut open = running.connect().await;
    assert!(is_greeted(&mut open, AT_MOST).await);
    running.stop.send_replace(true);
    timeout(AT_MOST, running.accepting)
        .await
        .expect("it ends")
        .expect("no panic");
    TcpStream::connect(running.address)
        .await
        .expect_err("nobody listens");
    running.tasks.close();
    assert!(
        timeout(QUIET, running.tasks.wait()).await.is_err(),
        "still served"
    );
    drop(open);
    timeout(AT_MOST, running.tasks.wait())
        .await
        .expect("it ends");
}

#[tokio::test]
async fn stop_is_heard_while_no_connection_more_is_allowed_and_cuts_those_that_may_be() {
    let running = greeting(1, true).await;
    let mut open = running.connect().await;
    assert!(is_greeted(&mut open, AT_MOST).await);
    let _waiting = running.connect().await;
    running.stop.send_replace(true);
    timeout(AT_MOST, running.accepting)
        .await
        .expect("it ends")
        .expect("no panic");
    running.tasks.close();
    timeout(AT_MOST, running.tasks.wait()).await.expect("cut");
}
