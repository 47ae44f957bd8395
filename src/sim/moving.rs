//! The rule, while ways move between heads.

use super::head::Head;
use super::{Outcome, SimError};
use crate::residency::{BalanceSettings, Balancer, Load, Rule};
use crate::table::Phase;
use crate::trace::Trace;

/// Heads step together. Every head starts with `budget` ways; what one gives another gets, so that the sum never exceeds heads × budget.
pub(super) fn run(trace: &Trace, rule: Rule, budget: usize, settings: BalanceSettings) -> Result<Outcome, SimError> {
    let shape = trace.shape();
    let mut heads: Vec<_> = trace.heads().iter().map(|_| Head::with_order(shape, rule.order())).collect();
    // What each head may own; a head that is still short of it takes ways as its pages open.
    let mut budgets = vec![budget; heads.len()];
    let mut balancer = Balancer::new(heads.len(), settings);
    let mut loads = vec![Load::default(); heads.len()];
    let mut since = 0;
    for (step, mark) in trace.marks().iter().enumerate() {
        for (index, (head, stream)) in heads.iter_mut().zip(trace.heads()).enumerate() {
            head.open(shape, mark, budgets[index])?;
            let tally = head.demand_step(mark, stream, step)?;
            if mark.phase == Phase::Decode {
                balancer.observe(index, tally.compulsory + tally.capacity);
            }
        }
        // Prefill uses everything and says nothing about what generation will need.
        if mark.phase == Phase::Prefill {
            since = mark.step;
            continue;
        }
        if !balancer.end_step() {
            continue;
        }
        for (load, (head, &budget)) in loads.iter_mut().zip(heads.iter().zip(&budgets)) {
            let used = head.table.residents().filter(|&(_, _, stamp)| stamp > since).count();
            // Ways that a short sequence has not claimed yet cannot be lent: it will want them as it grows.
            *load = Load { ways: head.table.ways(), used, pages: shape.pages(mark.end()) };
            load.used = load.used.max(if head.table.ways() < budget { load.ways } else { 0 });
        }
        since = mark.step;
        for &moved in balancer.rebalance(&loads, shape.pins.ways()) {
            if heads[moved.from].table.release(shape.pins).is_some() {
                budgets[moved.from] -= 1;
                budgets[moved.to] += 1;
                heads[moved.to].grant();
            }
        }
    }
    Ok(Outcome { shape: *shape, heads: heads.into_iter().map(|head| head.outcome).collect() })
}
