//! Settings from every source, and every fault told at once.

use clap::{CommandFactory, Parser};

use super::*;
use crate::cli::{Cli, Command};

fn resolve(args: &[&str]) -> Result<Config, ConfigError> {
    let line = ["hetero-kv-proxy", "check"].iter().chain(args);
    match Cli::try_parse_from(line).expect("flags parse").command {
        Command::Check(invocation) | Command::Serve(invocation) => Config::resolve(*invocation),
        Command::Sign(_) | Command::Trace(_) | Command::Bench(_) | Command::Mock(_) => {
            unreachable!("check was parsed")
        }
    }
}

const PAIR: [&str; 4] = ["--prefill", "http://p:1", "--decode", "http://d:2"];

fn faults(args: &[&str]) -> Vec<String> {
    resolve(args).expect_err("a fault").0
}

#[test]
fn workers_are_parsed_with_ranks_and_ipv6() {
    let config = resolve(&[
        "--prefill",
        "http://[fd00::1]:8100/,dp=8,rank0=16",
        "--prefill",
        "http://host/base",
        "--prefill",
        "http://host/v1/base",
        "--prefill",
        "http://host/basev1",
        "--decode",
        "http://d:2",
    ])
    .expect("valid");
    let first = &config.prefill[0];
    assert_eq!((first.spec.dp, first.spec.rank0), (8, 16));
    assert_eq!(first.base.host, "fd00::1");
    assert_eq!(first.base.authority, "[fd00::1]:8100");
    assert_eq!((first.base.port, first.base.path.as_str()), (8100, ""));
    let second = &config.prefill[1].base;
    assert_eq!((second.port, second.path.as_str()), (80, "/base"));
    assert_eq!(config.decode[0].spec.dp, 1);
}

#[test]
fn every_fault_is_told_at_once() {
    let faults = faults(&[
        "--listen",
        "nowhere",
        "--prefill",
        "http://p:1,dp=0",
        "--prefill",
        "ftp://p",
        "--connector",
        "p2p",
        "--policy",
        "fairest",
        "--prefill-policy",
        "auto",
        "--decode-policy",
        "fastest",
        "--hash-header",
        "x user",
        "--hash-prompt-bytes",
        "2000000",
        "--trace-sample",
        "NaN",
        "--requests-max",
        "0",
        "--log-format",
        "xml",
    ]);
    let want = [
        "--listen nowhere: must be HOST:PORT",
        "--connector p2p: unknown; one of hetero, none, nixl, mooncake, moriio-read, moriio-write",
        "--prefill http://p:1,dp=0: dp must be 1 to 1024, not `0`",
        "--prefill ftp://p: a URL begins with http://",
        "--decode: at least one instance is needed, or --admin-listen",
        "--policy fairest: unknown; one of round-robin, least-loaded, power-of-two, consistent-hash, \
         prefix-aware, auto",
        "--prefill-policy auto: decides for both legs at once; say --policy auto",
        "--decode-policy fastest: unknown; one of round-robin, least-loaded, power-of-two, \
         consistent-hash, prefix-aware",
        "--hash-header x user: must be the name of a header, or empty",
        "--log-format xml: must be text or json",
        "--requests-max 0: must be 1 to 1000000",
        "--hash-prompt-bytes 2000000: must be 0 to 1048576",
        "--trace-sample NaN: must be 0 to 1",
    ];
    assert_eq!(faults, want);
}

