//! Workers that a configuration names, when another one follows it.
//!
//! What both name alike is left as administrators and the workers themselves have made it since.

use std::sync::Arc;

use super::change::{WORKERS_MAX, check};
use super::facts::Facts;
use crate::app::App;
use crate::config::{Config, Worker};
use crate::instance::{Instance, Leave, Registration, WorkerWeights};
use crate::routing::{Role, Standing};

/// What is to be done; nothing of it can fail.
pub(crate) struct Plan {
    taken_in: Vec<Instance>,
    /// The new one, and the one whose place it takes.
    changed: Vec<(Instance, Arc<Instance>)>,
    let_go: Vec<Arc<Instance>>,
    /// Those of which only the weight changes.
    weighed: Vec<(Arc<Instance>, WorkerWeights)>,
}

/// What was done, by URL.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) taken_in: Vec<String>,
    pub(crate) changed: Vec<String>,
    pub(crate) let_go: Vec<String>,
}

/// The worker that goes by this entry of a role, whatever role an administrator gave it since.
fn known<'a>(here: &'a [Arc<Instance>], role: Role, entry: &Worker) -> Option<&'a Arc<Instance>> {
    here.iter().find(|known| {
        let over = matches!(
            known.leave(),
            Some(Leave::Expired | Leave::Replaced | Leave::Removed)
        );
        known.registration.told_role == role
            && known.worker.base.is_same_place(&entry.base)
            && !over
    })
}

/// What `next` asks for where `running` ran. The caller holds [`App::changes`].
///
/// # Errors
/// Every reason why not; nothing is changed.
pub(crate) fn plan(app: &App, running: &Config, next: &Config) -> Result<Plan, Vec<String>> {
    let mut plan = Plan {
        taken_in: Vec::new(),
        changed: Vec::new(),
        let_go: Vec::new(),
        weighed: Vec::new(),
    };
    let mut faults = Vec::new();
    let here: Vec<Arc<Instance>> = [Role::Prefill, Role::Decode]
        .into_iter()
        .flat_map(|role| app.snapshot(role).to_vec())
        .collect();
    for (role, before, after) in [
        (Role::Prefill, &running.prefill, &next.prefill),
        (Role::Decode, &running.decode, &next.decode),
    ] {
        for entry in after {
            let mut former = before.iter();
            let former = former.find(|known| known.base.is_same_place(&entry.base));
            let same_weight = former.is_some_and(|former| former.weight == entry.weight);
            if same_weight && former.is_some_and(|former| former.says_the_same(entry)) {
                continue;
            }
            let known = known(&here, role, entry);
            if let Err(fault) = plan.enter(app, role, entry, known, same_weight) {
                faults.push(format!("--{} {}: {fault}", role.name(), entry.spec.url));
            }
        }
        for entry in before {
            if after
                .iter()
                .any(|next| next.base.is_same_place(&entry.base))
            {
                continue;
            }
            let known = known(&here, role, entry).filter(|known| known.registration.by_flag);
            let Some(known) = known else { continue };
            match changes_role(known) {
                Some(fault) => faults.push(fault),
                None => plan.let_go.push(Arc::clone(known)),
            }
        }
    }
    let count = here.len() + plan.taken_in.len();
    if !plan.taken_in.is_empty() && count > WORKERS_MAX {
        faults.push(format!(
            "{count} workers, those that are leaving among them; at most {WORKERS_MAX}"
        ));
    }
    match faults.is_empty() {
        true => Ok(plan),
        false => Err(faults),
    }
}

fn changes_role(instance: &Instance) -> Option<String> {
    let leaving = instance.leave() == Some(Leave::RoleChange);
    leaving.then(|| {
        format!(
            "worker `{}` is changing its role; reload when that is done",
            instance.id()
        )
    })
}

impl Plan {
    /// An entry that is new, or differs from the one before.
    fn enter(
        &mut self,
        app: &App,
        role: Role,
        entry: &Worker,
        known: Option<&Arc<Instance>>,
        same_weight: bool,
    ) -> Result<(), String> {
        let registration = Registration {
            told_role: role,
            by_flag: true,
        };
        let Some(known) = known else {
            let instance = app.instance(role, entry.clone(), registration);
            self.taken_in
                .push(instance.map_err(|error| error.to_string())?);
            return Ok(());
        };
        if let Some(fault) = changes_role(known) {
            return Err(fault);
        }
        let by_flag = known.registration.by_flag;
        let facts: Facts = known.facts();
        let worker = match by_flag {
            true => Worker {
                traits: entry.traits.clone().with_compat(facts.compat.clone()),
                ..entry.clone()
            },
            // What it told of itself stays: it knows its sizes best.
            false => Worker {
                traits: entry.traits.clone().or(&known.worker.traits),
                ..known.worker.clone()
            },
        };
        let before = known.weights();
        let weights = WorkerWeights {
            told: match by_flag {
                true => entry.weight,
                false => entry.weight.or(before.told),
            },
            // Other words of the file count more than an administrator's from before.
            set: before.set.filter(|_| same_weight || entry.weight.is_none()),
        };
        if by_flag && known.worker.says_the_same(&worker) {
            self.weighed.push((Arc::clone(known), weights));
            return Ok(());
        }
        check(app, known.role, &worker).map_err(|error| error.message)?;
        let instance = app.instance(known.role, worker, registration);
        let instance = instance.map_err(|error| error.to_string())?;
        instance.is_start(known.engine_id().as_deref());
        let (heard_ms, ttl_ms) = known.last_heard();
        instance.heard(heard_ms, ttl_ms);
        instance.set_facts(facts);
        instance.set_weights(weights);
        self.changed.push((instance, Arc::clone(known)));
        Ok(())
    }

    /// Does it, first what comes and then what goes, so that there is no moment without workers.
    pub(crate) fn follow(self, app: &Arc<App>) -> Done {
        let mut done = Done::default();
        for instance in self.taken_in {
            let instance = app.take_in_probed(instance, Standing::Serving);
            done.taken_in.push(instance.label.to_string());
        }
        for (instance, known) in self.changed {
            // What an administrator keeps from traffic stays so.
            let standing = app.with_pool(known.role, |pool| pool.standing(known.index));
            let instance = app.take_in_probed(instance, standing.unwrap_or(Standing::Serving));
            app.let_go(&known, Leave::Replaced);
            done.changed.push(instance.label.to_string());
        }
        for (instance, weights) in self.weighed {
            app.set_weight(&instance, weights);
            done.changed.push(instance.label.to_string());
        }
        for instance in self.let_go {
            app.let_go(&instance, Leave::Removed);
            done.let_go.push(instance.label.to_string());
        }
        done
    }
}
