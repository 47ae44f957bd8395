//! The arithmetic of the CPU backend: paged attention over one head, and page digests.
//!
//! Kernels know nothing of tables, residency or sequences. They get rows of queries and a list of pages, all of whose
//! bytes are there. They do not allocate.
//!
//! ```text
//! isa         which instructions the machine has
//! vector/     the few operations that kernels are written in, per instruction set
//! element     f32, f16, bf16
//! attention/  the attention kernel, generic over the three above and the number of rows
//! state       merging and finishing partial results
//! digest/     summaries of pages, and scoring them: a file per kind
//! dispatch    instantiates the kernels and picks one, once
//! ```

mod attention;
mod digest;
mod dispatch;
mod element;
mod isa;
mod state;
#[cfg(test)]
mod tests;
mod vector;

pub(crate) use digest::{DigestKernels, Shelf};
pub(crate) use dispatch::Kernels;
pub use isa::Isa;

use crate::geometry::DType;

/// One page as an attention kernel sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageView {
    /// The page's bytes: K `[page_tokens, head_dim]`, then V `[page_tokens, head_dim]`.
    pub data: *const u8,
    /// Token position of the page's first token.
    pub first: u32,
    /// Tokens of the page that are written, 1 to `page_tokens`. Bytes behind them are never read.
    pub tokens: u32,
}

/// A few query rows that read the same KV head. At most [`MAX_ROWS`].
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    /// `[rows, head_dim]`, already multiplied by the softmax scale.
    pub queries: &'a [f32],
    /// Per row: the row reads token positions below this (causality). `visible.len()` is the number of rows.
    pub visible: &'a [u32],
}

/// Rows that one kernel call handles at most: one pass over the pages serves them all.
///
/// Four are as fast per row as more would be with 16 registers, and every number of rows is an instance of the kernel to compile.
pub(crate) const MAX_ROWS: usize = 4;

/// Channels that a head has at most.
const MAX_HEAD_DIM: usize = 256;

/// The softmax state of some rows (FlashInfer's `state_t`): what has been attended so far, not yet normalised.
///
/// Empty is `max = -inf, sum = 0, acc = 0`.
pub(crate) struct State<'a> {
    /// `[rows]`, the largest logit seen.
    pub max: &'a mut [f32],
    /// `[rows]`, Σ exp(logit − max).
    pub sum: &'a mut [f32],
    /// `[rows, head_dim]`, Σ exp(logit − max) · v.
    pub acc: &'a mut [f32],
}

/// Shape of the pages of one head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageShape {
    pub head_dim: usize,
    pub page_tokens: usize,
    pub dtype: DType,
}
