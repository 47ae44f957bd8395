//! The seam between a forward pass and whoever keeps its keys and values.

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};

/// Attention as a forward pass sees it: it hands over each layer's new keys and values and gets the attended values.
pub trait Attention {
    /// Appends `k` and `v` (`[tokens, kv_heads, head_dim]`) to the layer, then attends causally with `q`
    /// (`[tokens, query_heads, head_dim]`) over all that the layer holds, into `out` (shape of `q`).
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<()>;

    /// Only the first half: for a pass whose outcome is known already.
    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()>;
}

/// One sequence's memory of keys and values, as the generation loop sees it.
pub trait Memory {
    /// Runs one forward pass of `tokens` new tokens. If it fails the memory is as it was before.
    fn step(&mut self, kind: Kind, tokens: usize, pass: Pass<'_>) -> Result<Vec<f32>>;

    /// Tokens held, over which the next step will attend.
    fn len(&self) -> usize;
}

/// Where a pass's tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Prompt,
    Generated,
}

/// A forward pass that waits for its attention, and returns logits.
pub type Pass<'a> = &'a mut dyn FnMut(&mut dyn Attention) -> Result<Vec<f32>>;

/// Exact attention over keys and values that all stay in memory as f32: the reference, short and slow.
pub struct Dense {
    kv_heads: usize,
    head_dim: usize,
    layers: Vec<LayerMemory>,
}

/// `[kv_heads, capacity, head_dim]`, of which `len` tokens are written.
struct LayerMemory {
    keys: Tensor,
    values: Tensor,
    len: usize,
}

impl Dense {
    /// Room for `capacity` tokens.
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> Result<Self> {
        let room = || Tensor::zeros((kv_heads, capacity, head_dim), candle_core::DType::F32, &Device::Cpu);
        let layers = (0..layers).map(|_| Ok(LayerMemory { keys: room()?, values: room()?, len: 0 }));
        Ok(Self { kv_heads, head_dim, layers: layers.collect::<Result<_>>()? })
    }
}

impl Attention for Dense {
    fn attend(&mut self, layer: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) -> Result<()> {
        let (kv_heads, head_dim) = (self.kv_heads, self.head_dim);
        let tokens = k.len() / (kv_heads * head_dim);
        let group = q.len() / k.len();
        self.append(layer, k, v)?;
        let memory = &self.layers[layer];

        // One matrix product per KV head serves its whole group: rows are (query head of the group, token).
        let q = Tensor::from_slice(q, (tokens, kv_heads, group, head_dim), &Device::Cpu)?
            .permute((1, 2, 0, 3))?
            .reshape((kv_heads, group * tokens, head_dim))?;
        let keys = memory.keys.narrow(1, 0, memory.len)?;
        let values = memory.values.narrow(1, 0, memory.len)?;
        let mut scores = q.matmul(&keys.t()?)?.flatten_all()?.to_vec1::<f32>()?;
        for (row, scores) in scores.chunks_exact_mut(memory.len).enumerate() {
            let visible = memory.len - tokens + row % tokens + 1;
            scores[visible..].fill(f32::NEG_INFINITY);
            softmax(scores, (head_dim as f32).sqrt().recip());
        }
        let weights = Tensor::from_vec(scores, (kv_heads, group * tokens, memory.len), &Device::Cpu)?;
        let attended = weights
            .matmul(&values)?
            .reshape((kv_heads, group, tokens, head_dim))?
            .permute((2, 0, 1, 3))?
            .flatten_all()?
            .to_vec1::<f32>()?;
        out.copy_from_slice(&attended);
        Ok(())
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let tokens = k.len() / (self.kv_heads * self.head_dim);
        self.layers[layer].append(k, v, (tokens, self.kv_heads, self.head_dim))
    }
}

impl LayerMemory {
    fn append(&mut self, k: &[f32], v: &[f32], shape: (usize, usize, usize)) -> Result<()> {
        let capacity = self.keys.dim(1)?;
        let tokens = shape.0;
        ensure!(self.len + tokens <= capacity, "{} tokens exceed the room for {capacity}", self.len + tokens);
        for (all, new) in [(&self.keys, k), (&self.values, v)] {
            let new = Tensor::from_slice(new, shape, &Device::Cpu)?.transpose(0, 1)?.contiguous()?;
            all.slice_set(&new, 1, self.len)?;
        }
        self.len += tokens;
        Ok(())
    }
}

fn softmax(scores: &mut [f32], scale: f32) {
    let max = scores.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    let mut sum = 0f64;
    for score in scores.iter_mut() {
        *score = ((*score - max) * scale).exp();
        sum += f64::from(*score);
    }
    let norm = sum.recip() as f32;
    scores.iter_mut().for_each(|score| *score *= norm);
}

impl Memory for Dense {
    fn step(&mut self, _kind: Kind, _tokens: usize, pass: Pass<'_>) -> Result<Vec<f32>> {
        let before: Vec<usize> = self.layers.iter().map(|layer| layer.len).collect();
        let logits = pass(self);
        if logits.is_err() {
            self.layers.iter_mut().zip(before).for_each(|(layer, len)| layer.len = len);
        }
        logits
    }

    fn len(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.len)
    }
}
