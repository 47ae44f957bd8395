//! Demands of a recorded sequence by its true attention.

use super::lane::Lane;
use super::tensors::softmax;
use super::{Mark, Shape, Stream, Tensors, Trace, TraceError};
use crate::table::{Phase, Pins};

/// What makes a page worth demanding, over the query heads of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Worth {
    /// Its greatest logit, of any query head.
    Logit,
    /// Its attention weights, summed over tokens and query heads.
    Attention,
}

/// What an oracle demands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OracleSettings {
    /// Tokens per page, at least 1.
    pub page_tokens: usize,
    /// Pages per head and step beside the pinned ones.
    pub count: usize,
    /// Which pages these are.
    pub worth: Worth,
    /// What a page that the step before chose is worth more: as [`CacheBuilder::stickiness`](crate::CacheBuilder::stickiness).
    pub stickiness: f32,
    /// Pages that are always demanded.
    pub pins: Pins,
    /// Tokens per query head and step that the demand is for: those with the greatest weights.
    pub tokens: usize,
}

impl Default for OracleSettings {
    /// Pages of 16 tokens, the 8 with the greatest logits beside one sink and one recent page, for the 64 tokens that WakeKV's log keeps.
    fn default() -> Self {
        OracleSettings {
            page_tokens: 16,
            count: 8,
            worth: Worth::Logit,
            stickiness: 0.0,
            pins: Pins { sinks: 1, recent: 1 },
            tokens: 64,
        }
    }
}

/// Which pages every KV head demanded in every step, and for which tokens' sake.
#[derive(Clone, Debug, PartialEq)]
pub struct Demands {
    trace: Trace,
    /// Per head, ascending tokens of every step. As many steps as the trace has.
    tokens: Vec<Stream>,
}

impl Demands {
    /// What an oracle demands that knows the attention: in every step of the generation, the pinned pages and the best others. The
    /// prompt but its last token is one prefill step, which demands everything.
    ///
    /// A page's mass is its attention weight, averaged over the query heads of the group. The demanded tokens are, of each query
    /// head, the `tokens` with the greatest weights as far as they lie in demanded pages; and of a demanded page in which none of
    /// them lies, the one with the greatest weight.
    ///
    /// # Errors
    /// [`TraceError::Unknown`] when a query or key is missing, [`TraceError::PageTokens`].
    pub fn oracle(tensors: &Tensors, settings: OracleSettings) -> Result<Self, TraceError> {
        let OracleSettings { page_tokens, pins, .. } = settings;
        if page_tokens == 0 {
            return Err(TraceError::PageTokens);
        }
        let shape =
            Shape { layers: tensors.layers(), heads_per_layer: tensors.kv_heads(), page_tokens, pins, budget: None };
        let marks = marks(tensors);
        let mut heads = Vec::with_capacity(shape.heads());
        let mut tokens = Vec::with_capacity(shape.heads());
        for (layer, kv_head) in
            (0..tensors.layers()).flat_map(|layer| (0..tensors.kv_heads()).map(move |head| (layer, head)))
        {
            let lane = Lane::new(tensors, layer, kv_head);
            let mut step = OracleStep::default();
            let (mut pages, mut wanted) = (Stream::new(), Stream::new());
            for mark in &marks {
                if mark.phase == Phase::Prefill {
                    let all: Vec<u32> = (0..shape.pages(mark.end()) as u32).collect();
                    pages.extend(&all, &vec![0.0; all.len()]);
                } else {
                    let unknown =
                        || TraceError::Unknown { layer, query_head: kv_head * tensors.group(), token: mark.start };
                    let group = tensors.scaled_group(layer, kv_head, mark.start).ok_or_else(unknown)?;
                    step.attend(&lane, &group, mark.end(), &settings);
                    step.demand(&settings);
                    pages.extend(&step.demanded, &step.masses);
                    wanted.extend(&step.wanted, &[]);
                }
                pages.end_step(None);
                wanted.end_step(None);
            }
            heads.push(pages);
            tokens.push(wanted);
        }
        Ok(Demands { trace: Trace { shape, marks, heads }, tokens })
    }

    /// What a log says: the pages of the logged tokens and the pinned ones, by KV head, for the logged tokens' sake.
    ///
    /// # Errors
    /// Those of [`Log::trace`](super::Log::trace).
    #[cfg(feature = "trace")]
    pub fn of_log(log: &super::Log, page_tokens: usize, pins: Pins) -> Result<Self, TraceError> {
        let trace = log.trace(page_tokens, super::Lanes::Kv, pins)?;
        let super::Meta { n_heads, n_kv_heads, .. } = log.meta;
        let group = n_heads / n_kv_heads.max(1);
        let before = trace.marks.len() - log.steps();
        let tokens = (0..trace.heads.len()).map(|head| {
            let (layer, first) = (head / n_kv_heads, head % n_kv_heads * group);
            let mut stream = Stream::new();
            (0..before).for_each(|_| stream.end_step(None));
            for step in 0..log.steps() {
                let logged = (first..first + group).flat_map(|query_head| log.attended(step, layer, query_head));
                let mut wanted: Vec<u32> = logged.map(|(token, _)| token).collect();
                wanted.sort_unstable();
                wanted.dedup();
                stream.extend(&wanted, &[]);
                stream.end_step(None);
            }
            stream
        });
        Ok(Demands { tokens: tokens.collect(), trace })
    }

