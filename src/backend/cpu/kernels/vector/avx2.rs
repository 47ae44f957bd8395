//! AVX2 with FMA and F16C: 8 lanes.
//!
//! The safety comment of every block is the trait's contract: the CPU has these instructions, the pointers are good for
//! 8 elements.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Vector, exp};

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in super::super) struct Avx2(__m256);

impl Vector for Avx2 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the trait's contract.
        let bits = unsafe { _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))) };
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_castsi256_ps(bits) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_fmadd_ps(self.0, by.0, plus.0) })
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_min_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
    }

    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let lowest = _mm256_set1_ps(exp::LOWEST);
            let round = _mm256_set1_ps(exp::ROUND);
            let x = _mm256_max_ps(lowest, self.0); // keeps NaN
            let shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(exp::LOG2_E), round);
            let n = _mm256_sub_ps(shifted, round);
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(exp::LN2_HIGH), x);
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(exp::LN2_LOW), r);
            let mut tail = _mm256_set1_ps(exp::POLYNOMIAL[0]);
            for c in &exp::POLYNOMIAL[1..] {
                tail = _mm256_fmadd_ps(tail, r, _mm256_set1_ps(*c));
            }
            let e_to_r = _mm256_add_ps(_mm256_fmadd_ps(tail, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0));
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            let two_to_n = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f80_0000)));
            let in_range = _mm256_cmp_ps::<_CMP_NLT_UQ>(self.0, lowest);
            Avx2(_mm256_and_ps(_mm256_mul_ps(e_to_r, two_to_n), in_range))
        }
    }

    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self; 4], to: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe {
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a.0, b.0), _mm256_unpackhi_ps(a.0, b.0));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c.0, d.0), _mm256_unpackhi_ps(c.0, d.0));
            let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
            let even = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
            let odd = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
            let halves = _mm256_add_ps(even, odd);
            _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves)));
        }
    }
}

impl Avx2 {
    /// For the 512-bit vectors, which fold to this width.
    #[inline(always)]
    pub(super) fn from_register(register: __m256) -> Self {
        Avx2(register)
    }
}
