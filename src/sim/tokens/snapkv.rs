//! SnapKV (arXiv 2404.14469).

use super::pool::max_pool;
use super::{Living, observe};
use crate::sim::SimError;
use crate::trace::{Tensors, softmax};

/// SnapKV: when the prompt ends, its last queries vote which of its tokens stay.
///
/// As its code has it: softmax over the whole prompt, causal within the window; the weights of the window's queries summed over all
/// tokens before the window; pooled; the best stay, and the window. What is generated is never destroyed. A prompt that is no longer
/// than the budget stays whole. Our choice, as later work has it: the mean over the query heads of a group before pooling, so that a KV
/// head has one set, and the maximum as pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapKv {
    /// Tokens at the end of the prompt whose queries vote. Published: 32 or 64.
    pub window: usize,
    /// Neighbours that share a vote. An odd number; published: 5 or 7.
    pub kernel: usize,
}

impl Default for SnapKv {
    /// A window of 32, a kernel of 7.
    fn default() -> Self {
        SnapKv { window: 32, kernel: 7 }
    }
}

pub(super) fn run(tensors: &Tensors, settings: SnapKv, budget: usize) -> Result<Vec<Vec<u32>>, SimError> {
    let SnapKv { window, kernel } = settings;
    if budget <= window || window == 0 {
        return Err(SimError::Budget { budget, least: window.max(1) + 1 });
    }
    let prompt = tensors.prompt_tokens();
    let heads = (0..tensors.layers()).flat_map(|layer| (0..tensors.kv_heads()).map(move |head| (layer, head)));
    heads
        .map(|(layer, kv_head)| {
            let mut head = Living::new(tensors, layer, kv_head);
            if prompt <= budget {
                return Ok(head.died);
            }
            head.grow(0, prompt - 1);
            let before = prompt - window;
            let mut votes = vec![0.0; before];
            let mut weights = Vec::new();
            let observed = observe(tensors, layer, kv_head, prompt - 1, window)?;
            for (token, group) in (before..).zip(&observed) {
                for query in group {
                    head.lane.logits(query, token + 1, &mut weights);
                    softmax(&mut weights);
                    votes.iter_mut().zip(&weights).for_each(|(votes, weight)| *votes += weight / group.len() as f32);
                }
            }
            head.keep_best(&max_pool(&votes, kernel), budget - window, prompt);
            Ok(head.died)
        })
        .collect()
}
