//! WakeKV's published accounting, through the same table.

use super::head::Head;
use super::{HeadOutcome, Outcome, SimError};
use crate::residency::Replacement;
use crate::table::{Phase, Pins, Place, Tally};
use crate::trace::{Stream, Trace};

/// A head begins decode with nothing on the device and nothing in the reservoir. The first demand for a page puts it on the device
/// and is free. Within a step nothing has to go; after it the oldest pages do, until `budget` are left. If `destroy`, they miss for ever.
/// Beside the outcome returns what the heads could read.
pub(super) fn run<R: Replacement>(trace: &Trace, budget: usize, destroy: bool) -> Result<(Outcome, Trace), SimError> {
    let heads = trace.heads().iter().map(|stream| run_head::<R>(trace, stream, budget, destroy));
    let (heads, reads) = heads.collect::<Result<(Vec<_>, Vec<_>), _>>()?;
    Ok((Outcome { shape: *trace.shape(), heads }, trace.with_heads(reads)))
}

fn run_head<R: Replacement>(
    trace: &Trace,
    stream: &Stream,
    budget: usize,
    destroy: bool,
) -> Result<(HeadOutcome, Stream), SimError> {
    let mut head = Head::<R>::new(trace.shape());
    let mut reads = Stream::new();
    let (mut seen, mut alive) = (Vec::new(), Vec::new());
    let mut oldest: Vec<(u64, u32)> = Vec::new();
    for (step, mark) in trace.marks().iter().enumerate() {
        let demand = stream.demand(step);
        if mark.phase == Phase::Prefill {
            reads.extend(demand, &[]);
            reads.end_step(None);
            continue;
        }
        seen.resize(trace.shape().pages(mark.end()), false);
        // Nobody holds a page before it is demanded, and no demand may find the ways taken.
        while head.table.ways() <= head.table.resident() + demand.len() {
            head.grant();
        }
        for page in head.table.pages()..seen.len() {
            head.table.open(mark.step, Phase::Decode, Pins::default(), None)?;
            head.table.drop_page(page as u32);
        }
        let known = |page: u32| seen.get(page as usize).copied().unwrap_or(false);
        let masses = stream.masses(step).unwrap_or(&[]);
        alive.clear();
        let mut tally = Tally::default();
        let mut lost = 0;
        for (index, &page) in demand.iter().enumerate() {
            let mass = f64::from(masses.get(index).copied().unwrap_or(0.0));
            head.outcome.mass += mass;
            if known(page) && head.table.slot_of(page).is_none() {
                tally.capacity += 1;
                head.outcome.missed_mass += mass;
                if destroy {
                    lost += 1;
                    head.outcome.unserved_mass += mass;
                    continue;
                }
            } else {
                tally.hits += 1;
            }
            alive.push(page);
        }
        if !alive.is_empty() {
            head.table.demand(mark.step, Phase::Decode, &alive, &mut head.places)?;
            debug_assert!(!head.places.contains(&Place::Overflow));
        }
        for &page in demand {
            if let Some(seen) = seen.get_mut(page as usize) {
                *seen = true;
            }
        }
        let excess = head.table.resident().saturating_sub(budget);
        if excess > 0 {
            oldest.clear();
            oldest.extend(head.table.residents().map(|(page, _, stamp)| (stamp, page)));
            oldest.sort_unstable();
            oldest.truncate(excess);
            oldest.iter().for_each(|&(_, page)| head.table.drop_page(page));
            let old = oldest.iter().filter(|&&(stamp, _)| stamp < mark.step).count();
            head.outcome.leave(old, trace.shape().page_tokens);
            tally.evictions = excess as u32;
        }
        head.outcome.count(Phase::Decode, demand.len(), tally);
        head.outcome.leave_unserved(lost);
        head.end_step();
        reads.extend(&alive, &[]);
        reads.end_step(None);
    }
    Ok((head.outcome, reads))
}
