//! Borrowed tensors in device memory.

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use half::{bf16, f16};

use super::layout;
use crate::error::Error;
use crate::geometry::DType;

/// Keys, values or queries in device memory, as the engine has them. They are read in the order of the compute stream, so the engine
/// may free or overwrite them in that order right after the call.
pub struct CudaTensor<'t> {
    source: Source<'t>,
    elements: usize,
    dtype: DType,
}

/// Where attention writes its output, in device memory and in the order of the compute stream.
pub struct CudaTensorMut<'t> {
    target: Target<'t>,
    elements: usize,
    dtype: DType,
}

enum Source<'t> {
    Borrowed(&'t (dyn Readable + 't)),
    Address(u64),
}

enum Target<'t> {
    Borrowed(&'t mut (dyn Writable + 't)),
    Address(u64),
}

/// Device memory of cudarc's, which keeps events of its own where a context has several streams.
trait Readable {
    fn stream(&self) -> &CudaStream;
    fn lend<'a>(&'a self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>);
}

trait Writable {
    fn stream(&self) -> &CudaStream;
    fn lend<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>);
}

/// A tensor while launches are being made that use it. Slices of cudarc's learn of the use when it is dropped.
pub(super) struct Lent<'a> {
    pub address: u64,
    pub dtype: DType,
    _known: Option<SyncOnDrop<'a>>,
}

impl Lent<'_> {
    /// The element type as the kernels number it.
    pub fn dtype_code(&self) -> u32 {
        match self.dtype {
            DType::F32 => layout::F32,
            DType::F16 => layout::F16,
            DType::BF16 => layout::BF16,
        }
    }

    fn aligned(self, name: &'static str) -> Result<Self, Error> {
        if self.address.is_multiple_of(ALIGNMENT) {
            return Ok(self);
        }
        Err(Error::Alignment { tensor: name, address: self.address, bytes: ALIGNMENT })
    }
}

/// A slice of another stream is ordered with ours only where both contexts keep events for that.
fn check_stream(name: &str, own: &CudaStream, compute: &CudaStream) -> Result<(), Error> {
    let managed = |stream: &CudaStream| stream.context().is_managing_stream_synchronization();
    if own == compute || (own.context() == compute.context() && managed(own) && managed(compute)) {
        return Ok(());
    }
    Err(Error::Setting {
        knob: "the tensor's stream",
        value: format!("another one ({name})"),
        rule: "must be the cache's: allocate on Cache::stream(), or give the engine's stream to Cuda::from_stream"
            .into(),
    })
}

/// Bytes of the kernels' loads.
const ALIGNMENT: u64 = 16;

impl CudaTensor<'_> {
    /// A tensor of an engine that does not use cudarc's slices.
    ///
    /// # Safety
    /// `address` is device memory of the cache's device that holds `elements` elements, and stays so until the compute stream has
    /// passed the call that it is given to.
    pub unsafe fn from_raw(address: u64, elements: usize, dtype: DType) -> Self {
        CudaTensor { source: Source::Address(address), elements, dtype }
    }

    pub(super) fn len(&self) -> usize {
        self.elements
    }

    /// The tensor for launches on `stream`, until the result is dropped.
    ///
    /// # Errors
    /// It is not aligned as the kernels' loads need it.
    pub(super) fn lend<'a>(&'a self, name: &'static str, stream: &'a CudaStream) -> Result<Lent<'a>, Error> {
        let (address, known) = match self.source {
            Source::Address(address) => (address, None),
            Source::Borrowed(memory) => {
                check_stream(name, memory.stream(), stream)?;
                let (address, known) = memory.lend(stream);
                (address, Some(known))
            }
        };
        Lent { address, dtype: self.dtype, _known: known }.aligned(name)
    }
}

impl CudaTensorMut<'_> {
    /// A tensor of an engine that does not use cudarc's slices.
    ///
    /// # Safety
    /// As for [`CudaTensor::from_raw`], and nobody else reads or writes it meanwhile.
    pub unsafe fn from_raw(address: u64, elements: usize, dtype: DType) -> Self {
        CudaTensorMut { target: Target::Address(address), elements, dtype }
    }

    pub(super) fn len(&self) -> usize {
        self.elements
    }

    /// As [`CudaTensor::lend`].
    pub(super) fn lend<'a>(&'a mut self, name: &'static str, stream: &'a CudaStream) -> Result<Lent<'a>, Error> {
        let (address, known) = match &mut self.target {
            Target::Address(address) => (*address, None),
            Target::Borrowed(memory) => {
                check_stream(name, memory.stream(), stream)?;
                let (address, known) = memory.lend(stream);
                (address, Some(known))
            }
        };
        Lent { address, dtype: self.dtype, _known: known }.aligned(name)
    }
}

impl std::fmt::Debug for CudaTensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaTensor")
            .field("elements", &self.elements)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for CudaTensorMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaTensorMut")
            .field("elements", &self.elements)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

macro_rules! readable {
    ($($memory:ty),*) => {$(
        impl<T> Readable for $memory {
            fn stream(&self) -> &CudaStream {
                DeviceSlice::stream(self)
            }

            fn lend<'a>(&'a self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
                self.device_ptr(stream)
            }
        }
    )*};
}
readable!(CudaSlice<T>, CudaView<'_, T>);

macro_rules! writable {
    ($($memory:ty),*) => {$(
        impl<T> Writable for $memory {
            fn stream(&self) -> &CudaStream {
                DeviceSlice::stream(self)
            }

            fn lend<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
                self.device_ptr_mut(stream)
            }
        }
    )*};
}
writable!(CudaSlice<T>, CudaViewMut<'_, T>);

macro_rules! from_slices {
    ($($dtype:ident: $element:ty),*) => {$(
        impl<'t> From<&'t CudaSlice<$element>> for CudaTensor<'t> {
            fn from(slice: &'t CudaSlice<$element>) -> Self {
                CudaTensor { source: Source::Borrowed(slice), elements: slice.len(), dtype: DType::$dtype }
            }
        }
        impl<'t> From<&'t CudaView<'t, $element>> for CudaTensor<'t> {
            fn from(view: &'t CudaView<'t, $element>) -> Self {
                CudaTensor { source: Source::Borrowed(view), elements: DeviceSlice::len(view), dtype: DType::$dtype }
            }
        }
        impl<'t> From<&'t mut CudaSlice<$element>> for CudaTensorMut<'t> {
            fn from(slice: &'t mut CudaSlice<$element>) -> Self {
                CudaTensorMut { elements: slice.len(), target: Target::Borrowed(slice), dtype: DType::$dtype }
            }
        }
        impl<'t> From<&'t mut CudaViewMut<'t, $element>> for CudaTensorMut<'t> {
            fn from(view: &'t mut CudaViewMut<'t, $element>) -> Self {
                CudaTensorMut { elements: DeviceSlice::len(view), target: Target::Borrowed(view), dtype: DType::$dtype }
            }
        }
    )*};
}
from_slices!(F32: f32, F16: f16, BF16: bf16);
