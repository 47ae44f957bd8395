//! The log of WakeKV's published experiments (arXiv 2610.02713): what each query head attended to most, token by token.

use std::path::Path;

use half::f16;
use npyz::{AutoSerialize, Deserialize};
use serde_json::{Value, json};

use super::arrays::{Reader, Writer, format, io};
use super::saved::{read_json, read_number};
use super::{Mark, Shape, Trace, TraceError};
use crate::table::{Phase, Pins};

/// What `meta.json` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads per layer.
    pub n_heads: usize,
    /// KV heads per layer.
    pub n_kv_heads: usize,
    /// Tokens logged per query head and step.
    pub topk: usize,
    /// Tokens at the start that count as sinks.
    pub sink_tokens: usize,
    /// Tokens at the end that count as local.
    pub local_window: usize,
    /// First token of the needle and the one after its last.
    pub needle_token_span: Option<[usize; 2]>,
    /// What was generated.
    pub generated_text: String,
}

/// Values in C order and their shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    /// The length of each axis.
    pub shape: Vec<u64>,
    /// As many values as the lengths multiply to.
    pub values: Vec<T>,
}

/// A run's log: a folder with `log.npz` and `meta.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Log {
    /// `meta.json`.
    pub meta: Meta,
    /// `topk_idx` `[steps, layers, query_heads, topk]`: token positions, padded with -1. Step 0 is the last token of the prompt.
    pub indices: Vec<i32>,
    /// `topk_val`, of the same shape: their attention weights.
    pub weights: Vec<f16>,
    /// `ctx_len` `[steps]`: tokens that could be attended to.
    pub ctx_len: Vec<i32>,
    /// `gen_token_ids`: what was generated.
    pub gen_token_ids: Vec<i64>,
    /// `needle_score`, of whatever shape.
    pub needle_score: Option<Array<f32>>,
    /// `copy_paste`, of whatever shape.
    pub copy_paste: Option<Array<bool>>,
}

/// Whose demand a trace holds that is made from a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// Every query head by itself, as the paper's simulator has it.
    Query,
    /// KV heads: the union over the query heads of the group, as a cache has it.
    Kv,
}

impl Log {
    /// Steps.
    pub fn steps(&self) -> usize {
        self.ctx_len.len()
    }

    /// Positions and weights that a query head attended to most in a step. Padding is left out.
    pub fn attended(&self, step: usize, layer: usize, query_head: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let Meta { n_layers, n_heads, topk, .. } = self.meta;
        let from = ((step * n_layers + layer) * n_heads + query_head) * topk;
        let tokens = self.indices.get(from..from + topk).unwrap_or(&[]);
        let weights = self.weights.get(from..from + topk).unwrap_or(&[]);
        let pairs = tokens.iter().zip(weights);
        pairs.filter_map(|(&token, weight)| Some((u32::try_from(token).ok()?, weight.to_f32())))
    }

    /// Writes the log into a folder, which is made if it is not there. The arrays load in numpy.
    ///
    /// # Errors
    /// [`TraceError::Format`] when lengths do not fit the description, [`TraceError::Io`].
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<(), TraceError> {
        self.check()?;
        let folder = folder.as_ref();
        std::fs::create_dir_all(folder).map_err(io(folder))?;
        let mut arrays = Writer::create(&folder.join("log.npz"))?;
        let Meta { n_layers, n_heads, topk, .. } = self.meta;
        let shape = [self.steps(), n_layers, n_heads, topk].map(|axis| axis as u64);
        arrays.array("topk_idx", &shape, self.indices.iter().copied())?;
        arrays.array("topk_val", &shape, self.weights.iter().copied())?;
        arrays.array("ctx_len", &shape[..1], self.ctx_len.iter().copied())?;
        arrays.array("gen_token_ids", &[self.gen_token_ids.len() as u64], self.gen_token_ids.iter().copied())?;
        write_optional(&mut arrays, "needle_score", self.needle_score.as_ref())?;
        write_optional(&mut arrays, "copy_paste", self.copy_paste.as_ref())?;
        arrays.finish()?;
        let meta = &self.meta;
        let description = json!({
            "prompt_len": meta.prompt_len,
            "n_layers": meta.n_layers,
            "n_heads": meta.n_heads,
            "n_kv_heads": meta.n_kv_heads,
            "topk": meta.topk,
            "sink_tokens": meta.sink_tokens,
            "local_window": meta.local_window,
            "needle_token_span": meta.needle_token_span,
            "generated_text": meta.generated_text,
        });
        let path = folder.join("meta.json");
        std::fs::write(&path, format!("{description:#}\n")).map_err(io(&path))
    }

    /// Reads a log.
    ///
    /// # Errors
    /// [`TraceError::Io`], [`TraceError::Format`].
    pub fn read(folder: impl AsRef<Path>) -> Result<Self, TraceError> {
        let folder = folder.as_ref();
        let path = folder.join("meta.json");
        let description = read_json(&path)?;
        let number = |key: &str| read_number(&path, &description, key);
        let span = description.get("needle_token_span").and_then(Value::as_array).and_then(|span| {
            let bound = |index: usize| span.get(index).and_then(Value::as_u64).map(|bound| bound as usize);
            Some([bound(0)?, bound(1)?])
        });
        let meta = Meta {
            prompt_len: number("prompt_len")?,
            n_layers: number("n_layers")?,
            n_heads: number("n_heads")?,
            n_kv_heads: number("n_kv_heads")?,
            topk: number("topk")?,
            sink_tokens: number("sink_tokens")?,
            local_window: number("local_window")?,
            needle_token_span: span,
            generated_text: description.get("generated_text").and_then(Value::as_str).unwrap_or_default().to_owned(),
        };
        let mut arrays = Reader::open(&folder.join("log.npz"))?;
        let (shape, indices) = arrays.array("topk_idx")?;
        let (_, weights) = arrays.array("topk_val")?;
        let (_, ctx_len) = arrays.array::<i32>("ctx_len")?;
        let (_, gen_token_ids) = arrays.array("gen_token_ids")?;
        let expected = [ctx_len.len(), meta.n_layers, meta.n_heads, meta.topk].map(|axis| axis as u64);
        if shape != expected {
            return Err(format("topk_idx", format_args!("the shape is {shape:?}, but {expected:?} is described")));
        }
        let needle_score = read_optional(&mut arrays, "needle_score")?;
        let copy_paste = read_optional(&mut arrays, "copy_paste")?;
        let log = Log { meta, indices, weights, ctx_len, gen_token_ids, needle_score, copy_paste };
        log.check()?;
        Ok(log)
    }

