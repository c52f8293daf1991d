use std::sync::Arc;

use super::probe::{self, parse_start_ticks};
use super::*;
use crate::lease_page::LeasePage;

#[test]
fn the_start_time_is_found_behind_any_command_name() {
    let fields = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 987654 20 21";
    for name in ["(sh)", "(a b)", "(x) S 1 (y))", "()"] {
        let stat = format!("42 {name} {fields}\n");
        assert_eq!(parse_start_ticks(&stat), Some(987_654), "{name}");
    }
    for bad in [
        "",
        "42 (sh",
        "42 (sh) S 1 2",
        "42 (sh) S a b c d e f g h i j k l m n o p q r s",
    ] {
        assert_eq!(parse_start_ticks(bad), None, "{bad}");
    }
}

#[test]
fn a_process_reaches_itself_and_no_changed_endpoint() {
    let page = Arc::new(LeasePage::new(4).expect("mapped"));
    let holder = of_this_process(page, false).expect("this process");
    let endpoint = holder.endpoint().clone();
    probe::reach(&endpoint).expect("its own memory");

    let reached = |change: &dyn Fn(&mut hetero_kv_core::wire::card::ProcessEndpoint)| {
        let mut changed = endpoint.clone();
        change(&mut changed);
        let error = probe::reach(&changed).expect_err("not what was announced");
        (error.kind, error.call)
    };
    let unreachable = ReadFailureKind::Unreachable;
    let lost = ReadFailureKind::PeerLost;
    assert_eq!(reached(&|e| e.boot_id.push('0')), (unreachable, "boot_id"));
    assert_eq!(
        reached(&|e| e.pid_namespace += 1),
        (unreachable, "pid_namespace")
    );
    for pid in [0, u32::MAX, 1 << 31] {
        assert_eq!(reached(&|e| e.pid = pid), (unreachable, "pidfd_open"));
    }
    // Above the kernel's highest pid (2^22).
    assert_eq!(reached(&|e| e.pid = 1 << 23), (lost, "pidfd_open"));
    assert_eq!(reached(&|e| e.start_ticks += 1), (lost, "start_ticks"));
    assert_eq!(reached(&|e| e.nonce[0] ^= 1), (unreachable, "nonce"));
    assert_eq!(reached(&|e| e.nonce.truncate(3)), (unreachable, "nonce"));
    for address in [0, 8, u64::MAX] {
        assert_eq!(
            reached(&|e| e.nonce_address = address),
            (unreachable, "process_vm_readv")
        );
    }
}
