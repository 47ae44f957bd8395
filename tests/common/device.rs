//! How tests give tensors to a backend, whatever its memory is.

use wakekv::backend::Backend;
use wakekv::{CpuBackend, Error, PageLists, Step};

/// A backend that takes tensors from host memory.
pub trait Tensors: Backend + Sized {
    /// Whether counters are told by the end of the step that has counted.
    const COUNTS_AT_ONCE: bool;

    fn append_host(step: &mut Step<'_, Self>, layer: usize, k: &[f32], v: &[f32]) -> Result<(), Error>;

    /// With `pages` under an explicit selection.
    fn attend_host(
        step: &mut Step<'_, Self>,
        layer: usize,
        q: &[f32],
        pages: Option<PageLists<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error>;
}

impl Tensors for CpuBackend {
    const COUNTS_AT_ONCE: bool = true;

    fn append_host(step: &mut Step<'_, Self>, layer: usize, k: &[f32], v: &[f32]) -> Result<(), Error> {
        step.append(layer, k, v)
    }

    fn attend_host(
        step: &mut Step<'_, Self>,
        layer: usize,
        q: &[f32],
        pages: Option<PageLists<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        match pages {
            None => step.attend(layer, q, out),
            Some(pages) => step.attend_pages(layer, q, pages, out),
        }
    }
}
