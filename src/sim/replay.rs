//! A replay whose reads are kept, so that its quality can be judged.

use super::tokens::Survival;
use super::{Accounting, Outcome, Policy, SimError, evict, paper, run};
use crate::residency::Lru;
use crate::trace::Trace;

/// What a policy came to, and what it let the heads read.
#[derive(Clone, Debug)]
pub struct Replay {
    /// Hits, misses and memory.
    pub outcome: Outcome,
    pub(super) reads: Reads,
}

/// What the heads read in every decode step.
#[derive(Clone, Debug)]
pub(super) enum Reads {
    /// All that they demanded.
    Demanded,
    /// Other pages, in the same steps.
    Pages(Trace),
    /// All tokens that are left.
    Tokens(Survival),
}

/// As [`run`], and keeps what the heads read.
///
/// Whoever fetches what is missed reads the demand, whatever the budget: nothing is lost that the demand does not leave out.
/// [`Policy::Evict`] reads what it has not destroyed.
///
/// # Errors
/// Those of [`run`].
pub fn replay(trace: &Trace, policy: Policy<'_>, budget: usize, accounting: Accounting) -> Result<Replay, SimError> {
    super::check_budget(trace, budget, accounting)?;
    let (outcome, reads) = match (policy, accounting) {
        (Policy::Evict, Accounting::Strict) => evict::run(trace, budget)?,
        (Policy::Evict, Accounting::Paper) => paper::run::<Lru>(trace, budget, true)?,
        _ => return Ok(Replay { outcome: run(trace, policy, budget, accounting)?, reads: Reads::Demanded }),
    };
    Ok(Replay { outcome, reads: Reads::Pages(reads) })
}
