//! The router of a lab: sends requests, carries params, breaks things on time, and waits until
//! nothing is held any more.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::PATIENCE;
use super::cluster::{Cluster, Event, State};
use super::config::Plan;
use super::fault::{Fault, Kind, Role};
use super::host;
use super::ipc::{FromEngine, Load, Outcome, Prompt, Reason, ToEngine};
use super::model::mix;
use super::report::{Found, Progress};
use super::trace::Trace;

mod breaking;
mod choice;
mod settle;

use breaking::Resume;

/// Between looks at timers when nothing happens.
const TICK: Duration = Duration::from_millis(50);
/// Between looks at the processes' memory.
const MEMORY_LOOK: Duration = Duration::from_millis(500);
/// Runs the plan to its end.
///
/// # Errors
/// Processes that do not start, or a pair that the engines refuse.
pub(super) fn run(plan: &Plan) -> Result<Found> {
    let cpu_before = host::cpu_seconds();
    let trace = match &plan.trace {
        Some(path) => Some(Trace::create(path, !plan.faults.is_empty())?),
        None => None,
    };
    let cluster = Cluster::start(plan)?;
    let mut router = Router::new(plan, cluster, trace);
    router.serve()?;
    router.settle()?;
    let Router {
        mut found,
        cluster,
        trace,
        ..
    } = router;
    found.agreement = trace.map(Trace::finish).transpose()?;
    // Waits for every process, whose time counts from then on.
    drop(cluster);
    found.cpu_s = host::cpu_seconds() - cpu_before;
    Ok(found)
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The engine it is at.
    engine: usize,
    prefill: usize,
    prompt: Prompt,
    aborted: bool,
}

struct Router<'a> {
    plan: &'a Plan,
    cluster: Cluster,
    random: u64,
    in_flight: BTreeMap<u64, InFlight>,
    /// Prefilled while every decode engine was starting.
    waiting: Vec<(u64, Result<String, String>)>,
    faults: Vec<Fault>,
    /// Whether a fault that may fail requests has come.
    broken: bool,
    resumes: Vec<Resume>,
    started: u64,
    ended: u64,
    begun: Instant,
    last_end: Instant,
    /// When memory was looked at last.
    looked: Instant,
    found: Found,
    trace: Option<Trace>,
    progress: Progress,
}

impl<'a> Router<'a> {
    fn new(plan: &'a Plan, cluster: Cluster, trace: Option<Trace>) -> Self {
        let now = Instant::now();
        let mut found = Found::default();
        for engine in &cluster.engines {
            if engine.role == Role::Prefill {
                for tp in 0..engine.shape.tp {
                    let source = (engine.instance, engine.dp, tp);
                    found.reads_by_source.insert(source, (0, 0));
                }
            }
        }
        Self {
            plan,
            cluster,
            random: mix(plan.seed),
            in_flight: BTreeMap::new(),
            waiting: Vec::new(),
            faults: plan.faults.clone(),
            broken: false,
            resumes: Vec::new(),
            started: 0,
            ended: 0,
            begun: now,
            last_end: now,
            looked: now,
            found,
            trace,
            progress: Progress::new(now),
        }
    }

    fn serve(&mut self) -> Result<()> {
        let longest_stop = self
            .plan
            .faults
            .iter()
            .filter_map(|fault| match fault.kind {
                Kind::Stop(time) => Some(time),
                Kind::Kill
                | Kind::Restart
                | Kind::Slow(_)
                | Kind::Corrupt
                | Kind::DropAcks
                | Kind::Abort => None,
            });
        // A load may take two minutes by the engines' own settings.
        let patience = PATIENCE * 3
            + Duration::from_millis(self.plan.lease_ms)
            + longest_stop.max().unwrap_or_default();
        while self.ended < self.plan.requests {
            self.fire_due_faults()?;
            self.resume_due();
            self.start_requests();
            for (request, params) in std::mem::take(&mut self.waiting) {
                self.prefilled(request, params)?;
            }
            if let Some((index, event)) = self.cluster.next_event(TICK) {
                self.handle(index, event)?;
            }
            self.progress
                .show(self.plan, &self.found, self.ended, self.in_flight.len());
            self.watch_memory();
            if self.last_end.elapsed() > patience {
                let reason = Reason {
                    label: "never_ended".into(),
                    field: String::new(),
                    text: format!("no request has ended for {patience:?}"),
                };
                for request in self.in_flight.keys().copied().collect::<Vec<_>>() {
                    self.found.never_ended += 1;
                    self.end(request, &Outcome::Failed(reason.clone()));
                }
                self.fail_rest(&reason);
                break;
            }
        }
        self.found.elapsed = self.last_end.duration_since(self.begun);
        self.found.not_due = self.faults.iter().map(ToString::to_string).collect();
        Ok(())
    }

