//! One KV head's recorded keys and values, widened once for many steps.

use half::slice::HalfFloatSliceExt;

use super::Tensors;
use super::tensors::dot;

/// Keys and values of a KV head in single precision, `[tokens, head_dim]`.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    dim: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Lane {
    pub(crate) fn new(tensors: &Tensors, layer: usize, kv_head: usize) -> Self {
        let wide = |rows: &[half::f16]| {
            let mut wide = vec![0.0; rows.len()];
            rows.convert_to_f32_slice(&mut wide);
            wide
        };
        Lane {
            dim: tensors.head_dim(),
            keys: wide(tensors.keys(layer, kv_head)),
            values: wide(tensors.values(layer, kv_head)),
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.keys.len() / self.dim
    }

    pub(crate) fn keys(&self) -> impl DoubleEndedIterator<Item = &[f32]> + ExactSizeIterator {
        self.keys.chunks_exact(self.dim)
    }

    pub(crate) fn values(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.dim)
    }

    /// The key of a token, which must have one.
    pub(crate) fn key(&self, token: usize) -> &[f32] {
        self.keys.get(token * self.dim..(token + 1) * self.dim).unwrap_or_default()
    }

    /// The logits of a query, which the scale is already in, over the first `tokens` tokens.
    pub(crate) fn logits(&self, query: &[f32], tokens: usize, logits: &mut Vec<f32>) {
        logits.clear();
        logits.extend(self.keys().take(tokens).map(|key| dot(query, key)));
    }
}

impl Tensors {
    /// The query of a token, multiplied by the scale.
    pub(crate) fn scaled_query(&self, layer: usize, query_head: usize, token: usize) -> Option<Vec<f32>> {
        Some(self.query(layer, query_head, token)?.iter().map(|x| x.to_f32() * self.scale()).collect())
    }

    /// The same of every query head that a KV head serves.
    pub(crate) fn scaled_group(&self, layer: usize, kv_head: usize, token: usize) -> Option<Vec<Vec<f32>>> {
        let heads = kv_head * self.group()..(kv_head + 1) * self.group();
        heads.map(|query_head| self.scaled_query(layer, query_head, token)).collect()
    }
}
