//! FlexiCache (arXiv 2511.00868): a set of the best pages by min/max scores, ranked anew every so often.
//!
//! As its code has it: the score Σ_d max(q_d·min_d, q_d·max_d), the maximum over the query heads of a group, the last page always kept, and
//! unstable heads that keep all pages on the device, read as sparsely as the others and rank in every step. Our reading: the last
//! page is one of the `pages`, and when a page opens between rankings, the one that ranks lowest goes for it.

use super::replay::{Reads, Replay};
use super::{HeadOutcome, Outcome, SimError, Split};
use crate::table::{Phase, Tally};
use crate::trace::{Lane, Mark, Stream, Tensors, Trace, greatest};

/// What FlexiCache is set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlexiCache {
    /// Pages that a head reads, and that a stable head keeps on the device. At least 1.
    pub pages: usize,
    /// Decode steps from one ranking of a stable head to the next, at least 1. Published: 16.
    pub rerank_every: usize,
}

/// Replays a run under FlexiCache, whose heads read what they rank highest and not what the trace demands.
///
/// A demanded page hits if it was on the device when the step began, or has just been written. The first set is chosen from the whole
/// prompt, which prefill has left on the device. Misses are not served; what a ranking brings in counts as
/// [`refreshed`](HeadOutcome::refreshed).
///
/// # Errors
/// [`SimError::Budget`], [`SimError::Split`], [`SimError::Tensors`].
pub fn flexicache(tensors: &Tensors, trace: &Trace, split: &Split, settings: FlexiCache) -> Result<Replay, SimError> {
    let shape = *trace.shape();
    if settings.pages.min(settings.rerank_every) == 0 {
        return Err(SimError::Budget { budget: settings.pages.min(settings.rerank_every), least: 1 });
    }
    if split.unstable().len() != shape.heads() {
        return Err(SimError::Split { split: split.unstable().len(), heads: shape.heads() });
    }
    if (shape.layers, shape.heads_per_layer) != (tensors.layers(), tensors.kv_heads()) {
        return Err(SimError::Tensors { reason: "their layers and KV heads are not the trace's" });
    }
    let heads = split.unstable().iter().enumerate().map(|(head, &unstable)| {
        let (layer, kv_head) = (head / shape.heads_per_layer, head % shape.heads_per_layer);
        let mut run = Run {
            settings,
            unstable,
            bounds: Bounds::new(&Lane::new(tensors, layer, kv_head), shape.page_tokens),
            set: Vec::new(),
            decoded: 0,
            outcome: HeadOutcome::default(),
        };
        let mut reads = Stream::new();
        for (step, mark) in trace.marks().iter().enumerate() {
            let demand = trace.head(head).demand(step);
            if mark.phase == Phase::Prefill {
                run.prefill(demand);
                reads.extend(demand, &[]);
            } else {
                let queries = (mark.start..mark.end()).map(|token| tensors.scaled_group(layer, kv_head, token));
                let queries = queries.collect::<Option<Vec<_>>>();
                let queries = queries.ok_or(SimError::Tensors { reason: "they have no query of a decode step" })?;
                let masses = trace.head(head).masses(step).unwrap_or(&[]);
                run.decode(&queries.concat(), mark, (shape.page_tokens, demand, masses));
                let mut set = run.set.clone();
                set.sort_unstable();
                reads.extend(&set, &[]);
            }
            reads.end_step(None);
        }
        Ok((run.outcome, reads))
    });
    let (heads, reads) = heads.collect::<Result<(Vec<_>, Vec<_>), SimError>>()?;
    Ok(Replay { outcome: Outcome { shape, heads }, reads: Reads::Pages(trace.with_heads(reads)) })
}

/// One head.
struct Run {
    settings: FlexiCache,
    unstable: bool,
    bounds: Bounds,
    /// What the head reads: the last page, then the others from the best down.
    set: Vec<u32>,
    decoded: usize,
    outcome: HeadOutcome,
}

impl Run {
    fn prefill(&mut self, demand: &[u32]) {
        let tally = Tally { hits: demand.len() as u32, ..Tally::default() };
        self.outcome.count(Phase::Prefill, demand.len(), tally);
    }

    fn decode(&mut self, queries: &[Vec<f32>], mark: &Mark, (page_tokens, demand, masses): (usize, &[u32], &[f32])) {
        let pages = mark.end().div_ceil(page_tokens);
        for page in mark.start.div_ceil(page_tokens)..pages {
            self.set.insert(0, page as u32);
        }
        self.set.truncate(self.settings.pages);
        let before = self.set.clone();
        if self.unstable || self.decoded.is_multiple_of(self.settings.rerank_every) {
            self.rank(queries, pages);
        }
        let (first, whole) = (self.decoded == 0, self.unstable);
        let resident = |page: &u32| whole || if first { self.set.contains(page) } else { before.contains(page) };
        let mut tally = Tally::default();
        for (index, page) in demand.iter().enumerate() {
            let mass = f64::from(masses.get(index).copied().unwrap_or(0.0));
            self.outcome.mass += mass;
            if resident(page) {
                tally.hits += 1;
            } else {
                tally.capacity += 1;
                self.outcome.missed_mass += mass;
                self.outcome.unserved_mass += mass;
            }
        }
        self.outcome.count(mark.phase, demand.len(), tally);
        self.outcome.leave_unserved(tally.capacity);
        let moved = self.set.iter().filter(|page| !resident(page)).count();
        self.outcome.refresh(moved as u32);
        if !whole && !first {
            self.outcome.leave(before.iter().filter(|page| !self.set.contains(page)).count(), page_tokens);
        }
        self.outcome.end_step(if whole { pages } else { self.set.len() } * page_tokens);
        self.decoded += 1;
    }

    fn rank(&mut self, queries: &[Vec<f32>], pages: usize) {
        let last = pages - 1;
        let scores: Vec<f32> = (0..last)
            .map(|page| queries.iter().map(|query| self.bounds.score(page, query)).fold(f32::NEG_INFINITY, f32::max))
            .collect();
        let score = |page: usize| scores.get(page).copied().unwrap_or(f32::INFINITY);
        greatest(&mut self.set, pages, self.settings.pages, score);
    }
}

/// Per page the least and the greatest of every channel.
struct Bounds {
    dim: usize,
    least: Vec<f32>,
    greatest: Vec<f32>,
}

impl Bounds {
    fn new(lane: &Lane, page_tokens: usize) -> Self {
        let dim = lane.keys().next().map_or(1, <[f32]>::len);
        let len = lane.tokens().div_ceil(page_tokens) * dim;
        let mut bounds = Bounds { dim, least: vec![f32::INFINITY; len], greatest: vec![f32::NEG_INFINITY; len] };
        for (token, key) in lane.keys().enumerate() {
            let at = token / page_tokens * dim;
            for (channel, &x) in key.iter().enumerate() {
                let (least, greatest) = (&mut bounds.least[at + channel], &mut bounds.greatest[at + channel]);
                (*least, *greatest) = (least.min(x), greatest.max(x));
            }
        }
        bounds
    }

    /// The most that a key within the bounds could have with the query.
    fn score(&self, page: usize, query: &[f32]) -> f32 {
        let range = page * self.dim..(page + 1) * self.dim;
        let least = self.least.get(range.clone()).unwrap_or_default();
        let greatest = self.greatest.get(range).unwrap_or_default();
        query.iter().zip(least.iter().zip(greatest)).map(|(q, (least, greatest))| (q * least).max(q * greatest)).sum()
    }
}
