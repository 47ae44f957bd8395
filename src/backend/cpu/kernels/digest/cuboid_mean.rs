//! Bounds that most keys lie within.
//!
//! ```text
//! digest   centre − deviation [head_dim], centre + deviation [head_dim]   in the KV dtype
//! score    that of bounds
//! ```
//! The centre is the middle of a channel's smallest and largest key, the deviation the keys' mean distance from it (ArkVale,
//! NeurIPS 2024). One far key moves these less than it moves the ends.

use super::super::element::Element;
use super::super::vector::Vector;
use super::min_max::MinMax;
use super::{Digest, Lanes, PageShape, Shelf, bounds};

pub(super) struct CuboidMean;

impl Digest for CuboidMean {
    fn bytes(shape: &PageShape) -> usize {
        MinMax::bytes(shape)
    }

    #[inline(always)]
    unsafe fn build<V: Vector, E: Element>(shape: &PageShape, keys: *const E, out: *mut u8) {
        let out = out.cast::<E>();
        let (dim, tokens) = (shape.head_dim, shape.page_tokens);
        for d in (0..dim).step_by(V::LANES) {
            // SAFETY: the keys are [page_tokens, head_dim], the digest holds 2 × head_dim elements.
            unsafe {
                let [lowest, highest] = bounds::<V, E>(keys.add(d), dim, tokens);
                let centre = V::load(lowest.as_ptr()).add(V::load(highest.as_ptr())).mul(V::splat(0.5));
                let mut deviation = V::splat(0.0);
                for token in 0..tokens {
                    deviation = deviation.add(E::load::<V>(keys.add(token * dim + d)).sub(centre).abs());
                }
                let deviation = deviation.mul(V::splat(1.0 / tokens as f32));
                let mut ends = [[0.0; 8]; 2];
                centre.sub(deviation).store(ends[0].as_mut_ptr());
                centre.add(deviation).store(ends[1].as_mut_ptr());
                for (lane, (&low, &high)) in ends[0].iter().zip(&ends[1]).enumerate() {
                    out.add(d + lane).write_unaligned(E::round(low));
                    out.add(dim + d + lane).write_unaligned(E::round(high));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn score<V: Lanes, E: Element>(shape: &PageShape, queries: &[f32], shelf: Shelf<'_>, out: &mut [f32]) {
        // SAFETY: the trait's contract; the digests have the same layout.
        unsafe { MinMax::score::<V, E>(shape, queries, shelf, out) }
    }
}
