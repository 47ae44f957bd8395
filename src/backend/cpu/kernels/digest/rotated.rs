//! Rotated keys at a few bits about the page's centre: key ≈ centre + scale_t · code, one scale per token.
//!
//! ```text
//! digest   codes [blocks of 16 tokens], see `nibbles`
//!          weights [tokens] u8, centre [head_dim] i8
//!          scale f32, step of the centre f32
//! score    max over tokens and rows of  Σ_d q_d · centre_d  +  scale · weight_t / 255 · Σ_d q_d · (2 code_d,t − 2^BITS + 1)
//! ```
//! Keys and queries are rotated by Hadamard's matrix first, which keeps dot products and makes all channels alike: so
//! channels need no scales of their own, and one rounded query serves every page. Codes are an equal distance apart, as suits
//! normally distributed numbers; a token's scale is the one that leaves its dot products unbiased (RaBitQ, arXiv
//! 2405.12497). The query is rounded to some 5 bits for the codes, which is far below what rounding the keys loses, and to
//! 16 for the centre.
//!
//! A page that holds NaN or infinity, or whose squares overflow, has scale NaN, and so has its score.

use super::super::MAX_HEAD_DIM;
use super::super::element::Element;
use super::super::vector::Vector;
use super::nibbles::{BLOCK, LARGEST_ENTRY, ROWS, Row, WORD, Words};
use super::rotation::{block, rotate};
use super::{Digest, Lanes, PageShape, Shelf, larger_or_nan};

/// `BITS` is 1, 2 or 3.
pub(super) struct RotatedSketch<const BITS: usize>;

/// Where a digest's parts begin.
struct Layout {
    words: Words,
    blocks: usize,
    /// Channels of the centre, padded with zeros.
    padded: usize,
    weights: usize,
    centre: usize,
    scales: usize,
}

impl<const BITS: usize> RotatedSketch<BITS> {
    /// Codes stand for −LARGEST to LARGEST in steps of 2.
    const LARGEST: f32 = ((1 << BITS) - 1) as f32;
    /// The distance between codes that loses least of a normal distribution, in its deviations.
    const DISTANCE: f32 = [1.596, 0.996, 0.586][BITS - 1];
    /// Bits that dot products are shifted up before they are weighted: as many as 16 bits have room for.
    const SHIFT: u32 = [3, 2, 0][BITS - 1];
    /// What the magnitudes of neighbouring channels of the rounded query add up to before rounding, pairs or quads.
    const NEIGHBOURS: usize = if BITS == 1 { 4 } else { 2 };
    const LARGEST_SUM: f32 = if BITS == 1 { (LARGEST_ENTRY - 2) as f32 } else { (LARGEST_ENTRY / 3 - 1) as f32 };

    fn layout(shape: &PageShape) -> Layout {
        let words = Words::new(BITS, shape.head_dim);
        let blocks = shape.page_tokens.div_ceil(BLOCK);
        let padded = shape.head_dim.next_multiple_of(16);
        let weights = blocks * words.bytes();
        let centre = weights + blocks * BLOCK;
        Layout { words, blocks, padded, weights, centre, scales: centre + padded }
    }
}

impl<const BITS: usize> Digest for RotatedSketch<BITS> {
    fn bytes(shape: &PageShape) -> usize {
        Self::layout(shape).scales + 8
    }

    #[inline(always)]
    unsafe fn build<V: Vector, E: Element>(shape: &PageShape, keys: *const E, out: *mut u8) {
        let layout = Self::layout(shape);
        let dim = shape.head_dim;
        let mut lanes = Channels::new();
        let mut scales = [0.0f32; 128];
        // SAFETY: the digest is as long as the layout says. The keys are [page_tokens, head_dim], tokens at most 128.
        unsafe {
            out.write_bytes(0, Self::bytes(shape));
            let mut centre = Channels::new();
            mean::<V, E>(keys, dim, shape.page_tokens, &mut centre);
            rotate(&mut centre.0[..dim]);
            let step = round_centre(&mut centre.0[..dim], out.add(layout.centre).cast());

            for (token, scale) in scales.iter_mut().enumerate().take(shape.page_tokens) {
                for d in (0..dim).step_by(V::LANES) {
                    E::load::<V>(keys.add(token * dim + d)).store(lanes.0.as_mut_ptr().add(d));
                }
                rotate(&mut lanes.0[..dim]);
                *scale = Self::code::<V>(&mut lanes, &centre, dim);
                // A short page fills its block with what it has.
                for token in (token..layout.blocks * BLOCK).step_by(shape.page_tokens) {
                    let codes = out.add(token / BLOCK * layout.words.bytes() + token % BLOCK);
                    Self::pack(&lanes.0[..dim], codes, layout.words);
                }
            }
            let scales = &scales[..shape.page_tokens];
            // The first NaN stays.
            let largest = scales.iter().fold(0.0f32, |largest, &scale| larger_or_nan(largest, scale));
            let weigh = if largest > 0.0 { 255.0 / largest } else { 0.0 };
            for (token, scale) in (0..layout.blocks * BLOCK).zip(scales.iter().cycle()) {
                out.add(layout.weights + token).write(nearest(scale * weigh) as u8);
            }
            let known = largest.is_finite() && step.is_finite() && (largest == 0.0 || weigh.is_finite());
            let scales = out.add(layout.scales).cast::<f32>();
            scales.write_unaligned(if known { largest } else { f32::NAN });
            scales.add(1).write_unaligned(if known { step } else { 0.0 });
        }
    }

