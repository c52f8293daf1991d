use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hetero_kv_core::ids::{BlockId, TransferId};
use hetero_kv_core::step::StepOrders;
use hetero_kv_core::wire::params::TransferParams;

use super::{Prefilled, Roles, SchedulerOptions, SchedulerSide, StartError};
use crate::control::ControlLimits;
use crate::net::listen::ListenError;
use crate::testing::{
    PATIENCE, address, card, consumer_options, fields, heads, identity, lease_times, prompt,
};

fn options(name: &str, producer: bool) -> SchedulerOptions {
    SchedulerOptions {
        keys: None,
        identity: identity(name, 7),
        fields: fields(),
        heads: heads(),
        workers: vec![card()],
        roles: Roles {
            producer,
            consumer: !producer,
        },
        address: address("127.0.0.1"),
        limits: ControlLimits::default(),
        leases: lease_times(),
        lease_slots: 4,
        consumer: consumer_options(),
    }
}

fn prefilled(request_id: &str) -> Prefilled {
    Prefilled {
        request_id: request_id.into(),
        transfer_id: None,
        digest: prompt(),
        block_ids: vec![vec![BlockId(5), BlockId(6)]],
        num_tokens: 8,
    }
}

/// Takes orders until some are as wanted.
fn orders_until(side: &SchedulerSide, mut wanted: impl FnMut(&StepOrders) -> bool) -> StepOrders {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let orders = side.take_orders();
        if wanted(&orders) {
            return orders;
        }
        assert!(Instant::now() < deadline, "the orders never come");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_listener_that_cannot_be_bound_is_an_error_in_words() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let mut exhausted = options("p", true);
    exhausted.address.port_range = Some(port..=port);
    let error = SchedulerSide::start(exhausted).expect_err("taken");
    assert!(
        matches!(
            error,
            StartError::Listen(ListenError::PortRangeExhausted { needed: 2, .. })
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains(&format!("{port}-{port}")),
        "{error}"
    );
    for host in ["0.0.0.0", "::", "192.0.2.1", "host.invalid"] {
        let mut elsewhere = options("p", true);
        elsewhere.address.host = host.into();
        let error = SchedulerSide::start(elsewhere).expect_err("not an address of ours");
        assert!(error.to_string().contains(host), "{error}");
    }
}

#[test]
fn an_address_apart_is_bound_and_the_other_announced() {
    let mut apart = options("p", true);
    apart.address.host = "192.0.2.1".into();
    apart.address.bind_host = Some("127.0.0.1".into());
    let side = SchedulerSide::start(apart).expect("bound");
    let answer = side.prefilled(prefilled("r")).expect("held");
    assert_eq!(answer.host, "192.0.2.1");
    assert_eq!(Some(answer.port), side.port());
}

#[test]
fn a_consumer_listens_nowhere_and_holds_nothing() {
    let side = SchedulerSide::start(options("d", false)).expect("no port needed");
    assert_eq!(side.port(), None);
    let refused = side.prefilled(prefilled("r")).expect_err("no producer");
    assert!(refused.to_string().contains("kv_role"), "{refused}");
    assert_eq!(side.take_orders().incarnation, None);
    assert!(side.figures().producer.is_none());
}

/// From the end of prefill to the release, without a byte: both sides over a real connection.
#[test]
fn a_prompt_is_claimed_loaded_and_released() {
    let p = SchedulerSide::start(options("p", true)).expect("a free port");
    let d = SchedulerSide::start(options("d", false)).expect("a thread");
    let params = p.prefilled(prefilled("r")).expect("held");
    assert_eq!(p.take_orders().incarnation, Some(params.incarnation));
    assert_eq!(p.take_orders().pending, 1, "one lease is held");
    let text = params.to_json().to_string();
    d.new_request("q", TransferParams::parse(&text), prompt(), 8);
    assert_eq!(d.matched_tokens("q", 0), 7);
    d.allocated("q", &[BlockId(1), BlockId(2)], 7);
    let orders = orders_until(&d, |orders| !orders.loads.is_empty());
    assert_eq!(orders.peers.len(), 1, "the card comes with the first load");
    assert_eq!(orders.peers[0].layout.workers, [card()]);
    let load = &orders.loads[0];
    assert_eq!(load.source_blocks, [BlockId(5), BlockId(6)]);
    assert_eq!(load.dest_blocks, [BlockId(1), BlockId(2)]);
    assert!(!p.desk.lock().producer.as_ref().expect("p").has_releases());
    d.received("q", false);
    d.finished("q");
    let started = Instant::now();
    p.wait_for_orders(PATIENCE);
    assert!(started.elapsed() < PATIENCE, "the release ends the wait");
    let releases = orders_until(&p, |orders| !orders.releases.is_empty()).releases;
    assert_eq!(releases.len(), 1);
    assert_eq!(releases[0].request_id, "r");
    assert_eq!(releases[0].lease, load.lease);
    assert!(p.take_orders().releases.is_empty(), "each comes once");
    p.sent("r");
    let (counts, gauges) = p.figures().producer.expect("a producer");
    assert_eq!((counts.read_out, gauges.leases_alive), (1, 0));
    assert_eq!(d.figures().consumer_open, (0, 0));
}

#[test]
fn revoked_leases_are_released_in_the_next_step() {
    let p = SchedulerSide::start(options("p", true)).expect("a free port");
    for request_id in ["a", "b"] {
        p.prefilled(prefilled(request_id)).expect("held");
    }
    p.revoke_leases();
    p.revoke_leases();
    let mut released: Vec<String> = p
        .take_orders()
        .releases
        .into_iter()
        .map(|release| release.request_id)
        .collect();
    released.sort_unstable();
    assert_eq!(released, ["a", "b"]);
}

#[test]
fn an_idle_engine_sweeps_its_leases() {
    let mut short = options("p", true);
    short.leases.lease = Duration::from_millis(50);
    short.leases.grace = Duration::from_millis(50);
    let p = SchedulerSide::start(short).expect("a free port");
    let started = Instant::now();
    p.prefilled(prefilled("r")).expect("held");
    p.wait_for_orders(PATIENCE);
    let waited = started.elapsed();
    assert!(waited >= Duration::from_millis(100), "{waited:?}");
    assert_eq!(p.take_orders().releases.len(), 1);
    assert_eq!(p.figures().producer.expect("a producer").0.expired, 1);
}

#[test]
fn a_transfer_id_has_one_owner() {
    let p = SchedulerSide::start(options("p", true)).expect("a free port");
    let named = |request_id| Prefilled {
        transfer_id: Some(TransferId([3; 16])),
        ..prefilled(request_id)
    };
    p.prefilled(named("a")).expect("held");
    let refused = p.prefilled(named("b")).expect_err("taken");
    assert!(refused.to_string().contains("another request"), "{refused}");
}

/// A router that was told of one prefill host twice, or a client's own params: decode cannot know
/// that both names lead to one engine, and has a connection to each.
#[test]
fn one_engine_by_two_names_serves_under_both() {
    let p = SchedulerSide::start(options("p", true)).expect("a free port");
    let d = SchedulerSide::start(options("d", false)).expect("a thread");
    let ask = |request: &str, params: &str, block| {
        d.new_request(request, TransferParams::parse(params), prompt(), 8);
        assert_eq!(d.matched_tokens(request, 0), 7);
        d.allocated(request, &[BlockId(block), BlockId(block + 1)], 7);
        orders_until(&d, |orders| {
            assert!(orders.cancels.is_empty(), "{:?}", orders.cancels);
            assert!(orders.fails.is_empty(), "{:?}", orders.fails);
            orders.loads.iter().any(|load| load.request_id == request)
        });
    };
    let first = p.prefilled(prefilled("a")).expect("held").to_json();
    let second = p.prefilled(prefilled("b")).expect("held").to_json();
    ask("x", &first.to_string(), 1);
    ask("y", &second.to_string().replace("127.0.0.1", "127.1"), 3);
    // Nobody's load is stopped, neither connection is lost, and each acknowledges its own.
    for (request, held) in [("x", "a"), ("y", "b")] {
        assert!(d.take_orders().cancels.is_empty());
        d.received(request, false);
        d.finished(request);
        let orders = orders_until(&p, |orders| !orders.releases.is_empty());
        assert_eq!(orders.releases[0].request_id, held);
    }
    let counts = d.figures().consumer.expect("a consumer");
    assert_eq!(
        (counts.loads, counts.failures.len(), counts.reconnects),
        (2, 0, 0)
    );
    assert_eq!(p.figures().producer.expect("a producer").0.read_out, 2);
}

/// Something in the middle that can cut all that runs through it, as a firewall does that forgets.
struct Relay {
    port: u16,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let relay = Self {
            port: listener.local_addr().expect("bound").port(),
            streams: Arc::default(),
        };
        let streams = Arc::clone(&relay.streams);
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                let far = TcpStream::connect(("127.0.0.1", port)).expect("listens");
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let [mut from, mut to] = [from, to].map(|s| s.try_clone().expect("a file"));
                    thread::spawn(move || std::io::copy(&mut from, &mut to));
                }
                streams.lock().expect("no panic").extend([near, far]);
            }
        });
        relay
    }

    /// Connections cut.
    fn cut(&self) -> usize {
        let streams: Vec<_> = self.streams.lock().expect("no panic").drain(..).collect();
        for stream in &streams {
            // The peer may have been quicker.
            let _ = stream.shutdown(Shutdown::Both);
        }
        streams.len() / 2
    }
}

