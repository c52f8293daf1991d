//! The engines that flags name, and what their connector cannot serve of them.

use super::address::{self, Worker, WorkerFault};
use super::faults::{Faults, fill};
use super::{host_port, own_listener};
use crate::cli::Settings;
use crate::connectors::{self, Connector, Order};
use crate::routing::{Field, Role};

impl Faults {
    /// The connector that is named, where there is one of that name.
    pub(super) fn connector(&mut self, settings: &mut Settings) -> Option<&'static dyn Connector> {
        let name = fill(&mut settings.connector, connectors::ALL[0].name());
        let known = connectors::by_name(&name);
        if known.is_none() {
            let names = connectors::names();
            self.add(format!("--connector {name}: unknown; one of {names}"));
        }
        known
    }

    pub(super) fn workers(&mut self, flag: &str, given: Option<&[String]>) -> Vec<Worker> {
        let mut workers: Vec<Worker> = Vec::new();
        for text in given.unwrap_or_default() {
            match address::worker(text) {
                Ok(worker) => {
                    if workers
                        .iter()
                        .any(|known| known.base.is_same_place(&worker.base))
                    {
                        self.add(format!("{flag} {text}: this instance is given twice"));
                    }
                    workers.push(worker);
                }
                Err(fault) => self.add(format!("{flag} {text}: {fault}")),
            }
        }
        workers
    }

    /// What the connector cannot serve, or would not look at.
    pub(super) fn peers(&mut self, connector: &dyn Connector, role: Role, workers: &[Worker]) {
        for worker in workers {
            for fault in worker_faults(connector, role, worker) {
                let at = format!("--{} {}", role.name(), worker.spec.url);
                self.add(format!("{at}: {}", fault.text));
            }
        }
    }

    /// Workers that are one of the proxy's own listeners, each given by its setting.
    pub(super) fn own_listeners(
        &mut self,
        listeners: &[(&'static str, Option<&str>)],
        role: Role,
        workers: &[Worker],
    ) {
        let listeners: Vec<(&'static str, String, u16)> = listeners
            .iter()
            .filter_map(|(setting, address)| {
                let (host, port) = host_port((*address)?).ok()?;
                Some((*setting, host, port))
            })
            .collect();
        for worker in workers {
            let listeners = listeners.iter();
            let listeners = listeners.map(|(setting, host, port)| (*setting, &**host, *port));
            if let Some(fault) = own_listener(&worker.base, listeners) {
                self.add(format!("--{} {}: {fault}", role.name(), worker.spec.url));
            }
        }
    }

    /// Whether both roles have somebody, or somebody can come.
    pub(super) fn each_role_has_one(
        &mut self,
        settings: &Settings,
        connector: &dyn Connector,
        may_register: bool,
    ) {
        let none = |given: &Option<Vec<String>>| given.as_ref().is_none_or(Vec::is_empty);
        let needed = |flag| format!("{flag}: at least one instance is needed, or --admin-listen");
        let alone = connector.order() == Order::DecodeAlone;
        if alone && !none(&settings.prefill) {
            self.add(format!(
                "--prefill: --connector {} sends no prefill leg; give decode only",
                connector.name()
            ));
        }
        if !alone && !may_register && none(&settings.prefill) {
            self.add(needed("--prefill"));
        }
        if !may_register && none(&settings.decode) {
            self.add(needed("--decode"));
        }
    }
}

/// Why a worker cannot be served in a role, whoever names it: a flag or the worker itself.
pub(crate) fn worker_faults(
    connector: &dyn Connector,
    role: Role,
    worker: &Worker,
) -> Vec<WorkerFault> {
    let name = connector.name();
    let unused = |key: &&&'static str| !connector.worker_keys().contains(key);
    let unused = worker.peer.given.iter().filter(unused);
    let mut faults: Vec<WorkerFault> = unused
        .map(|key| WorkerFault {
            key: Some(key),
            text: format!("`{key}` has no use with --connector {name}"),
        })
        .collect();
    let mode = worker.traits.get(Field::Mode);
    if let Some(text) = mode.and_then(|told| connectors::other_mode(connector, told)) {
        let key = Some(Field::Mode.key());
        faults.push(WorkerFault { key, text });
    }
    if let Err(text) = connector.check(role, &worker.peer) {
        faults.push(WorkerFault { key: None, text });
    }
    faults
}