    #[inline(always)]
    unsafe fn score<V: Lanes, E: Element>(shape: &PageShape, queries: &[f32], shelf: Shelf<'_>, out: &mut [f32]) {
        out.fill(f32::NEG_INFINITY);
        for queries in queries.chunks(ROWS * shape.head_dim) {
            // SAFETY: the trait's contract; the chunk has that many rows.
            unsafe {
                match queries.len() / shape.head_dim {
                    1 => Self::score_rows::<V, 1>(shape, queries, shelf, out),
                    2 => Self::score_rows::<V, 2>(shape, queries, shelf, out),
                    3 => Self::score_rows::<V, 3>(shape, queries, shelf, out),
                    _ => Self::score_rows::<V, 4>(shape, queries, shelf, out),
                }
            }
        }
    }
}

impl<const BITS: usize> RotatedSketch<BITS> {
    /// Turns a token's rotated channels into codes, and returns its scale.
    ///
    /// # Safety
    /// The CPU has what `V` needs.
    #[inline(always)]
    unsafe fn code<V: Vector>(channels: &mut Channels, centre: &Channels, dim: usize) -> f32 {
        // SAFETY: `d` + LANES ≤ dim ≤ MAX_HEAD_DIM.
        unsafe {
            let nothing = V::splat(0.0);
            let mut squares = nothing;
            for d in (0..dim).step_by(V::LANES) {
                let at = channels.0.as_mut_ptr().add(d);
                let rest = V::load(at).sub(V::load(centre.0.as_ptr().add(d)));
                squares = squares.add(rest.mul(rest));
                rest.store(at);
            }
            let mut sums = [0.0f32; 4];
            V::sum4([squares, nothing, nothing, nothing], sums.as_mut_ptr());
            let square = sums[0];
            let inverse = 1.0 / (Self::DISTANCE * (square / dim as f32).sqrt());
            let inverse = V::splat(if inverse.is_finite() { inverse } else { 0.0 });
            let mut products = nothing;
            for d in (0..dim).step_by(V::LANES) {
                let at = channels.0.as_mut_ptr().add(d);
                let rest = V::load(at);
                let half = V::splat((1 << (BITS - 1)) as f32);
                let mut codes = [0.0f32; 8];
                // NaN becomes the largest code here; the scale still has it.
                rest.mul(inverse).add(half).min(V::splat(Self::LARGEST)).max(nothing).store(codes.as_mut_ptr());
                let mut values = [0.0f32; 8];
                for (code, value) in codes.iter_mut().zip(&mut values) {
                    *code = f32::from(*code as u8);
                    *value = 2.0 * *code - Self::LARGEST;
                }
                products = products.add(rest.mul(V::load(values.as_ptr())));
                V::load(codes.as_ptr()).store(at);
            }
            V::sum4([products, nothing, nothing, nothing], sums.as_mut_ptr());
            let scale = square / sums[0];
            if square == 0.0 { 0.0 } else { scale }
        }
    }

    /// Writes a token's codes into its place in a block.
    ///
    /// # Safety
    /// `codes` points to the token's byte in the first word of a block that is writable and zero there.
    #[inline(always)]
    unsafe fn pack(channels: &[f32], codes: *mut u8, words: Words) {
        // Nibble n lies in word n / 4: nibbles 0 and 2 in the first half, 1 and 3 in the second, 2 and 3 in the high bits.
        let place = |nibble: usize| (nibble / 4 * WORD + nibble % 2 * BLOCK, nibble / 2 % 2 * 4);
        for (d, &code) in channels.iter().enumerate() {
            let code = code as u8;
            // SAFETY: every channel has its nibble in the planes of the block.
            unsafe {
                if BITS >= 2 {
                    let (at, bit) = place(d / 2);
                    *codes.add(at) |= (code >> (BITS - 2)) << (bit + d % 2 * 2);
                }
                if BITS % 2 == 1 {
                    let (at, bit) = place(d / 4);
                    *codes.add(words.pairs * WORD + at) |= (code & 1) << (bit + d % 4);
                }
            }
        }
    }

