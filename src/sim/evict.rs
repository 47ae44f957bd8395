//! The rule with LRU, whose evictions destroy.

use super::head::Head;
use super::{HeadOutcome, Outcome, SimError};
use crate::residency::Lru;
use crate::table::{Phase, Tally};
use crate::trace::{Stream, Trace};

/// The outcome, and what the heads could still read of what they demanded.
pub(super) fn run(trace: &Trace, budget: usize) -> Result<(Outcome, Trace), SimError> {
    let heads = trace.heads().iter().map(|stream| run_head(trace, stream, budget));
    let (heads, reads) = heads.collect::<Result<(Vec<_>, Vec<_>), _>>()?;
    Ok((Outcome { shape: *trace.shape(), heads }, trace.with_heads(reads)))
}

/// What has become of a page, beside being resident.
#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Opened by prefill since the last decode step.
    Prompt,
    /// Left in the reservoir by prefill: it is there for the first decode demand.
    Left,
    /// Once it loses its way it is gone.
    Mortal,
}

fn run_head(trace: &Trace, stream: &Stream, budget: usize) -> Result<(HeadOutcome, Stream), SimError> {
    let shape = trace.shape();
    let mut head = Head::<Lru>::new(shape);
    let mut reads = Stream::new();
    head.reserve(shape, trace.marks(), stream, budget);
    let mut states: Vec<State> = Vec::new();
    let (mut alive, mut masses) = (Vec::new(), Vec::new());
    for (step, mark) in trace.marks().iter().enumerate() {
        if mark.phase == Phase::Decode {
            // The prompt has ended, if there was one.
            for (page, state) in (0..).zip(&mut states).filter(|(_, state)| **state == State::Prompt) {
                *state = if head.table.slot_of(page).is_some() { State::Mortal } else { State::Left };
            }
        }
        head.open(shape, mark, budget)?;
        let born = if mark.phase == Phase::Prefill { State::Prompt } else { State::Mortal };
        states.resize(head.table.pages(), born);
        let demand = stream.demand(step);
        alive.clear();
        masses.clear();
        let weights = stream.masses(step).unwrap_or(&[]);
        let mut lost = Tally::default();
        for (index, &page) in demand.iter().enumerate() {
            let state = states.get_mut(page as usize);
            let weight = weights.get(index).copied().unwrap_or(0.0);
            if head.table.slot_of(page).is_none() && state.as_ref().is_none_or(|state| **state == State::Mortal) {
                lost.capacity += 1;
                if mark.phase == Phase::Decode {
                    head.outcome.mass += f64::from(weight);
                    head.outcome.missed_mass += f64::from(weight);
                    head.outcome.unserved_mass += f64::from(weight);
                }
                continue;
            }
            if let Some(state) = state.filter(|_| mark.phase == Phase::Decode) {
                *state = State::Mortal;
            }
            alive.push(page);
            masses.push(weight);
        }
        head.outcome.count(mark.phase, lost.capacity as usize, lost);
        if mark.phase == Phase::Decode {
            head.outcome.leave_unserved(lost.capacity);
        }
        reads.extend(&alive, &[]);
        reads.end_step(None);
        head.demand(mark, &alive, Some(&masses).filter(|_| !weights.is_empty()).map(Vec::as_slice))?;
    }
    Ok((head.outcome, reads))
}
