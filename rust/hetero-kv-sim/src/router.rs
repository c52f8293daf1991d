//! Clients and a router that does what routers do to `kv_transfer_params`: copies them to siblings,
//! sends them twice, late, elsewhere or not at all, mixes them up and changes them.

use std::time::Duration;

use hetero_kv_core::digest::PromptHasher;
use hetero_kv_core::ids::{Incarnation, PromptDigest, TransferId};
use hetero_kv_core::layout::CompatFields;
use hetero_kv_core::wire::params::RemotePrefill;
use serde_json::{Value, json};

use crate::book::Outcome;
use crate::decode::DecodeMail;
use crate::fault::Fault;
use crate::prefill::PrefillMail;
use crate::scenario::PROMPT_TOKENS_MAX;
use crate::world::{Event, World};

/// The fields that both sides of every pair agree in.
pub(crate) fn fields() -> CompatFields {
    let mut fields = CompatFields::new();
    fields
        .insert("model", "simulated")
        .expect("a short printable name and value");
    fields
}

/// What a prompt is.
pub(crate) fn digest(prompt: u32, tokens: u32) -> PromptDigest {
    PromptHasher::new(&[prompt, tokens]).finish()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    ToCome,
    InPrefill,
    Routed,
    Lost,
}

/// One prompt on its way through prefill.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) prompt: u32,
    pub(crate) tokens: u32,
    pub(crate) transfer: TransferId,
    prefill: usize,
    siblings: u32,
    stage: Stage,
    pub(crate) params: Option<RemotePrefill>,
}

impl Client {
    /// The prefill engine has died.
    pub(crate) fn prefill_lost(&mut self, p: usize) {
        if self.prefill == p && self.stage == Stage::InPrefill && self.params.is_none() {
            self.stage = Stage::Lost;
        }
    }

    /// Whether the router still waits for its prefill.
    pub(crate) fn open(&self) -> bool {
        matches!(self.stage, Stage::ToCome | Stage::InPrefill)
    }
}

/// What a decode leg's params are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Params {
    /// Those of its prompt, as prefill made them.
    Right,
    /// Those of another prompt.
    Foreign,
    /// Those of its prompt with one field changed.
    Changed,
    /// None: prefill held nothing.
    Missing,
}

/// One decode request.
#[derive(Clone, Debug)]
pub(crate) struct Leg {
    pub(crate) prompt: u32,
    pub(crate) tokens: u32,
    pub(crate) decode: usize,
    pub(crate) params: Params,
    pub(crate) params_text: String,
    pub(crate) transfer: Option<TransferId>,
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) delivered: bool,
    pub(crate) outcome: Option<Outcome>,
}