#[test]
fn bad_workers_are_refused() {
    for (url, part) in [
        ("p:1", "begins with http://"),
        (
            "https://p:1",
            "http:// address in the cluster's own network, and let a TLS terminator",
        ),
        ("http://u@p:1", "user name"),
        ("http://p:1?x=1", "no query"),
        (
            "http://p:1/v1",
            "--prefill http://p:1/v1: leave `/v1` out: the paths of requests begin with it",
        ),
        ("http://p:1/v1/,dp=2", "leave `/v1` out"),
        ("http://p:1/base/v1//", "leave `/v1` out"),
        ("http://p:0", "1 to 65535"),
        ("http://p:70000", "1 to 65535"),
        ("http://p:1,dp", "not key=value"),
        ("http://p:1,pp=2", "unknown key `pp`"),
        ("http://p:1,tp=2", "`tp` has no use with --connector hetero"),
        ("http://p:1,handshake=0", "handshake must be 1 to 65535"),
        ("http://p:1,bootstrap=p:x", "bootstrap: `x` is not a port"),
        ("http://p:1,dp=2,dp=2", "given twice"),
        ("http://p:1,dp=2000", "1 to 1024"),
        ("http://p:1,rank0=-1", "rank0 must be"),
    ] {
        let faults = faults(&["--prefill", url, "--decode", "http://d:2"]);
        assert!(
            faults.len() == 1 && faults[0].contains(part),
            "{url}: {faults:?}"
        );
    }
    let twice = [
        "--decode",
        "http://d:2",
        "--prefill",
        "http://p:1",
        "--prefill",
        "http://p:1",
    ];
    assert!(faults(&twice)[0].contains("given twice"));
}

#[test]
fn workers_state_what_their_connector_needs() {
    let args = [
        "--connector",
        "moriio-read",
        "--prefill",
        "http://[fd00::1]:8100,dp=8,dp-size=16,dp-rank0=8,handshake=7000,notify=7100",
        "--decode",
        "http://d:2,tp=8,kv-host=10.0.0.9",
    ];
    let config = resolve(&args).expect("valid");
    assert_eq!(config.connector.name(), "moriio-read");
    let peer = &config.prefill[0].peer;
    assert_eq!(
        peer.zmq.to_string(),
        "host:fd00::1,handshake:7000,notify:7100"
    );
    assert_eq!((peer.dp_size, peer.dp_rank0, peer.tp), (16, 8, 0));
    let peer = &config.decode[0].peer;
    assert_eq!(
        peer.zmq.to_string(),
        "host:10.0.0.9,handshake:6301,notify:61005"
    );
    assert_eq!((peer.dp_size, peer.tp), (1, 8));

    let bootstrap = |worker: &str| {
        let args = ["--connector", "mooncake", "--decode", "http://d:2"];
        let args = [&args[..], &["--prefill", worker]].concat();
        let config = resolve(&args).expect("valid");
        config.prefill[0].peer.bootstrap.clone()
    };
    assert_eq!(bootstrap("http://[fd00::1]:1"), "http://[fd00::1]:8998");
    assert_eq!(bootstrap("http://p:1,bootstrap=90"), "http://p:90");
    assert_eq!(bootstrap("http://p:1,bootstrap=b:90"), "http://b:90");
}

#[test]
fn a_connector_refuses_workers_that_it_cannot_serve() {
    let args = |connector, worker| {
        let head = ["--connector", connector, "--prefill", worker];
        faults(&[&head[..], &PAIR[2..]].concat())
    };
    assert!(args("moriio-read", "http://p:1,dp=2,tp=2")[0].contains("share ports"));
    let other = args("moriio-read", "http://p:1,mode=write").remove(0);
    for part in ["http://p:1: `mode` is `write`", "--connector moriio-write"] {
        assert!(other.contains(part), "{part}: {other}");
    }
    assert!(args("none", "http://p:1")[0].contains("sends no prefill leg"));
    let alone = ["--connector", "none", "--decode", "http://d:2"];
    assert!(resolve(&alone).expect("valid").prefill.is_empty());
}

#[test]
fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(
        file.path(),
        "prefill = [\"http://a:1\"]\ndecode = [\"http://b:2,dp=2\"]\nrequests_max = 7\ndrain_timeout_s = 3\n",
    )
    .expect("written");
    let path = file.path().to_str().expect("UTF-8 path");
    let config = resolve(&["--config", path, "--requests-max", "9"]).expect("valid");
    assert_eq!(config.requests_max, 9);
    assert_eq!(config.drain_timeout, Duration::from_secs(3));
    assert_eq!(config.request_timeout, Duration::from_secs(600));
    assert_eq!(config.decode[0].spec.dp, 2);
}

