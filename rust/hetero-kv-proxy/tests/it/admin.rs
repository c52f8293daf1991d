//! The admin listener of a proxy, as those who run engines and the engines themselves use it.

use hetero_kv_proxy::run::Proxy;
use serde_json::{Value, json};

use crate::client::{Client, Reply};
use crate::engine::Engine;
use crate::soon;

pub(crate) async fn connect(proxy: &Proxy) -> Client {
    Client::connect(proxy.admin_address.expect("a listener for administrators")).await
}

/// Posts without a body.
pub(crate) async fn order(proxy: &Proxy, path: &str) -> Reply {
    let mut client = connect(proxy).await;
    client.post(path, &[], b"").await;
    client.reply().await
}

/// Posts JSON.
pub(crate) async fn tell(proxy: &Proxy, path: &str, body: &Value) -> Reply {
    let mut client = connect(proxy).await;
    client.post(path, &[], body.to_string().as_bytes()).await;
    client.reply().await
}

pub(crate) async fn look(proxy: &Proxy, path: &str) -> Reply {
    let mut client = connect(proxy).await;
    client.get(path).await;
    client.reply().await
}

pub(crate) async fn delete(proxy: &Proxy, path: &str) -> Reply {
    let mut client = connect(proxy).await;
    client.delete(path).await;
    client.reply().await
}

/// All workers, as `/workers` shows them.
pub(crate) async fn list(proxy: &Proxy) -> Vec<Value> {
    let reply = look(proxy, "/workers").await;
    reply.json().as_array().expect("a list").clone()
}

pub(crate) async fn ids(proxy: &Proxy) -> Vec<String> {
    let id = |worker: &Value| worker["id"].as_str().expect("an id").to_owned();
    list(proxy).await.iter().map(id).collect()
}

/// One worker as `/workers` shows it; null where it does not.
pub(crate) async fn worker(proxy: &Proxy, id: &str) -> Value {
    let workers = list(proxy).await;
    let found = workers.into_iter().find(|worker| worker["id"] == id);
    found.unwrap_or(Value::Null)
}

/// Registers, or beats, and returns the status and the worker.
pub(crate) async fn register(
    proxy: &Proxy,
    role: &str,
    engine: &Engine,
    more: Value,
) -> (u16, Value) {
    let mut body = json!({"role": role, "url": engine.url()});
    for (name, value) in more.as_object().expect("members") {
        body[name] = value.clone();
    }
    let reply = tell(proxy, "/v1/workers", &body).await;
    (reply.status, reply.json())
}

/// Waits until a worker takes legs.
pub(crate) async fn routable(proxy: &Proxy, id: &str) {
    soon(&format!("{id} takes legs"), async || {
        worker(proxy, id).await["routable"] == json!(true)
    })
    .await;
}

/// Waits until a worker is not listed any more.
pub(crate) async fn gone(proxy: &Proxy, id: &str) {
    soon(&format!("{id} goes"), async || {
        worker(proxy, id).await.is_null()
    })
    .await;
}