    fn start_requests(&mut self) {
        while self.in_flight.len() < self.plan.concurrency && self.started < self.plan.requests {
            for role in [Role::Prefill, Role::Decode] {
                if !self.comes_back(role) {
                    self.fail_rest(&lost(role));
                    return;
                }
            }
            let Some(engine) = self.choose(Role::Prefill) else {
                return;
            };
            let request = self.started;
            self.started += 1;
            let (low, high) = self.plan.prompt_tokens;
            let tokens = low + (self.draw() % u64::from(high - low + 1)) as u32;
            let prompt = Prompt {
                salt: self.draw(),
                tokens,
            };
            let transfer_id = self.transfer_id(engine);
            let started = InFlight {
                engine,
                prefill: engine,
                prompt,
                aborted: false,
            };
            self.in_flight.insert(request, started);
            self.cluster.engines[engine].in_flight += 1;
            self.cluster.engines[engine].tell(ToEngine::Prefill {
                request,
                prompt,
                transfer_id,
            });
        }
    }

    /// Whether there is, or will be, an engine of this side.
    fn comes_back(&self, role: Role) -> bool {
        self.cluster
            .engines
            .iter()
            .any(|engine| engine.role == role && engine.state != State::Dead)
    }

    /// Requests not yet sent fail: there is nobody to send them to.
    fn fail_rest(&mut self, reason: &Reason) {
        while self.started < self.plan.requests {
            self.started += 1;
            self.count(&Outcome::Failed(reason.clone()));
        }
    }

    fn handle(&mut self, index: usize, event: Event) -> Result<()> {
        let message = match event {
            Event::Message(message) => message,
            Event::Gone => {
                self.lose(index);
                return Ok(());
            }
        };
        match message {
            FromEngine::Prefilled { request, params } => self.prefilled(request, params),
            FromEngine::PrefillAborted { request } => {
                self.end(request, &Outcome::Cancelled);
                Ok(())
            }
            FromEngine::Decoded {
                request,
                outcome,
                load,
            } => self.decoded(request, &outcome, &load),
            FromEngine::Started { .. } | FromEngine::StartFailed(_) => {
                self.cluster.started(index, message)
            }
            FromEngine::Acknowledged(transfers) => self.acknowledged(index, &transfers),
            FromEngine::Figures(_) | FromEngine::Swept { .. } => Ok(()),
        }
    }

    fn prefilled(&mut self, request: u64, params: Result<String, String>) -> Result<()> {
        let Some(mut state) = self.in_flight.get(&request).copied() else {
            return Ok(());
        };
        let Some(decode) = self.choose(Role::Decode) else {
            if self.comes_back(Role::Decode) {
                self.waiting.push((request, params));
            } else {
                // Its lease runs out.
                self.end(request, &Outcome::Failed(lost(Role::Decode)));
            }
            return Ok(());
        };
        self.cluster.engines[state.engine].in_flight -= 1;
        self.cluster.engines[decode].in_flight += 1;
        state.engine = decode;
        self.in_flight.insert(request, state);
        let params = match params {
            Ok(params) => match &self.cluster.engines[state.prefill].relay {
                Some(relay) => through(&params, relay.port)?,
                None => params,
            },
            Err(refused) => {
                self.found.note_refused(&refused);
                "null".to_owned()
            }
        };
        let engine = &self.cluster.engines[decode];
        engine.tell(ToEngine::Decode {
            request,
            prompt: state.prompt,
            params,
        });
        if state.aborted {
            // The client left while the prefill finished: only decode can give the lease back.
            engine.tell(ToEngine::Abort { request });
        }
        Ok(())
    }

