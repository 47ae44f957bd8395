//! Recorded runs under other policies and budgets.
//!
//! Every policy that keeps pages by the rule is replayed through the very [`HeadTable`](crate::table::HeadTable) that serves.
//!
//! | policy | resident pages | a page that is not resident |
//! |---|---|---|
//! | [`Policy::Reactive`] | the rule, with any [`Rule`] for who goes | is fetched and kept |
//! | [`Policy::Moving`] | the same, and ways move between heads at an equal sum | is fetched and kept |
//! | [`Policy::Pooled`] | those of greatest standing in all heads together | is fetched and kept |
//! | [`Policy::Full`] | all | does not occur |
//! | [`Policy::Evict`] | LRU | is lost: it misses for ever |
//! | [`Policy::Frozen`] | unstable heads all, the others the most demanded, refreshed every 16 steps | is fetched and not kept |
//! | [`Policy::Belady`], [`Policy::PooledBelady`] | whatever will be demanded soonest | is fetched |
//!
//! Policies that look at queries and keys need [`Tensors`](crate::trace::Tensors):
//!
//! | policy | what is left on the device | a page that is not resident |
//! |---|---|---|
//! | [`flexicache()`] | the best pages by min/max score, ranked every so often; unstable heads all | is not read |
//! | [`tokens`]: SnapKV, R-KV, ReasonAlloc | single tokens | is lost |
//!
//! # Quality
//! [`replay()`] keeps what the heads of a policy read, and [`judge`] computes from tensors what that costs: attention mass that is not
//! read, and the error of the output.
//!
//! ```
//! use wakekv::Geometry;
//! use wakekv::sim::tokens::{SnapKv, TokenPolicy, destroy_tokens};
//! use wakekv::sim::{Accounting, Policy, Rule, judge, replay};
//! use wakekv::trace::{Demands, OracleSettings, Tensors};
//! let mut tensors = Tensors::new(&Geometry::builder().head_dim(32).build()?, 1.0, 200, 32);
//! let wave = |token: usize| (0..32).map(move |channel| ((token * 7 + channel) as f32).sin());
//! let rows: Vec<f32> = (0..210).flat_map(wave).collect();
//! tensors.append(0, &rows, &rows)?;
//! tensors.queries(0, 0, &rows)?;
//! let demands = Demands::oracle(&tensors, OracleSettings { count: 4, ..OracleSettings::default() })?;
//! let replays = [
//!     replay(demands.trace(), Policy::Reactive(Rule::Lru), 6, Accounting::Strict)?,
//!     replay(demands.trace(), Policy::Evict, 6, Accounting::Strict)?,
//!     destroy_tokens(&tensors, &demands, TokenPolicy::SnapKv(SnapKv::default()), 6 * 16)?,
//! ];
//! let qualities = judge(&tensors, demands.trace(), &replays)?;
//! for (replay, quality) in replays.iter().zip(&qualities) {
//!     println!("{} missed, output error {}", replay.outcome.miss_rate(), quality.output_error());
//! }
//! assert!(qualities[0].lost_mass() <= qualities[1].lost_mass());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Accounting
//! [`Accounting::Strict`] is what the live cache counts: a hard budget at every moment, the last page always resident, and the first
//! decode demand of a page that prefill left in the reservoir a compulsory miss. [`Accounting::Paper`] is that of WakeKV's published
//! simulator (arXiv 2610.02713), so that its numbers can be set beside: prefill does not count, a head's first demand for a page
//! is free, and a head may hold more pages than its budget until the step ends.
//!
//! ```
//! use wakekv::sim::{Accounting, Policy, Rule, run};
//! use wakekv::table::{Phase, Pins};
//! use wakekv::trace::{Mark, Shape, Trace};
//! let shape = Shape { layers: 1, heads_per_layer: 1, page_tokens: 16, pins: Pins::default(), budget: None };
//! let mut trace = Trace::new(shape);
//! trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: 60 }, &[[0, 1, 2, 3]])?;
//! for (step, pages) in [(2, [0, 3]), (3, [1, 3]), (4, [0, 3])] {
//!     trace.push(Mark { step, phase: Phase::Decode, start: 58 + step as usize, tokens: 1 }, &[pages])?;
//! }
//! let outcome = run(&trace, Policy::Reactive(Rule::Lru), 2, Accounting::Strict)?;
//! let counts = outcome.counts();
//! assert_eq!((counts.hits, counts.compulsory, counts.capacity), (3, 2, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod belady;
mod evict;
mod flexicache;
mod frozen;
mod head;
pub mod metrics;
mod moving;
mod outcome;
mod paper;
mod pooled;
mod quality;
mod replay;
mod rule;
pub mod tokens;

pub use flexicache::{FlexiCache, flexicache};
pub use frozen::Split;
pub use outcome::{Bandwidths, HeadOutcome, Outcome, Point, Traffic, at_memory};
pub use quality::{HeadQuality, Quality, judge};
pub use replay::{Replay, replay};