#[test]
fn what_check_prints_is_a_configuration_that_resolves_to_itself() {
    let mut args = PAIR.to_vec();
    args.extend([
        "--decode-policy",
        "least-loaded",
        "--body-bytes-max",
        "1000",
    ]);
    let printed = resolve(&args).expect("valid").to_toml().expect("TOML");
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), &printed).expect("written");
    let path = file.path().to_str().expect("UTF-8 path");
    let again = resolve(&["--config", path]).expect("valid");
    assert_eq!(again.to_toml().expect("TOML"), printed);
    assert_eq!(again.decode_policy, PolicyKind::LeastLoaded);
    assert_eq!(again.prefill_policy, PolicyKind::RoundRobin);
    assert_eq!(again.body_bytes_max, 1000);
}

#[test]
fn requests_belong_together_by_a_header_unless_there_is_none() {
    let default = resolve(&PAIR).expect("valid");
    assert_eq!(default.hash_header.expect("a header"), "x-session-id");
    let mut args = PAIR.to_vec();
    args.extend(["--hash-header", ""]);
    assert_eq!(resolve(&args).expect("valid").hash_header, None);
}

#[test]
fn an_unknown_key_or_a_wrong_type_in_the_file_is_an_error() {
    for text in ["requests_maxx = 1", "requests_max = \"1\"", "x"] {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        std::fs::write(file.path(), text).expect("written");
        let path = file.path().to_str().expect("UTF-8 path");
        let found = &faults(&["--config", path])[0];
        assert!(
            found.starts_with(&format!("--config {path}, line 1: ")),
            "{found}"
        );
    }
    assert!(faults(&["--config", "/nonexistent/x.toml"])[0].contains("No such file"));
}

#[test]
fn listen_addresses() {
    assert_eq!(host_port("[::1]:80"), Ok(("::1".to_owned(), 80)));
    assert_eq!(host_port("a:0"), Ok(("a".to_owned(), 0)));
    for bad in ["::1:80", ":80", "a", "a:x", "a:70000"] {
        assert!(host_port(bad).is_err(), "{bad}");
    }
}

#[test]
fn zeromq_is_for_moriio_and_lets_workers_come_later() {
    let config = resolve(&[
        "--connector",
        "moriio-read",
        "--zmq-listen",
        "0.0.0.0:36367",
    ]);
    let config = config.expect("no worker is needed");
    assert_eq!(config.zmq_listen.as_deref(), Some("0.0.0.0:36367"));
    assert_eq!(config.zmq_ttl, Duration::from_secs(15));
    let mut args = PAIR.to_vec();
    args.extend(["--zmq-listen", "nowhere", "--zmq-ttl-ms", "8999"]);
    let faults = faults(&args);
    assert_eq!(faults.len(), 3, "{faults:?}");
    assert!(faults[0].starts_with("--zmq-listen nowhere: must be HOST:PORT"));
    assert!(faults[1].contains("--connector is hetero; take moriio-read"));
    assert!(faults[2].starts_with("--zmq-ttl-ms 8999: must be 9000 to"));
}

#[test]
fn keys_are_read_and_their_faults_told_with_the_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "a-key-of-sixteen-and-more").expect("written");
    let keys = file.to_str().expect("UTF-8");
    let mut args = PAIR.to_vec();
    args.extend(["--admin-listen", "h:1", "--admin-key-file", keys]);
    let config = resolve(&args).expect("valid");
    assert!(config.admin_keys.is_some() && config.api_keys.is_none());
    assert!(config.forward_authorization);
    args.extend(["--api-key-file", keys]);
    let config = resolve(&args).expect("valid");
    assert!(config.api_keys.is_some() && !config.forward_authorization);
    let printed = config.to_toml().expect("TOML");
    assert!(
        printed.contains(keys) && !printed.contains("a-key-of"),
        "{printed}"
    );

    let zmq = ["--connector", "moriio-read", "--zmq-listen", "h:2"];
    let signed = ["--admin-key-file", keys];
    let faults_of = faults(&[&zmq[..], &signed[..]].concat());
    assert_eq!(faults_of.len(), 1, "{faults_of:?}");
    assert!(
        faults_of[0].contains("--zmq-unsigned true"),
        "{faults_of:?}"
    );
    resolve(&[&zmq[..], &signed[..], &["--zmq-unsigned"]].concat()).expect("said so");

    std::fs::write(&file, "short").expect("written");
    let mut args = PAIR.to_vec();
    args.extend(["--admin-key-file", keys, "--api-key-file", "/nowhere/keys"]);
    let told = faults(&args);
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told[0].ends_with("has no use without --admin-listen"));
    assert!(told[1].contains("line 1: a key has 16 to 512 characters, not 5"));
    assert!(told[2].starts_with("--api-key-file /nowhere/keys: "));
}

