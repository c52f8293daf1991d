//! SIGHUP: the files are read again, and what may change while the proxy runs is taken over.

use std::sync::Arc;

use crate::app::App;
use crate::config::{Config, ConfigError};
use crate::sync::lock;
use crate::workers::file;

/// Changes what is logged; an error says why that cannot be.
pub type SetLogLevel = Box<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Reads the files again. A fault changes nothing, and each is logged.
pub(crate) async fn run(app: &Arc<App>, set_log_level: Option<&SetLogLevel>) {
    let source = app.config().source.clone();
    // A file may be on a disk that has to be waited for.
    let resolved = tokio::task::spawn_blocking(move || Config::resolve(source)).await;
    let faults = match resolved {
        Ok(Ok(next)) => match take_over(app, &next, set_log_level) {
            Ok(()) => return,
            Err(error) => error.0,
        },
        Ok(Err(error)) => error.0,
        Err(error) => vec![error.to_string()],
    };
    for fault in faults {
        tracing::error!(fault, "reload: nothing was changed");
    }
}

fn take_over(
    app: &Arc<App>,
    next: &Config,
    set_log_level: Option<&SetLogLevel>,
) -> Result<(), ConfigError> {
    // An administrator's change comes before or after, never between.
    let held = lock(&app.changes);
    let running = app.config();
    let next = running.followed_by(next);
    for kept in next.kept {
        tracing::warn!(
            setting = kept.setting,
            running = kept.running,
            given = kept.next,
            "cannot change while the proxy runs: restart it"
        );
    }
    let config = *next.config?;
    let plan = file::plan(app, &running, &config).map_err(ConfigError)?;

    let (admin, clients) = (config.admin_keys.clone(), config.api_keys.clone());
    app.gate.set(admin, clients, config.forward_authorization);
    let is_changed = |name: &str| next.changed.iter().any(|changed| changed.setting == name);
    // What an administrator set meanwhile stays, unless the file has other words.
    if is_changed("revision_weights") {
        app.set_weights(config.revision_weights.clone());
    }
    if is_changed("log_level")
        && let Some(set) = set_log_level
        && let Err(error) = set(&config.log_level)
    {
        tracing::warn!(error, "log_level stays as it is");
    }
    app.set_config(config);
    let workers = plan.follow(app);
    // Workers that went may have been the last of a revision.
    app.ask_for_revisions();
    drop(held);
    let changed = next.changed.iter();
    let changed: Vec<String> = changed
        .map(|known| format!("{} {} -> {}", known.setting, known.running, known.next))
        .collect();
    tracing::info!(
        changed = changed.join(", "),
        workers_in = workers.taken_in.join(" "),
        workers_changed = workers.changed.join(" "),
        workers_out = workers.let_go.join(" "),
        "reloaded"
    );
    Ok(())
}
