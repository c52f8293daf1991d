//! Which instances a leg may go to.

use super::super::{InstanceIndex, KindSet};
use super::instance::Instance;
use super::span::Span;
use super::{Ask, NoSlot, Pool};

/// For whom the round says which slots may be chosen. Most requests may go where the one before
/// might, and instances are judged again when one has changed, or time brings a change.
#[derive(Debug)]
pub(super) struct Reach {
    /// Empty where it says so for nobody.
    span: Span,
    avoid: Vec<InstanceIndex>,
    shun: Vec<InstanceIndex>,
    /// Of all kinds, where not.
    is_among: bool,
    among: KindSet,
    marks: Vec<Mark>,
}

impl Default for Reach {
    fn default() -> Self {
        Self {
            span: Span::NONE,
            avoid: Vec::new(),
            shun: Vec::new(),
            is_among: false,
            among: KindSet::default(),
            marks: Vec::new(),
        }
    }
}

/// What is found of one instance.
#[derive(Debug, Clone, Copy)]
struct Mark {
    /// Of its health, where it may take the leg.
    tier: Option<u8>,
    /// Its slots may be chosen.
    open: bool,
}

impl Reach {
    /// An instance has changed.
    pub(super) fn forget(&mut self) {
        self.span = Span::NONE;
    }

    fn serves(&self, ask: &Ask<'_>) -> bool {
        let same_kinds = match ask.among {
            Some(among) => self.is_among && self.among.is_same(among),
            None => !self.is_among,
        };
        self.span.holds(ask.now_ms)
            && same_kinds
            && self.avoid == ask.avoid
            && self.shun == ask.shun
    }

    /// From here on it is for `ask`, and whoever asks the same within `span`.
    fn is_for(&mut self, ask: &Ask<'_>, span: Span) {
        self.span = span;
        self.avoid.clear();
        self.avoid.extend_from_slice(ask.avoid);
        self.shun.clear();
        self.shun.extend_from_slice(ask.shun);
        self.is_among = ask.among.is_some();
        if let Some(among) = ask.among {
            self.among.copy(among);
        }
    }
}

impl Pool {
    /// Lets the round say which slots may be chosen for `ask`.
    pub(super) fn bring_reach(&mut self, ask: &Ask<'_>) -> Result<(), NoSlot> {
        if self.reach.serves(ask) {
            return Ok(());
        }
        self.reach.forget();
        let now_ms = ask.now_ms;
        let fits = |known: &Instance| {
            let among = ask.among;
            known.is_routable() && among.is_none_or(|among| among.contains(known.kind))
        };
        let last = ask.avoid.last().map_or(&[][..], std::slice::from_ref);
        let other_than = |avoid: &[InstanceIndex]| {
            let mut fitting = self.instances.iter().filter(|known| fits(known));
            fitting.any(|known| !avoid.contains(&known.index))
        };
        let avoid = [ask.avoid, last]
            .into_iter()
            .find(|avoid| other_than(avoid))
            .unwrap_or_default();
        let usable = |known: &Instance| fits(known) && !avoid.contains(&known.index);
        let mut span = Span::ALL;
        let marks = &mut self.reach.marks;
        marks.clear();
        marks.extend(self.instances.iter().map(|known| {
            let usable = usable(known);
            if let Some(edge_ms) = known.health.edge_ms() {
                span.cut(edge_ms, now_ms);
            }
            Mark {
                tier: usable.then(|| known.health.tier(now_ms)),
                open: false,
            }
        }));
        let tiers = marks.iter().filter_map(|mark| mark.tier);
        let best = tiers.min().ok_or(NoSlot::NoEngine(self.role))?;
        let mut weighs = false;
        for (mark, known) in marks.iter_mut().zip(&self.instances) {
            mark.open = mark.tier == Some(best);
            weighs |= mark.open && !known.weight.is_zero();
        }
        // Those of weight 0 stand in where no other does.
        if weighs {
            for (mark, known) in marks.iter_mut().zip(&self.instances) {
                mark.open &= !known.weight.is_zero();
            }
        }
        if !ask.shun.is_empty() {
            let shunned = |known: &Instance| ask.shun.contains(&known.index);
            let mut open = marks.iter().zip(&self.instances);
            if open.any(|(mark, known)| mark.open && !shunned(known)) {
                for (mark, known) in marks.iter_mut().zip(&self.instances) {
                    mark.open &= !shunned(known);
                }
            }
        }
        let (slots, marks) = (&self.slots, &self.reach.marks);
        self.round.set_reach(|place| marks[slots[place].at].open);
        self.reach.is_for(ask, span);
        Ok(())
    }
}
