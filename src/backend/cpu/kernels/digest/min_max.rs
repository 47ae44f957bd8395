//! Bounds of every channel.
//!
//! ```text
//! digest   lowest [head_dim], highest [head_dim]   in the KV dtype, exact
//! score    Σ_d max(q_d, 0) · highest_d + min(q_d, 0) · lowest_d
//! ```
//! That is Quest's Σ_d max(q_d · lowest_d, q_d · highest_d) with half the products. A channel with a NaN or an infinity
//! has NaN for both bounds.

use super::super::element::Element;
use super::super::vector::Vector;
use super::{Digest, Lanes, PageShape, Shelf, bounds, larger_or_nan};

pub(super) struct MinMax;

impl Digest for MinMax {
    fn bytes(shape: &PageShape) -> usize {
        2 * shape.head_dim * shape.dtype.bytes()
    }

    #[inline(always)]
    unsafe fn build<V: Vector, E: Element>(shape: &PageShape, keys: *const E, out: *mut u8) {
        let out = out.cast::<E>();
        for d in (0..shape.head_dim).step_by(V::LANES) {
            // SAFETY: the keys are [page_tokens, head_dim], the digest holds 2 × head_dim elements.
            unsafe {
                let [lowest, highest] = bounds::<V, E>(keys.add(d), shape.head_dim, shape.page_tokens);
                for lane in 0..V::LANES {
                    out.add(d + lane).write_unaligned(E::round(lowest[lane]));
                    out.add(shape.head_dim + d + lane).write_unaligned(E::round(highest[lane]));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn score<V: Lanes, E: Element>(shape: &PageShape, queries: &[f32], shelf: Shelf<'_>, out: &mut [f32]) {
        for (index, out) in out.iter_mut().enumerate() {
            let digest = shelf.digest(index);
            shelf.prefetch(index + 2);
            *out = f32::NEG_INFINITY;
            for rows in queries.chunks(4 * shape.head_dim) {
                let count = rows.len() / shape.head_dim;
                let mut scores = [0.0; 4];
                // SAFETY: the trait's contract; the chunk has `count` rows.
                unsafe {
                    match count {
                        1 => dots::<V, E, 1>(shape.head_dim, rows, digest.cast(), &mut scores),
                        2 => dots::<V, E, 2>(shape.head_dim, rows, digest.cast(), &mut scores),
                        3 => dots::<V, E, 3>(shape.head_dim, rows, digest.cast(), &mut scores),
                        _ => dots::<V, E, 4>(shape.head_dim, rows, digest.cast(), &mut scores),
                    }
                }
                *out = scores[..count].iter().fold(*out, |best, &score| larger_or_nan(best, score));
            }
        }
    }
}

/// The scores of up to four rows.
///
/// # Safety
/// The digest holds 2 × `dim` elements; the queries are [ROWS, dim]; `dim` is a multiple of 8.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "indices name rows")]
unsafe fn dots<V: Vector, E: Element, const ROWS: usize>(
    dim: usize,
    queries: &[f32],
    digest: *const E,
    scores: &mut [f32; 4],
) {
    // SAFETY: the function's contract.
    unsafe {
        let zero = V::splat(0.0);
        let mut sums = [zero; 4];
        for d in (0..dim).step_by(V::LANES) {
            let lowest = E::load::<V>(digest.add(d));
            let highest = E::load::<V>(digest.add(dim + d));
            for r in 0..ROWS {
                let q = V::load(queries.as_ptr().add(r * dim + d));
                let up = zero.max(q).mul(highest); // these orders keep NaN
                let down = zero.min(q).mul(lowest);
                sums[r] = sums[r].add(up.add(down));
            }
        }
        V::sum4(sums, scores.as_mut_ptr());
    }
}
