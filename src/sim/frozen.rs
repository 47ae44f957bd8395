//! An offline split: unstable heads keep everything, stable ones a set that is frozen between refreshes.

use super::{Accounting, HeadOutcome, Outcome, SimError};
use crate::sim::metrics::overlap;
use crate::table::{Phase, Tally};
use crate::trace::{Stream, Trace};

/// Which heads are unstable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    unstable: Vec<bool>,
}

impl Split {
    /// The share of heads that the published comparison keeps whole.
    pub const SHARE: f64 = 0.25;

    /// Learns a split from a run: the `share` of heads with the lowest mean Jaccard index of adjacent decode demands is unstable. Of
    /// equal heads the first.
    ///
    /// The paper learns it on the very run that it is judged on. Learning it on another run of the same model is what an engine could do.
    pub fn learn(trace: &Trace, share: f64) -> Self {
        let mut order: Vec<(f64, usize)> = (0..trace.heads().len())
            .map(|head| (overlap::adjacent_jaccard(&decode_demands(trace, trace.head(head))), head))
            .collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let count = (share.clamp(0.0, 1.0) * order.len() as f64).round() as usize;
        let mut unstable = vec![false; order.len()];
        for &(_, head) in order.iter().take(count) {
            if let Some(unstable) = unstable.get_mut(head) {
                *unstable = true;
            }
        }
        Split { unstable }
    }

    /// A split that somebody else has made: per head whether it is unstable.
    pub fn new(unstable: Vec<bool>) -> Self {
        Split { unstable }
    }

    /// Per head, whether it is unstable.
    pub fn unstable(&self) -> &[bool] {
        &self.unstable
    }
}

/// The demands of a head in its decode steps.
pub(super) fn decode_demands<'t>(trace: &Trace, stream: &'t Stream) -> Vec<&'t [u32]> {
    let steps = trace.marks().iter().enumerate().filter(|(_, mark)| mark.phase == Phase::Decode);
    steps.map(|(step, _)| stream.demand(step)).collect()
}

/// Decode steps from one refresh to the next.
const REFRESH: usize = 16;

/// Stable heads hold the pages most demanded in the last 16 decode steps (our reading of "top B by demand count"; at first those of
/// the first demand). Under strict accounting the last page is one of them; when a page opens, the least demanded one goes for it. A
/// miss is served and not kept.
pub(super) fn run(trace: &Trace, split: &Split, budget: usize, accounting: Accounting) -> Result<Outcome, SimError> {
    if split.unstable.len() != trace.heads().len() {
        return Err(SimError::Split { split: split.unstable.len(), heads: trace.heads().len() });
    }
    let heads = trace.heads().iter().zip(&split.unstable);
    Ok(Outcome {
        shape: *trace.shape(),
        heads: heads
            .map(|(stream, &unstable)| run_head(trace, stream, if unstable { usize::MAX } else { budget }, accounting))
            .collect(),
    })
}

fn run_head(trace: &Trace, stream: &Stream, budget: usize, accounting: Accounting) -> HeadOutcome {
    let strict = accounting == Accounting::Strict;
    let mut outcome = HeadOutcome::default();
    // The most demanded first.
    let mut frozen: Vec<u32> = Vec::new();
    // Prompt pages that no decode step has demanded: their first miss is compulsory.
    let mut cold: Vec<bool> = Vec::new();
    let mut counts: Vec<u32> = Vec::new();
    let mut decoded = 0;
    let page_tokens = trace.shape().page_tokens;
    for (step, mark) in trace.marks().iter().enumerate() {
        let (pages, demand) = (trace.shape().pages(mark.end()), stream.demand(step));
        cold.resize(pages, mark.phase == Phase::Prefill);
        counts.resize(pages, 0);
        if mark.phase == Phase::Prefill {
            if strict {
                let tally = Tally { hits: demand.len() as u32, ..Tally::default() };
                outcome.count(mark.phase, demand.len(), tally);
            }
            continue;
        }
        let whole = budget >= pages;
        if strict {
            for page in trace.shape().pages(mark.start)..pages {
                frozen.insert(0, page as u32);
            }
            outcome.leave(frozen.len().saturating_sub(budget), page_tokens);
            frozen.truncate(budget);
        }
        if decoded % REFRESH == 0 && !whole {
            if decoded == 0 {
                count(&mut counts, demand);
            }
            let new = most_demanded(&counts, budget, strict.then(|| pages as u32 - 1));
            let refreshed = new.iter().filter(|page| decoded > 0 && !frozen.contains(page)).count();
            outcome.refresh(refreshed as u32);
            outcome.leave(frozen.iter().filter(|page| !new.contains(page)).count(), page_tokens);
            frozen = new;
            counts.fill(0);
        }
        let mut tally = Tally::default();
        let masses = stream.masses(step).unwrap_or(&[]);
        for (index, &page) in demand.iter().enumerate() {
            let mass = f64::from(masses.get(index).copied().unwrap_or(0.0));
            outcome.mass += mass;
            let first = cold.get_mut(page as usize).is_some_and(std::mem::take);
            if whole || frozen.contains(&page) {
                tally.hits += 1;
                continue;
            }
            outcome.missed_mass += mass;
            *if first && strict { &mut tally.compulsory } else { &mut tally.capacity } += 1;
        }
        outcome.count(mark.phase, demand.len(), tally);
        count(&mut counts, demand);
        outcome.end_step(if whole { pages } else { frozen.len() } * page_tokens);
        decoded += 1;
    }
    outcome
}

fn count(counts: &mut [u32], demand: &[u32]) {
    for &page in demand {
        if let Some(count) = counts.get_mut(page as usize) {
            *count += 1;
        }
    }
}

/// Up to `most` pages, the most demanded first and of equally demanded ones the lower; before them all the page that has to be there.
fn most_demanded(counts: &[u32], most: usize, always: Option<u32>) -> Vec<u32> {
    let demanded = (0u32..).zip(counts).filter(|&(page, &count)| count > 0 && Some(page) != always);
    let mut order: Vec<(std::cmp::Reverse<u32>, u32)> =
        demanded.map(|(page, &count)| (std::cmp::Reverse(count), page)).collect();
    order.sort_unstable();
    always.into_iter().chain(order.into_iter().map(|(_, page)| page)).take(most).collect()
}
