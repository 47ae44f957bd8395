//! Device memory and pinned host memory, each freed when its owner is dropped.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::driver::{Called, describe, is_out_of_memory};
use crate::error::Error;

/// Device memory. Its contents are undefined until something is written to it.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// `knob` is the setting that decides the size.
    pub fn new(context: &Arc<CudaContext>, knob: &'static str, bytes: usize) -> Result<Self, Error> {
        context.bind_to_thread().called("cuCtxSetCurrent")?;
        // SAFETY: at least one byte, freed by the owner only.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|error| match is_out_of_memory(error) {
            true => Error::OutOfMemory { knob, bytes },
            false => Error::Cuda { call: "cuMemAlloc", cause: describe(error) },
        })?;
        Ok(DeviceMemory { context: context.clone(), address, bytes })
    }

    /// The device address of a byte.
    pub fn at(&self, offset: usize) -> u64 {
        debug_assert!(offset <= self.bytes);
        self.address + offset as u64
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new` and freed once. Whoever owns the memory has waited for the streams that use it. In a context that
            // is broken the call fails, and nothing is left to free.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Pinned host memory that the device reaches too: portable, mapped, and not write-combined, for the host reads it as well.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    context: Arc<CudaContext>,
    address: NonNull<u8>,
    device: u64,
    bytes: usize,
}

// SAFETY: an address of memory that nobody else owns; access goes through `&self` or `&mut self` as for a boxed slice, and that the
// device does not touch it meanwhile is the caller's promise in either case.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, Error> {
        Self::pin(context, bytes).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
            | sys::CUresult::CUDA_ERROR_NOT_PERMITTED
            | sys::CUresult::CUDA_ERROR_OPERATING_SYSTEM => {
                Error::Pinning { bytes: bytes as u64, pinned: 0, cause: describe(error) }
            }
            _ => Error::Cuda { call: "cuMemHostAlloc", cause: describe(error) },
        })
    }

    fn pin(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, result::DriverError> {
        context.bind_to_thread()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: at least one byte, freed by the owner only.
        let address = unsafe { result::malloc_host(bytes.max(1), flags) }?;
        let unknown = result::DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN);
        let address = NonNull::new(address.cast::<u8>()).ok_or(unknown)?;
        let mut memory = PinnedMemory { context: context.clone(), address, device: 0, bytes };
        // SAFETY: mapped host memory that was just allocated.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut memory.device, address.as_ptr().cast(), 0) }.result()?;
        Ok(memory)
    }

    /// The device address of the first byte.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// The host address of a byte.
    pub fn host(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        // SAFETY: inside the allocation, or at its end.
        unsafe { self.address.as_ptr().add(offset) }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `from` to `offset`.
    ///
    /// # Safety
    /// The device neither reads nor writes this range now.
    pub unsafe fn write(&mut self, offset: usize, from: &[u8]) {
        debug_assert!(offset + from.len() <= self.bytes);
        // SAFETY: inside the allocation, and nobody else has it, by the caller's promise.
        unsafe { self.host(offset).copy_from_nonoverlapping(from.as_ptr(), from.len()) }
    }

    /// # Safety
    /// The range has been written, by the host or the device, and the device does not write it during the borrow.
    pub unsafe fn read(&self, offset: usize, bytes: usize) -> &[u8] {
        debug_assert!(offset + bytes <= self.bytes);
        // SAFETY: inside the allocation and initialised, by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.host(offset), bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new` and freed once, when no stream uses it any more. In a context that is broken the call fails.
            let _ = unsafe { result::free_host(self.address.as_ptr().cast()) };
        }
    }
}
