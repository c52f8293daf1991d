//! Faults of the network itself, planted in a network of three namespaces: a decode host and a
//! prefill host with a router between them.

use std::process::Command;

use super::report::{HETERO_KV, Report, skip};

/// Three namespaces in a mount and network namespace of their own, which end with the script:
/// `d` (10.77.1.2) and `p` (10.77.2.2 and 10.77.2.3), and `r` that forwards between them.
const NETWORK: &str = r#"
set -e
mount -t tmpfs none /run
mkdir /run/netns
for name in d r p; do ip netns add $name; ip -n $name link set lo up; done
ip -n r link add to_d type veth peer name eth0 netns d
ip -n r link add to_p type veth peer name eth0 netns p
ip -n d addr add 10.77.1.2/24 dev eth0
ip -n r addr add 10.77.1.1/24 dev to_d
ip -n r addr add 10.77.2.1/24 dev to_p
ip -n p addr add 10.77.2.2/24 dev eth0
ip -n p addr add 10.77.2.3/24 dev eth0
for link in d/eth0 r/to_d r/to_p p/eth0; do ip -n ${link%/*} link set ${link#*/} up; done
ip -n d route add default via 10.77.1.1
ip -n p route add default via 10.77.2.1
ip netns exec r sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'
"#;

fn isolated(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "sh", "-c", script]);
    command
}

/// Why there can be no such network here, if so.
fn unavailable() -> Option<String> {
    match isolated(NETWORK).output() {
        Err(error) => Some(format!("unshare: {error}")),
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!(
            "no network namespaces: {}",
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

/// What `check 10.77.2.2:7000` in `d` finds of `listen` with these words in `p`, with the fault
/// planted. `None`: skipped.
fn check_with(fault: &str, listen: &str) -> Option<Report> {
    if let Some(why) = unavailable() {
        skip(why);
        return None;
    }
    let script = format!(
        r#"{NETWORK}
{fault}
ip netns exec p {HETERO_KV} doctor listen --json --seconds 60 {listen} > /run/listening &
listener=$!
waited=0
while [ ! -s /run/listening ] && [ $waited -lt 100 ]; do sleep 0.1; waited=$((waited + 1)); done
status=0
ip netns exec d {HETERO_KV} doctor check 10.77.2.2:7000 --json --seconds 1 || status=$?
kill $listener
exit $status
"#
    );
    Some(Report::of(&mut isolated(&script)))
}

const LISTEN: &str = "--listen 10.77.2.2:7000 --port-range 7001-7004 --tp 2";

#[test]
fn a_sound_network_has_no_fault() {
    let Some(report) = check_with("", LISTEN) else {
        return;
    };
    assert_eq!((report.code, report.failed()), (0, vec![]), "{report}");
    assert!(
        report
            .found("large packets")
            .contains("segments of 1448 bytes"),
        "{report}"
    );
    assert_eq!(report.found("data ports"), "10.77.2.2 7001, 7002");
}

#[test]
fn dropped_packets_are_named() {
    let drop = "ip -n r rule add pref 1 ipproto tcp dport 7000 blackhole";
    let Some(report) = check_with(drop, LISTEN) else {
        return;
    };
    report.assert_only(
        "reach",
        &["10.77.2.2:7000: no answer within 5 s: packets are dropped on the way"],
        &["open TCP port 7000"],
    );
}

#[test]
fn a_data_port_behind_a_firewall_is_named() {
    let drop = "ip -n r rule add pref 1 ipproto tcp dport 7002 blackhole";
    let Some(report) = check_with(drop, LISTEN) else {
        return;
    };
    report.assert_only(
        "data ports",
        &["10.77.2.2:7002, one of 2 data ports: no answer within 5 s"],
        &["set port_range", "firewall"],
    );
}

#[test]
fn an_advertised_address_whose_packets_are_dropped_is_named() {
    let drop = "ip -n r route add blackhole 10.77.2.3/32";
    let listen = "--listen 10.77.2.2:7000 --advertise 10.77.2.3:7000 --tp 1";
    let Some(report) = check_with(drop, listen) else {
        return;
    };
    assert_eq!(
        (report.code, report.status("advertised")),
        (1, "fail"),
        "{report}"
    );
    let found = report.found("advertised");
    assert!(
        found.contains("10.77.2.3:7000 is advertised and cannot be reached"),
        "{found}"
    );
    assert!(found.contains("packets are dropped"), "{found}");
    assert!(found.contains("10.77.2.2:7000 can"), "{found}");
    assert!(report.mend("advertised").contains("10.77.2.2"), "{report}");
}

#[test]
fn no_way_to_the_peer_is_named() {
    let Some(report) = check_with("ip -n d route del default", LISTEN) else {
        return;
    };
    report.assert_only("reach", &["no way there"], &["ip route get 10.77.2.2"]);
}

/// A link of 1400 bytes behind the router, whose ICMP messages do not come back.
#[test]
fn an_mtu_black_hole_is_named_with_the_size_that_passes() {
    let black_hole = "ip -n r link set to_p mtu 1400\n\
                      ip -n r rule add pref 1 iif lo to 10.77.1.0/24 blackhole";
    let Some(report) = check_with(black_hole, LISTEN) else {
        return;
    };
    report.assert_only(
        "large packets",
        &[
            "MTU black hole from here to the listener",
            "packets of up to 1400 bytes pass",
            "eth0 here has MTU 1500",
        ],
        &["ip link set dev eth0 mtu 1400", "fragmentation needed"],
    );
}

/// The same link, with the router's ICMP messages: TCP finds the size by itself.
#[test]
fn a_small_mtu_that_is_announced_is_no_fault() {
    let Some(report) = check_with("ip -n r link set to_p mtu 1400", LISTEN) else {
        return;
    };
    assert_eq!((report.code, report.failed()), (0, vec![]), "{report}");
}