pub use crate::residency::Rule;
use crate::residency::{BalanceSettings, Lru, Replacement};
use crate::table::TableError;
use crate::trace::Trace;

/// How pages become resident and stop being so.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Policy<'a> {
    /// The rule: fetched on demand, kept until somebody else needs the way, never lost.
    Reactive(Rule),
    /// The rule, and every so often ways move from heads that have cooled to heads that miss.
    Moving(Rule, BalanceSettings),
    /// One pool of as many ways for all heads, from which the page goes that has least standing of all, as
    /// [`Standing`](crate::residency::Standing) has it. Heads are all served before anybody goes. It shows what is to be had from sharing: a device would
    /// have to move ways between heads in every step.
    Pooled,
    /// Every page of every head.
    Full,
    /// The rule with LRU, but a page that gives up its way is destroyed. Under [`Accounting::Strict`] what prefill leaves behind
    /// outlives it until its first demand, so that the policy is charged the same compulsory misses as the rule.
    Evict,
    /// FlexiCache's split (arXiv 2511.00868) as WakeKV compares with it.
    Frozen(&'a Split),
    /// The least misses that any policy with this budget per head can have.
    Belady,
    /// The least misses that any policy can have whose heads share one pool of as many ways.
    PooledBelady,
}

/// What counts, and what is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accounting {
    /// As the live cache counts.
    Strict,
    /// As WakeKV's simulator counts.
    Paper,
}

/// Why a trace could not be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The budget is smaller than what has to stay.
    #[error("a budget of {budget} pages per head, but {least} must be able to stay")]
    Budget {
        /// Ways per head.
        budget: usize,
        /// The least that will do.
        least: usize,
    },
    /// A split of another model.
    #[error("the split is of {split} heads, the trace has {heads}")]
    Split {
        /// Heads of the split.
        split: usize,
        /// Heads of the trace.
        heads: usize,
    },
    /// The tensors are not those of the trace's run.
    #[error("tensors: {reason}")]
    Tensors {
        /// What does not fit.
        reason: &'static str,
    },
    /// A policy looks at queries that were not recorded.
    #[error("the queries from token {first} on are looked at: record more of the prompt's last ones")]
    Unobserved {
        /// The first of them.
        first: usize,
    },
    /// A policy that is not defined under the paper's accounting.
    #[error("{policy} is not defined under the paper's accounting")]
    Undefined {
        /// The policy.
        policy: &'static str,
    },
    /// The table refused.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// Replays a trace: `budget` ways per head.
///
/// # Errors
/// [`SimError`]; a trace from a [`Recorder`](crate::trace::Recorder) is refused only for its budget or its split.
pub fn run(trace: &Trace, policy: Policy<'_>, budget: usize, accounting: Accounting) -> Result<Outcome, SimError> {
    check_budget(trace, budget, accounting)?;
    match (policy, accounting) {
        (Policy::Belady, _) => Ok(belady::per_head(trace, budget, accounting)),
        (Policy::PooledBelady, _) => Ok(belady::pooled(trace, budget, accounting)),
        (Policy::Pooled, Accounting::Strict) => Ok(pooled::run(trace, budget)),
        (Policy::Pooled, Accounting::Paper) => Err(SimError::Undefined { policy: "a pool that all heads share" }),
        (Policy::Frozen(split), _) => frozen::run(trace, split, budget, accounting),
        (Policy::Full, Accounting::Strict) => rule::run(trace, usize::MAX, Lru::new),
        (Policy::Full, Accounting::Paper) => Ok(paper::run::<Lru>(trace, usize::MAX, false)?.0),
        (Policy::Evict, Accounting::Strict) => Ok(evict::run(trace, budget)?.0),
        (Policy::Evict, Accounting::Paper) => Ok(paper::run::<Lru>(trace, budget, true)?.0),
        // The published rule is what is replayed most, and pays no branch per call.
        (Policy::Reactive(Rule::Lru), Accounting::Strict) => rule::run(trace, budget, Lru::new),
        (Policy::Reactive(rule), Accounting::Strict) => rule::run(trace, budget, || rule.order()),
        (Policy::Reactive(Rule::Lru), Accounting::Paper) => Ok(paper::run::<Lru>(trace, budget, false)?.0),
        (Policy::Reactive(_), Accounting::Paper) => Err(SimError::Undefined { policy: "a rule other than LRU" }),
        (Policy::Moving(rule, settings), Accounting::Strict) => moving::run(trace, rule, budget, settings),
        (Policy::Moving(..), Accounting::Paper) => Err(SimError::Undefined { policy: "moving ways" }),
    }
}

fn check_budget(trace: &Trace, budget: usize, accounting: Accounting) -> Result<(), SimError> {
    let least = match accounting {
        Accounting::Strict => trace.shape().pins.ways(),
        Accounting::Paper => 1,
    };
    if budget < least { Err(SimError::Budget { budget, least }) } else { Ok(()) }
}