    /// # Safety
    /// As [`Digest::score`]; there are `COUNT` rows.
    #[inline(always)]
    unsafe fn score_rows<V: Lanes, const COUNT: usize>(
        shape: &PageShape,
        queries: &[f32],
        shelf: Shelf<'_>,
        out: &mut [f32],
    ) {
        let layout = Self::layout(shape);
        let mut rows = [Row::EMPTY; ROWS];
        // Per row, what a unit of the centre's and of the codes' dot product is worth.
        let mut units = [[0.0f32; 2]; ROWS];
        for (query, (row, units)) in queries.chunks_exact(shape.head_dim).zip(rows.iter_mut().zip(&mut units)) {
            // SAFETY: the function's contract.
            *units = unsafe { Self::prepare::<V>(query, row, layout.words) };
        }
        for (index, out) in out.iter_mut().enumerate() {
            // SAFETY: the digest's layout is the one that `build` writes, for this shape.
            unsafe {
                let digest = shelf.digest(index);
                shelf.prefetch(index + 2);
                let centres = V::centre::<COUNT>(&rows, digest.add(layout.centre).cast(), layout.padded);
                let weights = digest.add(layout.weights);
                let dots = V::largest::<COUNT>(&rows, layout.words, Self::SHIFT, layout.blocks, digest, weights);
                let scales = digest.add(layout.scales).cast::<f32>();
                let (scale, step) = (scales.read_unaligned(), scales.add(1).read_unaligned());
                for r in 0..COUNT {
                    let [centre, code] = units[r];
                    *out = larger_or_nan(*out, centres[r] as f32 * (centre * step) + dots[r] as f32 * (code * scale));
                }
            }
        }
    }

    /// Rotates and rounds a query. Returns what a unit of the centre's and of the codes' dot product is worth: NaN where the query
    /// has one.
    ///
    /// # Safety
    /// The CPU has what `V` needs.
    #[inline(always)]
    unsafe fn prepare<V: Lanes>(query: &[f32], row: &mut Row, words: Words) -> [f32; 2] {
        let dim = query.len();
        let mut channels = Channels::new();
        let channels = &mut channels.0[..dim];
        channels.copy_from_slice(query);
        rotate(channels);
        let shrink = 1.0 / block(dim) as f32;
        channels.iter_mut().for_each(|x| *x *= shrink);

        let largest = largest_magnitude(channels.iter().copied());
        let sums = channels.chunks_exact(Self::NEIGHBOURS).map(|near| near.iter().map(|x| x.abs()).sum());
        let largest_sum = largest_magnitude(sums);
        if !largest_sum.is_finite() {
            return [f32::NAN; 2];
        }
        // Below this the query is noise beside anything that could matter, and the inverses overflow.
        let inverse = |most: f32, of: f32| if of > 1e-30 { most / of } else { 0.0 };
        let (wide, narrow) = (inverse(32767.0, largest), inverse(Self::LARGEST_SUM, largest_sum));
        let mut small = [0i8; MAX_HEAD_DIM + 16];
        for ((&x, wide_to), small) in channels.iter().zip(&mut row.wide).zip(&mut small) {
            *wide_to = nearest(x * wide);
            *small = nearest(x * narrow) as i8;
        }
        // SAFETY: the function's contract.
        unsafe { V::fill(row, &small, words) };
        let shifted = (256.0 / 255.0) / (1 << Self::SHIFT) as f32;
        [largest / 32767.0, largest_sum / Self::LARGEST_SUM * shifted]
    }
}

/// NaN counts as larger than infinity.
#[inline(always)]
fn largest_magnitude(of: impl Iterator<Item = f32>) -> f32 {
    // The bits of positive numbers are in the order of the numbers.
    f32::from_bits(of.fold(0, |largest, x| largest.max(x.to_bits() & 0x7fff_ffff)))
}

/// The nearest integer, ties to even, of a number that 16 bits can hold.
#[inline(always)]
fn nearest(x: f32) -> i16 {
    const ROUND: f32 = 12582912.0; // leaves the rounded number in the low bits
    (x + ROUND).to_bits() as i16
}

/// A token's channels.
#[repr(align(32))]
struct Channels([f32; MAX_HEAD_DIM]);

impl Channels {
    fn new() -> Self {
        Channels([0.0; MAX_HEAD_DIM])
    }
}

/// The mean key.
///
/// # Safety
/// `keys` is readable for [tokens, dim]. The CPU has what `V` needs.
#[inline(always)]
unsafe fn mean<V: Vector, E: Element>(keys: *const E, dim: usize, tokens: usize, to: &mut Channels) {
    // SAFETY: the function's contract; dim ≤ MAX_HEAD_DIM.
    unsafe {
        let share = V::splat(1.0 / tokens as f32);
        for d in (0..dim).step_by(V::LANES) {
            let mut sum = V::splat(0.0);
            for token in 0..tokens {
                sum = sum.add(E::load::<V>(keys.add(token * dim + d)));
            }
            sum.mul(share).store(to.0.as_mut_ptr().add(d));
        }
    }
}

/// Rounds a centre to bytes, and replaces it by what these stand for. Returns their step, which is not finite where the centre is not.
///
/// # Safety
/// `to` is writable for as many bytes as there are channels.
#[inline(always)]
unsafe fn round_centre(centre: &mut [f32], to: *mut i8) -> f32 {
    let largest = largest_magnitude(centre.iter().copied());
    let inverse = if largest > 1e-30 { 127.0 / largest } else { 0.0 };
    let step = largest / 127.0;
    for (d, x) in centre.iter_mut().enumerate() {
        let rounded = nearest(*x * inverse) as i8;
        // SAFETY: the function's contract.
        unsafe { to.add(d).write(rounded) };
        *x = f32::from(rounded) * step;
    }
    step
}
