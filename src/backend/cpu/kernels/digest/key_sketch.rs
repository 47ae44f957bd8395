//! Keys at a few bits: key ≈ zero + scale · code, with a scale and a zero per page and channel.
//!
//! ```text
//! digest   codes [page_tokens, S] bytes, S = head_dim · BITS / 8
//!          zero  [head_dim], scale [head_dim]   in the KV dtype
//! codes    bits BITS·j.. of byte b of a token are the code of channel j·S + b
//! score    max over tokens and rows of  Σ_d q_d · zero_d  +  step · Σ_d round(q_d · scale_d / step) · code_d
//! ```
//! A byte's codes belong to channels S apart, so that a shift and a mask of a whole register (or of a CUDA thread's
//! word) yields codes of consecutive channels. `q · scale` is rounded to 8 bits for every page and row with a step of its
//! own, which makes the inner loop one of byte products.
//!
//! A channel that is constant has scale 0. One that holds NaN or infinity, or whose range overflows, has zero = NaN, and
//! with it the page's score is NaN.

use super::super::MAX_HEAD_DIM;
use super::super::element::Element;
use super::super::vector::Vector;
use super::codes::Plan;
use super::{Digest, Lanes, MAX_ROWS, PageShape, Shelf, bounds, larger_or_nan};

/// `BITS` is 1, 2 or 4.
pub(super) struct KeySketch<const BITS: usize>;

impl<const BITS: usize> KeySketch<BITS> {
    const LARGEST: f32 = ((1 << BITS) - 1) as f32;

    fn code_bytes(shape: &PageShape) -> usize {
        shape.page_tokens * shape.head_dim * BITS / 8
    }
}

impl<const BITS: usize> Digest for KeySketch<BITS> {
    fn bytes(shape: &PageShape) -> usize {
        Self::code_bytes(shape) + 2 * shape.head_dim * shape.dtype.bytes()
    }

