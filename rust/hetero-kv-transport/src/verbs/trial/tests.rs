//! Both ends in this process, on whatever device it has.

use hetero_kv_core::wire::card::TcpEndpoint;

use super::*;
use crate::reader::{JobDone, ReadJob, ReadPiece, Reader, ReaderOptions};
use crate::transport::TransportName;
use crate::verbs::{DeviceChoice, probe, survey};

fn holder() -> Option<TrialHolder> {
    let address = ServerOptions::default().address;
    match TrialHolder::start(VerbsOptions::default(), address) {
        Ok(holder) => Some(holder),
        Err(error) if std::env::var_os("HETERO_KV_REQUIRE_RDMA").is_some() => {
            panic!("RDMA is required: {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn read(site: &TrialSite) -> Result<Tried, TrialError> {
    let here = Some(IpAddr::from([127, 0, 0, 1]));
    try_read(VerbsOptions::default(), here, site, Duration::from_secs(20))
}

#[test]
fn a_trial_reads_all_of_a_holder_and_tells_both_ends() {
    let Some(holder) = holder() else { return };
    let tried = read(holder.site()).expect("the device is here");
    assert_eq!(tried.device, holder.site().device);
    assert_eq!(tried.mtu_bytes, holder.site().mtu_bytes);
    let found = survey().expect("a device");
    let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
    let taken = probe(&DeviceChoice::default(), None).expect("usable");
    let name = taken.split(' ').next().expect("a name");
    let own = shown.iter().find(|shown| shown.starts_with(name));
    let own = own.unwrap_or_else(|| panic!("{taken} among {shown:?}"));
    assert!(own.contains("port 1 ACTIVE, "), "{own}");
    assert!(
        own.contains(&format!("MTU {} of ", tried.mtu_bytes)),
        "{own}"
    );
}

#[test]
fn a_trial_of_another_start_or_with_wrong_keys_fails_by_how_far_it_came() {
    let Some(holder) = holder() else { return };
    let mut other = holder.site().clone();
    other.endpoint.lease_page_nonce ^= 1;
    let error = read(&other).expect_err("another start");
    assert!(matches!(error, TrialError::Connect(_)), "{error}");
    let mut wrong = holder.site().clone();
    wrong.endpoint.region_keys[0] ^= 0x0050_0000;
    let error = read(&wrong).expect_err("no such key");
    assert!(
        matches!(&error, TrialError::Read { error, .. } if error.kind == ReadFailureKind::OutOfBounds),
        "{error}"
    );
}

/// A device that has failed as a whole comes back by no new queue pair. Where another transport is
/// allowed, later reads go by it.
#[test]
fn a_rank_whose_device_failed_reads_by_tcp() {
    let Some(holder) = holder() else { return };
    let (memory, _) = registered(words()).expect("a region");
    let loopback = Some(IpAddr::from([127, 0, 0, 1]));
    let node = Node::open(VerbsOptions::default(), loopback, Arc::clone(&memory), None)
        .expect("the device is here");
    let endpoint = &holder.site().endpoint;
    let source = Arc::new(Source {
        route: route(endpoint).expect("a plan"),
        endpoints: Endpoints {
            verbs: Some(endpoint.clone()),
            tcp: Some(TcpEndpoint {
                host: endpoint.host.clone(),
                port: endpoint.port,
            }),
            ..Endpoints::default()
        },
        regions: vec![holder.site().region],
    });
    let options = ReaderOptions {
        verbs: Some(Arc::clone(&node)),
        ..ReaderOptions::default()
    };
    let reader = Reader::start(memory, options);
    let read = |id| -> JobDone {
        let run = Run {
            source_region: 0,
            source_offset: 0,
            dest_region: 0,
            dest_offset: 0,
            bytes: TRIAL_BYTES as u64,
        };
        let piece = ReadPiece {
            source: Arc::clone(&source),
            runs: vec![run].into(),
        };
        let lease = LeaseRef {
            slot: Slot(0),
            epoch: Epoch(1),
        };
        let job = ReadJob {
            id,
            lease,
            deadline: now() + Duration::from_secs(30),
            pieces: vec![piece],
        };
        reader.submit(job).expect("taken");
        assert!(reader.wait(Duration::from_secs(40)));
        reader.drain().remove(0)
    };
    let done = read(1);
    done.outcome.expect("the device works");
    assert_eq!(done.reads[0].transport, Some(TransportName::Verbs));
    node.fault.happen();
    // The connection that stands ends when its thread next sleeps; until then reads over it arrive,
    // or fail with it.
    let by_tcp = |done: &JobDone| done.reads[0].transport == Some(TransportName::Tcp);
    let first = (2..100).find(|&id| {
        std::thread::sleep(Duration::from_millis(50));
        by_tcp(&read(id))
    });
    assert!(first.is_some(), "the device is not left");
    for id in 100..104 {
        let done = read(id);
        assert!(by_tcp(&done));
        done.outcome.expect("tcp works");
    }
    let why = reader.stats().peers.remove(0).why;
    assert!(why.contains("RDMA device of this rank failed"), "{why}");
    reader
        .shutdown(now() + Duration::from_secs(10))
        .expect("quiet");
}