    fn check(&self) -> Result<(), TraceError> {
        let Meta { n_layers, n_heads, n_kv_heads, topk, .. } = self.meta;
        let sizes = [n_layers, n_heads, topk].into_iter().try_fold(self.steps(), usize::checked_mul);
        if sizes != Some(self.indices.len()) || self.weights.len() != self.indices.len() {
            return Err(format("topk_idx, topk_val", "there must be steps × layers × query heads × topk values"));
        }
        if n_kv_heads == 0 || n_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
            return Err(format("n_heads", "must be a positive multiple of n_kv_heads"));
        }
        let whole = |shape: &[u64]| shape.iter().try_fold(1u64, |product, &axis| product.checked_mul(axis));
        let fits = |shape: &[u64], len: usize| whole(shape) == Some(len as u64);
        let scores = self.needle_score.as_ref().is_none_or(|array| fits(&array.shape, array.values.len()));
        if !scores || !self.copy_paste.as_ref().is_none_or(|array| fits(&array.shape, array.values.len())) {
            return Err(format("needle_score, copy_paste", "the shape does not fit the number of values"));
        }
        Ok(())
    }

    /// The demands of the run in pages of `page_tokens` tokens: the pages of the logged tokens, and those that `pins` hold. The mass of a
    /// page is the weight of its logged tokens, averaged over the query heads of a lane.
    ///
    /// The prompt but its last token becomes one prefill step, which demands everything; each logged step is a decode step.
    ///
    /// # Errors
    /// [`TraceError`] when the log contradicts itself.
    pub fn trace(&self, page_tokens: usize, lanes: Lanes, pins: Pins) -> Result<Trace, TraceError> {
        self.check()?;
        if page_tokens == 0 {
            return Err(format("page_tokens", "must be at least 1"));
        }
        let Meta { n_layers, n_heads, n_kv_heads, .. } = self.meta;
        let heads_per_layer = if lanes == Lanes::Kv { n_kv_heads } else { n_heads };
        let group = n_heads / heads_per_layer;
        let shape = Shape { layers: n_layers, heads_per_layer, page_tokens, pins, budget: None };
        let mut trace = Trace::new(shape);
        let mut end = 0;
        if let Some(prompt) = self.ctx_len.first().map(|&len| len.saturating_sub(1)).filter(|&tokens| tokens > 0) {
            end = prompt as usize;
            let all: Vec<u32> = (0..shape.pages(end) as u32).collect();
            let mark = Mark { step: 1, phase: Phase::Prefill, start: 0, tokens: end };
            let nothing = vec![0.0; all.len()];
            trace.push_weighted(mark, &vec![all; shape.heads()], &vec![nothing; shape.heads()])?;
        }
        for (step, &len) in self.ctx_len.iter().enumerate() {
            let tokens = usize::try_from(len).ok().and_then(|len| len.checked_sub(end)).filter(|&tokens| tokens > 0);
            let tokens = tokens.ok_or_else(|| format("ctx_len", format_args!("step {step} adds no token")))?;
            let mark = Mark { step: step as u64 + 2, phase: Phase::Decode, start: end, tokens };
            end += tokens;
            let last = shape.pages(end) as u32 - 1;
            let pinned: Vec<(u32, f32)> =
                (0..=last).filter(|&page| pins.contain(page, last)).map(|page| (page, 0.0)).collect();
            let (mut demands, mut masses) = (Vec::new(), Vec::new());
            for lane in 0..shape.heads() {
                let (layer, first) = (lane / heads_per_layer, lane % heads_per_layer * group);
                let mut weights = pinned.clone();
                for query_head in first..first + group {
                    let attended = self.attended(step, layer, query_head);
                    weights.extend(attended.map(|(token, weight)| (token / page_tokens as u32, weight / group as f32)));
                }
                weights.sort_by_key(|&(page, _)| page);
                weights.dedup_by(|next, kept| {
                    let same = next.0 == kept.0;
                    kept.1 += if same { next.1 } else { 0.0 };
                    same
                });
                demands.push(weights.iter().map(|&(page, _)| page).collect::<Vec<u32>>());
                masses.push(weights.iter().map(|&(_, mass)| mass).collect::<Vec<f32>>());
            }
            trace.push_weighted(mark, &demands, &masses)?;
        }
        Ok(trace)
    }
}

fn write_optional<T: AutoSerialize + Copy>(
    arrays: &mut Writer,
    name: &str,
    array: Option<&Array<T>>,
) -> Result<(), TraceError> {
    array.map_or(Ok(()), |array| arrays.array(name, &array.shape, array.values.iter().copied()))
}

fn read_optional<T: Deserialize>(arrays: &mut Reader, name: &str) -> Result<Option<Array<T>>, TraceError> {
    Ok(arrays.optional(name)?.map(|(shape, values)| Array { shape, values }))
}
