//! Integer dot products of packed codes with bytes: the inner loop of the key sketches.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::super::MAX_HEAD_DIM;
#[cfg(target_arch = "x86_64")]
use super::super::vector::Avx2;
use super::super::vector::Portable;
use super::MAX_ROWS;

/// Codes are read in steps of so many bytes, or half as many where a token has no more.
const STEP: usize = 32;

/// The shape of the codes, and the query bytes of some rows in the order of the codes.
///
/// Plane j of a row holds the bytes for the jth code of every code byte, padded with zeros to whole steps: what is read
/// behind a token's codes then counts for nothing.
pub(super) struct Plan {
    rows: [[i8; MAX_HEAD_DIM]; MAX_ROWS],
    /// One row in the order of the channels.
    flat: [i8; MAX_HEAD_DIM + STEP],
    planes: usize,
    /// Bytes of a token's codes, and the same in whole steps.
    stride: usize,
    padded: usize,
    tokens: usize,
}

impl Plan {
    #[inline(always)]
    pub fn new(bits: usize, dim: usize, tokens: usize) -> Plan {
        let stride = dim * bits / 8;
        let padded = if stride <= STEP / 2 { STEP / 2 } else { stride.next_multiple_of(STEP) };
        Plan {
            rows: [[0; MAX_HEAD_DIM]; MAX_ROWS],
            flat: [0; MAX_HEAD_DIM + STEP],
            planes: 8 / bits,
            stride,
            padded,
            tokens,
        }
    }

    /// Takes round(products · inverse) as the bytes of a row.
    ///
    /// # Safety
    /// No product · inverse of the head's channels rounds to more than ±127. The CPU has what `C` needs.
    #[inline(always)]
    pub unsafe fn set_row<C: Codes>(&mut self, row: usize, products: &[f32; MAX_HEAD_DIM], inverse: f32) {
        if self.stride == self.padded {
            // SAFETY: a row is as long as the products.
            return unsafe { C::round(products, inverse, self.rows[row].as_mut_ptr()) };
        }
        // SAFETY: `flat` is longer than the products.
        unsafe { C::round(products, inverse, self.flat.as_mut_ptr()) };
        for plane in 0..self.planes {
            for step in (0..self.padded).step_by(STEP / 2) {
                let from = &self.flat[(plane * self.stride + step).min(MAX_HEAD_DIM)..][..STEP / 2];
                let to = &mut self.rows[row][plane * self.padded + step..][..STEP / 2];
                for (i, (to, &from)) in to.iter_mut().zip(from).enumerate() {
                    *to = if step + i < self.stride { from } else { 0 };
                }
            }
        }
    }
}

/// # Safety of every function
/// The CPU has the instructions that the type stands for.
pub(super) trait Codes {
    /// Writes round(products · inverse), ties to even, as MAX_HEAD_DIM bytes. Unspecified where that is beyond ±127.
    unsafe fn round(products: &[f32; MAX_HEAD_DIM], inverse: f32, to: *mut i8);

    /// For each of the first `rows` rows the largest Σ byte · code over the tokens.
    ///
    /// `codes` is readable for the tokens' codes and [`STEP`] bytes behind them.
    unsafe fn largest_dots<const BITS: usize>(plan: &Plan, codes: *const u8, rows: usize) -> [i32; MAX_ROWS];
}

impl Codes for Portable<8> {
    #[inline(always)]
    unsafe fn round(products: &[f32; MAX_HEAD_DIM], inverse: f32, to: *mut i8) {
        const ROUND: f32 = 12582912.0; // leaves the rounded number in the low bits
        for (i, product) in products.iter().enumerate() {
            // SAFETY: MAX_HEAD_DIM bytes are writable.
            unsafe { to.add(i).write((product * inverse + ROUND).to_bits() as i8) };
        }
    }

    #[inline(always)]
    unsafe fn largest_dots<const BITS: usize>(plan: &Plan, codes: *const u8, rows: usize) -> [i32; MAX_ROWS] {
        let mut largest = [i32::MIN; MAX_ROWS];
        for token in 0..plan.tokens {
            // SAFETY: every token has `stride` bytes of codes.
            let codes = unsafe { std::slice::from_raw_parts(codes.add(token * plan.stride), plan.stride) };
            for (row, largest) in plan.rows.iter().zip(&mut largest).take(rows) {
                let mut dot = 0i32;
                for (plane, bytes) in row.chunks_exact(plan.padded).take(plan.planes).enumerate() {
                    for (&code, &byte) in codes.iter().zip(bytes) {
                        dot += i32::from((code >> (plane * BITS)) & ((1 << BITS) - 1)) * i32::from(byte);
                    }
                }
                *largest = dot.max(*largest);
            }
        }
        largest
    }
}

