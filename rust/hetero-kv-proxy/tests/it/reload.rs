//! SIGHUP: the TOML file is read again, and a running proxy takes over what it can.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::client::{Client, Reply, get, send};
use crate::engine::{Blocks, Engine, Script, engines, pair};
use crate::process::{Serving, lines};
use crate::{COMPLETIONS, PROMPT, STREAM, soon};

/// A proxy with a file, and the log that it writes.
struct Filed {
    serving: Serving,
    file: PathBuf,
    log: PathBuf,
    told: usize,
    _folder: tempfile::TempDir,
}

impl Filed {
    fn start(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, log) = (folder.path().join("proxy.toml"), folder.path().join("log"));
        std::fs::write(&file, text).expect("written");
        let flags = ["--config", file.to_str().expect("UTF-8")];
        Self {
            serving: Serving::start(&flags, &log),
            file,
            log,
            told: 0,
            _folder: folder,
        }
    }

    /// Has the proxy read `text`, of which it says `words` things.
    async fn reload(&mut self, text: &str, words: usize) {
        std::fs::write(&self.file, text).expect("written");
        self.told += words;
        self.serving.reload(&self.log, self.told).await;
    }

    /// The fields of all log lines of this message.
    fn said(&self, message: &str) -> Vec<Value> {
        let lines = lines(&self.log).into_iter();
        let fields = lines.map(|line| line["fields"].clone());
        fields
            .filter(|fields| fields["message"] == message)
            .collect()
    }

    fn faults(&self) -> Vec<String> {
        let said = self.said("reload: nothing was changed");
        let texts = said.iter().map(|fields| fields["fault"].as_str());
        texts
            .map(|text| text.expect("a fault").to_owned())
            .collect()
    }

    async fn workers(&self) -> Vec<Value> {
        let workers = get(self.serving.admin, "/workers").await.json();
        workers.as_array().expect("a list").clone()
    }

    /// `id`, `standing` and `source` of the workers at a URL.
    async fn at(&self, url: &str) -> Vec<[String; 3]> {
        let workers = self.workers().await;
        let here = workers.iter().filter(|worker| worker["url"] == url);
        here.map(|worker| {
            ["id", "standing", "source"].map(|field| {
                let text = worker[field].as_str();
                text.expect("a text").to_owned()
            })
        })
        .collect()
    }

    async fn admin(&self, target: &str, body: &str) -> Reply {
        send(self.serving.admin, target, &[], body).await
    }
}

async fn ask(at: SocketAddr, body: &str) -> Reply {
    let mut client = Client::connect(at).await;
    client.post(COMPLETIONS, &[], body.as_bytes()).await;
    client.reply().await
}

fn list(entries: &[&str]) -> Value {
    json!(entries)
}

fn row(id: &str, standing: &str, source: &str) -> [String; 3] {
    [id, standing, source].map(str::to_owned)
}

