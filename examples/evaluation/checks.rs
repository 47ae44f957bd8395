//! What must hold of every run, whatever came out.

use anyhow::{Result, ensure};
use wakekv::sim::Rule;

use super::regime::Regime;
use crate::study::grid::Contender;
use crate::tasks::run::Reads;

/// How many of each have been seen to hold.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checked {
    /// Replays that counted what the live cache counted.
    pub replays: usize,
    /// Runs that wrote the same under a budget and without.
    pub same: usize,
    /// Policies that were compared with a bound.
    pub bounded: usize,
}

/// Fails when a replay differs from the live counts, a budget changes what is written, a policy beats its bound, or the model
/// finds nothing even with its full cache.
pub fn check(regimes: &[Regime], reads: &[Reads]) -> Result<Checked> {
    let mut checked = Checked::default();
    for regime in regimes {
        let task = regime.task;
        ensure!(
            regime.exact == regime.runs.len(),
            "{task}: {} of {} replays are exact",
            regime.exact,
            regime.runs.len()
        );
        checked.replays += regime.exact;
        for run in &regime.runs {
            ensure!(
                run.same != Some(false),
                "{task}, seed {}: a budget has changed what the model writes",
                run.job.seed
            );
            checked.same += usize::from(run.same == Some(true));
        }
        checked.bounded += check_bounds(regime)?;
        if let Some(full) = reads.iter().position(|&reads| reads == Reads::Full) {
            let score = regime.scores.get(full).copied().unwrap_or_default();
            ensure!(task.measure().is_none() || score.sum > 0.0, "{task}: nothing is right even with the full cache");
        }
    }
    Ok(checked)
}

/// Every policy that keeps to the budget of each head misses at least what the optimum per head does, those that move ways at
/// least what the pooled optimum does, and that one no more than the optimum per head.
fn check_bounds(regime: &Regime) -> Result<usize> {
    let mut compared = 0;
    for cell in &regime.cells {
        let bound = match cell.contender {
            Contender::Reactive(_) | Contender::Evict => Contender::Belady,
            Contender::Moving(_) | Contender::Pooled | Contender::Belady => Contender::PooledBelady,
            // It holds more than the budget.
            Contender::Frozen | Contender::PooledBelady => continue,
        };
        let Some(least) = regime.cell(bound, cell.budget) else { continue };
        let (misses, least) = (cell.counts.misses(), least.counts.misses());
        let (task, contender, budget) = (regime.task, cell.contender, cell.budget);
        ensure!(misses >= least, "{task}: {contender} at {budget} pages misses {misses}, and {bound} {least}");
        compared += 1;
    }
    let lru = regime.cells.iter().filter(|cell| cell.contender == Contender::Reactive(Rule::Lru));
    ensure!(
        lru.clone().any(|cell| cell.counts.misses() > 0),
        "{}: no budget is small enough to miss anything",
        regime.task
    );
    Ok(compared)
}
