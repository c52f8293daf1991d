//! Who decides where legs run: the policies of both roles, and the shares of revisions.

use super::faults::{Faults, fill};
use super::numbers::AUTO_PROMPT_BYTES_MIN;
use crate::cli::Settings;
use crate::connectors::{Connector, Order};
use crate::routing::policy::PolicyKind;
use crate::routing::{AutoRules, Weights};

/// The policy that decides for both legs at once.
const AUTO: &str = "auto";

/// The policies of both roles.
pub(super) struct Policies {
    pub(super) prefill: PolicyKind,
    pub(super) decode: PolicyKind,
    /// Whether each request decides if it needs prefill at all.
    pub(super) auto: bool,
}

impl Faults {
    pub(super) fn policies(
        &mut self,
        settings: &mut Settings,
        connector: &dyn Connector,
    ) -> Policies {
        let given = settings.policy.clone();
        let auto = given.as_deref() == Some(AUTO);
        let [prefill_default, decode_default] = match given.as_deref() {
            // Decode's legs are long and of unlike length: turns alone would leave some engines full
            // and others idle.
            None => ["round-robin", "least-loaded"],
            Some(AUTO) => ["round-robin", "prefix-aware"],
            Some(policy) => [policy; 2],
        };
        if auto && connector.order() == Order::DecodeAlone {
            self.add(format!(
                "--policy auto: --connector {} sends no prefill leg; there is nothing to decide",
                connector.name()
            ));
        }
        fill(&mut settings.policy, "round-robin");
        if let Some(policy) = given.as_deref().filter(|_| !auto) {
            self.policy("--policy", policy);
        }
        let prefill = fill(&mut settings.prefill_policy, prefill_default);
        let decode = fill(&mut settings.decode_policy, decode_default);
        Policies {
            prefill: self.policy("--prefill-policy", &prefill),
            decode: self.policy("--decode-policy", &decode),
            auto,
        }
    }

    /// What `auto` goes by, where that is the policy.
    pub(super) fn auto(
        &mut self,
        settings: &mut Settings,
        policies: &Policies,
    ) -> Option<AutoRules> {
        let slot = &mut settings.auto_prompt_bytes_min;
        let prompt_bytes_min = self.number(AUTO_PROMPT_BYTES_MIN, slot);
        policies.auto.then_some(AutoRules { prompt_bytes_min })
    }

    fn policy(&mut self, flag: &str, name: &str) -> PolicyKind {
        if let Some(kind) = PolicyKind::ALL.into_iter().find(|kind| kind.name() == name) {
            return kind;
        }
        let built = PolicyKind::ALL.map(PolicyKind::name).join(", ");
        let fault = match (flag, name) {
            ("--policy", _) => format!("{flag} {name}: unknown; one of {built}, {AUTO}"),
            (_, AUTO) => {
                format!("{flag} {name}: decides for both legs at once; say --policy auto")
            }
            _ => format!("{flag} {name}: unknown; one of {built}"),
        };
        // The policies of the roles default to --policy: its fault is told once.
        let told = self.told().iter().any(|known| {
            known
                .split_once(": ")
                .is_some_and(|(head, _)| head == format!("--policy {name}"))
        });
        if !told {
            self.add(fault);
        }
        PolicyKind::RoundRobin
    }

    /// Shares of revisions.
    pub(super) fn weights(&mut self, given: Option<&str>) -> Option<Weights> {
        let given = given.unwrap_or_default();
        Weights::parse(given).unwrap_or_else(|fault| {
            self.add(format!("--revision-weights {given}: {fault}"));
            None
        })
    }
}