#[tokio::test]
async fn workers_of_the_file_come_change_and_go_with_their_streams_whole() {
    let ([p, q], [old, new]) = engines(&Blocks::default()).await;
    let text = |prefill: &[&str], decode: &[&str]| {
        format!("prefill = {}\ndecode = {}\n", list(prefill), list(decode))
    };
    let mut filed = Filed::start(&text(&[&p.url()], &[&old.url()]));
    let body = json!({"role": "prefill", "url": q.url()}).to_string();
    assert_eq!(filed.admin("/v1/workers", &body).await.status, 201);

    let gate = Arc::new(Semaphore::new(1));
    let events = vec!["data: 1\n\n", "data: 2\n\n", "data: [DONE]\n\n"];
    old.once(Script::Gated(events.clone(), Arc::clone(&gate)));
    let mut client = Client::connect(filed.serving.clients).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");

    let told = format!("{},model=m", p.url());
    filed.reload(&text(&[&told], &[&new.url()]), 1).await;
    let said = filed.said("reloaded");
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(said[0]["workers_in"], new.url());
    assert_eq!(said[0]["workers_changed"], p.url());
    assert_eq!(said[0]["workers_out"], old.url());
    assert_eq!(said[0]["changed"], "");
    // What runs goes on, and nothing new comes there.
    assert_eq!(
        filed.at(&old.url()).await,
        [row("decode-0", "leaving", "flag")]
    );
    assert_eq!(
        filed.at(&new.url()).await,
        [row("decode-1", "serving", "flag")]
    );
    assert_eq!(
        filed.at(&q.url()).await,
        [row("prefill-1", "serving", "registered")]
    );
    let replaced = [row("prefill-2", "serving", "flag")];
    soon("the old one of the changed worker is gone", async || {
        filed.at(&p.url()).await == replaced
    })
    .await;
    for _ in 0..4 {
        assert_eq!(ask(filed.serving.clients, PROMPT).await.status, 200);
    }
    assert_eq!((old.count(), new.count()), (1, 4));
    gate.add_permits(events.len());
    let mut streamed = Vec::new();
    while let Some(chunk) = client.chunk().await
        && !chunk.is_empty()
    {
        streamed.extend(chunk);
    }
    assert_eq!(streamed, events.concat().as_bytes());
    soon("a worker that is let go goes", async || {
        filed.at(&old.url()).await.is_empty()
    })
    .await;
}

#[tokio::test]
async fn what_administrators_made_of_a_worker_stays_and_a_named_one_expires_no_more() {
    let ([p, swung], [d, removed, own]) = engines(&Blocks::default()).await;
    let mut filed = Filed::start(&format!(
        "prefill = {}\ndecode = {}\n",
        list(&[&p.url(), &swung.url()]),
        list(&[&d.url(), &removed.url()])
    ));
    let drained = filed.admin("/v1/workers/prefill-0/drain", "").await;
    assert_eq!(drained.status, 200);
    let role = r#"{"role":"decode"}"#;
    let changed = filed.admin("/v1/workers/prefill-1/role", role).await;
    assert_eq!(changed.json()["id"], "decode-2");
    let mut client = Client::connect(filed.serving.admin).await;
    client.delete("/v1/workers/decode-1").await;
    assert_eq!(client.reply().await.status, 200);
    let body = json!({"role": "decode", "url": own.url(), "dp": 2, "revision": "v1"}).to_string();
    assert_eq!(filed.admin("/v1/workers", &body).await.status, 201);

    // One is changed in the file, one comes in that registered itself.
    let decode = format!("{},model=m", own.url());
    filed
        .reload(
            &format!(
                "prefill = {}\ndecode = {}\n",
                list(&[&format!("{},model=m", p.url()), &swung.url()]),
                list(&[&d.url(), &removed.url(), &decode])
            ),
            1,
        )
        .await;
    soon("replaced ones are gone", async || {
        filed.workers().await.len() == 4
    })
    .await;
    assert_eq!(
        filed.at(&p.url()).await,
        [row("prefill-2", "drained", "flag")]
    );
    assert_eq!(
        filed.at(&swung.url()).await,
        [row("decode-2", "serving", "flag")]
    );
    assert_eq!(
        filed.at(&d.url()).await,
        [row("decode-0", "serving", "flag")]
    );
    assert!(filed.at(&removed.url()).await.is_empty());
    let workers = filed.workers().await;
    let named = workers.iter().find(|worker| worker["url"] == own.url());
    let named = named.expect("it is there");
    assert_eq!(named["source"], "flag");
    assert_eq!(named["expires_in_ms"], Value::Null);
    assert_eq!(named["dp"], 2);
    assert_eq!(named["told"], json!({"model": "m", "revision": "v1"}));
    // Its heartbeat is one, and no registration anew.
    assert_eq!(filed.admin("/v1/workers", &body).await.status, 200);
}

async fn with_engines() -> (Engine, Engine, String) {
    let (p, d) = pair().await;
    let workers = format!(
        "prefill = {}\ndecode = {}\n",
        list(&[&p.url()]),
        list(&[&d.url()])
    );
    (p, d, workers)
}

