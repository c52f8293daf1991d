//! Faults, when they are due.

use std::time::Instant;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::{Fault, Kind, Role, Router, ToEngine};
use crate::lab::fault::When;

/// A stopped process that goes on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resume {
    at: Instant,
    engine: usize,
    generation: u64,
    tp: Option<u32>,
}

impl Router<'_> {
    pub(super) fn fire_due_faults(&mut self) -> Result<()> {
        let share = self.started as f64 / self.plan.requests as f64;
        let elapsed = self.begun.elapsed();
        let (due, later) = std::mem::take(&mut self.faults)
            .into_iter()
            .partition(|fault| match fault.when {
                // A fault at 0 is there before the first request.
                When::Share(at) => share >= at,
                When::After(at) => elapsed >= at,
            });
        self.faults = later;
        for fault in Vec::into_iter(due) {
            self.fire(&fault)
                .with_context(|| format!("--fault {fault}"))?;
        }
        Ok(())
    }

    fn fire(&mut self, fault: &Fault) -> Result<()> {
        self.broken |= fault.kind.may_fail_requests();
        self.progress.say(&format!("fault {fault}"));
        let named: Vec<usize> = (0..self.cluster.engines.len())
            .filter(|index| self.cluster.engines[*index].is_named_by(fault))
            .collect();
        for index in named {
            let engine = &self.cluster.engines[index];
            match fault.kind {
                Kind::Kill => match fault.tp {
                    // The engine ends when it misses its rank, and the router when it misses the
                    // engine.
                    Some(_) => engine.signal(fault.tp, Signal::KILL),
                    None => self.lose(index),
                },
                Kind::Stop(time) => {
                    engine.signal(fault.tp, Signal::STOP);
                    self.resumes.push(Resume {
                        at: Instant::now() + time,
                        engine: index,
                        generation: engine.generation,
                        tp: fault.tp,
                    });
                }
                Kind::Restart => {
                    self.lose(index);
                    self.cluster.spawn(index)?;
                }
                Kind::Slow(bytes_per_s) => engine.tell(ToEngine::Slow {
                    tp: fault.tp,
                    bytes_per_s,
                }),
                Kind::Corrupt => engine.tell(ToEngine::Corrupt { tp: fault.tp }),
                Kind::DropAcks => self.drop_acks(index),
                Kind::Abort => self.abort_all(index),
            }
        }
        Ok(())
    }

    fn drop_acks(&self, index: usize) {
        let engine = &self.cluster.engines[index];
        match (engine.role, &engine.relay) {
            (Role::Prefill, Some(relay)) => relay.lose(|losses| losses.of_all = true),
            (Role::Prefill, None) => {}
            (Role::Decode, _) => {
                for relay in self.cluster.engines.iter().filter_map(|e| e.relay.as_ref()) {
                    relay.lose(|losses| {
                        losses.of.insert(engine.id().to_owned());
                    });
                }
            }
        }
    }

    fn abort_all(&mut self, index: usize) {
        for (request, state) in &mut self.in_flight {
            if state.engine == index && !state.aborted {
                state.aborted = true;
                self.cluster.engines[index].tell(ToEngine::Abort { request: *request });
            }
        }
    }

    pub(super) fn resume_due(&mut self) {
        let now = Instant::now();
        let (due, later): (Vec<Resume>, Vec<Resume>) =
            self.resumes.iter().partition(|resume| resume.at <= now);
        self.resumes = later;
        for resume in due {
            let engine = &self.cluster.engines[resume.engine];
            if engine.generation == resume.generation {
                engine.signal(resume.tp, Signal::CONT);
            }
        }
    }
}
