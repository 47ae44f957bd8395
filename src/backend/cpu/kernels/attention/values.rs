//! Weighted sums of a block's values.

use super::super::MAX_ROWS;
use super::super::element::Element;
use super::super::vector::Vector;
use super::walk::Block;
use super::{LINE, prefetch_range, stride};

/// # Safety
/// As [`attend`](super::attend); `weights` is the block's buffer.
#[inline(always)]
pub(super) unsafe fn add_values<V: Vector, E: Element, const ROWS: usize>(
    block: &Block,
    next: &Block,
    dim: usize,
    visible: &[u32],
    weights: *const f32,
    scale: &[f32; MAX_ROWS],
    acc: &mut [f32],
) {
    // Accumulators of rows × registers of channels.
    // SAFETY: the function's contract.
    unsafe {
        match ROWS {
            1 | 2 => columns::<V, E, ROWS, 4>(block, next, dim, weights, scale, acc),
            3 => columns::<V, E, ROWS, 3>(block, next, dim, weights, scale, acc),
            _ => columns::<V, E, ROWS, 2>(block, next, dim, weights, scale, acc),
        }
        if block.parts().iter().any(|part| part.common < part.tokens) {
            diagonal::<V, E, ROWS>(block, dim, visible, weights, acc);
        }
    }
}

/// The tokens that all rows see, some channels at a time.
///
/// # Safety
/// As [`add_values`].
#[inline(always)]
unsafe fn columns<V: Vector, E: Element, const ROWS: usize, const WIDTH: usize>(
    block: &Block,
    next: &Block,
    dim: usize,
    weights: *const f32,
    scale: &[f32; MAX_ROWS],
    acc: &mut [f32],
) {
    let acc = acc.as_mut_ptr();
    let mut d = 0;
    // SAFETY: a column lies within `dim`.
    unsafe {
        while d + WIDTH * V::LANES <= dim {
            column::<V, E, ROWS, WIDTH>(block, next, dim, d, weights, scale, acc);
            d += WIDTH * V::LANES;
        }
        while d < dim {
            column::<V, E, ROWS, 1>(block, next, dim, d, weights, scale, acc);
            d += V::LANES;
        }
    }
}

/// `WIDTH` registers of channels from `d` on. With every value read, as much of the next block's keys is fetched.
///
/// # Safety
/// As [`add_values`]; `d` + WIDTH × LANES ≤ `dim`.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indices name tokens, rows and registers")]
unsafe fn column<V: Vector, E: Element, const ROWS: usize, const WIDTH: usize>(
    block: &Block,
    next: &Block,
    dim: usize,
    d: usize,
    weights: *const f32,
    scale: &[f32; MAX_ROWS],
    acc: *mut f32,
) {
    let bytes = WIDTH * V::LANES * size_of::<E>(); // of values per token
    let tokens = (LINE / bytes).max(1); // per prefetch
    // SAFETY: acc is [ROWS, dim]; a part's values are [tokens, dim], its weights [tokens, stride] from its slot on.
    unsafe {
        let mut sums = [[V::splat(0.0); WIDTH]; ROWS];
        for r in 0..ROWS {
            for w in 0..WIDTH {
                sums[r][w] = V::load(acc.add(r * dim + d + w * V::LANES)).mul(V::splat(scale[r]));
            }
        }
        for (i, part) in block.parts().iter().enumerate() {
            // Over the whole block, the next one's keys are asked for from their first byte to their last.
            let place = d * block.len + i * WIDTH * V::LANES;
            let next = next.parts().get(place / dim).unwrap_or(part);
            let mut ahead = next.keys.wrapping_add(part.common * (place % dim) * size_of::<E>());
            let values = part.values.cast::<E>().add(d);
            let weights = weights.add(part.slot * stride(ROWS));
            let mut token = 0;
            while token + tokens <= part.common {
                prefetch_range(ahead, tokens * bytes);
                ahead = ahead.wrapping_add(tokens * bytes);
                for _ in 0..tokens {
                    add_token::<V, E, ROWS, WIDTH>(
                        values.add(token * dim),
                        weights.add(token * stride(ROWS)),
                        &mut sums,
                    );
                    token += 1;
                }
            }
            while token < part.common {
                add_token::<V, E, ROWS, WIDTH>(values.add(token * dim), weights.add(token * stride(ROWS)), &mut sums);
                token += 1;
            }
        }
        for r in 0..ROWS {
            for w in 0..WIDTH {
                sums[r][w].store(acc.add(r * dim + d + w * V::LANES));
            }
        }
    }
}

/// Adds a token's values, by its weight in every row.
///
/// # Safety
/// `values` is readable for WIDTH registers, `weights` for ROWS floats.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indices name tokens, rows and registers")]
unsafe fn add_token<V: Vector, E: Element, const ROWS: usize, const WIDTH: usize>(
    values: *const E,
    weights: *const f32,
    sums: &mut [[V; WIDTH]; ROWS],
) {
    // SAFETY: the function's contract.
    unsafe {
        let mut value = [V::splat(0.0); WIDTH];
        for w in 0..WIDTH {
            value[w] = E::load::<V>(values.add(w * V::LANES));
        }
        for r in 0..ROWS {
            let weight = V::splat(*weights.add(r));
            for w in 0..WIDTH {
                sums[r][w] = weight.mul_add(value[w], sums[r][w]);
            }
        }
    }
}

/// The tokens that only some rows see, row by row: a hidden value may be NaN, so its weight of 0 would not hide it.
///
/// # Safety
/// As [`add_values`].
#[inline(always)]
unsafe fn diagonal<V: Vector, E: Element, const ROWS: usize>(
    block: &Block,
    dim: usize,
    visible: &[u32],
    weights: *const f32,
    acc: &mut [f32],
) {
    for (row, (&visible, acc)) in visible.iter().zip(acc.chunks_exact_mut(dim)).enumerate() {
        for part in block.parts() {
            for token in part.common..part.seen(visible) {
                // SAFETY: `token` is one of the part's; `d` + LANES ≤ dim.
                unsafe {
                    let values = part.values.cast::<E>().add(token * dim);
                    let p = V::splat(*weights.add((part.slot + token) * stride(ROWS) + row));
                    for d in (0..dim).step_by(V::LANES) {
                        let sum = acc.as_mut_ptr().add(d);
                        p.mul_add(E::load::<V>(values.add(d)), V::load(sum)).store(sum);
                    }
                }
            }
        }
    }
}
