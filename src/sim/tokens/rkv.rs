//! R-KV (arXiv 2505.24133).

use super::pool::max_pool;
use super::{Living, Observed, observe};
use crate::sim::SimError;
use crate::trace::{Lane, Tensors, dot, softmax};

/// R-KV: every so often the tokens go that are unimportant to the last queries, or say what others say as well.
///
/// As its code has it. Importance: logits of the last `window` queries, the maximum over the query heads of a group, softmax over the
/// tokens before the window, mean over the queries, pooled by maximum. Redundancy: the cosine of all pairs of cached keys, without
/// the diagonal and, in each row, without its last entry above `threshold`; mean over rows; softmax over columns. Score: λ × importance −
/// (1 − λ) × redundancy. The best stay beside the window. It happens when the prompt ends, and whenever the
/// number of tokens so far is a multiple of `every`, if the head has at least its budget. One budget for all heads ("uniform").
///
/// Our reading: λ is that of its description (its code has 0.07).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RKv {
    /// Last tokens whose queries are asked, and which stay. Published: 8.
    pub window: usize,
    /// λ, the part of importance. Published: 0.1.
    pub importance: f32,
    /// Neighbours that share importance. An odd number; published: 7.
    pub kernel: usize,
    /// Cosine above which keys say the same. Published: 0.5.
    pub threshold: f32,
    /// Tokens from one time to the next, at least 1. Published: 128.
    pub every: usize,
}

impl Default for RKv {
    /// What was published.
    fn default() -> Self {
        RKv { window: 8, importance: 0.1, kernel: 7, threshold: 0.5, every: 128 }
    }
}

impl RKv {
    pub(super) fn check(&self, budget: usize) -> Result<(), SimError> {
        if budget <= self.window || self.window == 0 || self.every == 0 {
            return Err(SimError::Budget { budget, least: self.window.max(1) + 1 });
        }
        Ok(())
    }

    /// Scores of all tokens alive but the last `window`, which must be the last ones of the sequence.
    pub(super) fn scores(&self, head: &Living, observed: &Observed) -> Vec<f32> {
        let before = head.alive.len().saturating_sub(observed.len());
        let importance = max_pool(&importance(&head.lane, &head.alive[..before], observed), self.kernel);
        let redundancy = redundancy(&head.lane, &head.alive, self.threshold);
        let scores = importance.iter().zip(&redundancy);
        scores.map(|(important, redundant)| self.importance * important - (1.0 - self.importance) * redundant).collect()
    }

    /// Whether tokens go once `token` has been attended.
    pub(super) fn is_due(&self, tensors: &Tensors, token: usize) -> bool {
        let (tokens, prompt) = (token + 1, tensors.prompt_tokens());
        tokens == prompt || tokens > prompt && tokens.is_multiple_of(self.every)
    }
}

fn importance(lane: &Lane, before: &[u32], observed: &Observed) -> Vec<f32> {
    let mut mean = vec![0.0; before.len()];
    for group in observed {
        let logit = |&token: &u32| {
            let logits = group.iter().map(|query| dot(query, lane.key(token as usize)));
            logits.fold(f32::NEG_INFINITY, f32::max)
        };
        let mut weights: Vec<f32> = before.iter().map(logit).collect();
        softmax(&mut weights);
        mean.iter_mut().zip(weights).for_each(|(mean, weight)| *mean += weight / observed.len() as f32);
    }
    mean
}

fn redundancy(lane: &Lane, alive: &[u32], threshold: f32) -> Vec<f32> {
    let units: Vec<Vec<f32>> = alive
        .iter()
        .map(|&token| {
            let key = lane.key(token as usize);
            let norm = dot(key, key).sqrt();
            key.iter().map(|x| if norm > 0.0 { x / norm } else { 0.0 }).collect()
        })
        .collect();
    // Each cosine stands in two rows. Rows are walked downwards, so that the last near-duplicate of each is found last.
    let mut columns = vec![0.0f64; units.len()];
    let mut spared: Vec<Option<(usize, f32)>> = vec![None; units.len()];
    for (row, unit) in units.iter().enumerate() {
        for (column, other) in units.iter().enumerate().skip(row + 1) {
            let cosine = dot(unit, other);
            columns[column] += f64::from(cosine);
            columns[row] += f64::from(cosine);
            if cosine > threshold {
                spared[row] = Some((column, cosine));
                if spared[column].is_none_or(|(last, _)| last < row) {
                    spared[column] = Some((row, cosine));
                }
            }
        }
    }
    for (column, cosine) in spared.into_iter().flatten() {
        columns[column] -= f64::from(cosine);
    }
    let mut mean: Vec<f32> = columns.iter().map(|sum| (sum / units.len() as f64) as f32).collect();
    softmax(&mut mean);
    mean
}

pub(super) fn run(tensors: &Tensors, settings: RKv, budget: usize) -> Result<Vec<Vec<u32>>, SimError> {
    settings.check(budget)?;
    let heads = (0..tensors.layers()).flat_map(|layer| (0..tensors.kv_heads()).map(move |head| (layer, head)));
    heads
        .map(|(layer, kv_head)| {
            let mut head = Living::new(tensors, layer, kv_head);
            let mut from = 0;
            for token in tensors.steps() {
                head.grow(std::mem::replace(&mut from, token + 1), token);
                if settings.is_due(tensors, token) && head.alive.len() >= budget {
                    let observed = observe(tensors, layer, kv_head, token, settings.window)?;
                    let scores = settings.scores(&head, &observed);
                    head.keep_best(&scores, budget - settings.window, token + 1);
                }
            }
            Ok(head.died)
        })
        .collect()
}
