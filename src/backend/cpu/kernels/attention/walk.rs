//! The pages of a call, cut into blocks.

use super::super::{PageShape, PageView};
use super::{BLOCK, MAX_PARTS};

/// Consecutive tokens of one page, at most a block of them.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub keys: *const u8,
    pub values: *const u8,
    /// Position of the first token.
    pub first: u32,
    /// Tokens that some row sees.
    pub tokens: usize,
    /// Leading tokens that every row sees.
    pub common: usize,
    /// The first token's place in the block.
    pub slot: usize,
}

impl Part {
    /// Leading tokens that a row sees.
    #[inline(always)]
    pub fn seen(&self, visible: u32) -> usize {
        (visible.saturating_sub(self.first) as usize).min(self.tokens)
    }
}

pub(super) struct Block {
    pub parts: [Part; MAX_PARTS],
    pub len: usize,
}

impl Block {
    #[inline(always)]
    pub fn parts(&self) -> &[Part] {
        // SAFETY: `Walk::next` stops at MAX_PARTS.
        unsafe { self.parts.get_unchecked(..self.len) }
    }
}

/// Cuts the pages into blocks. What no row sees is left out.
pub(super) struct Walk<'a> {
    pages: &'a [PageView],
    /// Tokens of the first page that are behind us.
    done: usize,
    /// Most tokens of a part.
    pub span: usize,
    token_bytes: usize,
    block_bytes: usize,
    /// What every row sees, and what some row sees.
    visible: (u32, u32),
}

impl<'a> Walk<'a> {
    #[inline(always)]
    pub fn new<E>(shape: &PageShape, visible: &[u32], pages: &'a [PageView]) -> Self {
        let token_bytes = shape.head_dim * size_of::<E>();
        let least = visible.iter().copied().min().unwrap_or(0);
        let most = visible.iter().copied().max().unwrap_or(0);
        Walk {
            pages,
            done: 0,
            span: shape.page_tokens.min(BLOCK),
            token_bytes,
            block_bytes: shape.page_tokens * token_bytes,
            visible: (least, most),
        }
    }

    #[inline(always)]
    pub fn next(&mut self) -> Block {
        let none = Part { keys: [].as_ptr(), values: [].as_ptr(), first: 0, tokens: 0, common: 0, slot: 0 };
        let mut block = Block { parts: [none; MAX_PARTS], len: 0 };
        while block.len * self.span < BLOCK {
            let Some((page, rest)) = self.pages.split_first() else { break };
            let seen = |visible: u32| (visible.saturating_sub(page.first)).min(page.tokens) as usize;
            let (least, most) = (seen(self.visible.0), seen(self.visible.1));
            if self.done < most {
                let keys = page.data.wrapping_add(self.done * self.token_bytes);
                block.parts[block.len] = Part {
                    keys,
                    values: keys.wrapping_add(self.block_bytes),
                    first: page.first + self.done as u32,
                    tokens: (most - self.done).min(self.span),
                    common: least.saturating_sub(self.done).min(self.span),
                    slot: block.len * self.span,
                };
                block.len += 1;
                self.done += self.span;
            }
            if self.done >= most {
                self.pages = rest;
                self.done = 0;
            }
        }
        block
    }
}
