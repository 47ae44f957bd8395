//! The few vector operations that the kernels are written in.
//!
//! A kernel is generic over [`Vector`] and is instantiated inside a function that enables the instruction set, so every
//! operation here must be inlined: outside such a function the intrinsics would become calls.

mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(super) use self::{avx2::Avx2, avx512::Avx512};
pub(super) use portable::Portable;

use half::{bf16, f16};

/// A register of f32 lanes.
///
/// # Safety of every function
/// The CPU has the instructions that the type stands for. Pointers are readable or writable for [`LANES`](Self::LANES)
/// elements; none needs to be aligned.
pub(super) trait Vector: Copy {
    /// f32 lanes of one register: 8 or 16.
    const LANES: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const f16) -> Self;
    unsafe fn load_bf16(from: *const bf16) -> Self;
    unsafe fn store(self, to: *mut f32);

    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;

    /// `self * by + plus`, rounded once where the machine can.
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self;

    /// The larger, and `other` where either is NaN: the order of the operands decides whether NaN survives.
    unsafe fn max(self, other: Self) -> Self;

    /// The smaller, and `other` where either is NaN.
    unsafe fn min(self, other: Self) -> Self;

    /// Without the sign.
    unsafe fn abs(self) -> Self;

    /// e^x for x ≤ 0 within 2 units in the last place; 0 below [`exp::LOWEST`], at −∞ too. NaN gives NaN.
    unsafe fn exp(self) -> Self;

    /// Writes the sums of the lanes of four vectors to `to[0..4]`.
    ///
    /// The order of the additions is that of [`tree`], on every machine.
    unsafe fn sum4(vectors: [Self; 4], to: *mut f32);
}

/// The order in which the lanes of 8 are added; 16 lanes are first folded to 8, lane i with lane i + 8.
#[inline(always)]
fn tree(x: &[f32; 8]) -> f32 {
    ((x[0] + x[2]) + (x[1] + x[3])) + ((x[4] + x[6]) + (x[5] + x[7]))
}

/// Constants of the exponential: e^x = 2^n · e^r with n = round(x / ln 2), and a polynomial for e^r (Cephes' `expf`).
#[expect(clippy::excessive_precision, reason = "as published")]
mod exp {
    /// The smallest x whose exponential is a normal number.
    pub const LOWEST: f32 = -87.336544;
    pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
    /// ln 2 in two parts; the first has so few bits that its product with n is exact.
    pub const LN2_HIGH: f32 = 0.693359375;
    pub const LN2_LOW: f32 = -2.12194440e-4;
    /// (e^r − 1 − r) / r², highest power first.
    pub const POLYNOMIAL: [f32; 6] =
        [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1];
    /// Adding it to a small number rounds that to an integer, which is then in the low bits.
    pub const ROUND: f32 = 12582912.0;
}

/// Asks for the cache line at `at`. A hint: any address is allowed, nothing is read.
#[inline(always)]
pub(super) fn prefetch(at: *const u8) {
    // SAFETY: prefetching has no effect on the program's state and cannot fault.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    // SAFETY: as above.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = at;
}
