//! Sequences with queries, keys and values, and slow float64 arithmetic over them.

use crate::common::{Which, World};
use half::f16;
use wakekv::Geometry;
use wakekv::table::Pins;
use wakekv::trace::{OracleSettings, Tensors, Worth};

/// A hand-made sequence of one layer. Rows are `(channel, value)`; the other channels are 0.
pub struct Sparse {
    pub tensors: Tensors,
    heads: usize,
}

pub type Row = Vec<(usize, f32)>;

impl Sparse {
    pub fn new(heads: usize, prompt: usize) -> Self {
        let geometry = Geometry::builder().query_heads(heads).kv_heads(heads).head_dim(32).build().unwrap();
        Sparse { tensors: Tensors::new(&geometry, 1.0, prompt, prompt), heads }
    }

    /// One token: per head its query, key and value.
    pub fn push(&mut self, rows: &[[Row; 3]]) {
        assert_eq!(rows.len(), self.heads);
        let token = self.tensors.tokens();
        let dense = |which: usize| -> Vec<f32> {
            let row = |row: &Row| {
                let mut dense = vec![0.0; 32];
                row.iter().for_each(|&(channel, x)| dense[channel] = x);
                dense
            };
            rows.iter().flat_map(|rows| row(&rows[which])).collect()
        };
        self.tensors.append(0, &dense(1), &dense(2)).unwrap();
        self.tensors.queries(0, token, &dense(0)).unwrap();
    }
}

/// Demands of the best `count` pages of 2 tokens and the last one, for the sake of `tokens` tokens.
pub fn small(count: usize, tokens: usize) -> OracleSettings {
    OracleSettings { page_tokens: 2, count, worth: Worth::Logit, pins: Pins::default(), tokens, stickiness: 0.0 }
}

pub const SCALE: f32 = 0.3;

pub fn world(seed: u64) -> World {
    let geometry = Geometry::builder().layers(2).query_heads(6).kv_heads(2).head_dim(32).build().unwrap();
    World { geometry, seed }
}

pub fn record(world: &World, prompt: usize, tokens: usize) -> Tensors {
    let mut tensors = Tensors::new(&world.geometry, SCALE, prompt, 32);
    for layer in 0..world.geometry.layers() {
        let part = |which| world.tensor(which, layer, 0..tokens);
        tensors.append(layer, &part(Which::Key), &part(Which::Value)).unwrap();
        tensors.queries(layer, 0, &part(Which::Query)).unwrap();
    }
    tensors
}

/// One head's vectors in float64, as they are kept.
pub fn row(world: &World, which: Which, layer: usize, token: usize, head: usize) -> Vec<f64> {
    let channels = 0..world.geometry.head_dim();
    channels.map(|channel| f16::from_f32(world.at(which, layer, token, head, channel)).to_f64()).collect()
}

pub fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub fn softmax(logits: &[f64]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - most).exp()).sum();
    logits.iter().map(|logit| (logit - most).exp() / sum).collect()
}

/// The logits of a query over the tokens up to its own.
pub fn logits(world: &World, layer: usize, query_head: usize, token: usize) -> Vec<f64> {
    let query = row(world, Which::Query, layer, token, query_head);
    let kv_head = query_head / world.geometry.group();
    (0..=token)
        .map(|other| f64::from(SCALE) * product(&query, &row(world, Which::Key, layer, other, kv_head)))
        .collect()
}

/// (lost mass, output error) of one query when only some tokens are read.
pub fn loss(world: &World, layer: usize, query_head: usize, token: usize, read: &dyn Fn(usize) -> bool) -> (f64, f64) {
    let kv_head = query_head / world.geometry.group();
    let weights = softmax(&logits(world, layer, query_head, token));
    let output = |read: &dyn Fn(usize) -> bool| -> (f64, Vec<f64>) {
        let (mut mass, mut sum) = (0.0, vec![0.0; world.geometry.head_dim()]);
        for (other, weight) in weights.iter().enumerate().filter(|(other, _)| read(*other)) {
            mass += weight;
            let value = row(world, Which::Value, layer, other, kv_head);
            sum.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
        }
        sum.iter_mut().for_each(|sum| *sum /= if mass > 0.0 { mass } else { 1.0 });
        (mass, sum)
    };
    let ((_, full), (mass, part)) = (output(&|_| true), output(read));
    let difference: Vec<f64> = full.iter().zip(&part).map(|(full, part)| full - part).collect();
    (1.0 - mass, (product(&difference, &difference) / product(&full, &full)).sqrt())
}
