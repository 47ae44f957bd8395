//! Policies that look at queries and keys, and what reading less costs: attention mass and output, beside the paper's policies.

use anyhow::{Context, Result};
use wakekv::sim::tokens::{LayerShares, RKv, ReasonAlloc, SnapKv, TokenPolicy, destroy_tokens};
use wakekv::sim::{
    Accounting, FlexiCache, Point, Policy, Replay, Rule, Split, at_memory, flexicache, judge, replay, run,
};
use wakekv::table::Pins;
use wakekv::trace::{Demands, Log, Tensors};

use super::plan::{PAGE_TOKENS, Plan};
use super::work::Done;
use crate::tasks::Task;

/// What a policy came to at a budget, on one run.
#[derive(Clone, Debug)]
pub struct Judged {
    pub task: Task,
    pub budget: usize,
    pub policy: &'static str,
    /// Mean resident pages per head; token-level policies hold fractions of pages.
    pub resident: f64,
    pub miss_rate: f64,
    /// The rule's miss rate at that memory, where its curve reaches so far.
    pub matched: Option<f64>,
    /// Attention mass that is not read, and the relative error of the output.
    pub lost_mass: f64,
    pub output_error: f64,
}

/// Steps between those that are looked at to learn how many tokens a layer needs.
const STRIDE: usize = 8;

/// Judges a run of a task. What has to be learned is learned on another run of it.
pub fn compare(judged_run: &Done, other: &Done, plan: &Plan) -> Result<Vec<Judged>> {
    let load = |done: &Done| -> Result<(Demands, Tensors)> {
        let demands = Demands::of_log(&Log::read(&done.folder)?, PAGE_TOKENS, Pins::default())?;
        Ok((demands, Tensors::load(done.folder.join("tensors.npz"))?))
    };
    let (split, layers) = {
        let (demands, tensors) = load(other)?;
        (Split::learn(demands.trace(), Split::SHARE), LayerShares::learn(&[&tensors], STRIDE)?)
    };
    let (demands, tensors) = load(judged_run)?;
    let trace = demands.trace();
    let heads = trace.heads().len() as f64;
    let strict = Accounting::Strict;
    let curve: Vec<Point> = plan
        .budgets
        .iter()
        .map(|&budget| run(trace, Policy::Reactive(Rule::Lru), budget, strict).map(|outcome| outcome.point()))
        .collect::<Result<_, _>>()?;

    let mut judged = Vec::new();
    for &budget in &plan.attentive_budgets {
        let tokens = budget * trace.shape().page_tokens;
        let destroy = |policy| destroy_tokens(&tensors, &demands, policy, tokens);
        let flexi = |rerank_every| flexicache(&tensors, trace, &split, FlexiCache { pages: budget, rerank_every });
        let (names, replays): (Vec<&str>, Vec<Replay>) = [
            ("reactive lru", replay(trace, Policy::Reactive(Rule::Lru), budget, strict)?),
            ("evict", replay(trace, Policy::Evict, budget, strict)?),
            ("frozen", replay(trace, Policy::Frozen(&split), budget, strict)?),
            ("FlexiCache, rerank 1", flexi(1)?),
            ("FlexiCache, rerank 16", flexi(16)?),
            ("SnapKV", destroy(TokenPolicy::SnapKv(SnapKv::default()))?),
            ("R-KV", destroy(TokenPolicy::RKv(RKv::default()))?),
            ("ReasonAlloc", destroy(TokenPolicy::ReasonAlloc(ReasonAlloc::new(&layers)))?),
        ]
        .into_iter()
        .unzip();
        let qualities = judge(&tensors, trace, &replays).context("trace and tensors do not fit")?;
        for ((policy, replay), quality) in names.into_iter().zip(&replays).zip(&qualities) {
            let point = replay.outcome.point();
            judged.push(Judged {
                task: judged_run.job.task,
                budget,
                policy,
                resident: point.memory / heads,
                miss_rate: point.miss_rate,
                matched: at_memory(&curve, point.memory),
                lost_mass: quality.lost_mass(),
                output_error: quality.output_error(),
            });
        }
    }
    Ok(judged)
}
