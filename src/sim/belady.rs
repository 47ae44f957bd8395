//! The offline optimum: keep what will be demanded soonest.
//!
//! After each step the pages stay, out of those that were resident, written or demanded in it, whose next demand comes first
//! (Belady 1966, with the freedom not to keep a page). A step counts as one moment, and where the last page lies is not
//! constrained, so nobody who knows less or is bound to more can miss less.

use std::collections::BTreeSet;

use super::{Accounting, HeadOutcome, Outcome};
use crate::table::{Phase, Tally};
use crate::trace::{Mark, Stream, Trace};

const NEVER: u32 = u32::MAX;

pub(super) fn per_head(trace: &Trace, budget: usize, accounting: Accounting) -> Outcome {
    let heads =
        trace.heads().iter().flat_map(|stream| optimum(trace, std::slice::from_ref(stream), budget, accounting));
    Outcome { shape: *trace.shape(), heads: heads.collect() }
}

pub(super) fn pooled(trace: &Trace, budget: usize, accounting: Accounting) -> Outcome {
    let capacity = budget.saturating_mul(trace.heads().len());
    Outcome { shape: *trace.shape(), heads: optimum(trace, trace.heads(), capacity, accounting) }
}

/// One head's demands, and what is known of its pages.
struct Lane<'t> {
    stream: &'t Stream,
    /// Per demanded page, in the order of the stream, the index of the step that demands it next.
    next_use: Vec<u32>,
    /// Per page the step that demands it first.
    first_use: Vec<u32>,
    /// How many of them have gone by.
    done: usize,
    /// Per page its key among the residents, and the step since which it is one.
    key: Vec<Option<u32>>,
    since: Vec<u32>,
    /// Prompt pages that no decode step has demanded.
    cold: Vec<bool>,
    seen: Vec<bool>,
    resident: usize,
    outcome: HeadOutcome,
}

fn optimum(trace: &Trace, streams: &[Stream], capacity: usize, accounting: Accounting) -> Vec<HeadOutcome> {
    let paper = accounting == Accounting::Paper;
    let counts = |mark: &Mark| !paper || mark.phase == Phase::Decode;
    let pages = trace.marks().last().map_or(0, |mark| trace.shape().pages(mark.end()));
    let mut lanes: Vec<Lane<'_>> = streams.iter().map(|stream| Lane::new(trace, stream, pages, counts)).collect();
    // (next use, lane, page): the last one goes first.
    let mut residents: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    for (step, mark) in trace.marks().iter().enumerate() {
        if !counts(mark) {
            lanes.iter_mut().for_each(|lane| lane.done += lane.stream.demand(step).len());
            continue;
        }
        let written = if paper { 0..0 } else { trace.shape().pages(mark.start)..trace.shape().pages(mark.end()) };
        for (index, lane) in (0u32..).zip(&mut lanes) {
            for page in written.clone() {
                lane.keep(index, page as u32, lane.first_use[page], step, &mut residents);
            }
            lane.step(step, mark, index, paper, &mut residents);
        }
        while residents.len() > capacity {
            let Some((_, index, page)) = residents.pop_last() else { break };
            if let Some(lane) = lanes.get_mut(index as usize) {
                lane.key[page as usize] = None;
                lane.resident -= 1;
                if mark.phase == Phase::Decode && lane.since[page as usize] < step as u32 {
                    lane.outcome.leave(1, trace.shape().page_tokens);
                }
                lane.outcome.counts.of_mut(mark.phase).evictions += 1;
            }
        }
        if mark.phase == Phase::Decode {
            lanes.iter_mut().for_each(|lane| lane.outcome.end_step(lane.resident * trace.shape().page_tokens));
        }
    }
    lanes.into_iter().map(|lane| lane.outcome).collect()
}

impl<'t> Lane<'t> {
    fn new(trace: &Trace, stream: &'t Stream, pages: usize, counts: impl Fn(&Mark) -> bool) -> Self {
        let mut next_use = vec![NEVER; stream.demanded()];
        let mut coming = vec![NEVER; pages];
        let mut at = stream.demanded();
        for (step, mark) in trace.marks().iter().enumerate().rev() {
            for &page in stream.demand(step).iter().rev() {
                at -= 1;
                next_use[at] = coming[page as usize];
                if counts(mark) {
                    coming[page as usize] = step as u32;
                }
            }
        }
        Lane {
            stream,
            next_use,
            first_use: coming,
            done: 0,
            key: vec![None; pages],
            since: vec![0; pages],
            cold: vec![false; pages],
            seen: vec![false; pages],
            resident: 0,
            outcome: HeadOutcome::default(),
        }
    }

    /// The page is on the device, and will be demanded next at step `next`.
    fn keep(&mut self, lane: u32, page: u32, next: u32, step: usize, residents: &mut BTreeSet<(u32, u32, u32)>) {
        match self.key[page as usize].replace(next) {
            Some(old) => _ = residents.remove(&(old, lane, page)),
            None => {
                self.resident += 1;
                self.since[page as usize] = step as u32;
            }
        }
        residents.insert((next, lane, page));
    }

    fn step(&mut self, step: usize, mark: &Mark, lane: u32, paper: bool, residents: &mut BTreeSet<(u32, u32, u32)>) {
        let demand = self.stream.demand(step);
        let masses = self.stream.masses(step).unwrap_or(&[]);
        let mut tally = Tally::default();
        let decode = mark.phase == Phase::Decode;
        for (index, &page) in demand.iter().enumerate() {
            let at = page as usize;
            let next = self.next_use.get(self.done + index).copied().unwrap_or(NEVER);
            let first = std::mem::take(&mut self.cold[at]) && decode;
            let free = paper && !std::mem::replace(&mut self.seen[at], true);
            let mass = f64::from(masses.get(index).copied().unwrap_or(0.0));
            if self.key[at].is_some() || free {
                tally.hits += 1;
            } else {
                *if first { &mut tally.compulsory } else { &mut tally.capacity } += 1;
                if decode {
                    self.outcome.missed_mass += mass;
                }
            }
            if decode {
                self.outcome.mass += mass;
            } else {
                self.cold[at] = true;
            }
            self.keep(lane, page, next, step, residents);
        }
        self.done += demand.len();
        self.outcome.count(mark.phase, demand.len(), tally);
    }
}
