//! The demands of one head.

use crate::residency::Scores;
use crate::table::Tally;

/// What one head demanded, step by step: lists of pages, one after the other, and where each ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stream {
    pub(super) ends: Vec<usize>,
    pub(super) pages: Vec<u32>,
    /// As long as `pages`, or empty.
    pub(super) masses: Vec<f32>,
    /// As long as `ends`, or empty.
    pub(super) tallies: Vec<Tally>,
    pub(super) scored: Scored,
}

/// Scores of a head's pages, step by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Scored {
    /// Per step the first page that was scored, and how many there were: as long as the stream's `ends`, or empty.
    pub rows: Vec<[u32; 2]>,
    /// Per row, where its scores begin.
    starts: Vec<usize>,
    pub scores: Vec<f32>,
}

impl Scored {
    const fn new() -> Self {
        Scored { rows: Vec::new(), starts: Vec::new(), scores: Vec::new() }
    }

    /// Adds a step's scores.
    pub fn push(&mut self, scores: Option<Scores<'_>>) {
        let Scores { first, scores } = scores.unwrap_or(Scores { first: 0, scores: &[] });
        self.rows.push([first, scores.len() as u32]);
        self.starts.push(self.scores.len());
        self.scores.extend_from_slice(scores);
    }

    fn of(&self, step: usize) -> Option<Scores<'_>> {
        let (&[first, len], &start) = self.rows.get(step).zip(self.starts.get(step))?;
        let scores = self.scores.get(start..start + len as usize)?;
        (len > 0).then_some(Scores { first, scores })
    }

    fn truncate(&mut self, steps: usize) {
        self.scores.truncate(self.starts.get(steps).copied().unwrap_or(self.scores.len()));
        self.rows.truncate(steps);
        self.starts.truncate(steps);
    }
}

impl Stream {
    pub(crate) const fn new() -> Self {
        Stream { ends: Vec::new(), pages: Vec::new(), masses: Vec::new(), tallies: Vec::new(), scored: Scored::new() }
    }

    /// Steps.
    pub fn steps(&self) -> usize {
        self.ends.len()
    }

    /// Demanded pages over all steps.
    pub fn demanded(&self) -> usize {
        self.pages.len()
    }

    /// The pages demanded in a step, given its index from 0, ascending. Empty when the head was not attended or there is no such step.
    pub fn demand(&self, step: usize) -> &[u32] {
        self.range(step).and_then(|range| self.pages.get(range)).unwrap_or(&[])
    }

    /// The attention mass of each demanded page, where it is known.
    pub fn masses(&self, step: usize) -> Option<&[f32]> {
        if self.masses.len() != self.pages.len() {
            return None;
        }
        self.range(step).and_then(|range| self.masses.get(range))
    }

    /// What the step's selection found the pages to be worth, where it scored any and that was recorded.
    pub fn scores(&self, step: usize) -> Option<Scores<'_>> {
        self.scored.of(step)
    }

    /// What the cache that was recorded counted.
    pub fn tally(&self, step: usize) -> Option<Tally> {
        self.tallies.get(step).copied()
    }

    /// The demands in their order.
    pub fn demands(&self) -> impl Iterator<Item = &[u32]> {
        (0..self.ends.len()).map(|step| self.demand(step))
    }

    fn range(&self, step: usize) -> Option<std::ops::Range<usize>> {
        let end = *self.ends.get(step)?;
        let start = step.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        Some(start..end)
    }

    pub(crate) fn extend(&mut self, pages: &[u32], masses: &[f32]) {
        self.pages.extend_from_slice(pages);
        self.masses.extend_from_slice(masses);
    }

    pub(crate) fn end_step(&mut self, tally: Option<Tally>) {
        self.ends.push(self.pages.len());
        self.tallies.extend(tally);
    }

    /// Ends the scores of a step, which may have had none. Comes before [`end_step`](Self::end_step).
    pub(super) fn end_scores(&mut self) {
        if self.scored.rows.len() == self.ends.len() {
            self.scored.push(None);
        }
    }

    /// Forgets pages of a step that has not ended.
    pub(super) fn forget_open(&mut self) {
        self.pages.truncate(self.ends.last().copied().unwrap_or(0));
        self.masses.truncate(self.pages.len());
        self.scored.truncate(self.ends.len());
    }
}
