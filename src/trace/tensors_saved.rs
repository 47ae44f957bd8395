//! Tensors on disk, and the log of the attention that they make.

use std::path::Path;

use half::f16;

use super::arrays::{Reader, Writer, format};
use super::{Log, Meta, Tensors, TraceError, greatest};

impl Tensors {
    /// Writes the tensors as one npz file, which numpy loads. What not all layers have is left out.
    ///
    /// | array | dtype | shape | |
    /// |---|---|---|---|
    /// | `keys`, `values` | float16 | layers, kv_heads, tokens, head_dim | after rotary embedding |
    /// | `queries` | float16 | layers, query_heads, tokens from `first_query` on, head_dim | |
    /// | `tokens` | uint64 | 2 | tokens of the prompt, `first_query` |
    /// | `scale` | float32 | 1 | what q·k is multiplied by |
    ///
    /// # Errors
    /// [`TraceError::Io`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), TraceError> {
        let (tokens, rows) = (self.tokens(), self.queried().len());
        let mut arrays = Writer::create(path.as_ref())?;
        for (name, heads, per_layer, rows) in [
            ("keys", &self.keys, self.kv_heads, tokens),
            ("values", &self.values, self.kv_heads, tokens),
            ("queries", &self.queries, self.query_heads, rows),
        ] {
            let shape = [self.layers, per_layer, rows, self.head_dim].map(|axis| axis as u64);
            let whole = heads.iter().flat_map(|head| head.iter().take(rows * self.head_dim).copied());
            arrays.plain_array(name, &shape, whole)?;
        }
        arrays.array("tokens", &[2], [self.prompt_tokens as u64, self.first_query as u64])?;
        arrays.array("scale", &[1], [self.scale])?;
        arrays.finish()
    }

    /// Reads what [`save`](Self::save) has written.
    ///
    /// # Errors
    /// [`TraceError::Io`], [`TraceError::Format`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let wrong = |reason: &str| format(path.display(), reason);
        let mut arrays = Reader::open(path)?;
        let (keys_shape, keys) = arrays.array::<f16>("keys")?;
        let (values_shape, values) = arrays.array::<f16>("values")?;
        let (queries_shape, queries) = arrays.array::<f16>("queries")?;
        let (_, tokens) = arrays.array::<u64>("tokens")?;
        let (_, scale) = arrays.array::<f32>("scale")?;
        let axes = |shape: &[u64]| -> Option<[usize; 4]> {
            let axes: Vec<usize> = shape.iter().map_while(|&axis| usize::try_from(axis).ok()).collect();
            axes.try_into().ok()
        };
        let (Some([layers, kv_heads, kv_rows, head_dim]), Some([query_layers, query_heads, rows, query_dim])) =
            (axes(&keys_shape), axes(&queries_shape))
        else {
            return Err(wrong("keys and queries must have four axes"));
        };
        if keys_shape != values_shape || query_layers != layers || query_dim != head_dim {
            return Err(wrong("keys, values and queries do not fit each other"));
        }
        if head_dim == 0 || kv_heads == 0 || query_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            return Err(wrong("query heads must be a positive multiple of KV heads, and heads must have channels"));
        }
        if layers.checked_mul(query_heads).is_none_or(|heads| heads > 1 << 24) {
            return Err(wrong("there must be at most 2^24 query heads"));
        }
        let (&[prompt_tokens, first_query], &[scale]) = (tokens.as_slice(), scale.as_slice()) else {
            return Err(wrong("tokens and scale must have 2 and 1 elements"));
        };
        let number = |number: u64| usize::try_from(number).map_err(|_| wrong("tokens are too many"));
        let heads = |values: Vec<f16>, count: usize, rows: usize| match rows * head_dim {
            0 => vec![Vec::new(); count],
            len => values.chunks_exact(len).map(<[f16]>::to_vec).collect(),
        };
        Ok(Tensors {
            layers,
            query_heads,
            kv_heads,
            head_dim,
            scale,
            prompt_tokens: number(prompt_tokens)?,
            first_query: number(first_query)?,
            keys: heads(keys, layers * kv_heads, kv_rows),
            values: heads(values, layers * kv_heads, kv_rows),
            queries: heads(queries, layers * query_heads, rows),
        })
    }

    /// What every query head attended to most: its `topk` tokens with the greatest weights, of equal ones the earlier, in descending
    /// order. Step 0 is the last token of the prompt. What the tensors do not know (the generated text, its tokens, needles) is
    /// left empty for the caller to fill in.
    ///
    /// # Errors
    /// [`TraceError::Unknown`] when keys are missing.
    pub fn log(&self, topk: usize) -> Result<Log, TraceError> {
        let steps = self.steps();
        let size = steps.len() * self.layers * self.query_heads * topk;
        let (mut indices, mut logged) = (Vec::with_capacity(size), Vec::with_capacity(size));
        let (mut weights, mut order) = (Vec::new(), Vec::new());
        for token in steps.clone() {
            for (layer, query_head) in
                (0..self.layers).flat_map(|layer| (0..self.query_heads).map(move |head| (layer, head)))
            {
                self.attention(layer, query_head, token, &mut weights)?;
                greatest(&mut order, weights.len(), topk, |token| weights.get(token).copied().unwrap_or(0.0));
                let padding = topk - order.len();
                indices.extend(order.iter().map(|&token| token as i32).chain(std::iter::repeat_n(-1, padding)));
                let best = order.iter().filter_map(|&token| weights.get(token as usize));
                logged.extend(best.map(|&weight| f16::from_f32(weight)));
                logged.extend(std::iter::repeat_n(f16::ZERO, padding));
            }
        }
        let meta = Meta {
            prompt_len: self.prompt_tokens,
            n_layers: self.layers,
            n_heads: self.query_heads,
            n_kv_heads: self.kv_heads,
            topk,
            ..Meta::default()
        };
        Ok(Log {
            meta,
            indices,
            weights: logged,
            ctx_len: steps.map(|token| token as i32 + 1).collect(),
            gen_token_ids: Vec::new(),
            needle_score: None,
            copy_paste: None,
        })
    }
}
