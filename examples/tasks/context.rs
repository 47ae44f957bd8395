//! The keys and values of a context: the model reads it once, exactly, and they are written into every cache that is compared.

use anyhow::{Result, ensure};
use wakekv::Cpu;
use wakekv::sim::tokens::{TokenPolicy, survivors};
use wakekv::trace::Tensors;

use super::run::Reads;
use crate::llm::attention::{Attention, Kind, Memory, Pass};
use crate::llm::cached::Cached;
use crate::llm::engine;
use crate::llm::model::{Config, Logits, Model};

/// Prompt tokens per forward pass.
const CHUNK: usize = 512;

/// Prompt tokens whose queries are kept: what SnapKV observes (arXiv 2404.14469).
pub const OBSERVED: usize = 32;

/// What the model made of a context.
pub struct Context {
    pub tokens: usize,
    pub layers: Vec<Layer>,
}

/// One layer's part, rows of tokens.
#[derive(Default)]
pub struct Layer {
    /// `[tokens, kv_heads, head_dim]`, after rotary embedding.
    pub keys: Vec<f32>,
    /// `[tokens, kv_heads, head_dim]`.
    pub values: Vec<f32>,
    /// `[min(tokens, OBSERVED), query_heads, head_dim]`, of the last tokens.
    pub queries: Vec<f32>,
}

impl Context {
    /// Reads the tokens. `on` is told how many have been read.
    pub fn read(model: &Model, ids: &[u32], mut on: impl FnMut(usize)) -> Result<Self> {
        ensure!(!ids.is_empty(), "the context is empty");
        let config = model.config();
        let cache = Reads::Full.cache(config, ids.len())?.build(Cpu::new().threads(1))?;
        let mut memory = Tapped {
            inner: Cached::new(cache),
            tap: Layers {
                layers: (0..config.layers).map(|_| Layer::default()).collect(),
                query_row: config.query_heads * config.head_dim,
            },
        };
        for chunk in ids.chunks(CHUNK) {
            engine::pass(model, &mut memory, Kind::Prompt, chunk, Logits::Last)?;
            on(memory.len());
        }
        Ok(Context { tokens: ids.len(), layers: memory.tap.layers })
    }

    /// As recorded tensors, the last queries among them.
    pub fn tensors(&self, config: &Config) -> Result<Tensors> {
        let scale = (config.head_dim as f32).sqrt().recip();
        let mut tensors = Tensors::new(&config.geometry().build()?, scale, self.tokens, OBSERVED);
        let observed = self.tokens.min(OBSERVED);
        for (index, layer) in self.layers.iter().enumerate() {
            tensors.append(index, &layer.keys, &layer.values)?;
            tensors.queries(index, self.tokens - observed, &layer.queries)?;
        }
        Ok(tensors)
    }

    /// What a policy that destroys tokens leaves of it, `budget` tokens of every head.
    pub fn after(&self, config: &Config, policy: TokenPolicy<'_>, budget: usize) -> Result<Self> {
        let kept = survivors(&self.tensors(config)?, policy, budget)?;
        let tokens = kept.first().map_or(0, Vec::len);
        ensure!(kept.iter().all(|kept| kept.len() == tokens), "the policy leaves heads different numbers of tokens");
        let (heads, dim) = (config.kv_heads, config.head_dim);
        let gather = |layer: usize, rows: &[f32]| {
            let mut left = vec![0.0; tokens * heads * dim];
            for (head, kept) in kept[layer * heads..][..heads].iter().enumerate() {
                for (index, &token) in kept.iter().enumerate() {
                    let row = |token: usize| (token * heads + head) * dim..(token * heads + head + 1) * dim;
                    left[row(index)].copy_from_slice(&rows[row(token as usize)]);
                }
            }
            left
        };
        let layers = self.layers.iter().enumerate().map(|(index, layer)| Layer {
            keys: gather(index, &layer.keys),
            values: gather(index, &layer.values),
            queries: Vec::new(),
        });
        Ok(Context { tokens, layers: layers.collect() })
    }

    /// Writes the context into a memory, as a prompt of one step.
    pub fn write(&self, memory: &mut dyn Memory) -> Result<()> {
        memory.step(Kind::Prompt, self.tokens, &mut |attention| {
            for (index, layer) in self.layers.iter().enumerate() {
                attention.append(index, &layer.keys, &layer.values)?;
            }
            Ok(Vec::new())
        })?;
        Ok(())
    }
}

/// Somebody who is shown every layer's queries, keys and values.
pub trait Tap {
    fn see(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32]) -> Result<()>;
}

struct Layers {
    layers: Vec<Layer>,
    /// Numbers in one token's queries.
    query_row: usize,
}

impl Tap for Layers {
    fn see(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32]) -> Result<()> {
        let layer = &mut self.layers[layer];
        layer.keys.extend_from_slice(k);
        layer.values.extend_from_slice(v);
        layer.queries.extend_from_slice(q);
        layer.queries.drain(..layer.queries.len().saturating_sub(self.query_row * OBSERVED));
        Ok(())
    }
}

/// A memory with somebody who looks on.
pub struct Tapped<M, T> {
    pub inner: M,
    pub tap: T,
}

impl<M: Memory, T: Tap> Memory for Tapped<M, T> {
    fn step(&mut self, kind: Kind, tokens: usize, pass: Pass<'_>) -> Result<Vec<f32>> {
        let Tapped { inner, tap } = self;
        inner.step(kind, tokens, &mut |attention| pass(&mut TappedAttention { attention, tap }))
    }

    fn len(&self) -> usize {
        self.inner.len()
    }
}

struct TappedAttention<'a> {
    attention: &'a mut dyn Attention,
    tap: &'a mut dyn Tap,
}

impl Attention for TappedAttention<'_> {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<()> {
        self.tap.see(layer, q, k, v)?;
        self.attention.attend(layer, q, k, v, out)
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.attention.append(layer, k, v)
    }
}
