//! Paged attention of a few query rows over one head.
//!
//! Pages are walked in blocks of some tokens. For a block all logits are computed first, then the softmax state advances
//! once, then the values are summed. While the keys of a block are read its values are prefetched, and while its values
//! are read the keys of the next block are: the hardware cannot guess where a scattered page begins.
//!
//! ```text
//! logits of a block   [token slot][STRIDE]   f32, STRIDE = rows rounded up to 1, 2 or 4
//! ```
//! Token-major logits let four horizontal sums be stored at once, need no horizontal maximum, and make the weight of a
//! (token, row) one broadcast load.

mod logits;
mod softmax;
mod values;
mod walk;

use std::mem::MaybeUninit;

use self::logits::{pack, part_logits};
use self::softmax::{hide, softmax};
use self::values::add_values;
use self::walk::Walk;

use super::element::Element;
use super::vector::{Vector, prefetch};
use super::{MAX_HEAD_DIM, MAX_ROWS, PageShape, PageView, State, Tile};

/// Tokens of a block: their keys or values (f16, 128 channels) share the L1 cache with the queries and sums.
const BLOCK: usize = 64;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Parts of a block: the smallest pages have 8 tokens.
const MAX_PARTS: usize = BLOCK / 8;

/// Floats between the logits of two tokens.
const fn stride(rows: usize) -> usize {
    match rows {
        0..=2 => rows,
        _ => MAX_ROWS,
    }
}

/// Continues the softmax of `ROWS` rows over `pages`.
///
/// # Safety
/// The contract of [`Kernels::attend`](super::Kernels::attend), with exactly `ROWS` rows, `shape.dtype` stored as `E`
/// and `shape.head_dim` a multiple of `V::LANES`. The CPU has what `V` needs.
#[inline(always)]
pub(super) unsafe fn attend<V: Vector, E: Element, const ROWS: usize>(
    shape: &PageShape,
    tile: &Tile<'_>,
    pages: &[PageView],
    state: &mut State<'_>,
) {
    let mut walk = Walk::new::<E>(shape, tile.visible, pages);
    let mut block = walk.next();
    if block.parts().is_empty() {
        return;
    }
    let mut packed = [const { MaybeUninit::<f32>::uninit() }; MAX_ROWS * MAX_HEAD_DIM];
    let mut logits = [const { MaybeUninit::<f32>::uninit() }; BLOCK * MAX_ROWS];
    let (packed, logits) = (packed.as_mut_ptr().cast::<f32>(), logits.as_mut_ptr().cast::<f32>());
    // SAFETY: `packed` holds ROWS × head_dim floats, `logits` BLOCK × stride(ROWS); both are written before they are
    // read. Parts describe written tokens of the caller's pages.
    unsafe {
        pack::<V, ROWS>(tile.queries, shape.head_dim, packed);
        while !block.parts().is_empty() {
            let next = walk.next();
            for part in block.parts() {
                part_logits::<V, E, ROWS>(part, shape.head_dim, packed, logits.add(part.slot * stride(ROWS)));
            }
            hide::<V, ROWS>(&block, walk.span, tile.visible, logits);
            let scale = softmax::<V, ROWS>(&block, walk.span, tile.visible, logits, state);
            add_values::<V, E, ROWS>(&block, &next, shape.head_dim, tile.visible, logits, &scale, state.acc);
            block = next;
        }
    }
}

#[inline(always)]
fn prefetch_range(from: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(LINE) {
        prefetch(from.wrapping_add(offset));
    }
}
