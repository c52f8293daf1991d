use std::io::{self, Write};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::{STANDSTILL, Steps};
use crate::control::SharedDesk;

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn logged(act: impl FnOnce()) -> String {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, act);
    let bytes = log.0.lock().expect("no panic").clone();
    String::from_utf8(bytes).expect("text")
}

#[test]
fn only_what_is_late_by_seconds_is_told() {
    let told = logged(|| {
        let mut steps = Steps::new();
        steps.end("a quick step");
        thread::sleep(STANDSTILL + Duration::from_millis(50));
        steps.end_after("a sleep as long as planned", STANDSTILL);
        thread::sleep(STANDSTILL + Duration::from_millis(50));
        steps.end("a slow step");
        steps.end("the next one");
    });
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(
        told.contains("stood still for 2.") && told.contains("while a slow step"),
        "{told}"
    );
}

#[test]
fn a_wait_for_the_machines_names_both_sides() {
    let desk = SharedDesk::default();
    let (taken, is_taken) = channel();
    let told = logged(|| {
        thread::scope(|scope| {
            scope.spawn(|| {
                let held = desk.lock();
                taken.send(()).expect("listening");
                thread::sleep(STANDSTILL + Duration::from_millis(200));
                drop(held);
            });
            is_taken.recv().expect("taken");
            drop(desk.lock());
        });
    });
    let line = |text: &str| {
        let lines = include_str!("tests.rs").lines();
        1 + lines.take_while(|line| !line.contains(text)).count()
    };
    let (holder, waiter) = (line("let held = desk.lock()"), line("drop(desk.lock())"));
    let wanted = format!("line {waiter} waited for the machines, taken at line {holder}");
    assert!(told.contains(&wanted), "{told}");
}