#[tokio::test]
async fn limits_policies_and_the_log_level_change_at_run_time_and_the_rest_is_named() {
    let (_p, d, workers) = with_engines().await;
    let mut filed = Filed::start(&workers);
    let clients = filed.serving.clients;
    assert_eq!(ask(clients, PROMPT).await.status, 200);
    assert!(
        lines(&filed.log)
            .iter()
            .all(|line| line["level"] != "DEBUG")
    );
    filed
        .reload(
            &format!(
                "{workers}queue_max = 0\nrequests_max = 1\nbody_bytes_max = 200\n\
                 decode_policy = \"prefix-aware\"\nlog_level = \"debug\"\n\
                 threads = 3\npool_idle_max = 7\nadmin_key_file = \"{}\"\n",
                key_file(&filed, "an-admin-key-of-ours").display()
            ),
            1,
        )
        .await;
    let mut kept = filed.said("cannot change while the proxy runs: restart it");
    for line in &mut kept {
        line.as_object_mut().expect("fields").remove("message");
    }
    assert_eq!(
        kept,
        [
            json!({"setting": "pool_idle_max", "running": "1024", "given": "7"}),
            json!({"setting": "threads", "running": "0", "given": "3"}),
        ]
    );
    let said = filed.said("reloaded");
    let changed = said[0]["changed"].as_str().expect("a text");
    for part in [
        "body_bytes_max 67108864 -> 200",
        "decode_policy \"least-loaded\" -> \"prefix-aware\"",
        "queue_max 1024 -> 0",
        "requests_max 4096 -> 1",
    ] {
        assert!(changed.contains(part), "{part} in {changed}");
    }
    assert!(!changed.contains("threads"), "{changed}");

    let long = format!(r#"{{"prompt":"{}","max_tokens":8}}"#, "x".repeat(200));
    assert_eq!(ask(clients, &long).await.status, 413);
    let gate = Arc::new(Semaphore::new(1));
    d.once(Script::Gated(
        vec!["data: 1\n\n", "data: [DONE]\n\n"],
        Arc::clone(&gate),
    ));
    let mut client = Client::connect(clients).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client.head().await.expect("a head");
    assert_eq!(ask(clients, PROMPT).await.status, 429);
    let unsigned = filed.admin("/v1/workers", "{}").await;
    assert_eq!(unsigned.error_code(), "signature_missing");
    soon("requests are logged", async || {
        lines(&filed.log)
            .iter()
            .any(|line| line["level"] == "DEBUG")
    })
    .await;

    // A limit that rises lets in who would have been sent away.
    let key = filed.file.with_file_name("key");
    let text = format!(
        "{workers}queue_max = 0\nadmin_key_file = \"{}\"\n",
        key.display()
    );
    filed.reload(&text, 1).await;
    assert_eq!(ask(clients, &long).await.status, 200);
    gate.add_permits(1);
    assert_eq!(client.chunk().await.expect("a chunk"), b"data: 1\n\n");
}

fn key_file(filed: &Filed, key: &str) -> PathBuf {
    let path = filed.file.with_file_name("key");
    std::fs::write(&path, key).expect("written");
    path
}

fn key_line(name: &str, path: &Path) -> String {
    format!("{name} = \"{}\"\n", path.display())
}

#[tokio::test]
async fn a_bad_file_changes_nothing_and_every_fault_of_it_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let key = folder.path().join("key");
    std::fs::write(&key, "a-key-of-16-bytes").expect("written");
    let (_p, d, workers) = with_engines().await;
    let keys = key_line("admin_key_file", &key) + &key_line("api_key_file", &key);
    let mut filed = Filed::start(&format!("{workers}{keys}"));
    let before = filed.workers().await.len();
    let other = "decode = [\"http://127.0.0.1:9\"]\nbody_bytes_max = 2\n";

    // A file that is cut short is not TOML, or lacks what is needed.
    filed.reload("prefill = [", 1).await;
    assert!(
        filed.faults()[0].contains("proxy.toml"),
        "{:?}",
        filed.faults()
    );
    let bad =
        format!("prefill = [\"http://h:0\"]\n{other}{keys}retries_max = 99\npolicy = \"x\"\n");
    filed.reload(&bad, 3).await;
    let faults = filed.faults();
    for part in [
        "--prefill http://h:0: the port must be",
        "--policy x: unknown",
        "--retries-max 99: must be 0 to 16",
    ] {
        let told = faults[1..].iter().filter(|fault| fault.contains(part));
        assert_eq!(told.count(), 1, "{part} in {faults:?}");
    }

    // What was closed does not open for want of a line.
    filed.reload(&format!("prefill = []\n{other}"), 2).await;
    let faults = filed.faults();
    for (at, (name, lets)) in [
        ("admin_key_file", "anybody change the workers"),
        ("api_key_file", "any client in"),
    ]
    .into_iter()
    .enumerate()
    {
        let fault = format!(
            "{name}: is {} and no longer given, which would let {lets}; give it, or restart the \
             proxy without it",
            key.display()
        );
        assert_eq!(faults[4 + at], fault);
    }

    // What is new has to go with what stays.
    let tied = format!(
        "connector = \"none\"\n{keys}decode = [\"{},tp=2\"]\n",
        d.url()
    );
    filed.reload(&tied, 1).await;
    assert!(
        filed.faults()[6].contains("`tp` has no use"),
        "{:?}",
        filed.faults()
    );

    assert_eq!(filed.said("reloaded"), Vec::<Value>::new());
    let after = get_with_key(filed.serving.clients, "/workers").await;
    assert_eq!(after.json().as_array().expect("a list").len(), before);
    let mut client = Client::connect(filed.serving.clients).await;
    let bearer = [("Authorization", "Bearer a-key-of-16-bytes")];
    client.post(COMPLETIONS, &bearer, PROMPT.as_bytes()).await;
    assert_eq!(client.reply().await.status, 200);
    assert_eq!(ask(filed.serving.clients, PROMPT).await.status, 401);
}

