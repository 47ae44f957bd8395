//! Plain arrays. The compiler turns the loops into whatever vectors the target's baseline has.

use half::{bf16, f16};

use super::{Vector, exp, tree};

/// `N` lanes, 8 or 16. 16 exist so that the wide kernels are tested on machines without AVX-512.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in super::super) struct Portable<const N: usize>([f32; N]);

impl<const N: usize> Portable<N> {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| f(self.0[i])))
    }

    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl<const N: usize> Vector for Portable<N> {
    const LANES: usize = N;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; N])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: N elements are readable, says the caller.
        Portable(unsafe { from.cast::<[f32; N]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: N elements are readable, says the caller; f16 is a u16.
        let bits = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        Portable(std::array::from_fn(|i| widen_f16(bits[i])))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: N elements are readable, says the caller; bf16 is a u16.
        let bits = unsafe { from.cast::<[u16; N]>().read_unaligned() };
        Portable(std::array::from_fn(|i| f32::from_bits(u32::from(bits[i]) << 16)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: N elements are writable, says the caller.
        unsafe { to.cast::<[f32; N]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self {
        Portable(std::array::from_fn(|i| mul_add(self.0[i], by.0[i], plus.0[i])))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(f32::abs)
    }

    #[inline(always)]
    unsafe fn exp(self) -> Self {
        self.map(|x| {
            let clamped = if x < exp::LOWEST { exp::LOWEST } else { x };
            let shifted = mul_add(clamped, exp::LOG2_E, exp::ROUND);
            let n = shifted - exp::ROUND;
            let r = mul_add(n, -exp::LN2_LOW, mul_add(n, -exp::LN2_HIGH, clamped));
            let tail = exp::POLYNOMIAL.into_iter().reduce(|sum, c| mul_add(sum, r, c)).unwrap_or(0.0);
            let two_to_n = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
            let y = (mul_add(tail, r * r, r) + 1.0) * two_to_n;
            if x < exp::LOWEST { 0.0 } else { y }
        })
    }

    #[inline(always)]
    unsafe fn sum4(vectors: [Self; 4], to: *mut f32) {
        let sums = vectors.map(|v| {
            let mut eight = [0.0; 8];
            for (i, lane) in eight.iter_mut().enumerate() {
                *lane = if N == 16 { v.0[i] + v.0[i + N / 2] } else { v.0[i] };
            }
            tree(&eight)
        });
        // SAFETY: 4 elements are writable, says the caller.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(sums) }
    }
}

/// Fused only where that is one instruction: elsewhere it would be a call per lane.
#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

/// Without branches, so that it vectorises: shifts the bits into an f32's place and mends the exponent's bias by a
/// multiplication, which normalises subnormals too.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    const BIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * BIAS).to_bits();
    let special = magnitude | 0x7f80_0000;
    let widened = if magnitude >= 0x7c00 << 13 { special } else { finite };
    f32::from_bits(widened | u32::from(bits & 0x8000) << 16)
}
