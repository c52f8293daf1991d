//! Workers that register, are drained, removed, and change their role, while requests run.

mod lease;
mod leaving;
mod refused;
mod registration;
mod role;

use hetero_kv_proxy::cli::Settings;
use hetero_kv_proxy::run::Proxy;

use crate::client::Client;
use crate::engine::Engine;
use crate::{COMPLETIONS, STREAM, proxy_with};

const CHUNKS: [&str; 2] = ["data: {\"a\":1}\n\n", "data: [DONE]\n\n"];

/// A proxy with a listener for administrators, that probes often.
pub(crate) async fn managed(prefill: &[&Engine], decode: &[&Engine]) -> Proxy {
    managed_with(Settings::default(), prefill, decode).await
}

pub(crate) async fn managed_with(
    mut settings: Settings,
    prefill: &[&Engine],
    decode: &[&Engine],
) -> Proxy {
    settings.admin_listen = Some("127.0.0.1:0".to_owned());
    settings.health_interval_ms.get_or_insert(20);
    proxy_with(settings, &crate::urls(prefill), &crate::urls(decode)).await
}

/// A stream whose head has come and whose chunks wait.
async fn stream(proxy: &Proxy) -> Client {
    let mut client = Client::connect(proxy.address).await;
    client.post(COMPLETIONS, &[], STREAM.as_bytes()).await;
    client
}
