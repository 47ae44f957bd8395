//! How tests give tensors to a CUDA device.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use wakekv::{CudaBackend, Error, PageLists, Step};

use crate::common::Tensors;

impl Tensors for CudaBackend {
    const COUNTS_AT_ONCE: bool = false;

    fn append_host(step: &mut Step<'_, Self>, layer: usize, k: &[f32], v: &[f32]) -> Result<(), Error> {
        let stream = step.stream().clone();
        let (k, v) = (stream.clone_htod(k).map_err(engine)?, stream.clone_htod(v).map_err(engine)?);
        step.append(layer, &k, &v)
    }

    fn attend_host(
        step: &mut Step<'_, Self>,
        layer: usize,
        q: &[f32],
        pages: Option<PageLists<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let stream = step.stream().clone();
        let q = stream.clone_htod(q).map_err(engine)?;
        let mut device_out = stream.clone_htod(out).map_err(engine)?;
        match pages {
            None => step.attend(layer, &q, &mut device_out),
            Some(pages) => step.attend_pages(layer, &q, pages, &mut device_out),
        }?;
        stream.memcpy_dtoh(&device_out, out).map_err(engine)
    }
}

/// What the engine's own calls meet.
fn engine(error: DriverError) -> Error {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { knob: "the engine's tensors", bytes: 0 },
        _ => Error::Cuda { call: "the engine's", cause: error.to_string() },
    }
}