impl World {
    pub(crate) fn plan_clients(&mut self) {
        for number in 0..self.scenario.requests {
            let reused = self.clients.len() > 1
                && self.book.may(Fault::TransferIdTwice)
                && self.rng.permille(150);
            let transfer = if reused {
                self.book.happened(Fault::TransferIdTwice);
                let other = self.rng.index(self.clients.len());
                self.clients[other].transfer
            } else {
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&self.rng.bits().to_le_bytes());
                bytes[8..].copy_from_slice(&u64::from(number).to_le_bytes());
                TransferId(bytes)
            };
            let client = Client {
                prompt: number + 1,
                tokens: self.rng.count(2, PROMPT_TOKENS_MAX),
                transfer,
                prefill: self.rng.index(self.prefill.len()),
                siblings: if self.rng.permille(200) {
                    self.rng.count(2, 4)
                } else {
                    1
                },
                stage: Stage::ToCome,
                params: None,
            };
            self.clients.push(client);
            let window = self.scenario.trouble_until.as_secs_f64() * 0.9;
            // Bursts: a third of the prompts come at one of three moments.
            let at = if self.rng.permille(330) {
                window * f64::from(self.rng.count(1, 3)) / 4.0
            } else {
                window * f64::from(self.rng.count(0, 1000)) / 1000.0
            };
            self.after(Duration::from_secs_f64(at), Event::Client(number as usize));
        }
    }

    pub(crate) fn send_prefill(&mut self, number: usize) {
        let p = self.clients[number].prefill;
        if self.prefill[p].engine.is_none() {
            self.clients[number].stage = Stage::Lost;
            self.book.count("prefills refused");
            return;
        }
        self.clients[number].stage = Stage::InPrefill;
        self.mail_prefill(p, PrefillMail::Add(number));
    }

    /// Some client leaves before its prefill is done.
    pub(crate) fn abort_a_prefill(&mut self) {
        let waiting: Vec<usize> = (0..self.clients.len())
            .filter(|number| self.clients[*number].stage == Stage::InPrefill)
            .collect();
        if waiting.is_empty() {
            return;
        }
        let number = self.rng.pick(&waiting);
        self.book.happened(Fault::AbortInPrefill);
        self.clients[number].stage = Stage::Lost;
        let p = self.clients[number].prefill;
        self.mail_prefill(p, PrefillMail::Abort(number));
    }

    /// Prefill has answered: the router makes the decode legs.
    pub(crate) fn route_decode(&mut self, number: usize) {
        if self.clients[number].stage != Stage::InPrefill {
            return;
        }
        self.clients[number].stage = Stage::Routed;
        if self.fault(Fault::DecodeLegLost, 150) {
            return;
        }
        let mut delay = self.millis(0, 5);
        if self.fault(Fault::DecodeLegLate, 150) {
            delay += self.millis(1500, 5000);
        }
        let d = self.rng.index(self.decode.len());
        let siblings = self.clients[number].siblings;
        for sibling in 0..siblings {
            self.make_leg(&format!("{sibling}_{number}"), number, d, delay);
        }
        if self.fault(Fault::DecodeLegTwice, 200) {
            let later = delay + self.millis(0, 3000);
            self.make_leg(&format!("again_{number}"), number, d, later);
        }
        if self.decode.len() > 1 && self.fault(Fault::DecodeLegElsewhere, 250) {
            let other = (d + 1) % self.decode.len();
            let later = delay + self.millis(0, 400);
            self.make_leg(&format!("elsewhere_{number}"), number, other, later);
        }
        if self.fault(Fault::ParamsMixedUp, 200) {
            // A list of prompts: all of them get the params of the first.
            let other = self.rng.index(self.clients.len());
            if other != number {
                let params = self.clients[number].params.clone();
                let leg = Leg {
                    params: if params.is_some() {
                        Params::Foreign
                    } else {
                        Params::Missing
                    },
                    ..self.leg(other, d, params)
                };
                self.send_leg(format!("list_{number}"), leg, delay);
            }
        }
    }

    fn fault(&mut self, fault: Fault, permille: u64) -> bool {
        let happens = self.book.may(fault) && self.rng.permille(permille);
        if happens {
            self.book.happened(fault);
        }
        happens
    }

    fn leg(&self, number: usize, d: usize, params: Option<RemotePrefill>) -> Leg {
        Leg {
            prompt: self.clients[number].prompt,
            tokens: self.clients[number].tokens,
            decode: d,
            params: if params.is_some() {
                Params::Right
            } else {
                Params::Missing
            },
            params_text: params
                .as_ref()
                .map_or_else(|| "null".to_owned(), |params| params.to_json().to_string()),
            transfer: params.as_ref().map(|params| params.transfer_id),
            incarnation: params.as_ref().map(|params| params.incarnation),
            delivered: false,
            outcome: None,
        }
    }

    fn make_leg(&mut self, id: &str, number: usize, d: usize, delay: Duration) {
        let params = self.clients[number].params.clone();
        let mut leg = self.leg(number, d, params.clone());
        if let Some(params) = params
            && self.fault(Fault::ParamsChanged, 200)
        {
            leg.params = Params::Changed;
            let mut value = params.to_json();
            let (field, changed) = match self.rng.below(6) {
                0 => ("lease_epoch", json!(params.lease_epoch + 1)),
                1 => ("remote_num_tokens", json!(params.num_tokens + 8)),
                2 => ("remote_incarnation", json!("00000000000000ff")),
                3 => ("remote_dp_rank", json!(params.dp_rank.0 + 1)),
                4 => ("remote_block_ids", json!([[0, 1]])),
                _ => ("remote_port", json!(1)),
            };
            value[field] = changed;
            if field == "remote_incarnation" {
                leg.incarnation = Some(Incarnation(0xff));
            }
            leg.params_text = value.to_string();
        }
        self.send_leg(id.to_owned(), leg, delay);
    }

    fn send_leg(&mut self, id: String, mut leg: Leg, delay: Duration) {
        // Some router knows the host by another name.
        if self.rng.permille(150)
            && let Ok(Value::Object(mut params)) = serde_json::from_str(&leg.params_text)
            && let Some(Value::String(host)) = params.get_mut("remote_host")
        {
            host.push_str(".local");
            leg.params_text = Value::Object(params).to_string();
            self.book.count("legs by another name of the host");
        }
        self.book.trace(|| {
            format!(
                "router sends {id} (prompt {}, {} tokens, {:?} params) to decode {}",
                leg.prompt, leg.tokens, leg.params, leg.decode
            )
        });
        self.legs.insert(id.clone(), leg);
        self.after(delay, Event::DecodeLeg(id));
    }

    pub(crate) fn deliver_leg(&mut self, id: &str) {
        let Some(leg) = self.legs.get_mut(id) else {
            return;
        };
        leg.delivered = true;
        let d = leg.decode;
        if self.decode[d].engine.is_none() {
            self.end_leg(id, Outcome::EngineLost);
        } else if self.fault(Fault::Rejected, 150) {
            self.mail_decode(d, DecodeMail::Rejected(id.to_owned()));
        } else {
            self.mail_decode(d, DecodeMail::Add(id.to_owned()));
        }
    }

    pub(crate) fn end_leg(&mut self, id: &str, outcome: Outcome) {
        if let Some(leg) = self.legs.get_mut(id)
            && leg.outcome.is_none()
        {
            leg.outcome = Some(outcome);
            *self.book.coverage.outcomes.entry(outcome).or_default() += 1;
            self.book.trace(|| format!("{id} ends: {outcome:?}"));
        }
    }

    /// Some client leaves its decode request.
    pub(crate) fn abort_a_leg(&mut self, wanted: Fault) {
        let legs: Vec<(usize, String)> = self
            .decode
            .iter()
            .enumerate()
            .flat_map(|(d, host)| host.open_in(wanted).map(move |id| (d, id)))
            .collect();
        if legs.is_empty() {
            return;
        }
        let at = self.rng.index(legs.len());
        let (d, id) = legs[at].clone();
        self.mail_decode(d, DecodeMail::Abort(id));
    }
}