async fn get_with_key(at: SocketAddr, path: &str) -> Reply {
    let mut client = Client::connect(at).await;
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: p\r\nAuthorization: Bearer a-key-of-16-bytes\r\n\r\n"
    );
    client.raw(head.as_bytes()).await;
    client.reply().await
}

#[tokio::test]
async fn another_weight_in_the_file_makes_no_other_worker_and_counts_more_than_an_older_order() {
    let (p, d) = pair().await;
    let text = |weight: &str, more: &str| {
        let decode = format!("{}{weight}", d.url());
        format!(
            "prefill = {}\ndecode = {}\n{more}",
            list(&[&p.url()]),
            list(&[&decode])
        )
    };
    let mut filed = Filed::start(&text(",weight=2", ""));
    let weight = async |filed: &Filed| {
        let workers = filed.workers().await;
        let found = workers.iter().find(|worker| worker["id"] == "decode-0");
        found.expect("it is still that one")["weight"].clone()
    };
    assert_eq!(weight(&filed).await, 2);
    let order = filed.admin("/v1/workers/decode-0/weight", r#"{"weight":5}"#);
    assert_eq!(order.await.status, 200);
    filed
        .reload(&text(",weight=2", "retries_max = 1\n"), 1)
        .await;
    assert_eq!(weight(&filed).await, 5);
    filed.reload(&text(",weight=7", ""), 1).await;
    assert_eq!(weight(&filed).await, 7);
    assert_eq!(filed.said("reloaded")[1]["workers_changed"], d.url());
    filed.reload(&text("", ""), 1).await;
    assert_eq!(weight(&filed).await, 1);
    filed.reload(&text(",weight=1001", ""), 1).await;
    assert!(
        filed.faults()[0].contains("weight must be 0 to 1000"),
        "{:?}",
        filed.faults()
    );
    assert_eq!(filed.workers().await.len(), 2);
}
