//! Both ends in this process, on whatever device it has.

use super::*;
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
