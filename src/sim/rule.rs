//! The rule, head by head.

use super::head::Head;
use super::{Outcome, SimError};
use crate::residency::Replacement;
use crate::trace::Trace;

/// `order` makes the order of a head.
pub(super) fn run<R: Replacement>(trace: &Trace, budget: usize, order: impl Fn() -> R) -> Result<Outcome, SimError> {
    let mut outcome = Outcome { shape: *trace.shape(), heads: Vec::new() };
    for stream in trace.heads() {
        let mut head = Head::with_order(trace.shape(), order());
        head.reserve(trace.shape(), trace.marks(), stream, budget);
        for (step, mark) in trace.marks().iter().enumerate() {
            head.open(trace.shape(), mark, budget)?;
            head.demand_step(mark, stream, step)?;
        }
        outcome.heads.push(head.outcome);
    }
    Ok(outcome)
}