#[test]
fn a_control_connection_cut_under_requests_costs_none_of_them() {
    let p = SchedulerSide::start(options("p", true)).expect("a free port");
    let d = SchedulerSide::start(options("d", false)).expect("a thread");
    let port = p.port().expect("a producer");
    let relay = Relay::to(port);
    let params = |held: &str| {
        let text = p.prefilled(prefilled(held)).expect("held").to_json();
        text.to_string()
            .replace(&format!(":{port}"), &format!(":{}", relay.port))
    };
    let ask = |request: &str, params: &str| {
        d.new_request(request, TransferParams::parse(params), prompt(), 8);
        assert_eq!(d.matched_tokens(request, 0), 7);
    };
    ask("loads", &params("a"));
    d.allocated("loads", &[BlockId(1), BlockId(2)], 7);
    orders_until(&d, |orders| !orders.loads.is_empty());
    ask("waits", &params("b"));
    thread::sleep(consumer_options().backoff);
    assert_eq!(relay.cut(), 1);
    ask("comes", &params("c"));
    let mut loads = Vec::new();
    for (request, block) in [("waits", 3), ("comes", 5)] {
        d.allocated(request, &[BlockId(block), BlockId(block + 1)], 7);
    }
    orders_until(&d, |orders| {
        assert!(orders.cancels.is_empty(), "{:?}", orders.cancels);
        assert!(orders.fails.is_empty(), "{:?}", orders.fails);
        loads.extend(orders.loads.iter().map(|load| load.request_id.clone()));
        loads.len() == 2
    });
    for request in ["loads", "waits", "comes"] {
        d.received(request, false);
        d.finished(request);
    }
    let mut released = 0;
    orders_until(&p, |orders| {
        released += orders.releases.len();
        released == 3
    });
    let counts = d.figures().consumer.expect("a consumer");
    assert_eq!((counts.reconnects, counts.failures.len()), (1, 0));
    assert_eq!(p.figures().producer.expect("a producer").0.read_out, 3);
}