    #[inline(always)]
    unsafe fn build<V: Vector, E: Element>(shape: &PageShape, keys: *const E, out: *mut u8) {
        let dim = shape.head_dim;
        let stride = dim * BITS / 8;
        // SAFETY: the digest is Self::bytes long: codes, then 2 × head_dim elements. The keys are [page_tokens, head_dim].
        unsafe {
            out.write_bytes(0, Self::code_bytes(shape));
            let elements = out.add(Self::code_bytes(shape)).cast::<E>();
            for d in (0..dim).step_by(V::LANES) {
                let [lowest, highest] = bounds::<V, E>(keys.add(d), dim, shape.page_tokens);
                let (mut zeros, mut inverses) = ([0.0f32; 8], [0.0f32; 8]);
                for lane in 0..V::LANES {
                    let (zero, scale) = fit::<E>(lowest[lane], highest[lane], Self::LARGEST);
                    elements.add(d + lane).write_unaligned(zero);
                    elements.add(dim + d + lane).write_unaligned(scale);
                    let inverse = 1.0 / scale.widen();
                    (zeros[lane], inverses[lane]) = (zero.widen(), if inverse.is_finite() { inverse } else { 0.0 });
                }
                let (zero, inverse) = (V::load(zeros.as_ptr()), V::load(inverses.as_ptr()));
                for t in 0..shape.page_tokens {
                    let steps = E::load::<V>(keys.add(t * dim + d)).sub(zero).mul(inverse).add(V::splat(0.5));
                    let mut codes = [0.0f32; 8];
                    steps.min(V::splat(Self::LARGEST)).store(codes.as_mut_ptr());
                    for (lane, code) in codes.into_iter().enumerate() {
                        let (plane, byte) = ((d + lane) / stride, (d + lane) % stride);
                        *out.add(t * stride + byte) |= (code as u8) << (plane * BITS);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn score<V: Lanes, E: Element>(shape: &PageShape, queries: &[f32], shelf: Shelf<'_>, out: &mut [f32]) {
        let dim = shape.head_dim;
        let mut plan = Plan::new(BITS, dim, shape.page_tokens);
        let (mut zeros, mut scales) = ([0.0f32; MAX_HEAD_DIM], [0.0f32; MAX_HEAD_DIM]);
        let mut products = [0.0f32; MAX_HEAD_DIM];
        for (index, out) in out.iter_mut().enumerate() {
            let digest = shelf.digest(index);
            shelf.prefetch(index + 2);
            *out = f32::NEG_INFINITY;
            // SAFETY: the digest's layout is the one that `build` writes, for this shape.
            unsafe {
                let elements = digest.add(Self::code_bytes(shape)).cast::<E>();
                for d in (0..dim).step_by(V::LANES) {
                    E::load::<V>(elements.add(d)).store(zeros.as_mut_ptr().add(d));
                    E::load::<V>(elements.add(dim + d)).store(scales.as_mut_ptr().add(d));
                }
                for rows in queries.chunks(MAX_ROWS * dim) {
                    let mut offsets = [0.0f32; MAX_ROWS];
                    let mut steps = [0.0f32; MAX_ROWS];
                    let count = rows.len() / dim;
                    for (r, row) in rows.chunks_exact(dim).enumerate() {
                        (offsets[r], steps[r]) = quantise::<V>(row, &zeros, &scales, &mut products, &mut plan, r);
                    }
                    let dots = V::largest_dots::<BITS>(&plan, digest, count);
                    for r in 0..count {
                        *out = larger_or_nan(*out, offsets[r] + steps[r] * dots[r] as f32);
                    }
                }
            }
        }
    }
}

/// Zero and scale of a channel. The codes span from the smallest key to the largest.
fn fit<E: Element>(lowest: f32, highest: f32, largest_code: f32) -> (E, E) {
    let scale = E::round((highest - lowest) / largest_code);
    if scale.widen().is_finite() { (E::round(lowest), scale) } else { (E::round(f32::NAN), E::round(0.0)) }
}

/// Rounds q · scale to bytes in row `row` of the plan. Returns Σ q · zero, and the step of the bytes.
///
/// `products` is scratch.
///
/// # Safety
/// The CPU has what `V` needs.
#[inline(always)]
unsafe fn quantise<V: Lanes>(
    query: &[f32],
    zeros: &[f32; MAX_HEAD_DIM],
    scales: &[f32; MAX_HEAD_DIM],
    products: &mut [f32; MAX_HEAD_DIM],
    plan: &mut Plan,
    row: usize,
) -> (f32, f32) {
    let dim = query.len();
    // SAFETY: `d` + LANES ≤ dim ≤ MAX_HEAD_DIM.
    unsafe {
        let nothing = V::splat(0.0);
        let (mut offset, mut largest) = (nothing, nothing);
        for d in (0..dim).step_by(V::LANES) {
            let q = V::load(query.as_ptr().add(d));
            offset = offset.add(q.mul(V::load(zeros.as_ptr().add(d))));
            let product = q.mul(V::load(scales.as_ptr().add(d)));
            largest = product.abs().max(largest); // drops NaN: the offset has it too
            product.store(products.as_mut_ptr().add(d));
        }
        let mut lanes = [0.0f32; 8];
        largest.store(lanes.as_mut_ptr());
        let largest = lanes.iter().fold(0.0f32, |a, &b| if b > a { b } else { a });
        let mut sums = [0.0; 4];
        V::sum4([offset, nothing, nothing, nothing], sums.as_mut_ptr());
        if !largest.is_finite() {
            return (f32::NAN, 0.0);
        }
        let step = largest / 127.0;
        // Below this the products are noise beside anything that could matter, and 127 / largest overflows.
        let inverse = if largest > 1e-30 { 127.0 / largest } else { 0.0 };
        plan.set_row::<V>(row, &products[..dim.next_multiple_of(32)], inverse);
        (sums[0], step)
    }
}
