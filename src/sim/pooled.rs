//! One pool for all heads, from which the page of least standing goes, whosever it is.

use super::{HeadOutcome, Outcome};
use crate::residency::{Replacement, Standing};
use crate::table::{Phase, Tally};
use crate::trace::{Mark, Shape, Stream, Trace};

/// Demands are served first, and when all heads have been served the pool shrinks to heads × budget again, as for the optimum that it is
/// to be compared with.
pub(super) fn run(trace: &Trace, budget: usize) -> Outcome {
    let capacity = budget.saturating_mul(trace.heads().len());
    let mut lanes: Vec<Lane> = trace.heads().iter().map(|_| Lane::new()).collect();
    let mut candidates = Vec::new();
    for (step, mark) in trace.marks().iter().enumerate() {
        let opened = trace.shape().pages(mark.end()) - trace.shape().pages(mark.start);
        for (lane, stream) in lanes.iter_mut().zip(trace.heads()) {
            lane.begin(mark, opened);
            lane.serve(mark, stream, step);
        }
        shrink(&mut lanes, capacity, mark, trace.shape(), &mut candidates);
        for lane in lanes.iter_mut().filter(|_| mark.phase == Phase::Decode) {
            lane.outcome.end_step(lane.resident * trace.shape().page_tokens);
        }
    }
    Outcome { shape: *trace.shape(), heads: lanes.into_iter().map(|lane| lane.outcome).collect() }
}

/// One head.
struct Lane {
    pages: Vec<Page>,
    resident: usize,
    /// Every page has a way of its own here, of the same number.
    standing: Standing,
    outcome: HeadOutcome,
}

#[derive(Clone, Copy, Default)]
struct Page {
    resident: bool,
    /// Demanded or opened in the step at hand.
    in_use: bool,
    /// Has come to the device in the step at hand.
    came: bool,
    /// Opened by prefill since the last decode step.
    fresh: bool,
    /// Left off the device by prefill, and not demanded by decode since.
    cold: bool,
}

impl Lane {
    fn new() -> Self {
        Lane { pages: Vec::new(), resident: 0, standing: Standing::new(), outcome: HeadOutcome::default() }
    }

    /// The step's pages open.
    fn begin(&mut self, mark: &Mark, opened: usize) {
        let prefill = mark.phase == Phase::Prefill;
        for page in &mut self.pages {
            page.in_use = false;
            page.came = false;
            page.fresh &= prefill;
        }
        for page in self.pages.len()..self.pages.len() + opened {
            self.pages.push(Page { resident: true, in_use: true, fresh: prefill, cold: false, came: true });
            self.standing.grow();
            self.standing.admit(page as u32, page as u32);
        }
        self.resident += opened;
    }

    fn serve(&mut self, mark: &Mark, stream: &Stream, step: usize) {
        let (demand, masses) = (stream.demand(step), stream.masses(step).unwrap_or(&[]));
        let decode = mark.phase == Phase::Decode;
        if let Some(scores) = stream.scores(step).filter(|_| !demand.is_empty()) {
            self.standing.rate(scores, demand);
        }
        // Also where nothing is demanded: all heads must have taken as many steps to be compared.
        if decode {
            self.standing.touch(demand.iter().copied());
        }
        let mut tally = Tally::default();
        for (index, &page) in demand.iter().enumerate() {
            let page = &mut self.pages[page as usize];
            let mass = masses.get(index).map_or(0.0, |&mass| f64::from(mass));
            let cold = decode && std::mem::take(&mut page.cold);
            if decode {
                self.outcome.mass += mass;
            }
            if page.resident {
                tally.hits += 1;
            } else {
                *if cold { &mut tally.compulsory } else { &mut tally.capacity } += 1;
                self.resident += 1;
                if decode {
                    self.outcome.missed_mass += mass;
                }
            }
            *page = Page { in_use: true, came: page.came || !page.resident, resident: true, ..*page };
        }
        self.outcome.count(mark.phase, demand.len(), tally);
    }
}

/// Until no more than `capacity` pages are left those go that are not in use, the ones of least standing first; then those that have been in
/// use, for what they were needed for is done. Of equal ones the lower page of the lower head. After prefill, which uses everything,
/// the first pages go, as with the rule. Pinned pages stay.
fn shrink(
    lanes: &mut [Lane],
    capacity: usize,
    mark: &Mark,
    shape: &Shape,
    candidates: &mut Vec<(bool, f32, usize, usize)>,
) {
    let resident: usize = lanes.iter().map(|lane| lane.resident).sum();
    let Some(over) = resident.checked_sub(capacity).filter(|&over| over > 0) else { return };
    let prefill = mark.phase == Phase::Prefill;
    candidates.clear();
    for (index, lane) in lanes.iter().enumerate() {
        let last = lane.pages.len().saturating_sub(1);
        let is_free = |&(at, page): &(usize, &Page)| page.resident && !shape.pins.contain(at as u32, last as u32);
        for (at, page) in lane.pages.iter().enumerate().filter(is_free) {
            let worth = if prefill { at as f32 } else { lane.standing.of(at as u32) };
            candidates.push((page.in_use && !prefill, worth, index, at));
        }
    }
    candidates.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then((a.2, a.3).cmp(&(b.2, b.3))));
    for &(_, _, index, at) in candidates.iter().take(over) {
        let lane = &mut lanes[index];
        let page = &mut lane.pages[at];
        *page = Page { resident: false, cold: page.cold || page.fresh, ..*page };
        if !prefill && !page.came {
            lane.outcome.leave(1, shape.page_tokens);
        }
        lane.resident -= 1;
        lane.outcome.counts.of_mut(mark.phase).evictions += 1;
    }
}
