//! Policies that destroy single tokens: SnapKV, R-KV and ReasonAlloc.
//!
//! They are charged in tokens, and read all that is left. A demanded page is resident only if its demanded tokens survive.
//!
//! What is faithful and what is our reading is told where each is described: [`SnapKv`], [`RKv`], [`ReasonAlloc`].

mod pool;
mod reasonalloc;
mod rkv;
mod snapkv;

pub use reasonalloc::{LayerShares, ReasonAlloc};
pub use rkv::RKv;
pub use snapkv::SnapKv;

use super::replay::{Reads, Replay};
use super::{HeadOutcome, Outcome, SimError};
use crate::table::{Phase, Tally};
use crate::trace::{Demands, Lane, Tensors};

/// How tokens are destroyed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum TokenPolicy<'a> {
    /// Of the prompt, once, when it ends.
    SnapKv(SnapKv),
    /// Again and again, every head to the same number.
    RKv(RKv),
    /// Again and again, to a number per layer and head.
    ReasonAlloc(ReasonAlloc<'a>),
}

/// Which tokens of which head are left, and until when. What is destroyed does not come back.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Survival {
    /// Per head and token, the first token whose query does not find it any more.
    died: Vec<Vec<u32>>,
}

const NEVER: u32 = u32::MAX;

impl Survival {
    /// Whether `token` of a head is there for the query of token `at`.
    pub(super) fn alive(&self, head: usize, token: usize, at: usize) -> bool {
        let died = self.died.get(head).and_then(|died| died.get(token));
        token <= at && died.is_some_and(|&died| died as usize > at)
    }
}

/// Replays demands under a policy that leaves every head `budget` tokens, in the mean over heads where it deals them out unequally.
///
/// A demanded page hits if all its demanded tokens are left; where none are known, if any of its tokens is. What misses is lost. The
/// tokens of a decode step are there for it.
///
/// # Errors
/// [`SimError::Budget`], [`SimError::Tensors`], [`SimError::Unobserved`].
pub fn destroy_tokens(
    tensors: &Tensors,
    demands: &Demands,
    policy: TokenPolicy<'_>,
    budget: usize,
) -> Result<Replay, SimError> {
    let shape = *demands.trace().shape();
    if (shape.layers, shape.heads_per_layer) != (tensors.layers(), tensors.kv_heads()) {
        return Err(SimError::Tensors { reason: "their layers and KV heads are not the trace's" });
    }
    let survival = Survival { died: run(tensors, policy, budget)? };
    let heads = (0..shape.heads()).map(|head| count(demands, &survival, head)).collect();
    Ok(Replay { outcome: Outcome { shape, heads }, reads: Reads::Tokens(survival) })
}

/// The tokens of each head that a policy has left once the prompt has ended, ascending: what a generation would begin with.
///
/// # Errors
/// As [`destroy_tokens`].
pub fn survivors(tensors: &Tensors, policy: TokenPolicy<'_>, budget: usize) -> Result<Vec<Vec<u32>>, SimError> {
    let prompt = tensors.prompt_tokens() as u32;
    let left =
        |died: Vec<u32>| (0..prompt).zip(died).filter(|&(_, died)| died > prompt).map(|(token, _)| token).collect();
    Ok(run(tensors, policy, budget)?.into_iter().map(left).collect())
}

/// Per head and token, when it dies.
fn run(tensors: &Tensors, policy: TokenPolicy<'_>, budget: usize) -> Result<Vec<Vec<u32>>, SimError> {
    match policy {
        TokenPolicy::SnapKv(settings) => snapkv::run(tensors, settings, budget),
        TokenPolicy::RKv(settings) => rkv::run(tensors, settings, budget),
        TokenPolicy::ReasonAlloc(settings) => reasonalloc::run(tensors, settings, budget),
    }
}

