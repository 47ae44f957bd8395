//! Queries and keys of a real run: what the study scores pages with.

use anyhow::Result;

use crate::llm::model::Model;
use crate::tasks::context::Context;
use crate::tasks::{Rest, Script};

/// One KV head at one context: all its keys, and the queries of the last tokens.
pub struct Head {
    /// `[tokens, head_dim]`, after rotary embedding.
    pub keys: Vec<f32>,
    /// `[positions, group, head_dim]`, after rotary embedding and times the softmax scale.
    pub queries: Vec<f32>,
}

/// All heads at one context.
pub struct Recording {
    pub tokens: usize,
    pub head_dim: usize,
    pub group: usize,
    pub heads: Vec<Head>,
}

impl Recording {
    /// Reads a script to its end, the right answer included. The queries are those of its last tokens.
    pub fn new(model: &Model, ids: &[u32], on: impl FnMut(usize)) -> Result<Self> {
        let config = model.config();
        let (kv_heads, head_dim) = (config.kv_heads, config.head_dim);
        let group = config.query_heads / kv_heads;
        let scale = (head_dim as f32).sqrt().recip();
        let context = Context::read(model, ids, on)?;
        let heads = context.layers.iter().flat_map(|layer| {
            (0..kv_heads).map(move |head| {
                let of = |rows: &[f32], width: usize| -> Vec<f32> {
                    rows.chunks_exact(width).skip(head).step_by(kv_heads).flatten().copied().collect()
                };
                let mut queries = of(&layer.queries, group * head_dim);
                queries.iter_mut().for_each(|x| *x *= scale);
                Head { keys: of(&layer.keys, head_dim), queries }
            })
        });
        Ok(Recording { tokens: ids.len(), head_dim, group, heads: heads.collect() })
    }
}

/// All that a script says, without the answers that a model would write.
pub fn ids(script: &Script) -> Vec<u32> {
    let mut ids = [&script.context[..], &script.question].concat();
    if let Rest::Follow(rest) = &script.rest {
        ids.extend(rest);
    }
    ids
}