    /// The demanded pages.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The tokens that a head's demand in a step, given its index in the trace, is for. Ascending; empty in prefill.
    pub fn tokens(&self, head: usize, step: usize) -> &[u32] {
        self.tokens.get(head).map_or(&[], |stream| stream.demand(step))
    }
}

/// The prompt but its last token, then token by token.
fn marks(tensors: &Tensors) -> Vec<Mark> {
    let steps = tensors.steps();
    let prefill = Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: steps.start };
    let decode = |(step, start)| Mark { step, phase: Phase::Decode, start, tokens: 1 };
    (steps.start > 0).then_some(prefill).into_iter().chain((2..).zip(steps).map(decode)).collect()
}

/// One head's attention in one step, and what it demands. Reused from step to step.
#[derive(Default)]
struct OracleStep {
    logits: Vec<f32>,
    /// Per token, over the group: weights summed, and whether a query head has it among its best.
    weights: Vec<f32>,
    best: Vec<bool>,
    /// Per page, over the group: the greatest logit, and the weights summed.
    top: Vec<f32>,
    mass: Vec<f32>,
    order: Vec<u32>,
    group: usize,
    /// What the last step chose beside the pinned pages.
    chosen: Vec<u32>,
    demanded: Vec<u32>,
    masses: Vec<f32>,
    wanted: Vec<u32>,
}

impl OracleStep {
    fn attend(&mut self, lane: &Lane, group: &[Vec<f32>], tokens: usize, settings: &OracleSettings) {
        let pages = tokens.div_ceil(settings.page_tokens);
        self.group = group.len();
        reset(&mut self.weights, tokens, 0.0);
        reset(&mut self.best, tokens, false);
        reset(&mut self.top, pages, f32::NEG_INFINITY);
        reset(&mut self.mass, pages, 0.0);
        for query in group {
            lane.logits(query, tokens, &mut self.logits);
            for (top, logits) in self.top.iter_mut().zip(self.logits.chunks(settings.page_tokens)) {
                *top = logits.iter().copied().fold(*top, f32::max);
            }
            let logits = &self.logits;
            greatest(&mut self.order, tokens, settings.tokens, |token| logits.get(token).copied().unwrap_or(0.0));
            for &token in &self.order {
                if let Some(best) = self.best.get_mut(token as usize) {
                    *best = true;
                }
            }
            softmax(&mut self.logits);
            self.weights.iter_mut().zip(&self.logits).for_each(|(sum, weight)| *sum += weight);
        }
        for (mass, weights) in self.mass.iter_mut().zip(self.weights.chunks(settings.page_tokens)) {
            *mass = weights.iter().sum();
        }
    }

    fn demand(&mut self, settings: &OracleSettings) {
        let pages = self.mass.len();
        let last = pages.saturating_sub(1) as u32;
        let pinned = |page: u32| settings.pins.contain(page, last);
        let worth = match settings.worth {
            Worth::Logit => &self.top,
            Worth::Attention => &self.mass,
        };
        // Pinned pages come first, whatever they are worth.
        let count = settings.count.saturating_add((0..=last).filter(|&page| pinned(page)).count());
        let mut ranks: Vec<f32> = worth.clone();
        for &page in &self.chosen {
            ranks[page as usize] += settings.stickiness;
        }
        let rank = |page: usize| if pinned(page as u32) { f32::INFINITY } else { ranks[page] };
        greatest(&mut self.order, pages, count, rank);
        self.chosen.clear();
        self.chosen.extend(self.order.iter().filter(|&&page| !pinned(page)));
        self.demanded.clone_from(&self.order);
        self.demanded.sort_unstable();
        self.masses.clear();
        self.wanted.clear();
        for &page in &self.demanded {
            self.masses.push(self.mass.get(page as usize).copied().unwrap_or(0.0) / self.group as f32);
            let first = page as usize * settings.page_tokens;
            let tokens = first..(first + settings.page_tokens).min(self.weights.len());
            let before = self.wanted.len();
            let best = tokens.clone().filter(|&token| self.best.get(token).copied().unwrap_or(false));
            self.wanted.extend(best.map(|token| token as u32));
            if self.wanted.len() == before {
                let weight = |token: &usize| self.weights.get(*token).copied().unwrap_or(0.0);
                let heaviest = tokens.rev().max_by(|a, b| weight(a).total_cmp(&weight(b)));
                self.wanted.extend(heaviest.map(|token| token as u32));
            }
        }
    }
}

fn reset<T: Clone>(values: &mut Vec<T>, len: usize, value: T) {
    values.clear();
    values.resize(len, value);
}

/// The `wanted` indices below `len` that rank highest, of equal ones the lower, in descending order of rank.
pub(crate) fn greatest(order: &mut Vec<u32>, len: usize, wanted: usize, rank: impl Fn(usize) -> f32) {
    let higher = |&a: &u32, &b: &u32| rank(b as usize).total_cmp(&rank(a as usize)).then(a.cmp(&b));
    order.clear();
    order.extend(0..len as u32);
    if (1..len).contains(&wanted) {
        order.select_nth_unstable_by(wanted - 1, higher);
    }
    order.truncate(wanted);
    order.sort_unstable_by(higher);
}
