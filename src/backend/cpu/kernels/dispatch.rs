//! Instantiates the kernels for every instruction set and picks one, once.

use half::{bf16, f16};

use super::attention;
use super::element::Element;
use super::vector::Portable;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::{Isa, MAX_HEAD_DIM, MAX_ROWS, PageShape, PageView, State, Tile};
use crate::geometry::DType;

/// One instance per number of rows.
macro_rules! table {
    ($function:ident::<$($type:ty),+>) => {
        [
            $function::<$($type),+, 1>,
            $function::<$($type),+, 2>,
            $function::<$($type),+, 3>,
            $function::<$($type),+, 4>,
        ]
    };
}
type Attend = unsafe fn(&PageShape, &Tile<'_>, &[PageView], &mut State<'_>);

/// The attention kernels for one shape of pages, by the number of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    shape: PageShape,
    attend: [Attend; MAX_ROWS],
}

impl Kernels {
    /// None where the machine lacks the instructions, or no kernel has such pages.
    pub fn new(isa: Isa, shape: PageShape) -> Option<Kernels> {
        let supported = (32..=MAX_HEAD_DIM).contains(&shape.head_dim)
            && shape.head_dim.is_multiple_of(8)
            && (8..=128).contains(&shape.page_tokens)
            && shape.page_tokens.is_power_of_two();
        if !isa.is_available() || !supported {
            return None;
        }
        let attend = match shape.dtype {
            DType::F32 => by_rows::<f32>(isa, shape.head_dim),
            DType::F16 => by_rows::<f16>(isa, shape.head_dim),
            DType::BF16 => by_rows::<bf16>(isa, shape.head_dim),
        };
        Some(Kernels { shape, attend })
    }

    /// The 16-lane kernels on plain arrays, so that their logic is tested on machines without AVX-512.
    #[cfg(test)]
    pub fn wide(shape: PageShape) -> Option<Kernels> {
        let attend = match shape.dtype {
            DType::F32 => table!(portable::<Portable<16>, f32>),
            DType::F16 => table!(portable::<Portable<16>, f16>),
            DType::BF16 => table!(portable::<Portable<16>, bf16>),
        };
        shape.head_dim.is_multiple_of(16).then_some(Kernels { shape, attend })
    }

    /// Continues the softmax `state` of the tile's rows over `pages`, in their order.
    ///
    /// Of a page with `n` tokens, row r reads the first `min(visible[r] − first, n)`; it is as if the others did not
    /// exist. A row that reads none keeps its state. NaN and infinities pass as through a dense softmax. The bits of the
    /// result depend on the arguments only.
    ///
    /// # Safety
    /// * Every page's `data` is readable for a page of the shape given to [`new`](Self::new), and aligned to its
    ///   elements (64 bytes is fastest). Its first `tokens` tokens, at most `page_tokens`, are initialised in both
    ///   blocks. Nobody writes them meanwhile.
    /// * The tile has 1 to [`MAX_ROWS`] rows, and `queries` and `state` have the lengths that follow from that.
    pub unsafe fn attend(&self, tile: &Tile<'_>, pages: &[PageView], state: &mut State<'_>) {
        let rows = tile.visible.len();
        debug_assert!((1..=MAX_ROWS).contains(&rows));
        debug_assert_eq!(tile.queries.len(), rows * self.shape.head_dim);
        debug_assert_eq!(state.acc.len(), rows * self.shape.head_dim);
        debug_assert!(state.max.len() == rows && state.sum.len() == rows);
        debug_assert!(pages.iter().all(|page| page.tokens as usize <= self.shape.page_tokens));
        // SAFETY: the kernel is the one for this number of rows, and `new` has checked CPU and shape; the rest is the
        // caller's contract.
        unsafe { self.attend[rows - 1](&self.shape, tile, pages, state) }
    }
}

fn by_rows<E: Element>(isa: Isa, head_dim: usize) -> [Attend; MAX_ROWS] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if head_dim.is_multiple_of(16) => table!(avx512::<E>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => table!(avx2::<E>),
        _ => table!(portable::<Portable<8>, E>),
    }
}

/// # Safety
/// As [`attention::attend`].
unsafe fn portable<V: super::vector::Vector, E: Element, const ROWS: usize>(
    shape: &PageShape,
    tile: &Tile<'_>,
    pages: &[PageView],
    state: &mut State<'_>,
) {
    // SAFETY: the function's contract.
    unsafe { attention::attend::<V, E, ROWS>(shape, tile, pages, state) }
}

/// # Safety
/// As [`attention::attend`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<E: Element, const ROWS: usize>(
    shape: &PageShape,
    tile: &Tile<'_>,
    pages: &[PageView],
    state: &mut State<'_>,
) {
    // SAFETY: the function's contract.
    unsafe { attention::attend::<Avx2, E, ROWS>(shape, tile, pages, state) }
}

/// # Safety
/// As [`attention::attend`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn avx512<E: Element, const ROWS: usize>(
    shape: &PageShape,
    tile: &Tile<'_>,
    pages: &[PageView],
    state: &mut State<'_>,
) {
    // SAFETY: the function's contract.
    unsafe { attention::attend::<Avx512, E, ROWS>(shape, tile, pages, state) }
}
