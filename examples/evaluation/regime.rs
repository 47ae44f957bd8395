//! All runs of a task, replayed.

use anyhow::{Result, ensure};
use wakekv::Counts;
use wakekv::sim::{self, Accounting, Policy, Rule, Split};
use wakekv::table::{Phase, Pins};
use wakekv::trace::{Lanes, Log, Trace};

use super::plan::{PAGE_TOKENS, Plan};
use super::work::{Done, STICKY, numbers};
use crate::study::behaviour::{self, Behaviour};
use crate::study::grid::{Cell, Contender, Run, cell, grid};
use crate::tasks::Task;
use crate::tasks::run::Score;

/// What came out of a task.
pub struct Regime {
    pub task: Task,
    pub runs: Vec<Done>,
    /// Per way of reading.
    pub scores: Vec<Score>,
    /// Heads by the pages that the cache demanded, and by the pages of the 64 tokens with the most attention.
    pub by_demand: Behaviour,
    pub by_attention: Behaviour,
    /// Every policy at every budget, on what the cache demanded.
    pub cells: Vec<Cell>,
    /// Some policies at every budget, on what it demanded with stickiness.
    pub sticky: Vec<Cell>,
    /// `frozen` with the split learned on the very run that is judged.
    pub own_split: Vec<Cell>,
    /// The paper's policies with the paper's accounting, on what single query heads attended to.
    pub paper: Vec<Cell>,
    /// Attention mass per head and step on pages that are gone (evict), on the pages of the most attended tokens.
    pub lost: Vec<(usize, f64)>,
    /// Runs whose replay counts exactly what the live cache counted.
    pub exact: usize,
    /// A map of a run's turnover.
    pub turnover: Vec<Vec<f64>>,
}

/// Budgets of the paper.
pub const PAPER_BUDGETS: [usize; 4] = [8, 16, 32, 64];

/// Decode steps of a column of the turnover map.
pub const MAP_WIDTH: usize = 4;

/// Runs of the paper's accounting: it looks at every query head, so a few runs are enough.
pub const PAPER_RUNS: usize = 3;

impl Regime {
    /// Policies that are looked at with stickiness.
    pub const STICKY: [Contender; 3] =
        [Contender::Reactive(Rule::Lru), Contender::Reactive(Rule::Standing), Contender::Pooled];

    /// Replays a task's runs.
    pub fn new(task: Task, runs: Vec<Done>, plan: &Plan) -> Result<Self> {
        let traces: Vec<Trace> = runs.iter().map(|run| Trace::load(&run.folder)).collect::<Result<_, _>>()?;
        let exact =
            traces.iter().zip(&runs).map(|(trace, run)| is_exact(trace, run, plan)).collect::<Result<Vec<_>>>()?;
        let scores = (0..plan.reads.len()).map(|index| {
            let mut total = Score::default();
            runs.iter().filter_map(|run| run.scores.get(index)).for_each(|&score| total += score);
            total
        });

        let own: Vec<Split> = traces.iter().map(|trace| Split::learn(trace, Split::SHARE)).collect();
        // Each run is judged with what the next one taught.
        let judged = |shift: usize| -> Vec<Run<'_>> {
            let split = |index: usize| own.get((index + shift) % own.len());
            traces.iter().enumerate().map(|(index, trace)| Run { trace, split: split(index) }).collect()
        };
        let mut contenders = Contender::all();
        // With one run there is no other to learn from.
        contenders.retain(|&contender| contender != Contender::Frozen || traces.len() > 1);
        let cells = grid(&judged(1), &contenders, &plan.budgets, Accounting::Strict, None, || ())?;
        let own_split =
            plan.budgets.iter().map(|&budget| cell(&judged(0), Contender::Frozen, budget, Accounting::Strict, None));
        let own_split = own_split.collect::<Result<_>>()?;

