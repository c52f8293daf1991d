//! Who waits for a slot, in which order.

use std::collections::{BTreeMap, HashMap};

/// Requests of one lane want the same workers; those of two lanes never do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lane(pub(super) u64);

impl Lane {
    /// That of requests which no worker can serve.
    pub const NOBODYS: Self = Self(0);
}

/// Whether it is a request's turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// Somebody stands before it.
    Waits,
    /// Nobody does.
    Next,
    /// Those of these lanes do, for their own workers: it is next for any other worker.
    Beside(Vec<Lane>),
}

/// Which roles a request wants a slot of, all at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wants {
    /// A prefill slot.
    pub prefill: bool,
    /// A decode slot.
    pub decode: bool,
    /// Of which workers; without a lane it may be any, and it stands in all lanes at once.
    pub lane: Option<Lane>,
}

impl Wants {
    /// Whether both may want the same slot.
    #[cfg(test)]
    fn meets(self, other: Self) -> bool {
        let apart = matches!((self.lane, other.lane), (Some(own), Some(other)) if own != other);
        !apart && self.any_of(other)
    }

    fn any_of(self, other: Self) -> bool {
        (self.prefill && other.prefill) || (self.decode && other.decode)
    }

    fn and(self, other: Self) -> Self {
        Self {
            prefill: self.prefill || other.prefill,
            decode: self.decode || other.decode,
            lane: None,
        }
    }

    const NONE: Self = Self {
        prefill: false,
        decode: false,
        lane: None,
    };
}

/// The line is as long as it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full")]
pub struct Full;

/// A bounded line, first come, first served: who wants a role that an earlier one of its lane waits
/// for stands behind it, also where there would be room. Otherwise those who want less would starve
/// those who want more.
#[derive(Debug)]
pub struct Line {
    /// By number, which is the order of service.
    waiting: BTreeMap<u64, Wants>,
    next: u64,
    max: usize,
}

impl Line {
    /// A line for at most `max`.
    pub fn new(max: usize) -> Self {
        Self {
            waiting: BTreeMap::new(),
            next: 0,
            max,
        }
    }

    /// Takes at most `max` from here on. Who has a place keeps it.
    pub fn set_max(&mut self, max: usize) {
        self.max = max;
    }

    /// A number behind all those given before. It is kept for all that a request waits for: a leg
    /// that is sent again stands before what came later.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether somebody before `number` wants any of `wants`. Who is of no lane is served by the
    /// first lane in which nobody does: it stands in each at its number, neither behind a burst of
    /// one model nor in front of what others ask for.
    pub fn turn(&self, number: u64, wants: Wants) -> Turn {
        let mut before = Vec::new();
        for (_, known) in self.waiting.range(..number) {
            if !known.any_of(wants) {
                continue;
            }
            match (known.lane, wants.lane) {
                (None, _) => return Turn::Waits,
                (Some(lane), Some(own)) if lane == own => return Turn::Waits,
                (Some(_), Some(_)) => {}
                (Some(lane), None) if before.contains(&lane) => {}
                (Some(lane), None) => before.push(lane),
            }
        }
        match before.is_empty() {
            true => Turn::Next,
            false => Turn::Beside(before),
        }
    }

    /// Takes a place. `others` wait elsewhere and count against the length. A lane has at most three
    /// quarters of it: what is left is for the others.
    ///
    /// # Errors
    /// [`Full`].
    pub fn enter(&mut self, number: u64, wants: Wants, others: usize) -> Result<(), Full> {
        if self.waiting.len() + others >= self.max {
            return Err(Full);
        }
        // Counted only where it may be too long.
        let lane_max = self.max - self.max / 4;
        if wants.lane.is_some() && self.waiting.len() >= lane_max {
            let of_lane = self
                .waiting
                .values()
                .filter(|known| known.lane == wants.lane);
            if of_lane.count() >= lane_max {
                return Err(Full);
            }
        }
        self.waiting.insert(number, wants);
        Ok(())
    }

    /// Gives a place up, served or not.
    pub fn leave(&mut self, number: u64) {
        self.waiting.remove(&number);
    }

    /// Those who do not wait for their turn: who may be served when room comes.
    pub fn heads(&self) -> Vec<u64> {
        let mut heads = Vec::new();
        // By those in front: of no lane, and of each.
        let mut common = Wants::NONE;
        let mut lanes: HashMap<Lane, Wants> = HashMap::new();
        for (number, wants) in &self.waiting {
            if common.prefill && common.decode {
                break;
            }
            let in_front = match wants.lane {
                None => common,
                Some(lane) => {
                    let own = lanes.entry(lane).or_insert(Wants::NONE);
                    let in_front = common.and(*own);
                    *own = own.and(*wants);
                    in_front
                }
            };
            if !in_front.any_of(*wants) {
                heads.push(*number);
            }
            if wants.lane.is_none() {
                common = common.and(*wants);
            }
        }
        heads
    }
}

#[cfg(test)]
mod tests;
