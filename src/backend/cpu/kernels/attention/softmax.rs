//! From a block's logits to weights.

use super::super::vector::Vector;
use super::super::{MAX_ROWS, State};
use super::stride;
use super::walk::Block;

/// Gives −∞ to every logit that a row must not see, and to the slots that no token fills.
///
/// # Safety
/// `logits` is the block's buffer.
#[inline(always)]
pub(super) unsafe fn hide<V: Vector, const ROWS: usize>(block: &Block, span: usize, visible: &[u32], logits: *mut f32) {
    const NEVER: f32 = f32::NEG_INFINITY;
    for part in block.parts() {
        for slot in part.slot + part.tokens..part.slot + span {
            for row in 0..stride(ROWS) {
                // SAFETY: slots of a part lie in the block.
                unsafe { logits.add(slot * stride(ROWS) + row).write(NEVER) };
            }
        }
        if part.common < part.tokens {
            for (row, &visible) in visible.iter().enumerate().take(ROWS) {
                for slot in part.slot + part.seen(visible)..part.slot + part.tokens {
                    // SAFETY: as above.
                    unsafe { logits.add(slot * stride(ROWS) + row).write(NEVER) };
                }
            }
        }
    }
    let filled = block.len * span * stride(ROWS);
    for i in filled..filled.next_multiple_of(V::LANES) {
        // SAFETY: the buffer's length is a multiple of LANES.
        unsafe { logits.add(i).write(NEVER) };
    }
}

/// Turns a block's logits into weights, and advances maximum and sum. Returns by what each row's sums so far shrink.
///
/// A row that sees a token has a maximum of at least `f32::MIN`, even where all its logits are −∞. So −∞ − −∞ cannot
/// happen, and such a row ends as 0/0, like a dense softmax; while a row that sees nothing keeps −∞.
/// A NaN logit is not taken into the maximum, but its weight is NaN and with it every sum.
///
/// # Safety
/// `logits` is the block's buffer, filled.
#[inline(always)]
pub(super) unsafe fn softmax<V: Vector, const ROWS: usize>(
    block: &Block,
    span: usize,
    visible: &[u32],
    logits: *mut f32,
    state: &mut State<'_>,
) -> [f32; MAX_ROWS] {
    let len = (block.len * span * stride(ROWS)).next_multiple_of(V::LANES);
    let mut lanes = [0.0f32; 16]; // one register, spilled to get at its lanes: lane i belongs to row i mod stride
    let mut scale = [1.0f32; MAX_ROWS];
    // SAFETY: `len` floats of `logits` are initialised; `lanes` holds a register.
    unsafe {
        let mut top = V::splat(f32::NEG_INFINITY);
        for i in (0..len).step_by(V::LANES) {
            top = V::load(logits.add(i)).max(top);
        }
        top.store(lanes.as_mut_ptr());
        let mut top = [0.0f32; MAX_ROWS];
        for row in 0..ROWS {
            let own = (row..V::LANES).step_by(stride(ROWS)).map(|i| lanes[i]);
            let own = own.fold(f32::MIN, |top, x| if x > top { x } else { top });
            let seen = block.parts().iter().any(|part| part.common > 0 || part.seen(visible[row]) > 0);
            let before = state.max[row];
            top[row] = if seen && own > before { own } else { before };
            scale[row] = if seen { before - top[row] } else { 0.0 };
        }
        for (i, lane) in lanes.iter_mut().enumerate().take(V::LANES) {
            *lane = scale[i % MAX_ROWS];
        }
        V::load(lanes.as_ptr()).exp().store(lanes.as_mut_ptr());
        scale.copy_from_slice(&lanes[..MAX_ROWS]);

        for (i, lane) in lanes.iter_mut().enumerate().take(V::LANES) {
            *lane = top[i % stride(ROWS)];
        }
        let top_lanes = V::load(lanes.as_ptr());
        let mut sum = V::splat(0.0);
        for i in (0..len).step_by(V::LANES) {
            let weight = V::load(logits.add(i)).sub(top_lanes).exp();
            sum = sum.add(weight);
            weight.store(logits.add(i));
        }
        sum.store(lanes.as_mut_ptr());
        for row in 0..ROWS {
            if top[row] == f32::NEG_INFINITY {
                continue; // has never seen a token; its weights mean nothing
            }
            let own: f32 = (row..V::LANES).step_by(stride(ROWS)).map(|i| lanes[i]).sum();
            state.sum[row] = state.sum[row] * scale[row] + own;
            state.max[row] = top[row];
        }
    }
    scale
}
