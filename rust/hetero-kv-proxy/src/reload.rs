//! SIGHUP: the files are read again, and what may change while the proxy runs is taken over.

use std::sync::Arc;

use crate::app::App;
use crate::config::Config;

/// Reads the files again. A fault changes nothing, and each is logged.
pub(crate) async fn run(app: &Arc<App>) {
    let source = app.config.source.clone();
    // A file may be on a disk that has to be waited for.
    let resolved = tokio::task::spawn_blocking(move || Config::resolve(source)).await;
    let next = match resolved {
        Ok(Ok(next)) => next,
        Ok(Err(error)) => {
            for fault in error.0 {
                tracing::error!(fault, "reload: nothing was changed");
            }
            return;
        }
        Err(error) => {
            tracing::error!(%error, "reload: nothing was changed");
            return;
        }
    };
    app.gate.set(next.admin_keys, next.api_keys);
    tracing::info!("reloaded");
}