#[test]
fn each_role_has_its_default_policy_and_auto_is_of_both() {
    let resolve = |settings: Settings| {
        Config::from_settings(Settings {
            prefill: Some(vec!["http://p:1".to_owned()]),
            decode: Some(vec!["http://d:1".to_owned()]),
            ..settings
        })
    };
    let with = |policy: Option<&str>| Settings {
        policy: policy.map(str::to_owned),
        ..Settings::default()
    };
    for (policy, prefill, decode, bytes_min) in [
        (None, PolicyKind::RoundRobin, PolicyKind::LeastLoaded, None),
        (
            Some("power-of-two"),
            PolicyKind::PowerOfTwo,
            PolicyKind::PowerOfTwo,
            None,
        ),
        (
            Some("auto"),
            PolicyKind::RoundRobin,
            PolicyKind::PrefixAware,
            Some(2_048),
        ),
    ] {
        let config = resolve(with(policy)).expect("valid");
        assert_eq!(
            (config.prefill_policy, config.decode_policy),
            (prefill, decode)
        );
        assert_eq!(config.auto.map(|rules| rules.prompt_bytes_min), bytes_min);
        // As `check` prints it, it is the same.
        let printed = config.to_toml().expect("TOML");
        let again = Config::from_settings(toml::from_str(&printed).expect("settings"));
        let again = again.expect("valid");
        assert_eq!(
            (again.prefill_policy, again.decode_policy),
            (prefill, decode)
        );
        assert_eq!(again.auto, config.auto);
    }
    let alone = Config::from_settings(Settings {
        connector: Some("none".to_owned()),
        decode: Some(vec!["http://d:1".to_owned()]),
        ..with(Some("auto"))
    });
    assert_eq!(
        alone.expect_err("nothing to decide").0,
        ["--policy auto: --connector none sends no prefill leg; there is nothing to decide"]
    );
}

#[test]
fn the_help_names_the_defaults_that_hold() {
    let printed = resolve(&PAIR).expect("valid").to_toml().expect("TOML");
    let holds: toml::Table = toml::from_str(&printed).expect("TOML");
    let command = Cli::command();
    let check = command.find_subcommand("check").expect("a subcommand");
    let mut compared = 0;
    for setting in check.get_arguments() {
        let help = setting.get_help().map(ToString::to_string);
        let help = help.unwrap_or_default();
        let Some((_, default)) = help.split_once("[default: ") else {
            continue;
        };
        let default = default.trim_end_matches(']');
        // Some depend on other settings, and are told in words.
        if default.contains(' ') {
            continue;
        }
        let name = setting.get_id().as_str();
        let value = holds.get(name).expect(name);
        let value = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        // 0.0 is 0.
        let number = |text: &str| text.parse::<f64>().ok();
        let same = value == default || number(&value).is_some_and(|n| Some(n) == number(default));
        assert!(same, "{name}: the help says {default}, and it is {value}");
        compared += 1;
    }
    assert!(compared >= 35, "{compared} defaults");
}

