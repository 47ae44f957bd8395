//! One head of a replay, taken through its steps as the live cache takes it.

use super::SimError;
use super::outcome::HeadOutcome;
use crate::residency::{Replacement, Scores};
use crate::table::{HeadTable, Phase, Place, Tally};
use crate::trace::{Mark, Shape, Stream};

#[derive(Debug)]
pub(super) struct Head<R> {
    pub table: HeadTable<R>,
    pub places: Vec<Place>,
    pub outcome: HeadOutcome,
    next_slot: u32,
    page_tokens: usize,
}

impl<R: Replacement> Head<R> {
    pub(super) fn new(shape: &Shape) -> Self {
        Self::with_order(shape, R::new())
    }

    pub(super) fn with_order(shape: &Shape, order: R) -> Self {
        Head {
            table: HeadTable::with_order(order),
            places: Vec::new(),
            outcome: HeadOutcome::default(),
            next_slot: 0,
            page_tokens: shape.page_tokens,
        }
    }

    /// A decode step has ended.
    pub(super) fn end_step(&mut self) {
        self.outcome.end_step(self.table.resident() * self.page_tokens);
    }

    pub(super) fn grant(&mut self) {
        self.table.grant(self.next_slot);
        self.next_slot += 1;
    }

    /// What admission and `append` do: ways that are due, then the pages that the step's tokens begin.
    pub(super) fn open(&mut self, shape: &Shape, mark: &Mark, budget: usize) -> Result<(), SimError> {
        let (before, after) = (shape.pages(mark.start), shape.pages(mark.end()));
        while self.table.ways() < after.min(budget) {
            self.grant();
        }
        let keep = (before as u32).checked_sub(1).filter(|_| !mark.start.is_multiple_of(shape.page_tokens));
        for _ in before..after {
            let opened = self.table.open(mark.step, mark.phase, shape.pins, keep)?;
            self.outcome.counts.of_mut(mark.phase).evictions += u64::from(opened.evicted.is_some());
            self.leave(mark, u32::from(opened.evicted.is_some()));
        }
        Ok(())
    }

    /// What `attend` does. A head that was not attended has an empty demand, which changes nothing.
    pub(super) fn demand(&mut self, mark: &Mark, pages: &[u32], masses: Option<&[f32]>) -> Result<Tally, SimError> {
        self.demand_scored(mark, pages, masses, None)
    }

    /// The same of a recorded step, with the scores by which its pages were chosen.
    pub(super) fn demand_step(&mut self, mark: &Mark, stream: &Stream, step: usize) -> Result<Tally, SimError> {
        self.demand_scored(mark, stream.demand(step), stream.masses(step), stream.scores(step))
    }

    fn demand_scored(
        &mut self,
        mark: &Mark,
        pages: &[u32],
        masses: Option<&[f32]>,
        scores: Option<Scores<'_>>,
    ) -> Result<Tally, SimError> {
        let mut tally = Tally::default();
        if !pages.is_empty() {
            if let Some(scores) = scores {
                self.table.rate(scores, pages);
            }
            tally = self.table.demand(mark.step, mark.phase, pages, &mut self.places)?;
            self.outcome.count(mark.phase, pages.len(), tally);
            self.leave(mark, tally.evictions);
            if let Some(masses) = masses.filter(|_| mark.phase == Phase::Decode) {
                for (&mass, place) in masses.iter().zip(&self.places) {
                    self.outcome.mass += f64::from(mass);
                    if !matches!(place, Place::Hit(_)) {
                        self.outcome.missed_mass += f64::from(mass);
                    }
                }
            }
        }
        if mark.phase == Phase::Decode {
            self.end_step();
        }
        Ok(tally)
    }

    /// Pages have left that were there when the step began: none is evicted in the step that fetches it.
    fn leave(&mut self, mark: &Mark, pages: u32) {
        if mark.phase == Phase::Decode {
            self.outcome.leave(pages as usize, self.page_tokens);
        }
    }

    /// Room for the whole run, unless it says that it is longer than any is.
    pub(super) fn reserve(&mut self, shape: &Shape, marks: &[Mark], stream: &Stream, budget: usize) {
        const LONGEST: usize = 1 << 20;
        let pages = marks.last().map_or(0, |mark| shape.pages(mark.end())).min(LONGEST);
        self.table.reserve(pages, pages.min(budget));
        self.places.reserve(stream.demands().map(<[u32]>::len).max().unwrap_or(0));
    }
}
