//! Names that are settings, slips, and Kubernetes' own.

use super::*;

fn of(names: &[&str]) -> Vec<String> {
    faults(names.iter().map(OsString::from))
}

#[test]
fn a_slip_is_told_with_what_was_meant() {
    let found = of(&[
        "HETERO_KV_PROXY_LISTN",
        "HETERO_KV_PROXY_ADMIN_KEY",
        "HETERO_KV_PROXY_listen",
        "HETERO_KV_PROXY_COLOUR",
    ]);
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(found[0].starts_with("HETERO_KV_PROXY_ADMIN_KEY: no setting"));
    assert!(found[1].contains("HETERO_KV_PROXY_COLOUR: ") && found[1].contains("unset it"));
    assert!(found[2].ends_with("did you mean HETERO_KV_PROXY_LISTEN?"));
    assert!(found[3].ends_with("did you mean HETERO_KV_PROXY_LISTEN?"));
}

#[test]
fn what_settings_read_and_what_others_put_there_is_no_fault() {
    let mut command = Cli::command();
    command.build();
    let serve = command.find_subcommand("serve").expect("a subcommand");
    let variables = serve
        .get_arguments()
        .filter_map(|known| known.get_env()?.to_str());
    let variables: Vec<&str> = variables.collect();
    assert!(variables.len() > 50, "{variables:?}");
    assert_eq!(of(&variables), [""; 0]);
    let others = [
        "HETERO_KV_PROXY",
        "HETERO_KV_LOG",
        "PATH",
        "HETERO_KV_PROXY_SERVICE_HOST",
        "HETERO_KV_PROXY_SERVICE_PORT",
        "HETERO_KV_PROXY_SERVICE_PORT_HTTP",
        "HETERO_KV_PROXY_PORT",
        "HETERO_KV_PROXY_PORT_8000_TCP",
        "HETERO_KV_PROXY_PORT_8000_TCP_ADDR",
        "HETERO_KV_PROXY_ADMIN_PORT_8001_TCP_PROTO",
        "HETERO_KV_PROXY_ADMIN_SERVICE_HOST",
    ];
    assert_eq!(of(&others), [""; 0]);
    assert_eq!(of(&["HETERO_KV_PROXY_PORT_TCP"]).len(), 1);
}

#[test]
fn an_environment_full_of_them_is_told_in_a_few_lines() {
    let names: Vec<String> = (0..100).map(|n| format!("HETERO_KV_PROXY_X{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let found = of(&names);
    assert_eq!(found.len(), FAULTS_MAX + 1);
    assert!(found[FAULTS_MAX].starts_with("and 84 more"), "{found:?}");
}
