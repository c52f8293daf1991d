//! When a body gives what.

use std::task::Waker;

use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};
use crate::mock::{Mock, leg};

async fn worker() -> Arc<Worker> {
    let line = ["hetero-kv-proxy", "mock", "--listen", "127.0.0.1:0"];
    let args = match Cli::try_parse_from(line).expect("flags").command {
        Command::Mock(args) => *args,
        Command::Serve(_)
        | Command::Check(_)
        | Command::Sign(_)
        | Command::Trace(_)
        | Command::Bench(_) => {
            unreachable!("mock was parsed")
        }
    };
    let mock = Mock::start(args).await.expect("the mock starts");
    Arc::clone(&mock.workers[0])
}

/// A connection writes what it has when a body has nothing to give, so a pause after each event
/// makes each a write of its own.
#[tokio::test]
async fn without_pace_there_is_a_pause_in_front_of_each_event() {
    let worker = worker().await;
    let request = br#"{"prompt":"p","max_tokens":3,"stream":true}"#;
    let leg = leg::parse(request, false).expect("a leg");
    let script = Script::new(Arc::clone(&worker), &leg, false);
    let running = Running::new(worker);
    let events = Events::new(script, Instant::now(), None, Duration::ZERO, running);
    let mut body = MockBody::Events(Box::new(events));
    let mut cx = Context::from_waker(Waker::noop());
    let mut seen = String::new();
    loop {
        seen.push(match Pin::new(&mut body).poll_frame(&mut cx) {
            Poll::Pending => '.',
            Poll::Ready(Some(Ok(_))) => 'e',
            Poll::Ready(Some(Err(_))) => '!',
            Poll::Ready(None) => '$',
        });
        if seen.ends_with(['!', '$']) || seen.len() > 50 {
            break;
        }
    }
    // Three tokens, the end's event, and the end.
    assert_eq!(seen, ".e.e.e.e.$");
}
