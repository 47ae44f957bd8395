//! The queries, keys and values of one sequence, from which true attention can be computed after the run.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::TraceError;
use crate::geometry::Geometry;

/// Queries, keys and values of one recorded sequence, kept in half precision: what a policy needs that looks at more than demands,
/// and what true attention is computed from.
///
/// Keys and values are kept of every token; queries of the last `observed` tokens of the prompt, and of every token after it.
///
/// ```
/// use wakekv::Geometry;
/// use wakekv::trace::Tensors;
/// let geometry = Geometry::builder().head_dim(32).build()?;
/// let mut tensors = Tensors::new(&geometry, 32f32.powf(-0.5), 4, 2);
/// tensors.append(0, &[0.5; 4 * 32], &[1.0; 4 * 32])?;      // the prompt, then one token
/// tensors.queries(0, 0, &[0.1; 4 * 32])?;
/// tensors.append(0, &[0.5; 32], &[1.0; 32])?;
/// tensors.queries(0, 4, &[0.1; 32])?;
/// let mut weights = Vec::new();
/// tensors.attention(0, 0, 4, &mut weights)?;
/// assert_eq!(weights, [0.2; 5]);
/// assert!(tensors.query(0, 0, 2).is_some() && tensors.query(0, 0, 1).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tensors {
    pub(super) layers: usize,
    pub(super) query_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
    pub(super) prompt_tokens: usize,
    /// The first token whose query is kept.
    pub(super) first_query: usize,
    /// Per layer and KV head `[tokens, head_dim]`.
    pub(super) keys: Vec<Vec<f16>>,
    /// As the keys.
    pub(super) values: Vec<Vec<f16>>,
    /// Per layer and query head `[tokens from first_query, head_dim]`.
    pub(super) queries: Vec<Vec<f16>>,
}

impl Tensors {
    /// Nothing yet, of a sequence whose prompt has `prompt_tokens` tokens. A query and a key make the logit `scale` × q·k. The queries of
    /// the last `observed` tokens of the prompt are kept; the last one always is, for it is the first that generates.
    pub fn new(geometry: &Geometry, scale: f32, prompt_tokens: usize, observed: usize) -> Self {
        let (layers, query_heads, kv_heads) = (geometry.layers(), geometry.query_heads(), geometry.kv_heads());
        Tensors {
            layers,
            query_heads,
            kv_heads,
            head_dim: geometry.head_dim(),
            scale,
            prompt_tokens,
            first_query: prompt_tokens.saturating_sub(observed.max(1)),
            keys: vec![Vec::new(); layers * kv_heads],
            values: vec![Vec::new(); layers * kv_heads],
            queries: vec![Vec::new(); layers * query_heads],
        }
    }

    /// Adds the keys and values of a layer's next tokens, `[tokens, kv_heads, head_dim]` each, the keys after rotary embedding,
    /// as they are given to [`Step::append`](crate::Step::append). Chunks may have any length.
    ///
    /// # Errors
    /// [`TraceError::Layer`], [`TraceError::Rows`], [`TraceError::Half`]. Nothing has been added then.
    pub fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<(), TraceError> {
        self.check_layer(layer)?;
        let row = self.kv_heads * self.head_dim;
        check_rows("keys", k, row)?;
        check_rows("values", v, row)?;
        if k.len() != v.len() {
            return Err(TraceError::Rows { tensor: "values", len: v.len(), row: k.len() });
        }
        let heads = layer * self.kv_heads..(layer + 1) * self.kv_heads;
        scatter(k, self.head_dim, self.keys.get_mut(heads.clone()).unwrap_or_default());
        scatter(v, self.head_dim, self.values.get_mut(heads).unwrap_or_default());
        Ok(())
    }

    /// Adds the queries of a layer's tokens from `start` on, `[tokens, query_heads, head_dim]`, after rotary embedding. Rows before the
    /// observed end of the prompt are passed over; what is kept must come without a gap.
    ///
    /// # Errors
    /// [`TraceError::Layer`], [`TraceError::Rows`], [`TraceError::Half`], [`TraceError::Queries`]. Nothing has been added then.
    pub fn queries(&mut self, layer: usize, start: usize, q: &[f32]) -> Result<(), TraceError> {
        self.check_layer(layer)?;
        let row = self.query_heads * self.head_dim;
        let passed = self.first_query.saturating_sub(start).min(q.len() / row);
        check_rows("queries", q, row)?;
        let kept = q.get(passed * row..).unwrap_or_default();
        let expected = self.first_query + self.query_rows(layer);
        if !kept.is_empty() && start + passed != expected {
            return Err(TraceError::Queries { layer, start: start + passed, expected });
        }
        let heads = layer * self.query_heads..(layer + 1) * self.query_heads;
        scatter(kept, self.head_dim, self.queries.get_mut(heads).unwrap_or_default());
        Ok(())
    }

    /// Transformer layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Query heads per layer.
    pub fn query_heads(&self) -> usize {
        self.query_heads
    }

    /// KV heads per layer.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Query heads that share one KV head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Channels per head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// What q·k is multiplied by.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens whose keys and values every layer has.
    pub fn tokens(&self) -> usize {
        self.keys.iter().map(|head| head.len() / self.head_dim).min().unwrap_or(0)
    }

