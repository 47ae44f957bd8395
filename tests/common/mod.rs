//! A world whose every number follows from a seed, and the dense float64 attention over it.
#![allow(dead_code, reason = "each test uses a part of it")]

pub mod device;
pub mod drive;
pub mod faulty;
pub mod heads;
pub mod memory;
pub mod naive;
pub mod overdue;
mod rng;

pub use device::Tensors;
pub use rng::Rng;

use half::{bf16, f16};
use wakekv::{Cache, DType, Entry, Error, Geometry, Sequence, StepReport};

/// Keys, values and queries of one sequence: random numbers that depend on the position only, so that a test can forget them.
#[derive(Clone, Copy, Debug)]
pub struct World {
    pub geometry: Geometry,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum Which {
    Key,
    Value,
    Query,
}

impl World {
    /// One element, roughly normal, rounded to the geometry's dtype where it is stored.
    pub fn at(&self, which: Which, layer: usize, position: usize, head: usize, channel: usize) -> f32 {
        let mut x = self.seed;
        for part in [which as u64 + 1, layer as u64, position as u64, head as u64, channel as u64] {
            x = mix(x ^ part.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        }
        let sum: f32 = (0..4).map(|byte| (x >> (16 * byte) & 0xFFFF) as f32 / 65_536.0 - 0.5).sum();
        match which {
            Which::Query => 2.0 * sum,
            _ => round(sum * 2.0, self.geometry.dtype()),
        }
    }

    /// `[tokens, heads, head_dim]` of one layer.
    pub fn tensor(&self, which: Which, layer: usize, positions: std::ops::Range<usize>) -> Vec<f32> {
        let g = &self.geometry;
        let heads = if matches!(which, Which::Query) { g.query_heads() } else { g.kv_heads() };
        let mut out = Vec::with_capacity(positions.len() * heads * g.head_dim());
        for position in positions {
            for head in 0..heads {
                out.extend((0..g.head_dim()).map(|channel| self.at(which, layer, position, head, channel)));
            }
        }
        out
    }

    /// Attention in float64 for the token at `position`, over the positions of `pages` up to and including its own.
    pub fn dense(&self, layer: usize, position: usize, query_head: usize, pages: &dyn Fn(usize) -> bool) -> Vec<f64> {
        let g = &self.geometry;
        let (dim, kv_head) = (g.head_dim(), query_head / g.group());
        let read: Vec<usize> = (0..=position).filter(|p| pages(p / g.page_tokens())).collect();
        let q: Vec<f64> = (0..dim).map(|d| self.at(Which::Query, layer, position, query_head, d) as f64).collect();
        let logits: Vec<f64> = read
            .iter()
            .map(|&p| (0..dim).map(|d| q[d] * self.at(Which::Key, layer, p, kv_head, d) as f64).sum::<f64>())
            .map(|logit| logit / (dim as f64).sqrt())
            .collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        (0..dim)
            .map(|d| {
                let values = read.iter().map(|&p| self.at(Which::Value, layer, p, kv_head, d) as f64);
                values.zip(&weights).map(|(value, weight)| value * weight).sum::<f64>() / sum
            })
            .collect()
    }
}

pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

pub fn round(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
    }
}

/// What a step appends for one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Part<'w> {
    pub world: &'w World,
    pub entry: Entry,
    pub start: usize,
    pub tokens: usize,
}

impl<'w> Part<'w> {
    pub fn new(world: &'w World, sequence: Sequence, start: usize, tokens: usize) -> Self {
        Part { world, entry: (sequence, tokens).into(), start, tokens }
    }
}

/// Runs one step and returns the output of every layer, `[layers][tokens, query_heads, head_dim]`, poisoned before it is written.
pub fn run_step<B: Tensors>(cache: &mut Cache<B>, parts: &[Part<'_>]) -> Result<(Vec<Vec<f32>>, StepReport), Error> {
    let geometry = *cache.geometry();
    let entries: Vec<Entry> = parts.iter().map(|part| part.entry).collect();
    let mut step = cache.step(&entries)?;
    let mut outputs = Vec::new();
    for layer in 0..geometry.layers() {
        let gather = |which| -> Vec<f32> {
            let tensor = |part: &Part<'_>| part.world.tensor(which, layer, part.start..part.start + part.tokens);
            parts.iter().flat_map(tensor).collect()
        };
        let mut out = vec![f32::NAN; geometry.query_elements(step.tokens())];
        B::append_host(&mut step, layer, &gather(Which::Key), &gather(Which::Value))?;
        B::attend_host(&mut step, layer, &gather(Which::Query), None, &mut out)?;
        outputs.push(out);
    }
    let report = step.finish()?;
    Ok((outputs, report))
}

/// The largest difference of an output from float64 attention over `pages`, relative to the size of the values.
pub fn error_against_dense(part: &Part<'_>, layer: usize, out: &[f32], pages: &dyn Fn(usize) -> bool) -> f64 {
    let g = part.world.geometry;
    let mut worst: f64 = 0.0;
    for token in 0..part.tokens {
        for head in 0..g.query_heads() {
            let expected = part.world.dense(layer, part.start + token, head, pages);
            let at = (token * g.query_heads() + head) * g.head_dim();
            for (got, expected) in out[at..at + g.head_dim()].iter().zip(expected) {
                let error = (*got as f64 - expected).abs();
                worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
            }
        }
    }
    worst
}
