//! What a running proxy takes over of another configuration.

use super::*;
use crate::cli::Settings;

fn config(change: impl FnOnce(&mut Settings)) -> Config {
    let mut settings = Settings {
        prefill: Some(vec!["http://p:1".to_owned()]),
        decode: Some(vec!["http://d:1".to_owned()]),
        ..Settings::default()
    };
    change(&mut settings);
    Config::from_settings(settings).expect("valid")
}

fn names(differences: &[Difference]) -> Vec<&str> {
    let names = differences.iter().map(|known| known.setting.as_str());
    names.collect()
}

#[test]
fn the_same_settings_are_no_change_whichever_way_they_are_filled_in() {
    let running = config(|settings| settings.policy = Some("auto".to_owned()));
    let next = config(|settings| {
        settings.policy = Some("auto".to_owned());
        settings.decode_policy = Some("prefix-aware".to_owned());
        settings.requests_max = Some(4_096);
    });
    let next = running.followed_by(&next);
    assert_eq!((next.kept, next.changed), (vec![], vec![]));
    assert_eq!(next.config.expect("valid").auto, running.auto);
}

#[test]
fn what_is_kept_keeps_its_value_and_the_rest_is_taken_over() {
    let running = config(|settings| settings.admin_listen = Some("127.0.0.1:1".to_owned()));
    let next = config(|settings| {
        settings.listen = Some("127.0.0.1:2".to_owned());
        settings.connections_max = Some(5);
        settings.retries_max = Some(0);
        settings.hash_header = Some(String::new());
        settings.decode = Some(vec!["http://other:1".to_owned()]);
    });
    let next = running.followed_by(&next);
    assert_eq!(
        names(&next.kept),
        ["admin_listen", "connections_max", "listen"]
    );
    assert_eq!(next.kept[0].running, "\"127.0.0.1:1\"");
    assert_eq!(next.kept[0].next, "none");
    assert_eq!(names(&next.changed), ["hash_header", "retries_max"]);
    let config = next.config.expect("valid");
    assert_eq!(config.admin_listen.as_deref(), Some("127.0.0.1:1"));
    assert_eq!(
        (&*config.listen, config.connections_max),
        ("127.0.0.1:8000", 16_384)
    );
    assert_eq!((config.retries_max, config.hash_header), (0, None));
    assert_eq!(config.decode[0].spec.url, "http://other:1");
}

#[test]
fn every_kept_setting_is_one() {
    let table = Table::try_from(Settings {
        listen: Some(String::new()),
        admin_listen: Some(String::new()),
        zmq_listen: Some(String::new()),
        ..config(|_| {}).resolved
    });
    let table = table.expect("TOML");
    for name in KEPT.into_iter().chain(WORKERS) {
        assert!(table.contains_key(name), "{name}");
    }
}

#[test]
fn keys_close_no_door_beside_a_listener_that_asks_for_none() {
    let moriio = |settings: &mut Settings| settings.connector = Some("moriio-read".to_owned());
    let running = config(|settings| {
        moriio(settings);
        settings.zmq_listen = Some("127.0.0.1:1".to_owned());
    });
    let key = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(key.path(), "a-key-of-16-bytes").expect("written");
    // Alone it is valid; but the listener that it does not name stays open.
    let next = config(|settings| {
        moriio(settings);
        settings.admin_listen = Some("127.0.0.1:2".to_owned());
        settings.admin_key_file = Some(key.path().to_owned());
    });
    let next = running.followed_by(&next);
    let faults = next.config.expect_err("a fault").0;
    assert!(
        faults.iter().any(|fault| fault.contains("--zmq-unsigned")),
        "{faults:?}"
    );
}