    /// The tokens whose queries every layer has, and their keys.
    pub fn queried(&self) -> std::ops::Range<usize> {
        let rows = self.queries.iter().map(|head| head.len() / self.head_dim).min().unwrap_or(0);
        self.first_query..(self.first_query + rows).min(self.tokens()).max(self.first_query)
    }

    /// The tokens that are steps of the generation: the last of the prompt, which is step 0, and all after it that have a query.
    pub fn steps(&self) -> std::ops::Range<usize> {
        let queried = self.queried();
        let first = self.prompt_tokens.saturating_sub(1);
        first..queried.end.max(first)
    }

    /// The keys of a KV head, `[tokens, head_dim]`. Empty where there is no such head.
    pub fn keys(&self, layer: usize, kv_head: usize) -> &[f16] {
        rows_of(&self.keys, layer, kv_head, self.kv_heads)
    }

    /// The values of a KV head, `[tokens, head_dim]`. Empty where there is no such head.
    pub fn values(&self, layer: usize, kv_head: usize) -> &[f16] {
        rows_of(&self.values, layer, kv_head, self.kv_heads)
    }

    /// The key of a token, `[head_dim]`. Empty where there is none.
    pub fn key(&self, layer: usize, kv_head: usize, token: usize) -> &[f16] {
        row(self.keys(layer, kv_head), token, self.head_dim).unwrap_or_default()
    }

    /// The value of a token, `[head_dim]`. Empty where there is none.
    pub fn value(&self, layer: usize, kv_head: usize, token: usize) -> &[f16] {
        row(self.values(layer, kv_head), token, self.head_dim).unwrap_or_default()
    }

    /// The query of a token, `[head_dim]`, if it was kept.
    pub fn query(&self, layer: usize, query_head: usize, token: usize) -> Option<&[f16]> {
        let rows = rows_of(&self.queries, layer, query_head, self.query_heads);
        row(rows, token.checked_sub(self.first_query)?, self.head_dim)
    }

    /// The attention weights of a token's query over tokens 0 to `token`, which replace what `weights` holds. They add up to 1.
    ///
    /// # Errors
    /// [`TraceError::Unknown`] when the query was not kept or a key is missing.
    pub fn attention(
        &self,
        layer: usize,
        query_head: usize,
        token: usize,
        weights: &mut Vec<f32>,
    ) -> Result<(), TraceError> {
        weights.clear();
        let unknown = || TraceError::Unknown { layer, query_head, token };
        let query = self.query(layer, query_head, token).ok_or_else(unknown)?;
        let keys = self.keys(layer, query_head / self.group());
        let keys = keys.get(..(token + 1) * self.head_dim).ok_or_else(unknown)?;
        let query: Vec<f32> = query.iter().map(|x| x.to_f32() * self.scale).collect();
        let mut wide = vec![0.0; self.head_dim];
        weights.extend(keys.chunks_exact(self.head_dim).map(|key| {
            key.convert_to_f32_slice(&mut wide);
            dot(&query, &wide)
        }));
        softmax(weights);
        Ok(())
    }

    fn query_rows(&self, layer: usize) -> usize {
        self.queries.get(layer * self.query_heads).map_or(0, |head| head.len() / self.head_dim)
    }

    fn check_layer(&self, layer: usize) -> Result<(), TraceError> {
        if layer < self.layers { Ok(()) } else { Err(TraceError::Layer { layer, layers: self.layers }) }
    }
}

/// Σ a·b in eight partial sums.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (mut a, mut b) = (a.chunks_exact(8), b.chunks_exact(8));
    let mut sums = [0.0f32; 8];
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// Logits become weights that add up to 1.
pub(crate) fn softmax(logits: &mut [f32]) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0f64;
    for logit in logits.iter_mut() {
        *logit = (*logit - most).exp();
        sum += f64::from(*logit);
    }
    logits.iter_mut().for_each(|weight| *weight = (f64::from(*weight) / sum) as f32);
}

/// `[tokens, heads, head_dim]` goes to the ends of the heads' own lists.
fn scatter(rows: &[f32], head_dim: usize, heads: &mut [Vec<f16>]) {
    let count = heads.len();
    for (index, head) in heads.iter_mut().enumerate() {
        let own = rows.chunks_exact(head_dim).skip(index).step_by(count);
        head.extend(own.flatten().map(|&x| f16::from_f32(x)));
    }
}

fn check_rows(tensor: &'static str, rows: &[f32], row: usize) -> Result<(), TraceError> {
    if !rows.len().is_multiple_of(row) {
        return Err(TraceError::Rows { tensor, len: rows.len(), row });
    }
    let fits = |x: &f32| f16::from_f32(*x).is_finite();
    match rows.iter().find(|x| !fits(x)) {
        Some(&value) => Err(TraceError::Half { tensor, value }),
        None => Ok(()),
    }
}

fn rows_of(heads: &[Vec<f16>], layer: usize, head: usize, per_layer: usize) -> &[f16] {
    if head >= per_layer {
        return &[];
    }
    heads.get(layer.saturating_mul(per_layer).saturating_add(head)).map_or(&[], Vec::as_slice)
}

fn row(rows: &[f16], index: usize, len: usize) -> Option<&[f16]> {
    rows.get(index.checked_mul(len)?..)?.get(..len)
}