    fn decoded(&mut self, request: u64, outcome: &Outcome, load: &Load) -> Result<()> {
        let ids: BTreeMap<&str, (u32, u32)> = self
            .cluster
            .engines
            .iter()
            .map(|engine| (engine.id(), (engine.instance, engine.dp)))
            .collect();
        for read in &load.reads {
            if let Some((instance, dp)) = ids.get(read.engine.as_str()) {
                let source = (*instance, *dp, read.tp);
                let (reads, bytes) = self.found.reads_by_source.entry(source).or_default();
                *reads += 1;
                *bytes += read.bytes;
            }
            self.found.bytes_moved += read.bytes;
        }
        if let Some(state) = self.in_flight.get(&request) {
            let reader = self.cluster.engines[state.engine].place();
            self.found.transports.note(reader, &load.reads);
        }
        if let (Some(trace), Some(state)) = (&mut self.trace, self.in_flight.get(&request)) {
            let reader = self.cluster.engines[state.engine].place();
            trace.read(request, outcome.label(), reader, &load.reads, &self.cluster)?;
        }
        self.found.bytes_mismatched += load.mismatched_bytes;
        for span in &load.spans {
            self.found.reading.add(*span);
        }
        if let (Outcome::Ok, Some(elapsed)) = (outcome, load.elapsed()) {
            self.found.bytes_planned += load.planned_bytes;
            self.found.bytes_loaded += load.reads.iter().map(|read| read.bytes).sum::<u64>();
            self.found.note_load(elapsed);
        }
        if let Outcome::Failed(reason) | Outcome::Recomputed(Some(reason)) = outcome
            && reason.label == "pair_refused"
            && !self.broken
        {
            bail!("{}: {}", reason.field, reason.text);
        }
        self.end(request, outcome);
        Ok(())
    }

    /// What the prefill engine at `index` heard.
    fn acknowledged(&mut self, index: usize, transfers: &[String]) -> Result<()> {
        let engine = self.cluster.engines[index].place();
        if let Some(trace) = &mut self.trace {
            for transfer_id in transfers {
                trace.acknowledged(engine, transfer_id)?;
            }
        }
        Ok(())
    }

    fn end(&mut self, request: u64, outcome: &Outcome) {
        if let Some(state) = self.in_flight.remove(&request) {
            self.cluster.engines[state.engine].in_flight -= 1;
            self.count(outcome);
        }
    }

    fn count(&mut self, outcome: &Outcome) {
        self.ended += 1;
        self.last_end = Instant::now();
        if let Outcome::Failed(_) = outcome
            && !self.broken
        {
            self.found.unexplained += 1;
        }
        self.found.count(outcome);
    }

    /// An engine is gone, with what was at it.
    fn lose(&mut self, index: usize) {
        self.cluster.kill(index);
        let role = self.cluster.engines[index].role;
        if !self.broken {
            let id = self.cluster.engines[index].id();
            self.found
                .violations
                .push(format!("engine {id} ended by itself"));
        }
        let there: Vec<(u64, bool)> = self
            .in_flight
            .iter()
            .filter(|(_, state)| state.engine == index)
            .map(|(request, state)| (*request, state.aborted))
            .collect();
        for (request, aborted) in there {
            match aborted {
                true => self.end(request, &Outcome::Cancelled),
                false => self.end(request, &Outcome::Failed(lost(role))),
            }
        }
    }

    /// From the first quarter on, the size of each process when it is first seen: one that starts
    /// later has touched all its KV before it serves.
    fn watch_memory(&mut self) {
        if self.ended * 4 < self.plan.requests || self.looked.elapsed() < MEMORY_LOOK {
            return;
        }
        self.looked = Instant::now();
        for (process, bytes) in self.resident() {
            self.found.resident_before.entry(process).or_insert(bytes);
        }
    }

    fn resident(&self) -> BTreeMap<(u32, String), u64> {
        let own = (std::process::id(), "this process".to_owned());
        self.cluster
            .engines
            .iter()
            .flat_map(|engine| engine.processes())
            .chain([own])
            .filter_map(|process| {
                let bytes = host::resident_bytes(process.0)?;
                Some((process, bytes))
            })
            .collect()
    }
}

fn lost(role: Role) -> Reason {
    Reason {
        label: "engine_lost".into(),
        field: String::new(),
        text: format!("the {role} engine of the request is gone, or none is left"),
    }
}

/// Params that lead through a relay instead, as an address translation would.
fn through(params: &str, port: u16) -> Result<String> {
    let mut json: serde_json::Value = serde_json::from_str(params).context("prefill's params")?;
    json["remote_port"] = port.into();
    Ok(json.to_string())
}
