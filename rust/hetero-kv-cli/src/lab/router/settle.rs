//! After the last request: waits until nothing is held, then looks at every byte once more.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Event, FromEngine, PATIENCE, Router, State, TICK, ToEngine};

/// Between two looks at the engines' figures.
const LOOK: Duration = Duration::from_millis(100);

impl Router<'_> {
    /// Reads `blocks_held` on living engines after the last release or lease end.
    ///
    /// # Errors
    /// The trace cannot be written.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.wait_for_starts();
        while !self.resumes.is_empty() {
            self.resume_due();
            std::thread::sleep(TICK);
        }
        // Claims and lingering transfers have deadlines of their own, below a minute.
        let deadline = Instant::now() + Duration::from_millis(self.plan.lease_ms) + PATIENCE;
        let mut told = Instant::now();
        loop {
            self.read_figures()?;
            let held = u64::from(self.found.blocks_held) + self.found.leases_held;
            let open = self.found.open.0 + self.found.open.1;
            if (held == 0 && open == 0) || Instant::now() > deadline {
                break;
            }
            if told.elapsed() > Duration::from_secs(2) {
                told = Instant::now();
                let text = format!(
                    "waiting for the last releases or lease ends: {} blocks held, {open} open",
                    self.found.blocks_held
                );
                self.progress.say(&text);
            }
            std::thread::sleep(LOOK);
        }
        self.found.resident_after = self.resident();
        self.sweep();
        self.cluster.stop();
        Ok(())
    }

    fn wait_for_starts(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.any(State::Starting) && Instant::now() < deadline {
            if let Some((index, event)) = self.cluster.next_event(TICK)
                && let Err(error) = self.handle(index, event)
            {
                self.found.violations.push(format!("{error:#}"));
                self.cluster.kill(index);
            }
        }
    }

    fn any(&self, state: State) -> bool {
        self.cluster
            .engines
            .iter()
            .any(|engine| engine.state == state)
    }

    fn read_figures(&mut self) -> Result<()> {
        let mut waiting = self.ask_all(&ToEngine::Figures);
        let found = &mut self.found;
        (found.blocks_held, found.leases_held, found.open) = (0, 0, (0, 0));
        found.leases.clear();
        let mut breaches = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        while waiting > 0 {
            match self
                .cluster
                .next_event(deadline.saturating_duration_since(Instant::now()))
            {
                Some((index, Event::Message(FromEngine::Figures(figures)))) => {
                    waiting -= 1;
                    self.found.blocks_held += figures.blocks_held;
                    self.found.leases_held += figures.leases_alive;
                    self.found.open.0 += figures.open.0;
                    self.found.open.1 += figures.open.1;
                    for (name, count) in figures.leases {
                        *self.found.leases.entry(name).or_default() += count;
                    }
                    let id = self.cluster.engines[index].id();
                    breaches.extend(
                        figures
                            .violations
                            .iter()
                            .map(|text| format!("{id}: {text}")),
                    );
                    if figures.unquiesced > 0 {
                        breaches.push(format!("{id}: {} loads never quiesced", figures.unquiesced));
                    }
                }
                Some((index, Event::Message(FromEngine::Acknowledged(transfers)))) => {
                    self.acknowledged(index, &transfers)?;
                }
                Some((_, Event::Message(_))) => {}
                Some((index, Event::Gone)) => {
                    waiting -= 1;
                    self.lose(index);
                }
                None => {
                    breaches.push("an engine does not answer".into());
                    break;
                }
            }
        }
        self.found.breaches = breaches;
        Ok(())
    }

    fn sweep(&mut self) {
        let mut waiting = self.ask_all(&ToEngine::Sweep);
        let deadline =
            Instant::now() + PATIENCE + Duration::from_secs(self.plan.memory_bytes >> 28);
        while waiting > 0 {
            match self
                .cluster
                .next_event(deadline.saturating_duration_since(Instant::now()))
            {
                Some((_, Event::Message(FromEngine::Swept { mismatched_bytes }))) => {
                    waiting -= 1;
                    self.found.bytes_mismatched += mismatched_bytes;
                }
                Some((_, Event::Message(_))) => {}
                Some((index, Event::Gone)) => {
                    waiting -= 1;
                    self.lose(index);
                }
                None => {
                    self.found
                        .breaches
                        .push("an engine does not sweep its memory".into());
                    break;
                }
            }
        }
    }

    /// How many answers will come.
    fn ask_all(&self, question: &ToEngine) -> usize {
        let alive = self.cluster.engines.iter();
        alive
            .filter(|engine| engine.state == State::Alive)
            .map(|engine| engine.tell(question.clone()))
            .count()
    }
}
