//! What a replay came to.

use crate::stats::{Counts, PhaseCounts};
use crate::table::{Phase, Tally};

/// What one head came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct HeadOutcome {
    /// Demands, hits, misses and evictions. Bytes are not counted: they are misses × the bytes of a page.
    pub counts: PhaseCounts,
    /// Decode steps.
    pub steps: u64,
    /// Pages resident at the end of a decode step, summed over decode steps.
    pub resident: u64,
    /// The most pages resident at the end of a decode step.
    pub peak: u64,
    /// Attention mass of the demanded pages over decode steps, where the trace knows it.
    pub mass: f64,
    /// Of that, the mass of pages that were not resident when the step asked.
    pub missed_mass: f64,
    /// Pages that were moved to the device at a refresh, without having been asked for.
    pub refreshed: u64,
}

impl HeadOutcome {
    pub(super) fn count(&mut self, phase: Phase, demanded: usize, tally: Tally) {
        let counts = self.counts.of_mut(phase);
        counts.demanded += demanded as u64;
        counts.hits += u64::from(tally.hits);
        counts.compulsory += u64::from(tally.compulsory);
        counts.capacity += u64::from(tally.capacity);
        counts.overflow += u64::from(tally.overflow);
        counts.evictions += u64::from(tally.evictions);
    }

    /// A decode step has ended with so many pages resident.
    pub(super) fn end_step(&mut self, resident: usize) {
        self.steps += 1;
        self.resident += resident as u64;
        self.peak = self.peak.max(resident as u64);
    }
}

/// What a policy came to at a budget.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// Per head, in the trace's order.
    pub heads: Vec<HeadOutcome>,
}

impl Outcome {
    /// Decode's counters summed over heads.
    pub fn counts(&self) -> Counts {
        let mut total = Counts::default();
        self.heads.iter().for_each(|head| total += head.counts.decode);
        total
    }

    /// Σ|D∖R| / Σ|D| over decode steps.
    pub fn miss_rate(&self) -> f64 {
        self.counts().miss_rate()
    }

    /// Missed attention mass over all demanded mass, 0 when the trace knows none.
    pub fn missed_mass(&self) -> f64 {
        let sum = |of: fn(&HeadOutcome) -> f64| self.heads.iter().map(of).sum::<f64>();
        let mass = sum(|head| head.mass);
        if mass > 0.0 { sum(|head| head.missed_mass) / mass } else { 0.0 }
    }

    /// Attention mass per head and decode step that would be lost if no miss were served: mean of Σ_{p∉R} a(p).
    pub fn lost_mass(&self) -> f64 {
        let steps: u64 = self.heads.iter().map(|head| head.steps).sum();
        self.heads.iter().map(|head| head.missed_mass).sum::<f64>() / steps.max(1) as f64
    }

    /// Pages resident at the end of a decode step, summed over heads, mean over steps.
    pub fn resident_mean(&self) -> f64 {
        self.heads.iter().map(|head| head.resident as f64 / head.steps.max(1) as f64).sum()
    }

    /// The most pages that each head held at the end of a decode step, summed over heads.
    pub fn resident_peak(&self) -> u64 {
        self.heads.iter().map(|head| head.peak).sum()
    }

    /// Where this lies in a chart of miss rate against memory.
    pub fn point(&self) -> Point {
        Point { memory: self.resident_mean(), miss_rate: self.miss_rate() }
    }
}

/// A policy at a budget: what it holds and what it misses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Mean resident pages.
    pub memory: f64,
    /// Miss rate.
    pub miss_rate: f64,
}

/// The miss rate of a curve at `memory`, by linear interpolation between the two points around it. `None` outside of the curve: the
/// comparison is to be listed as impossible there, not to be extrapolated.
pub fn at_memory(curve: &[Point], memory: f64) -> Option<f64> {
    let below = curve.iter().filter(|point| point.memory <= memory).max_by(|a, b| a.memory.total_cmp(&b.memory))?;
    let above = curve.iter().filter(|point| point.memory >= memory).min_by(|a, b| a.memory.total_cmp(&b.memory))?;
    let width = above.memory - below.memory;
    let share = if width > 0.0 { (memory - below.memory) / width } else { 0.0 };
    Some(below.miss_rate + share * (above.miss_rate - below.miss_rate))
}
