//! Who waits for a slot, in which order.

use std::collections::BTreeMap;

/// Which roles a request wants a slot of, all at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wants {
    /// A prefill slot.
    pub prefill: bool,
    /// A decode slot.
    pub decode: bool,
}

impl Wants {
    fn any_of(self, other: Self) -> bool {
        (self.prefill && other.prefill) || (self.decode && other.decode)
    }

    fn and(self, other: Self) -> Self {
        Self {
            prefill: self.prefill || other.prefill,
            decode: self.decode || other.decode,
        }
    }

    const NONE: Self = Self {
        prefill: false,
        decode: false,
    };
    const BOTH: Self = Self {
        prefill: true,
        decode: true,
    };
}

/// The line is as long as it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full")]
pub struct Full;

/// A bounded line, first come, first served: who wants a role that an earlier one waits for stands
/// behind it, also where there would be room. Otherwise those who want less would starve those
/// who want more.
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

    /// Whether nobody before `number` wants any of `wants`.
    pub fn is_next(&self, number: u64, wants: Wants) -> bool {
        let mut earlier = self.waiting.range(..number);
        !earlier.any(|(_, known)| known.any_of(wants))
    }

    /// Takes a place. `others` wait elsewhere and count against the length.
    ///
    /// # Errors
    /// [`Full`].
    pub fn enter(&mut self, number: u64, wants: Wants, others: usize) -> Result<(), Full> {
        if self.waiting.len() + others >= self.max {
            return Err(Full);
        }
        self.waiting.insert(number, wants);
        Ok(())
    }

    /// Gives a place up, served or not.
    pub fn leave(&mut self, number: u64) {
        self.waiting.remove(&number);
    }

    /// Those whom nobody stands before: who may be served when room comes.
    pub fn heads(&self) -> Vec<u64> {
        let mut heads = Vec::new();
        let mut taken = Wants::NONE;
        for (number, wants) in &self.waiting {
            if taken == Wants::BOTH {
                break;
            }
            if !taken.any_of(*wants) {
                heads.push(*number);
            }
            taken = taken.and(*wants);
        }
        heads
    }
}

#[cfg(test)]
mod tests;
