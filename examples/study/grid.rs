//! Policies × budgets over the traces of a regime.

use std::fmt;

use anyhow::{Context, Result};
use wakekv::Counts;
use wakekv::residency::BalanceSettings;
use wakekv::sim::{self, Accounting, Bandwidths, Outcome, Point, Rule, Split};
use wakekv::trace::Trace;

/// A policy, as tables name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contender {
    Reactive(Rule),
    Moving(Rule),
    Pooled,
    Evict,
    Frozen,
    Belady,
    PooledBelady,
}

impl Contender {
    /// Those of the paper, and the bounds.
    pub const PUBLISHED: [Contender; 5] = [
        Contender::Reactive(Rule::Lru),
        Contender::Evict,
        Contender::Frozen,
        Contender::Belady,
        Contender::PooledBelady,
    ];

    /// All that keep to a budget.
    pub fn all() -> Vec<Contender> {
        let reactive = Rule::ALL.map(Contender::Reactive);
        let moving = [Rule::Lru, Rule::Standing].map(Contender::Moving);
        let others =
            [Contender::Pooled, Contender::Evict, Contender::Frozen, Contender::Belady, Contender::PooledBelady];
        reactive.into_iter().chain(moving).chain(others).collect()
    }

    /// Whether it knows what is to come.
    pub fn is_bound(self) -> bool {
        matches!(self, Contender::Belady | Contender::PooledBelady)
    }

    /// Whether the paper's accounting says what it does.
    pub fn has_paper_accounting(self) -> bool {
        !matches!(self, Contender::Moving(_) | Contender::Pooled)
            && (!matches!(self, Contender::Reactive(_)) || self == Contender::Reactive(Rule::Lru))
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contender::Reactive(rule) => write!(f, "reactive {rule}"),
            Contender::Moving(rule) => write!(f, "moving {rule}"),
            Contender::Pooled => f.write_str("pooled standing"),
            Contender::Evict => f.write_str("evict"),
            Contender::Frozen => f.write_str("frozen"),
            Contender::Belady => f.write_str("Belady per head"),
            Contender::PooledBelady => f.write_str("Belady pooled"),
        }
    }
}

/// A trace to be replayed, and the split of heads that was learned elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Run<'t> {
    pub trace: &'t Trace,
    pub split: Option<&'t Split>,
}

/// What fetches are told against.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub page_bytes: usize,
    pub bandwidths: Bandwidths,
}

/// What a policy came to at a budget, over all runs.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    pub contender: Contender,
    pub budget: usize,
    /// Of decode.
    pub counts: Counts,
    /// Resident pages per head, the mean over decode steps.
    pub resident: f64,
    /// The most pages that a head held, the mean over heads.
    pub peak: f64,
    /// Share of the resident pages that a step replaces.
    pub churn: f64,
    /// Of the attention mass of the demanded pages, that of those which were not resident; 0 where it is not known.
    pub missed_mass: f64,
    /// Bytes per step that attention waits for, on a device that was given.
    pub stall: Option<f64>,
    /// Pages moved without having been asked for.
    pub refreshed: u64,
    pub steps: u64,
}

impl Cell {
    pub fn miss_rate(&self) -> f64 {
        self.counts.miss_rate()
    }

    /// Misses that a larger or wiser memory could have avoided, over all demands.
    pub fn capacity_rate(&self) -> f64 {
        self.counts.capacity as f64 / self.counts.demanded.max(1) as f64
    }

    pub fn point(&self) -> Point {
        Point { memory: self.resident, miss_rate: self.miss_rate() }
    }
}

/// One cell: the runs are added up.
pub fn cell(
    runs: &[Run<'_>],
    contender: Contender,
    budget: usize,
    accounting: Accounting,
    device: Option<Device>,
) -> Result<Cell> {
    let mut cell = Cell {
        contender,
        budget,
        counts: Counts::default(),
        resident: 0.0,
        peak: 0.0,
        churn: 0.0,
        missed_mass: 0.0,
        stall: device.map(|_| 0.0),
        refreshed: 0,
        steps: 0,
    };
    for run in runs {
        let outcome = replay(run, contender, budget, accounting)?;
        let heads = outcome.heads.len().max(1) as f64;
        let steps = outcome.heads.first().map_or(0, |head| head.steps);
        cell.counts += outcome.counts();
        cell.resident += outcome.resident_mean() / heads * steps as f64;
        cell.peak += outcome.resident_peak() as f64 / heads / runs.len() as f64;
        cell.churn += outcome.churn() / runs.len() as f64;
        cell.missed_mass += outcome.missed_mass() / runs.len() as f64;
        if let (Some(stall), Some(Device { page_bytes, bandwidths })) = (&mut cell.stall, device) {
            *stall += outcome.stall_bytes(page_bytes, bandwidths) / runs.len() as f64;
        }
        cell.refreshed += outcome.heads.iter().map(|head| head.refreshed).sum::<u64>();
        cell.steps += steps;
    }
    cell.resident /= cell.steps.max(1) as f64;
    Ok(cell)
}

/// All cells, budget by budget. `on` is called after each.
pub fn grid(
    runs: &[Run<'_>],
    contenders: &[Contender],
    budgets: &[usize],
    accounting: Accounting,
    device: Option<Device>,
    mut on: impl FnMut(),
) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for &budget in budgets {
        for &contender in contenders {
            cells.push(cell(runs, contender, budget, accounting, device)?);
            on();
        }
    }
    Ok(cells)
}

fn replay(run: &Run<'_>, contender: Contender, budget: usize, accounting: Accounting) -> Result<Outcome> {
    let policy = match contender {
        Contender::Reactive(rule) => sim::Policy::Reactive(rule),
        Contender::Moving(rule) => sim::Policy::Moving(rule, BalanceSettings::default()),
        Contender::Pooled => sim::Policy::Pooled,
        Contender::Evict => sim::Policy::Evict,
        Contender::Frozen => {
            sim::Policy::Frozen(run.split.context("frozen needs a run to learn the split from, beside the one judged")?)
        }
        Contender::Belady => sim::Policy::Belady,
        Contender::PooledBelady => sim::Policy::PooledBelady,
    };
    sim::run(run.trace, policy, budget, accounting).with_context(|| format!("{contender} at {budget} pages per head"))
}

/// The curve of one policy, by budget.
pub fn curve(cells: &[Cell], contender: Contender) -> Vec<Cell> {
    cells.iter().filter(|cell| cell.contender == contender).copied().collect()
}
