//! What a replay came to.

use crate::stats::{Counts, PhaseCounts};
use crate::table::{Phase, Tally};
use crate::trace::Shape;

/// What one head came to.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct HeadOutcome {
    /// Demands, hits, misses and evictions. Bytes are not counted: they are misses × the bytes of a page.
    pub counts: PhaseCounts,
    /// Decode steps.
    pub steps: u64,
    /// Tokens that there is room for on the device at the end of a decode step, summed over decode steps. A page is room for all
    /// its tokens.
    pub resident_tokens: u64,
    /// The most such tokens.
    pub peak_tokens: u64,
    /// Attention mass of the demanded pages over decode steps, where the trace knows it.
    pub mass: f64,
    /// Of that, the mass of pages that were not resident when the step asked.
    pub missed_mass: f64,
    /// Of that, the mass of pages that were not fetched either.
    pub unserved_mass: f64,
    /// Tokens' worth of pages that a decode step found on the device and that had left it at its end, summed over decode steps.
    pub left_tokens: u64,
    /// Pages that were moved to the device at a refresh, without having been asked for.
    pub refreshed: u64,
    /// Missed pages that were not fetched: because they had been destroyed, or because the policy reads what it has chosen itself.
    pub unserved: u64,
    /// What the decode steps moved, one by one.
    pub traffic: Vec<Traffic>,
}

/// What one head moved in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Demanded pages that were resident: attention can begin with them.
    pub hits: u32,
    /// Pages that were moved to the device, as a miss or by a refresh.
    pub fetched: u32,
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
        if phase == Phase::Decode {
            let step = self.step_at_hand();
            step.hits += tally.hits;
            step.fetched += tally.compulsory + tally.capacity;
        }
    }

    /// Of the misses that the decode step at hand has counted, so many are not fetched.
    pub(super) fn leave_unserved(&mut self, pages: u32) {
        self.unserved += u64::from(pages);
        let step = self.step_at_hand();
        step.fetched = step.fetched.saturating_sub(pages);
    }

    /// The decode step at hand has sent so many pages away that it had found on the device.
    pub(super) fn leave(&mut self, pages: usize, page_tokens: usize) {
        self.left_tokens += (pages * page_tokens) as u64;
    }

    /// The decode step at hand has moved so many pages to the device that it did not ask for.
    pub(super) fn refresh(&mut self, pages: u32) {
        self.refreshed += u64::from(pages);
        self.step_at_hand().fetched += pages;
    }

    /// A decode step has ended with room for so many tokens taken.
    pub(super) fn end_step(&mut self, resident_tokens: usize) {
        self.step_at_hand();
        self.steps += 1;
        self.resident_tokens += resident_tokens as u64;
        self.peak_tokens = self.peak_tokens.max(resident_tokens as u64);
    }

    /// The entry of the decode step that has not ended.
    fn step_at_hand(&mut self) -> &mut Traffic {
        let at = self.steps as usize;
        if self.traffic.len() <= at {
            self.traffic.resize(at + 1, Traffic::default());
        }
        &mut self.traffic[at]
    }
}

/// What a policy came to at a budget.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// What was replayed.
    pub shape: Shape,
    /// Per head, in the trace's order.
    pub heads: Vec<HeadOutcome>,
}

/// How fast bytes move, for [`Outcome::stall_bytes`]. Only the ratio matters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidths {
    /// Bytes per second from the reservoir to the device.
    pub fetch: f64,
    /// Bytes of keys and values per second that attention reads on the device.
    pub attention: f64,
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
        self.per_step(|head| head.missed_mass)
    }

    /// Attention mass per head and decode step that is lost, because what was missed was not fetched.
    pub fn unserved_mass(&self) -> f64 {
        self.per_step(|head| head.unserved_mass)
    }

    fn per_step(&self, of: fn(&HeadOutcome) -> f64) -> f64 {
        let steps: u64 = self.heads.iter().map(|head| head.steps).sum();
        self.heads.iter().map(of).sum::<f64>() / steps.max(1) as f64
    }

    /// Tokens that there is room for on the device at the end of a decode step, summed over heads, mean over steps.
    pub fn resident_tokens(&self) -> f64 {
        self.heads.iter().map(|head| head.resident_tokens as f64 / head.steps.max(1) as f64).sum()
    }

    /// The same in pages, which token-level policies hold fractions of.
    pub fn resident_mean(&self) -> f64 {
        self.resident_tokens() / self.shape.page_tokens as f64
    }

    /// The most pages that each head held at the end of a decode step, summed over heads.
    pub fn resident_peak(&self) -> u64 {
        self.heads.iter().map(|head| head.peak_tokens.div_ceil(self.shape.page_tokens as u64)).sum()
    }

    /// Residency churn: the share of what is on the device that a decode step sends away, mean over steps and heads. What
    /// only passes by in a step does not count.
    pub fn churn(&self) -> f64 {
        let sum = |of: fn(&HeadOutcome) -> u64| self.heads.iter().map(of).sum::<u64>() as f64;
        sum(|head| head.left_tokens) / sum(|head| head.resident_tokens).max(1.0)
    }

    /// Bytes per decode step that attention has to wait for: fetched, but not while attention was over the pages that hit.
    ///
    /// In each step and layer the pages that hit are attended first, at `attention` bytes per second. Meanwhile `fetch` × that time
    /// bytes arrive. What is still missing then is waited for: max(0, fetched − hits × fetch / attention) × `page_bytes`, summed
    /// over layers, mean over steps. Divided by `fetch` it is a time.
    pub fn stall_bytes(&self, page_bytes: usize, bandwidths: Bandwidths) -> f64 {
        let hidden = bandwidths.fetch / bandwidths.attention;
        let steps = self.heads.iter().map(|head| head.traffic.len()).max().unwrap_or(0);
        let mut pages = 0.0;
        for layer in self.heads.chunks(self.shape.heads_per_layer.max(1)) {
            for step in 0..steps {
                let moved = layer.iter().filter_map(|head| head.traffic.get(step));
                let (hits, fetched) = moved.fold((0, 0), |sum, moved| (sum.0 + moved.hits, sum.1 + moved.fetched));
                pages += (f64::from(fetched) - f64::from(hits) * hidden).max(0.0);
            }
        }
        pages * page_bytes as f64 / steps.max(1) as f64
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
