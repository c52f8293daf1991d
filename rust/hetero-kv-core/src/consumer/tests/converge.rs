//! Random lives of many requests with drops, delays, cuts and deaths; then the network heals, and
//! everything comes to rest: no lease, no request, no transfer, every slot free, one report each.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::testing::{
    CONTROL_PORT, Fate, common_fields, identity, lease_times, ms, prompt, secs, transfer,
};
use crate::wire::params::{RemotePrefill, TransferParams};

#[derive(Clone, Debug)]
enum Act {
    /// P finishes a prefill of so many tokens.
    Prefill(u32),
    /// D gets a request under one of the prefills; its prompt may be another.
    Arrive {
        prefill: usize,
        other_prompt: bool,
    },
    /// D gets a request with params that are of no use.
    Garbage,
    /// D's API server rejects a request of one of the prefills.
    Reject(usize),
    /// D's scheduler takes one up, with so many tokens cached here.
    Admit {
        request: usize,
        computed: u32,
    },
    Step,
    /// The workers report one that they were told of.
    Report {
        request: usize,
        failed: bool,
    },
    Finish(usize),
    StepProducers,
    Run(u64),
    Freeze(u64),
    Cut,
    /// P dies and starts anew at the same address.
    Restart,
    /// What the network does to messages from here on, by the lowest digits of a counter.
    Network {
        drop_one_in: usize,
        delay_ms: u64,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let index = 0..32usize;
    prop_oneof![
        4 => (1..200u32).prop_map(Act::Prefill),
        6 => (index.clone(), prop::bool::weighted(0.15))
            .prop_map(|(prefill, other_prompt)| Act::Arrive { prefill, other_prompt }),
        1 => Just(Act::Garbage),
        1 => index.clone().prop_map(Act::Reject),
        8 => (index.clone(), prop_oneof![3 => Just(0), 1 => (0..13u32).prop_map(|n| n * 16)])
            .prop_map(|(request, computed)| Act::Admit { request, computed }),
        8 => Just(Act::Step),
        6 => (index.clone(), prop::bool::weighted(0.2))
            .prop_map(|(request, failed)| Act::Report { request, failed }),
        3 => index.prop_map(Act::Finish),
        3 => Just(Act::StepProducers),
        8 => prop_oneof![0..30u64, 0..400u64, 0..12_000u64].prop_map(Act::Run),
        1 => (0..60_000u64).prop_map(Act::Freeze),
        1 => Just(Act::Cut),
        1 => Just(Act::Restart),
        2 => (2..6usize, 0..300u64)
            .prop_map(|(drop_one_in, delay_ms)| Act::Network { drop_one_in, delay_ms }),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Queued,
    Admitted,
    Finished,
}

struct World {
    pair: Pair,
    prefills: Vec<RemotePrefill>,
    requests: BTreeMap<String, Seen>,
    living: usize,
    next_transfer: u8,
}

impl World {
    fn new() -> Self {
        Self {
            pair: Pair::new(2, 1),
            prefills: Vec::new(),
            requests: BTreeMap::new(),
            living: 0,
            next_transfer: 0,
        }
    }

    fn request(&self, index: usize, seen: Seen) -> Option<String> {
        let fit: Vec<&String> = self
            .requests
            .iter()
            .filter(|(_, state)| **state == seen)
            .map(|(id, _)| id)
            .collect();
        (!fit.is_empty()).then(|| fit[index % fit.len()].clone())
    }

    fn new_request(&mut self) -> String {
        let id = format!("d{:03}", self.requests.len());
        self.requests.insert(id.clone(), Seen::Queued);
        id
    }

    fn prefill(&mut self, tokens: u32) {
        // The test's engine has 64 slots.
        if self.pair.producers[self.living]
            .gauges(self.pair.now)
            .leases_alive
            == 64
        {
            return;
        }
        self.next_transfer += 1;
        let n = self.next_transfer;
        let params = self.pair.prefill_at(
            self.living,
            CONTROL_PORT,
            &format!("p{n}"),
            transfer(n),
            prompt(n.into()),
            tokens,
        );
        self.prefills.push(params);
    }

    fn apply(&mut self, act: Act) {
        match act {
            Act::Prefill(tokens) => self.prefill(tokens),
            Act::Arrive {
                prefill,
                other_prompt,
            } => {
                if self.prefills.is_empty() {
                    return;
                }
                let params = self.prefills[prefill % self.prefills.len()].clone();
                let digest = if other_prompt {
                    prompt(9999)
                } else {
                    params.prompt_digest
                };
                let id = self.new_request();
                self.pair
                    .arrive_as(0, &id, &params, digest, params.num_tokens);
            }
            Act::Garbage => {
                let id = self.new_request();
                let params = TransferParams::parse(r#"{"do_remote_prefill":true}"#);
                let now = self.pair.now;
                self.pair.consumers[0].handle_new_request(now, &id, params, prompt(1), 40);
            }
            Act::Reject(prefill) => {
                if !self.prefills.is_empty() {
                    let params = self.prefills[prefill % self.prefills.len()].clone();
                    let params = Ok(TransferParams::Decode(Box::new(params)));
                    self.pair.consumers[0].handle_rejected(self.pair.now, params);
                }
            }
            Act::Admit { request, computed } => {
                if let Some(id) = self.request(request, Seen::Queued) {
                    self.pair.admit(&id, computed);
                    self.requests.insert(id, Seen::Admitted);
                }
            }
            Act::Step => self.pair.step(),
            Act::Report { request, failed } => self.report(request, failed),
            Act::Finish(request) => {
                let seen = if request % 2 == 0 {
                    Seen::Queued
                } else {
                    Seen::Admitted
                };
                if let Some(id) = self.request(request / 2, seen) {
                    self.pair.finish(&id);
                    self.requests.insert(id, Seen::Finished);
                }
            }
            Act::StepProducers => self.pair.step_producers(),
            Act::Run(time_ms) => self.pair.run(ms(time_ms)),
            Act::Freeze(time_ms) => self.pair.freeze(ms(time_ms)),
            Act::Cut => self.pair.cut(),
            Act::Restart => {
                self.pair.kill_producer(self.living);
                let incarnation = self.pair.producers.len() as u64 + 1;
                self.living = self.pair.add_producer(
                    identity("prefill", incarnation, 2),
                    common_fields(),
                    lease_times(),
                    CONTROL_PORT,
                );
            }
            Act::Network {
                drop_one_in,
                delay_ms,
            } => {
                let mut count = 0;
                self.pair.network(move |_, _| {
                    count += 1;
                    if count % drop_one_in == 0 {
                        Fate::Drop
                    } else if count % 3 == 0 {
                        Fate::Delay(ms(delay_ms))
                    } else if count % 7 == 0 {
                        Fate::Twice
                    } else {
                        Fate::Deliver
                    }
                });
            }
        }
    }

    fn report(&mut self, request: usize, failed: bool) {
        let owed: Vec<(String, bool)> = self.pair.workers[0]
            .unreported()
            .map(|(id, job)| {
                let late = job
                    .deadline
                    .is_none_or(|deadline| deadline <= self.pair.now);
                (id.clone(), late || job.cancel.is_some())
            })
            .collect();
        if !owed.is_empty() {
            let (id, must_fail) = &owed[request % owed.len()];
            self.pair.report(id, failed || *must_fail);
        }
    }

    /// The network heals, vLLM takes up and finishes what is left, time passes.
    fn rest(mut self) {
        self.pair.heal();
        self.pair.run(secs(120));
        while let Some(id) = self.request(0, Seen::Queued) {
            self.pair.admit(&id, 0);
            self.requests.insert(id, Seen::Admitted);
        }
        for _ in 0..3 {
            self.pair.run(secs(40));
            self.pair.step();
            while self.pair.workers[0].unreported().next().is_some() {
                self.report(0, false);
            }
        }
        while let Some(id) = self.request(0, Seen::Admitted) {
            self.pair.finish(&id);
            self.requests.insert(id, Seen::Finished);
        }
        self.pair.run(secs(120));
        self.pair.step();
        assert_nothing_left(&mut self.pair);
        // Every slot can be used again.
        for n in 0..64 {
            self.next_transfer = 100 + n;
            self.prefill(1);
        }
        assert_eq!(
            self.pair.producers[self.living]
                .gauges(self.pair.now)
                .leases_alive,
            64
        );
        // And the pair works.
        self.next_transfer = 200;
        self.pair.run(secs(40));
        self.pair.step_producers();
        self.prefill(40);
        let params = self.prefills[self.prefills.len() - 1].clone();
        self.pair.arrive("last", &params);
        self.pair.run(ms(100));
        assert_eq!(self.pair.admit("last", 0), 39);
        self.pair.step();
        assert!(self.pair.workers[0].job("last").load.is_some());
        self.pair.report("last", false);
        self.pair.finish("last");
        self.pair.run(secs(1));
        assert_nothing_left(&mut self.pair);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_all_comes_to_rest(acts in prop::collection::vec(act(), 1..90)) {
        let mut world = World::new();
        for act in acts {
            world.apply(act);
        }
        world.rest();
    }
}

#[test]
fn a_scripted_storm_comes_to_rest() {
    let mut world = World::new();
    for round in 0..12usize {
        for act in [
            Act::Prefill(40),
            Act::Prefill(100),
            Act::Arrive {
                prefill: 2 * round,
                other_prompt: false,
            },
            Act::Arrive {
                prefill: 2 * round + 1,
                other_prompt: false,
            },
            Act::Arrive {
                prefill: 2 * round,
                other_prompt: round % 3 == 0,
            },
            Act::Network {
                drop_one_in: 2 + round % 4,
                delay_ms: 50,
            },
            Act::Run(300),
            Act::Admit {
                request: 0,
                computed: 0,
            },
            Act::Admit {
                request: 1,
                computed: 16,
            },
            Act::Step,
            if round % 2 == 0 {
                Act::Cut
            } else {
                Act::Run(5_000)
            },
            Act::Report {
                request: round,
                failed: round % 4 == 0,
            },
            Act::Finish(round),
            if round == 7 {
                Act::Restart
            } else {
                Act::StepProducers
            },
            Act::Run(2_000),
        ] {
            world.apply(act);
        }
    }
    world.rest();
}