        let sticky: Vec<Trace> =
            runs.iter().map(|run| Trace::load(run.folder.join(STICKY))).collect::<Result<_, _>>()?;
        for (trace, run) in sticky.iter().zip(&runs) {
            ensure!(
                counted(trace) == replayed(trace, plan)?[..5],
                "{task}, seed {}: a sticky run's replay counts otherwise than its cache did",
                run.job.seed
            );
        }
        let sticky: Vec<Run<'_>> = sticky.iter().map(|trace| Run { trace, split: None }).collect();
        let sticky = grid(&sticky, &Self::STICKY, &plan.budgets, Accounting::Strict, None, || ())?;

        let mut regime = Regime {
            task,
            scores: scores.collect(),
            by_demand: Behaviour::default(),
            by_attention: Behaviour::default(),
            cells,
            sticky,
            own_split,
            paper: Vec::new(),
            lost: Vec::new(),
            exact: exact.into_iter().filter(|&exact| exact).count(),
            turnover: traces.first().map(|trace| behaviour::turnover(trace, MAP_WIDTH)).unwrap_or_default(),
            runs,
        };
        traces.iter().for_each(|trace| regime.by_demand += Behaviour::of(trace));
        regime.look_at_attention(plan)?;
        Ok(regime)
    }

    /// Everything that is learned from the logs of attention.
    fn look_at_attention(&mut self, plan: &Plan) -> Result<()> {
        let mut lost = vec![(0.0, 0.0); plan.budgets.len()];
        let mut singles = Vec::new();
        for (index, run) in self.runs.iter().enumerate() {
            let log = Log::read(&run.folder)?;
            let trace = log.trace(PAGE_TOKENS, Lanes::Kv, Pins::default())?;
            self.by_attention += Behaviour::of(&trace);
            for (sum, &budget) in lost.iter_mut().zip(&plan.budgets) {
                let outcome = sim::run(&trace, Policy::Evict, budget, Accounting::Strict)?;
                let steps: u64 = outcome.heads.iter().map(|head| head.steps).sum();
                sum.0 += outcome.unserved_mass() * steps as f64;
                sum.1 += steps as f64;
            }
            if index < PAPER_RUNS {
                singles.push(log.trace(PAGE_TOKENS, Lanes::Query, Pins::default())?);
            }
        }
        self.lost = plan
            .budgets
            .iter()
            .zip(&lost)
            .map(|(&budget, (sum, steps))| (budget, sum / f64::max(*steps, 1.0)))
            .collect();
        let own: Vec<Split> = singles.iter().map(|trace| Split::learn(trace, Split::SHARE)).collect();
        let runs: Vec<Run<'_>> =
            singles.iter().zip(&own).map(|(trace, split)| Run { trace, split: Some(split) }).collect();
        self.paper = grid(&runs, &Contender::PUBLISHED, &PAPER_BUDGETS, Accounting::Paper, None, || ())?;
        Ok(())
    }

    /// The cell of a policy at a budget.
    pub fn cell(&self, contender: Contender, budget: usize) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.contender == contender && cell.budget == budget)
    }
}

/// Whether the replay counts what the live cache counted.
fn is_exact(trace: &Trace, run: &Done, plan: &Plan) -> Result<bool> {
    Ok(replayed(trace, plan)? == run.live && counted(trace) == run.live[..5])
}

/// What the replay counts in decode.
fn replayed(trace: &Trace, plan: &Plan) -> Result<[u64; 6]> {
    Ok(numbers(&sim::run(trace, Policy::Reactive(Rule::Lru), plan.recorded.1, Accounting::Strict)?.counts()))
}

/// What the cache counted in decode, as the trace has it step by step: all but evictions, of which a demand knows only its own.
fn counted(trace: &Trace) -> [u64; 5] {
    let mut counts = Counts::default();
    for head in trace.heads() {
        for (step, _) in trace.marks().iter().enumerate().filter(|(_, mark)| mark.phase == Phase::Decode) {
            let tally = head.tally(step).unwrap_or_default();
            counts.demanded += head.demand(step).len() as u64;
            counts.hits += u64::from(tally.hits);
            counts.compulsory += u64::from(tally.compulsory);
            counts.capacity += u64::from(tally.capacity);
            counts.overflow += u64::from(tally.overflow);
        }
    }
    let [demanded, hits, compulsory, capacity, overflow, _] = numbers(&counts);
    [demanded, hits, compulsory, capacity, overflow]
}