#[test]
fn a_log_level_that_is_none_is_refused_and_warning_is_warn() {
    let with = |level: &str| resolve(&[&PAIR[..], &["--log-level", level]].concat());
    let tail =
        "one of error, warn, info, debug, trace, off, or a filter such as hetero_kv_proxy=debug";
    for level in ["verbose", "wran", "hyper", "infos"] {
        let faults = with(level).expect_err(level).0;
        assert_eq!(faults, [format!("--log-level {level}: {tail}")]);
    }
    let faults = with("hyper=warn,verbose").expect_err("a bare word").0;
    let want = format!("--log-level hyper=warn,verbose: `verbose` is no level; {tail}");
    assert_eq!(faults, [want]);
    assert!(with("hetero_kv_proxy=verbose").is_err());
    for (given, want) in [
        ("warning", "warn"),
        ("WARNING,hyper=info", "warn,hyper=info"),
        ("off", "off"),
        ("Debug", "Debug"),
        ("info,hetero_kv_proxy=debug", "info,hetero_kv_proxy=debug"),
        ("[leg]=trace", "[leg]=trace"),
    ] {
        let config = with(given).expect(given);
        assert_eq!(config.log_level, want);
        // What `check` prints and a reload compares.
        assert_eq!(config.resolved.log_level.as_deref(), Some(want));
    }
    // Any source of the setting is checked.
    let file: Settings = toml::from_str("log_level = \"verbose\"").expect("TOML");
    let faults = Config::from_settings(file).expect_err("a fault").0;
    assert!(
        faults
            .iter()
            .any(|fault| fault.starts_with("--log-level verbose: one of"))
    );
}

/// The flags of the settings that are numbers.
fn number_flags() -> Vec<String> {
    let mut command = Cli::command();
    command.build();
    let serve = command.find_subcommand("serve").expect("a subcommand");
    let is_number = |setting: &&clap::Arg| {
        let kind = setting.get_value_parser().type_id();
        [
            clap::builder::ValueParser::from(clap::value_parser!(u32)).type_id(),
            clap::builder::ValueParser::from(clap::value_parser!(u64)).type_id(),
            clap::builder::ValueParser::from(clap::value_parser!(usize)).type_id(),
            clap::builder::ValueParser::from(clap::value_parser!(f64)).type_id(),
        ]
        .contains(&kind)
    };
    let numbers = serve.get_arguments().filter(is_number);
    let flags = numbers.filter_map(|setting| setting.get_long());
    flags.map(|flag| format!("--{flag}")).collect()
}

#[test]
fn a_number_below_0_or_none_at_all_names_its_flag_and_limits() {
    let flags = number_flags();
    assert!(flags.len() >= 33, "{flags:?}");
    for flag in &flags {
        for value in ["-1", "-0.5", "1_000", "many", ""] {
            let line = ["hetero-kv-proxy", "check", flag, value];
            let line = line.iter().chain(&PAIR);
            let told = match Cli::try_parse_from(line) {
                Err(error) => crate::cli::number_fault(&error).expect("a number's fault"),
                // What is a number is held against its limits.
                Ok(parsed) => match parsed.command {
                    Command::Check(invocation) => {
                        let faults = Config::resolve(*invocation).expect_err(flag).0;
                        assert_eq!(faults.len(), 1, "{faults:?}");
                        faults[0].clone()
                    }
                    Command::Serve(_)
                    | Command::Sign(_)
                    | Command::Trace(_)
                    | Command::Bench(_)
                    | Command::Mock(_) => {
                        unreachable!("check was parsed")
                    }
                },
            };
            let limits = limits(flag).expect("limits");
            assert_eq!(told, format!("{flag} {value}: must be {limits}"));
        }
    }
}

#[test]
fn limits_that_are_told_are_those_that_hold() {
    for flag in number_flags() {
        let limits = limits(&flag).expect("limits");
        let (low, high) = limits.split_once(" to ").expect("two");
        for limit in [low, high] {
            // Whatever it depends on is not looked at here.
            let mut args = PAIR.to_vec();
            args.extend([flag.as_str(), limit]);
            let resolved = resolve(&args);
            assert!(resolved.is_ok(), "{flag} {limit}: {resolved:?}");
        }
    }
}