#[cfg(target_arch = "x86_64")]
impl Codes for Avx2 {
    #[inline(always)]
    unsafe fn round(products: &[f32; MAX_HEAD_DIM], inverse: f32, to: *mut i8) {
        // SAFETY: the trait's contract; MAX_HEAD_DIM is a multiple of 32.
        unsafe {
            let inverse = _mm256_set1_ps(inverse);
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); // packing works within halves of a register
            for i in (0..MAX_HEAD_DIM).step_by(32) {
                let from = products.as_ptr().add(i);
                let eight = |j: usize| _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from.add(8 * j)), inverse));
                let packed =
                    _mm256_packs_epi16(_mm256_packs_epi32(eight(0), eight(1)), _mm256_packs_epi32(eight(2), eight(3)));
                _mm256_storeu_si256(to.add(i).cast(), _mm256_permutevar8x32_epi32(packed, order));
            }
        }
    }

    #[inline(always)]
    unsafe fn largest_dots<const BITS: usize>(plan: &Plan, codes: *const u8, rows: usize) -> [i32; MAX_ROWS] {
        let mut largest = [i32::MIN; MAX_ROWS];
        for (first, largest) in (0..rows).step_by(4).zip(largest.chunks_exact_mut(4)) {
            // SAFETY: the trait's contract.
            unsafe {
                let four = if plan.padded < STEP {
                    narrow::<BITS>(plan, codes, first)
                } else if plan.padded == STEP {
                    wide::<BITS, 1>(plan, codes, first)
                } else {
                    wide::<BITS, 0>(plan, codes, first)
                };
                _mm_storeu_si128(largest.as_mut_ptr().cast(), four);
            }
        }
        largest
    }
}

/// Four rows over tokens of whole steps; `STEPS` of them, 0 = as the plan says.
///
/// Byte products are added in pairs of 16 bits: at most 8 sums of 2 · 15 · 127 (4 bits, 256 channels) fit.
///
/// # Safety
/// As [`Codes::largest_dots`]; rows beyond the plan's count may hold anything.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn wide<const BITS: usize, const STEPS: usize>(plan: &Plan, codes: *const u8, first: usize) -> __m128i {
    let steps = if STEPS == 0 { plan.padded / STEP } else { STEPS };
    let padded = steps * STEP;
    // SAFETY: the function's contract; plane and step stay within a row.
    unsafe {
        let mut largest = _mm_set1_epi32(i32::MIN);
        for token in 0..plan.tokens {
            let mut dots = [_mm256_setzero_si256(); 4];
            for step in 0..steps {
                let packed = _mm256_loadu_si256(codes.add(token * plan.stride + step * STEP).cast());
                for plane in 0..8 / BITS {
                    let code = unpack::<BITS>(packed, plane);
                    for (r, dots) in dots.iter_mut().enumerate() {
                        let bytes = plan.rows[first + r].as_ptr().add(plane * padded + step * STEP);
                        let products = _mm256_maddubs_epi16(code, _mm256_loadu_si256(bytes.cast()));
                        *dots = _mm256_add_epi16(*dots, products);
                    }
                }
            }
            let sums = add_lanes(dots);
            let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
            largest = _mm_max_epi32(largest, sums);
        }
        largest
    }
}

/// Four rows over tokens of half a step: two tokens share a register.
///
/// # Safety
/// As [`wide`]; the number of tokens is even.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn narrow<const BITS: usize>(plan: &Plan, codes: *const u8, first: usize) -> __m128i {
    // SAFETY: the function's contract; half a step behind the second token's codes is readable.
    unsafe {
        let mut largest = _mm256_set1_epi32(i32::MIN);
        for token in (0..plan.tokens).step_by(2) {
            let at = codes.add(token * plan.stride);
            let packed = _mm256_loadu2_m128i(at.add(plan.stride).cast(), at.cast());
            let mut dots = [_mm256_setzero_si256(); 4];
            for plane in 0..8 / BITS {
                let code = unpack::<BITS>(packed, plane);
                for (r, dots) in dots.iter_mut().enumerate() {
                    let bytes = plan.rows[first + r].as_ptr().add(plane * STEP / 2);
                    let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.cast()));
                    *dots = _mm256_add_epi16(*dots, _mm256_maddubs_epi16(code, bytes));
                }
            }
            largest = _mm256_max_epi32(largest, add_lanes(dots));
        }
        _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest))
    }
}

/// The codes of one plane, a byte each.
///
/// # Safety
/// The CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn unpack<const BITS: usize>(packed: __m256i, plane: usize) -> __m256i {
    // SAFETY: the function's contract.
    unsafe {
        let shifted = _mm256_srl_epi16(packed, _mm_cvtsi32_si128((plane * BITS) as i32));
        _mm256_and_si256(shifted, _mm256_set1_epi8((1 << BITS) - 1))
    }
}

/// Per half of a register the four sums of the 16-bit lanes.
///
/// # Safety
/// The CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn add_lanes(vectors: [__m256i; 4]) -> __m256i {
    // SAFETY: the function's contract.
    unsafe {
        let [a, b, c, d] = vectors.map(|v| _mm256_madd_epi16(v, _mm256_set1_epi16(1)));
        let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
    }
}
