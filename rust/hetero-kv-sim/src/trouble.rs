//! What goes wrong at moments of its own, and the end of it.

use std::time::Duration;

use hetero_kv_core::time::Time;

use crate::book::Invariant;
use crate::decode::{DecodeHost, DecodeMail, Stage};
use crate::fault::Fault;
use crate::world::{Event, Host, World};

impl DecodeHost {
    /// Requests in the stage that this abort is for.
    pub(crate) fn open_in(&self, abort: Fault) -> impl Iterator<Item = String> {
        let mail = self
            .engine
            .iter()
            .flat_map(|engine| engine.mail.iter())
            .filter_map(move |mail| match mail {
                DecodeMail::Add(id) if abort == Fault::AbortQueued => Some(id.clone()),
                DecodeMail::Add(_) | DecodeMail::Abort(_) | DecodeMail::Rejected(_) => None,
            });
        self.engine
            .iter()
            .flat_map(|engine| engine.requests.iter())
            .filter(move |(_, request)| {
                !request.aborted
                    && match request.stage {
                        Stage::Queued => abort == Fault::AbortQueued,
                        Stage::Loading { .. } => abort == Fault::AbortLoading,
                        Stage::Loaded | Stage::Running { .. } => abort == Fault::AbortRunning,
                    }
            })
            .map(|(id, _)| id.clone())
            .chain(mail)
    }
}

impl World {
    /// One thing goes wrong, if the scenario has any that come by themselves.
    pub(crate) fn trouble(&mut self) {
        let possible: Vec<Fault> = Fault::ALL
            .iter()
            .copied()
            .filter(|fault| self.book.may(*fault))
            .collect();
        if possible.is_empty() {
            return;
        }
        let fault = self.rng.pick(&possible);
        // Somebody to leave is not there at any moment.
        let soon = matches!(fault, Fault::AbortInPrefill | Fault::AbortQueued);
        let again = if soon {
            self.millis(5, 60)
        } else {
            self.millis(60, 700)
        };
        self.after(again, Event::Trouble);
        let p = self.rng.index(self.prefill.len());
        let d = self.rng.index(self.decode.len());
        // A run in which everything is dead most of the time shows little.
        let often = self.book.may(Fault::ReadStrays);
        let rarely = self.rng.permille(if often { 500 } else { 150 });
        match fault {
            Fault::ConnectionBreaks => {
                let links: Vec<u64> = self.links.keys().copied().collect();
                if !links.is_empty() {
                    self.book.happened(fault);
                    let link = self.rng.pick(&links);
                    let arrives = self.rng.permille(500);
                    self.break_link(link, arrives);
                }
            }
            Fault::Partition if rarely => {
                self.book.happened(fault);
                let until = self.now + self.millis(200, 5000);
                self.partitions.insert((p, d), until);
            }
            Fault::PrefillKilled if rarely && self.prefill[p].engine.is_some() => {
                self.book.happened(fault);
                self.kill(Host::Prefill(p), true);
            }
            Fault::PrefillVanishes if rarely && self.prefill[p].engine.is_some() => {
                self.book.happened(fault);
                self.kill(Host::Prefill(p), false);
            }
            Fault::DecodeKilled if rarely && self.decode[d].engine.is_some() => {
                self.book.happened(fault);
                self.kill(Host::Decode(d), true);
            }
            Fault::RankKilled if rarely => {
                if let Some(engine) = &mut self.prefill[p].engine {
                    let rank = self.rng.index(engine.ranks.len());
                    engine.ranks[rank].alive = false;
                    let incarnation = engine.identity.incarnation.0;
                    self.book.happened(fault);
                    let end = self.millis(50, 1500);
                    self.after(end, Event::KillPrefill(p, incarnation));
                }
            }
            Fault::Pause if rarely => {
                self.book.happened(fault);
                let length = self.millis(500, 5000);
                // Pauses may meet.
                self.slack += length + Duration::from_millis(50);
                let until = self.now + length;
                if self.rng.permille(500) {
                    self.prefill[p].paused_until = until;
                } else {
                    self.decode[d].paused_until = until;
                }
            }
            Fault::CacheReset => {
                if self.prefill[p].has_leases() {
                    self.book.happened(fault);
                    self.reset_cache(p);
                }
            }
            Fault::AbortInPrefill => self.abort_a_prefill(),
            Fault::AbortQueued | Fault::AbortLoading | Fault::AbortRunning => {
                self.abort_a_leg(fault);
            }
            // Those that are too rare here, and those that come with what they befall.
            Fault::Partition
            | Fault::PrefillKilled
            | Fault::PrefillVanishes
            | Fault::DecodeKilled
            | Fault::RankKilled
            | Fault::Pause
            | Fault::FrameDelayed
            | Fault::FrameTwice
            | Fault::AckSplit
            | Fault::DialRefused
            | Fault::ReadSlow
            | Fault::ReadStalls
            | Fault::ReadFails
            | Fault::DataBreaks
            | Fault::QuiesceSlow
            | Fault::ReadStrays
            | Fault::Restart
            | Fault::StepLong
            | Fault::ClockDrift
            | Fault::Preemption
            | Fault::DecodeLegLost
            | Fault::DecodeLegLate
            | Fault::DecodeLegTwice
            | Fault::DecodeLegElsewhere
            | Fault::ParamsMixedUp
            | Fault::ParamsChanged
            | Fault::TransferIdTwice
            | Fault::Rejected => {}
        }
    }

