//! The kernels of the loaded images, and how they are launched.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::driver::{Called, Driver};
use crate::error::Error;
use crate::geometry::{DType, Geometry};

/// The kernels that a geometry uses.
#[derive(Debug)]
pub(super) struct Kernels {
    pub open: Kernel,
    pub append: Kernel,
    pub score: Kernel,
    pub select: Kernel,
    pub demand: Kernel,
    pub gather: Kernel,
    pub mirror: Kernel,
    pub arrive: Kernel,
    /// Decode steps: tiles of [`rows`](Self::rows) query rows.
    pub attend: Kernel,
    /// Several new tokens per entry: tiles of [`CHUNK_ROWS`].
    pub attend_chunk: Kernel,
    pub rows: usize,
    pub merge: Kernel,
    pub grant: Kernel,
    pub relocate: Kernel,
    pub undo: Kernel,
    /// Behind the functions, which belong to them.
    _modules: Vec<Module>,
}

/// Query rows of a tile of `attend_chunk`.
pub(super) const CHUNK_ROWS: usize = 8;

/// Head dims that there are attention kernels for.
pub(super) const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// Dynamic shared memory that every device gives without being asked.
pub(super) const FREE_SHARED: usize = 48 << 10;

impl Kernels {
    pub fn load(context: &Arc<CudaContext>, images: &[&[u8]], geometry: &Geometry) -> Result<Self, Error> {
        let modules: Vec<Module> = images.iter().map(|image| Module::load(context, image)).collect::<Result<_, _>>()?;
        let stored = match geometry.dtype() {
            DType::BF16 => "bf16",
            _ => "f16",
        };
        let (dim, rows) = (geometry.head_dim(), geometry.group().next_power_of_two().min(8));
        let find = |name: String| Kernel::find(&modules, name);
        Ok(Kernels {
            open: find("wakekv_open".into())?,
            append: find(format!("wakekv_append_{stored}"))?,
            score: find(format!("wakekv_score_{stored}"))?,
            select: find("wakekv_select".into())?,
            demand: find("wakekv_demand".into())?,
            gather: find("wakekv_gather".into())?,
            mirror: find("wakekv_mirror".into())?,
            arrive: find("wakekv_arrive".into())?,
            attend: find(format!("wakekv_attend_{stored}_d{dim}_r{rows}"))?,
            attend_chunk: find(format!("wakekv_attend_chunk_{stored}_d{dim}"))?,
            rows,
            merge: find("wakekv_merge".into())?,
            grant: find("wakekv_grant".into())?,
            relocate: find("wakekv_move".into())?,
            undo: find("wakekv_undo".into())?,
            _modules: modules,
        })
    }
}

#[derive(Debug)]
struct Module {
    context: Arc<CudaContext>,
    handle: sys::CUmodule,
}

// SAFETY: a handle that the driver accepts from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    fn load(context: &Arc<CudaContext>, image: &[u8]) -> Result<Self, Error> {
        context.bind_to_thread().called("cuCtxSetCurrent")?;
        // SAFETY: an ELF file knows its length, and text ends with a zero, which all images do; they stay where they are during the call.
        let handle = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let handle = handle.map_err(|error| Error::CudaKernels {
            reason: format!("the driver does not load the image: {}", super::driver::describe(error)),
        })?;
        Ok(Module { context: context.clone(), handle })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded by `load`; its kernels have ended, for the backend waits for its streams before it is dropped.
            let _ = unsafe { result::module::unload(self.handle) };
        }
    }
}

/// A kernel, and what the driver says of its parameters.
#[derive(Debug)]
pub(super) struct Kernel {
    name: String,
    function: sys::CUfunction,
    /// Bytes of each parameter. Empty where the driver is too old to say.
    parameters: Vec<usize>,
}

// SAFETY: a handle that the driver accepts from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Blocks in each dimension, threads per block, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub blocks: (usize, usize, usize),
    pub threads: usize,
    pub shared: usize,
}

impl Kernel {
    fn find(modules: &[Module], name: String) -> Result<Self, Error> {
        let missing = || Error::CudaKernels { reason: format!("no image has the kernel {name}") };
        let symbol = CString::new(name.as_str()).map_err(|_| missing())?;
        // SAFETY: the modules are loaded, and outlive the kernel in `Kernels`.
        let find = |module: &Module| unsafe { result::module::get_function(module.handle, symbol.clone()) }.ok();
        let function = modules.iter().find_map(find).ok_or_else(missing)?;
        Ok(Kernel { parameters: parameters(function)?, function, name })
    }

    /// Lets the kernel have more shared memory than it would get.
    pub fn allow_shared(&self, bytes: usize) -> Result<(), Error> {
        if bytes <= FREE_SHARED {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        unsafe { result::function::set_function_attribute(self.function, attribute, bytes as i32) }
            .called("cuFuncSetAttribute")
    }

    /// Puts the kernel on a stream, whose context must be bound.
    ///
    /// # Safety
    /// The parameters are those of the kernel, and every address among them is good until the kernel has ended.
    pub unsafe fn launch(&self, stream: &CudaStream, grid: Grid, parameters: &[&dyn Parameter]) -> Result<(), Error> {
        let sizes = || parameters.iter().map(|parameter| parameter.size());
        if !self.parameters.is_empty() && !sizes().eq(self.parameters.iter().copied()) {
            let given: Vec<usize> = sizes().collect();
            return Err(Error::CudaKernels {
                reason: format!(
                    "the image's kernel {} takes parameters of {:?} bytes, not {given:?}: it was built from other sources",
                    self.name, self.parameters
                ),
            });
        }
        let mut addresses = [std::ptr::null_mut::<c_void>(); MAX_PARAMETERS];
        for (address, parameter) in addresses.iter_mut().zip(parameters) {
            *address = parameter.address();
        }
        let (x, y, z) = grid.blocks;
        let (blocks, threads) = ((x as u32, y as u32, z as u32), (grid.threads as u32, 1, 1));
        let (shared, addresses) = (grid.shared as u32, &mut addresses[..parameters.len()]);
        // SAFETY: as many addresses as parameters, which the call copies; the rest is the caller's promise.
        unsafe { result::launch_kernel(self.function, blocks, threads, shared, stream.cu_stream(), addresses) }
            .called("cuLaunchKernel")
    }
}

const MAX_PARAMETERS: usize = 12;

fn parameters(function: sys::CUfunction) -> Result<Vec<usize>, Error> {
    let Some(info) = Driver::get()?.parameter else { return Ok(Vec::new()) };
    let size_of = |index| {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function belongs to a loaded module; the call fails for an index behind the last parameter.
        unsafe { info(function, index, &mut offset, &mut size) }.result().ok().map(|()| size)
    };
    Ok((0..MAX_PARAMETERS).map_while(size_of).collect())
}

/// What a kernel takes: a number, an address or a struct of [`layout`](super::layout).
pub(super) trait Parameter {
    fn size(&self) -> usize;
    fn address(&self) -> *mut c_void;
}

impl<T: Pod> Parameter for T {
    fn size(&self) -> usize {
        size_of::<T>()
    }

    fn address(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}
