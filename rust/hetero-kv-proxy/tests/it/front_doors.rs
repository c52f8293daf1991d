//! Flags, environment and file: whichever way it is told, the same proxy serves.

use serde_json::json;

use crate::client::Client;
use crate::connectors::engine;
use crate::process::{Serving, command, lines};
use crate::{COMPLETIONS, PROMPT};

const PREFILLED: &str =
    r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"k":1.50}}"#;

/// Variables of the environment, by name and value.
type Environment<'a> = &'a [(&'a str, &'a str)];

#[tokio::test]
async fn flags_environment_and_file_come_to_one_configuration_one_mode_and_the_same_legs() {
    let (p, d) = (engine(PREFILLED).await, engine("{}").await);
    let (prefill, decode) = (p.url() + ",dp=2", d.url());
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("proxy.toml");
    let text = format!(
        "connector = \"nixl\"\nprefill = [\"{prefill}\"]\ndecode = [\"{decode}\"]\n\
         prefill_policy = \"least-loaded\"\nretries_max = 1\nrequire_kv = false\n"
    );
    std::fs::write(&file, text).expect("written");
    let flags = [
        ["--connector", "nixl"],
        ["--prefill", &prefill],
        ["--decode", &decode],
        ["--prefill-policy", "least-loaded"],
        ["--retries-max", "1"],
        ["--require-kv", "false"],
    ]
    .concat();
    let environment = [
        ("HETERO_KV_PROXY_CONNECTOR", "nixl"),
        ("HETERO_KV_PROXY_PREFILL", &*prefill),
        ("HETERO_KV_PROXY_DECODE", &*decode),
        ("HETERO_KV_PROXY_PREFILL_POLICY", "least-loaded"),
        ("HETERO_KV_PROXY_RETRIES_MAX", "1"),
        ("HETERO_KV_PROXY_REQUIRE_KV", "false"),
    ];
    let from_file = ["--config", file.to_str().expect("UTF-8")];
    let doors: [(Environment<'_>, &[&str]); 3] =
        [(&[], &flags), (&environment, &[]), (&[], &from_file)];
    let mut configurations = Vec::new();
    for (at, (environment, flags)) in doors.into_iter().enumerate() {
        let mut check = command();
        check.envs(environment.iter().copied()).arg("check");
        let checked = check.args(flags).output().expect("it runs");
        assert!(checked.status.success());
        configurations.push(String::from_utf8(checked.stdout).expect("UTF-8"));

        let log = folder.path().join(format!("log-{at}"));
        let serving = Serving::start_in(environment, flags, &log);
        let lines = lines(&log);
        let said = lines.iter().map(|line| &line["fields"]);
        let mut said = said.filter(|fields| fields["message"] == "serving");
        assert_eq!(said.next().expect("it serves")["connector"], "nixl");
        let mut client = Client::connect(serving.clients).await;
        client.post(COMPLETIONS, &[], PROMPT.as_bytes()).await;
        assert_eq!(client.reply().await.status, 200);
        let sent = p.seen()[at].json();
        assert_eq!(
            sent["kv_transfer_params"],
            json!({
                "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null,
            })
        );
        let want = PROMPT.replacen('{', r#"{"kv_transfer_params":{"k":1.50},"#, 1);
        assert_eq!(d.seen()[at].text(), want);
    }
    assert!(configurations[0].contains("connector = \"nixl\""));
    assert_eq!(configurations[0], configurations[1]);
    assert_eq!(configurations[0], configurations[2]);
}