    pub(crate) fn kill(&mut self, host: Host, seen: bool) {
        self.book.trace(|| format!("{host:?} ends, seen: {seen}"));
        match host {
            Host::Prefill(p) => self.kill_prefill(p, seen),
            Host::Decode(d) => self.kill_decode(d),
        }
        if self.book.may(Fault::Restart) {
            self.book.happened(Fault::Restart);
            let back = self.millis(50, 2500);
            self.after(back, Event::Start(host));
        }
    }

    /// Nothing goes wrong from here on; what is under way comes to its end.
    pub(crate) fn heal(&mut self) {
        self.book.trace(|| "trouble is over".into());
        self.book.heal();
        for until in self.partitions.values_mut() {
            *until = (*until).min(self.now);
        }
    }

    /// Trouble is over for a long while: everything has ended, and nothing is held.
    pub(crate) fn check_converged(&mut self) {
        let mut left: Vec<String> = Vec::new();
        for (p, host) in self.prefill.iter().enumerate() {
            let Some(engine) = &host.engine else {
                continue;
            };
            let leases = engine.producer.gauges(Time::ZERO).leases_alive;
            if leases > 0 || !engine.held.is_empty() || engine.pool.taken() > 0 {
                left.push(format!(
                    "prefill {p}: {leases} leases, holds {:?}, {} blocks taken",
                    engine.held.keys(),
                    engine.pool.taken()
                ));
            }
        }
        for (d, host) in self.decode.iter().enumerate() {
            let Some(engine) = &host.engine else {
                continue;
            };
            let open = engine.consumer.open();
            if open != (0, 0) || !engine.requests.is_empty() || engine.pool.taken() > 0 {
                left.push(format!(
                    "decode {d}: {open:?} requests and transfers open, {:?}, {} blocks taken",
                    engine.requests,
                    engine.pool.taken()
                ));
            }
        }
        if !self.ops.is_empty() {
            left.push(format!("{} reads in flight", self.ops.len()));
        }
        left.extend(
            self.legs
                .iter()
                .filter(|(_, leg)| leg.outcome.is_none())
                .map(|(id, _)| format!("{id} has not ended")),
        );
        left.extend(
            self.clients
                .iter()
                .filter(|client| client.open())
                .map(|client| format!("prompt {} is still in prefill", client.prompt)),
        );
        if !left.is_empty() {
            self.book.broken(Invariant::NotConverged, left.join("; "));
        }
    }
}
