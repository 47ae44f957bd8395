//! AVX-512F: 16 lanes.
//!
//! The safety comment of every block is the trait's contract: the CPU has these instructions, the pointers are good for
//! 16 elements.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Avx2, Vector, exp};

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in super::super) struct Avx512(__m512);

impl Vector for Avx512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the trait's contract.
        let bits = unsafe { _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))) };
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_castsi512_ps(bits) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_fmadd_ps(self.0, by.0, plus.0) })
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_min_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_abs_ps(self.0) })
    }

    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let lowest = _mm512_set1_ps(exp::LOWEST);
            let round = _mm512_set1_ps(exp::ROUND);
            let x = _mm512_max_ps(lowest, self.0); // keeps NaN
            let shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(exp::LOG2_E), round);
            let n = _mm512_sub_ps(shifted, round);
            let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(exp::LN2_HIGH), x);
            let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(exp::LN2_LOW), r);
            let mut tail = _mm512_set1_ps(exp::POLYNOMIAL[0]);
            for c in &exp::POLYNOMIAL[1..] {
                tail = _mm512_fmadd_ps(tail, r, _mm512_set1_ps(*c));
            }
            let e_to_r = _mm512_add_ps(_mm512_fmadd_ps(tail, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0));
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            let two_to_n = _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f80_0000)));
            let in_range = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, lowest);
            Avx512(_mm512_maskz_mul_ps(in_range, e_to_r, two_to_n))
        }
    }

    #[inline(always)]
    unsafe fn sum4(vectors: [Self; 4], to: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe { Avx2::sum4([fold(vectors[0]), fold(vectors[1]), fold(vectors[2]), fold(vectors[3])], to) }
    }
}

/// Adds the upper half of the lanes to the lower.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
unsafe fn fold(v: Avx512) -> Avx2 {
    // SAFETY: the function's contract.
    unsafe {
        let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v.0)));
        Avx2::from_register(_mm256_add_ps(_mm512_castps512_ps256(v.0), upper))
    }
}