fn count(demands: &Demands, survival: &Survival, head: usize) -> HeadOutcome {
    let trace = demands.trace();
    let page_tokens = trace.shape().page_tokens;
    let mut outcome = HeadOutcome::default();
    let resident = |page: u32, wanted: &[u32], at: usize| {
        let first = page as usize * page_tokens;
        let own = |token: &&u32| (first..first + page_tokens).contains(&(**token as usize));
        let mut wanted = wanted.iter().filter(own).peekable();
        match wanted.peek() {
            Some(_) => wanted.all(|&token| survival.alive(head, token as usize, at)),
            None => (first..first + page_tokens).any(|token| survival.alive(head, token, at)),
        }
    };
    for (step, mark) in trace.marks().iter().enumerate() {
        let demand = trace.head(head).demand(step);
        let mut tally = Tally::default();
        if mark.phase == Phase::Prefill {
            tally.hits = demand.len() as u32;
            outcome.count(mark.phase, demand.len(), tally);
            continue;
        }
        let masses = trace.head(head).masses(step).unwrap_or(&[]);
        let at = mark.end() - 1;
        for (index, &page) in demand.iter().enumerate() {
            let mass = f64::from(masses.get(index).copied().unwrap_or(0.0));
            outcome.mass += mass;
            if resident(page, demands.tokens(head, step), at) {
                tally.hits += 1;
            } else {
                tally.capacity += 1;
                outcome.missed_mass += mass;
                outcome.unserved_mass += mass;
            }
        }
        outcome.count(mark.phase, demand.len(), tally);
        outcome.leave_unserved(tally.capacity);
        // What the end of the step destroys is gone for the next query.
        let left = survival.died.get(head).map_or(&[][..], |died| died.get(..=at).unwrap_or(died));
        outcome.leave(left.iter().filter(|&&died| died as usize == at + 1).count(), 1);
        outcome.end_step(left.iter().filter(|&&died| died as usize > at + 1).count());
    }
    outcome
}

/// A head whose tokens are being destroyed.
struct Living {
    lane: Lane,
    /// Ascending.
    alive: Vec<u32>,
    died: Vec<u32>,
}

impl Living {
    fn new(tensors: &Tensors, layer: usize, kv_head: usize) -> Self {
        let lane = Lane::new(tensors, layer, kv_head);
        Living { died: vec![NEVER; lane.tokens()], alive: Vec::new(), lane }
    }

    /// All tokens up to `token` have been written.
    fn grow(&mut self, from: usize, token: usize) {
        self.alive.extend((from..=token).map(|token| token as u32));
    }

    /// Of all but the last `window` tokens those are left that are among the best `wanted` by score, of equal ones the earlier; from the
    /// query of token `at` on the others are gone.
    fn keep_best(&mut self, scores: &[f32], wanted: usize, at: usize) {
        let mut best = Vec::new();
        crate::trace::greatest(&mut best, scores.len(), wanted, |index| scores.get(index).copied().unwrap_or(0.0));
        let mut keep = vec![false; scores.len()];
        for index in best {
            if let Some(keep) = keep.get_mut(index as usize) {
                *keep = true;
            }
        }
        let mut keep = keep.into_iter().chain(std::iter::repeat(true));
        self.alive.retain(|&token| {
            let stays = keep.next().unwrap_or(true);
            if let (false, Some(died)) = (stays, self.died.get_mut(token as usize)) {
                *died = at as u32;
            }
            stays
        });
    }
}

/// Per window token the queries of a KV head's group.
type Observed = Vec<Vec<Vec<f32>>>;

/// The queries of the `window` tokens up to and including `token`.
fn observe(tensors: &Tensors, layer: usize, kv_head: usize, token: usize, window: usize) -> Result<Observed, SimError> {
    let first = (token + 1).saturating_sub(window);
    let queries = (first..=token).map(|token| tensors.scaled_group(layer, kv_head, token));
    queries.collect::<Option<Observed>>().ok_or(SimError::Unobserved { first })
}
