//! A cache with one sequence of random tokens, filled by append alone.
#![allow(dead_code, reason = "each bench uses a part of it")]

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use wakekv::{Cache, CacheBuilder, Cpu, DType, Geometry, Reservoir, Sequence};

/// The attention shape of Llama-3-8B: 32 query heads, 8 KV heads, 128 channels, pages of 16 tokens (8 KiB in f16).
pub fn llama(layers: usize) -> Geometry {
    Geometry::builder()
        .layers(layers)
        .query_heads(32)
        .kv_heads(8)
        .head_dim(128)
        .page_tokens(16)
        .dtype(DType::F16)
        .build()
        .expect("a valid shape")
}

/// Random numbers in [-1, 1).
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A cache whose only sequence has `tokens` tokens.
pub fn filled(settings: CacheBuilder, geometry: &Geometry, threads: usize, tokens: usize) -> (Cache, Sequence) {
    let settings =
        settings.reservoir(Reservoir::memory(geometry.sequence_bytes(tokens + geometry.page_tokens()) as u64));
    let mut cache = settings.build(Cpu::new().threads(threads)).expect("settings that fit");
    let sequence = cache.insert_with_capacity(tokens + geometry.page_tokens());
    let mut start = 0;
    while start < tokens {
        let chunk = 2048.min(tokens - start);
        let k = random(geometry.kv_elements(chunk), start as u64);
        let v = random(geometry.kv_elements(chunk), !(start as u64));
        let mut step = cache.step(&[(sequence, chunk)]).expect("room for the tokens");
        for layer in 0..geometry.layers() {
            step.append(layer, &k, &v).expect("tensors of the right shape");
        }
        step.finish().expect("nothing to fail");
        start += chunk;
    }
    (cache, sequence)
}

/// One decode token through every layer, dropped at the end, so that the sequence keeps its length from call to call.
pub struct Decode {
    pub k: Vec<f32>,
    pub q: Vec<f32>,
    pub out: Vec<f32>,
}

impl Decode {
    pub fn new(geometry: &Geometry) -> Self {
        Decode {
            k: random(geometry.kv_elements(1), 1),
            q: random(geometry.query_elements(1), 2),
            out: vec![0.0; geometry.query_elements(1)],
        }
    }

    pub fn step(&mut self, cache: &mut Cache, sequence: Sequence) {
        let layers = cache.geometry().layers();
        let mut step = cache.step(&[(sequence, 1)]).expect("room for a token");
        for layer in 0..layers {
            step.append(layer, &self.k, &self.k).expect("tensors of the right shape");
            step.attend(layer, &self.q, &mut self.out).expect("nothing to fail");
        }
    }
}
