//! Digests: small summaries of a page's keys, by which pages are chosen that need not be on the device.
//!
//! A digest is built once, when its page seals, and scored in every step. The score of a page estimates the largest
//! logit that any query row has with any of its tokens. A score of NaN means "unknown", and must be treated as the
//! highest: it comes from NaN or infinity in keys or queries, and such a page has to be read for its NaN to show.
//!
//! All arithmetic is done in 8 lanes, without fused operations and in a fixed order, so every instruction set gives the
//! same bits and chooses the same pages.
//!
//! To add a digest: a file with a type that is a [`Digest`], and an arm in the public [`Digest`](crate::Digest) and in
//! [`DigestKernels::new`].

mod codes;
mod cuboid_mean;
mod key_sketch;
mod min_max;
mod nibbles;
mod rotated;
mod rotation;
#[cfg(test)]
mod tests;

use half::{bf16, f16};

use self::codes::Codes;
use self::cuboid_mean::CuboidMean;
use self::key_sketch::KeySketch;
use self::min_max::MinMax;
use self::nibbles::Lookup;
use self::rotated::RotatedSketch;
use super::element::Element;
#[cfg(target_arch = "x86_64")]
use super::vector::Avx2;
use super::vector::{Portable, Vector, prefetch};
use super::{Isa, PageShape};
use crate::geometry::DType;
use crate::selection::Digest as DigestKind;

/// Query rows that one pass over a digest serves at most.
const MAX_ROWS: usize = 8;

/// What a kind of digest computes.
trait Digest {
    /// Bytes of one page's digest.
    fn bytes(shape: &PageShape) -> usize;

    /// Summarises a sealed page's K block.
    ///
    /// # Safety
    /// `keys` is readable for `[page_tokens, head_dim]` elements, `out` writable for [`bytes`](Self::bytes).
    /// The CPU has what `V` needs.
    unsafe fn build<V: Vector, E: Element>(shape: &PageShape, keys: *const E, out: *mut u8);

    /// Writes the score of every page: the largest over the rows of the queries, NaN if any is NaN.
    ///
    /// # Safety
    /// `queries` is `[rows, head_dim]`, every digest is one of this kind and shape, `out` is as long as `shelf`. The CPU
    /// has what `V` needs.
    unsafe fn score<V: Lanes, E: Element>(shape: &PageShape, queries: &[f32], shelf: Shelf<'_>, out: &mut [f32]);
}

/// What digests are scored with: 8 lanes and small integers.
trait Lanes: Vector + Codes + Lookup {}
impl<V: Vector + Codes + Lookup> Lanes for V {}

/// Where digests lie: one per slot of an arena.
#[derive(Clone, Copy)]
pub(crate) struct Shelf<'a> {
    /// The first slot.
    pub base: *const u8,
    /// Bytes of a slot.
    pub stride: usize,
    /// The slots of the pages to be scored.
    pub slots: &'a [u32],
}

impl Shelf<'_> {
    #[inline(always)]
    fn digest(&self, page: usize) -> *const u8 {
        self.base.wrapping_add(self.slots[page] as usize * self.stride)
    }

    /// Asks for a digest that is scored a little later. A head's digests lie far apart, which no hardware foresees.
    #[inline(always)]
    fn prefetch(&self, page: usize) {
        if let Some(&slot) = self.slots.get(page) {
            let at = self.base.wrapping_add(slot as usize * self.stride);
            (0..self.stride).step_by(64).for_each(|byte| prefetch(at.wrapping_add(byte)));
        }
    }
}

type Build = unsafe fn(&PageShape, *const u8, *mut u8);
type Score = unsafe fn(&PageShape, &[f32], Shelf<'_>, &mut [f32]);

/// Builds and scores digests of one kind, for one shape of pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DigestKernels {
    shape: PageShape,
    bytes: usize,
    build: Build,
    score: Score,
}

impl DigestKernels {
    /// None where the machine lacks the instructions.
    pub fn new(kind: DigestKind, isa: Isa, shape: PageShape) -> Option<DigestKernels> {
        isa.is_available().then(|| match kind {
            DigestKind::MinMax => Self::of::<MinMax>(isa, shape),
            DigestKind::CuboidMean => Self::of::<CuboidMean>(isa, shape),
            DigestKind::KeySketch2 => Self::of::<KeySketch<2>>(isa, shape),
            DigestKind::RotatedSketch1 => Self::of::<RotatedSketch<1>>(isa, shape),
            DigestKind::RotatedSketch2 => Self::of::<RotatedSketch<2>>(isa, shape),
            DigestKind::RotatedSketch3 => Self::of::<RotatedSketch<3>>(isa, shape),
        })
    }

