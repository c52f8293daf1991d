//! A read under a lease that does not stand is never a success.

use std::time::Duration;

use hetero_kv_core::memory::Run;
use hetero_kv_transport::clock::now;
use hetero_kv_transport::error::ReadFailureKind;
use hetero_kv_transport::transport::TransportName;

use super::buffer::{Buffer, check_exact};
use super::holder::{
    Holder, HolderConfig, Order, each_transport, failure_kind, job, lease, reader, wait_one,
};
use super::relay::Relay;

each_transport! {
    a_lease_bumped_before_the_read_is_gone;
    an_epoch_that_never_stood_is_gone;
    a_slot_that_is_not_on_the_page_is_gone;
    re_used_blocks_are_never_a_success;
}

fn whole(bytes: u64) -> [Run; 1] {
    [Run {
        source_region: 0,
        source_offset: 0,
        dest_region: 0,
        dest_offset: 0,
        bytes,
    }]
}

fn a_lease_bumped_before_the_read_is_gone(transport: TransportName) {
    let mut holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(1 << 20, 0)];
    let reader = reader(&buffers, transport);
    assert_eq!(holder.order(Order::Bump { slot: 5, epoch: 2 }), 1);
    let read = |slot, epoch| {
        let mut job = job(1, &holder.source, &whole(1 << 20));
        job.lease = lease(slot, epoch);
        reader.submit(job).expect("taken");
        wait_one(&reader)
    };
    assert_eq!(failure_kind(&read(5, 1)), ReadFailureKind::LeaseGone);
    assert_eq!(read(5, 2).outcome, Ok(()));
    assert_eq!(read(6, 1).outcome, Ok(()));
}

fn an_epoch_that_never_stood_is_gone(transport: TransportName) {
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, transport);
    for epoch in [0, 2, u64::MAX] {
        let mut job = job(1, &holder.source, &whole(4096));
        job.lease = lease(0, epoch);
        reader.submit(job).expect("taken");
        assert_eq!(
            failure_kind(&wait_one(&reader)),
            ReadFailureKind::LeaseGone,
            "epoch {epoch}"
        );
    }
}

fn a_slot_that_is_not_on_the_page_is_gone(transport: TransportName) {
    let holder = Holder::start(HolderConfig::default());
    let buffers = [Buffer::new(4096, 0)];
    let reader = reader(&buffers, transport);
    for slot in [64, u32::MAX] {
        let mut job = job(1, &holder.source, &whole(4096));
        job.lease = lease(slot, 1);
        reader.submit(job).expect("taken");
        assert_eq!(
            failure_kind(&wait_one(&reader)),
            ReadFailureKind::LeaseGone,
            "slot {slot}"
        );
    }
}

/// The holder bumps and re-uses its blocks all the time. Whatever is reported as read has the
/// bytes of its epoch, all of them.
fn re_used_blocks_are_never_a_success(transport: TransportName) {
    const BYTES: usize = 1 << 20;
    let mut holder = Holder::start(HolderConfig {
        region_bytes: vec![BYTES],
        ..HolderConfig::default()
    });
    let buffers = [Buffer::new(BYTES, 0)];
    let reader = reader(&buffers, transport);
    let runs = whole(BYTES as u64);
    let (mut good, mut gone) = (0, 0);
    let until = now() + Duration::from_secs(20);
    holder.order(Order::Churn { pause_us: 1500 });
    while (good < 20 || gone < 20) && now() < until {
        let epoch = holder.order(Order::Epoch);
        // Some reads begin long before the bump, some right at it.
        let mut job = job(1, &holder.source, &runs);
        job.lease = lease(0, epoch);
        reader.submit(job).expect("taken");
        let done = wait_one(&reader);
        match done.outcome {
            Ok(()) => {
                check_exact(&buffers, &runs, epoch, 0);
                good += 1;
            }
            Err(failure) => {
                assert_eq!(failure.kind, ReadFailureKind::LeaseGone, "{failure}");
                gone += 1;
            }
        }
    }
    holder.order(Order::Rest);
    assert!(good > 0 && gone > 0, "{good} good, {gone} gone");
}

/// On a slow network the bump comes while the bytes are on their way.
#[test]
fn a_lease_bumped_during_a_slow_fetch_is_gone() {
    let mut holder = Holder::start(HolderConfig {
        region_bytes: vec![64 << 20],
        ..HolderConfig::default()
    });
    let relay = Relay::start(holder.tcp_port());
    relay.set_rate(4 << 20);
    let source = holder.via(relay.port);
    let buffers = [Buffer::new(64 << 20, 0)];
    let reader = reader(&buffers, TransportName::Tcp);
    reader
        .submit(job(1, &source, &whole(64 << 20)))
        .expect("taken");
    while relay.bytes() < 1 << 20 {
        assert!(!reader.wait(Duration::from_millis(10)), "it takes longer");
    }
    holder.order(Order::Bump { slot: 0, epoch: 2 });
    holder.order(Order::Fill { seed: 99 });
    relay.set_rate(0);
    assert_eq!(failure_kind(&wait_one(&reader)), ReadFailureKind::LeaseGone);
}
