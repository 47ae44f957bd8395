//! What keys and values are stored as.

use half::{bf16, f16};

use super::vector::Vector;

/// A storage type, and how it is widened to f32.
pub(super) trait Element: Copy {
    /// Widens `V::LANES` consecutive elements.
    ///
    /// # Safety
    /// `V::LANES` elements are readable at `from`; no alignment is asked for. The CPU has what `V` needs.
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// Rounds to the nearest storable value.
    fn round(value: f32) -> Self;

    /// Widens one element.
    fn widen(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load(from) }
    }

    fn round(value: f32) -> f32 {
        value
    }

    fn widen(self) -> f32 {
        self
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f16) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_f16(from) }
    }

    fn round(value: f32) -> f16 {
        f16::from_f32(value)
    }

    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const bf16) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_bf16(from) }
    }

    fn round(value: f32) -> bf16 {
        bf16::from_f32(value)
    }

    fn widen(self) -> f32 {
        self.to_f32()
    }
}