    /// Bytes of one page's digest. Digests need no alignment.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Summarises a sealed page.
    ///
    /// # Safety
    /// `keys` is the K block of a page of the shape given to [`new`](Self::new): all tokens written, aligned to the
    /// elements, and not written meanwhile.
    pub unsafe fn build(&self, keys: *const u8, out: &mut [u8]) {
        debug_assert_eq!(out.len(), self.bytes);
        // SAFETY: the caller's contract; `out` is as long as a digest.
        unsafe { (self.build)(&self.shape, keys, out.as_mut_ptr()) }
    }

    /// Writes the scores of pages: `out[i]` is the largest score of the digest in `shelf.slots[i]` over the rows of
    /// `queries` (`[rows, head_dim]`, any number of rows), NaN where it is unknown.
    ///
    /// # Safety
    /// Every slot holds [`bytes`](Self::bytes) bytes that [`build`](Self::build) wrote and nobody changes meanwhile.
    pub unsafe fn score(&self, queries: &[f32], shelf: Shelf<'_>, out: &mut [f32]) {
        debug_assert_eq!(queries.len() % self.shape.head_dim, 0);
        debug_assert_eq!(shelf.slots.len(), out.len());
        debug_assert!(shelf.stride >= self.bytes);
        // SAFETY: the caller's contract; `new` has checked the CPU.
        unsafe { (self.score)(&self.shape, queries, shelf, out) }
    }

    fn of<D: Digest>(isa: Isa, shape: PageShape) -> DigestKernels {
        let (build, score): (Build, Score) = match shape.dtype {
            DType::F32 => functions::<D, f32>(isa),
            DType::F16 => functions::<D, f16>(isa),
            DType::BF16 => functions::<D, bf16>(isa),
        };
        DigestKernels { shape, bytes: D::bytes(&shape), build, score }
    }
}

fn functions<D: Digest, E: Element>(isa: Isa) -> (Build, Score) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => (build_avx2::<D, E>, score_avx2::<D, E>),
        _ => (build_portable::<D, E>, score_portable::<D, E>),
    }
}

/// # Safety
/// As [`Digest::build`].
unsafe fn build_portable<D: Digest, E: Element>(shape: &PageShape, keys: *const u8, out: *mut u8) {
    // SAFETY: the function's contract.
    unsafe { D::build::<Portable<8>, E>(shape, keys.cast(), out) }
}

/// # Safety
/// As [`Digest::build`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn build_avx2<D: Digest, E: Element>(shape: &PageShape, keys: *const u8, out: *mut u8) {
    // SAFETY: the function's contract.
    unsafe { D::build::<Avx2, E>(shape, keys.cast(), out) }
}

/// # Safety
/// As [`Digest::score`].
unsafe fn score_portable<D: Digest, E: Element>(shape: &PageShape, q: &[f32], shelf: Shelf<'_>, out: &mut [f32]) {
    // SAFETY: the function's contract.
    unsafe { D::score::<Portable<8>, E>(shape, q, shelf, out) }
}

/// # Safety
/// As [`Digest::score`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_avx2<D: Digest, E: Element>(shape: &PageShape, q: &[f32], shelf: Shelf<'_>, out: &mut [f32]) {
    // SAFETY: the function's contract.
    unsafe { D::score::<Avx2, E>(shape, q, shelf, out) }
}

/// The larger, and NaN if either is.
#[inline(always)]
fn larger_or_nan(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// Smallest and largest key of 8 channels; NaN in both where a key is NaN or infinite.
///
/// # Safety
/// `keys` is readable for 8 channels of [tokens, dim]. The CPU has what `V` needs.
#[inline(always)]
unsafe fn bounds<V: Vector, E: Element>(keys: *const E, dim: usize, tokens: usize) -> [[f32; 8]; 2] {
    // SAFETY: the function's contract.
    unsafe {
        let mut lowest = V::splat(f32::INFINITY);
        let mut highest = V::splat(f32::NEG_INFINITY);
        let mut unknown = V::splat(0.0);
        for token in 0..tokens {
            let key = E::load::<V>(keys.add(token * dim));
            lowest = key.min(lowest);
            highest = key.max(highest);
            unknown = unknown.add(key.sub(key)); // 0, or NaN
        }
        let mut bounds = [[0.0; 8]; 2];
        lowest.add(unknown).store(bounds[0].as_mut_ptr());
        highest.add(unknown).store(bounds[1].as_mut_ptr());
        bounds
    }
}
