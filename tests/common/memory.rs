//! What a sequence has been told, and exact attention over it in float64.
#![allow(dead_code, reason = "each test uses a part of it")]

use super::{Rng, round};
use wakekv::{Entry, Geometry};

/// New tokens of one sequence: per layer, `[tokens, kv_heads, head_dim]` and `[tokens, query_heads, head_dim]`.
#[derive(Clone, Debug)]
pub struct Draft {
    pub tokens: usize,
    pub keys: Vec<Vec<f32>>,
    pub values: Vec<Vec<f32>>,
    pub queries: Vec<Vec<f32>>,
}

impl Draft {
    /// Fresh random numbers, so that whatever an undone step leaves behind shows.
    pub fn random(geometry: &Geometry, tokens: usize, rng: &mut Rng) -> Self {
        let mut tensor = |elements: usize, scale: f32| -> Vec<f32> {
            let mut element = || {
                let bits = rng.next();
                let sum: f32 = (0..4).map(|part| (bits >> (16 * part) & 0xFFFF) as f32 / 65_536.0 - 0.5).sum();
                round(sum * scale, geometry.dtype())
            };
            (0..elements).map(|_| element()).collect()
        };
        let mut layers = |elements, scale| (0..geometry.layers()).map(|_| tensor(elements, scale)).collect();
        Draft {
            tokens,
            keys: layers(geometry.kv_elements(tokens), 2.0),
            values: layers(geometry.kv_elements(tokens), 2.0),
            queries: layers(geometry.query_elements(tokens), 3.0),
        }
    }
}

/// One sequence's part in a step.
#[derive(Clone, Debug)]
pub struct Turn {
    pub entry: Entry,
    pub draft: Draft,
}

/// Everything that a sequence's finished steps have stored.
#[derive(Clone, Debug)]
pub struct Memory {
    geometry: Geometry,
    pub tokens: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Memory {
    pub fn new(geometry: Geometry) -> Self {
        let empty = vec![Vec::new(); geometry.layers()];
        Memory { geometry, tokens: 0, keys: empty.clone(), values: empty }
    }

    pub fn extend(&mut self, draft: &Draft) {
        self.tokens += draft.tokens;
        for layer in 0..self.geometry.layers() {
            self.keys[layer].extend(&draft.keys[layer]);
            self.values[layer].extend(&draft.values[layer]);
        }
    }

    /// Attention of the token at `position` over the positions up to its own that lie in pages that are read.
    pub fn attend(&self, layer: usize, position: usize, head: usize, query: &[f32], reads: &[u32]) -> Vec<f64> {
        let g = &self.geometry;
        let dim = g.head_dim();
        let row = |tensor: &[Vec<f32>], token: usize| -> std::ops::Range<usize> {
            let at = (token * g.kv_heads() + head / g.group()) * dim;
            debug_assert!(at + dim <= tensor[layer].len());
            at..at + dim
        };
        let scale = f64::from(1.0 / (dim as f32).sqrt());
        let read: Vec<usize> =
            (0..=position).filter(|&token| reads.contains(&((token / g.page_tokens()) as u32))).collect();
        let logit = |&token: &usize| {
            let key = &self.keys[layer][row(&self.keys, token)];
            query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * scale
        };
        let logits: Vec<f64> = read.iter().map(logit).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
        let mut out = vec![0.0; dim];
        for (&token, logit) in read.iter().zip(logits) {
            let weight = (logit - max).exp() / sum;
            let value = &self.values[layer][row(&self.values, token)];
            out.iter_mut().zip(value).for_each(|(out, &value)| *out += weight * f64::from(value));
        }
        out
    }
}
