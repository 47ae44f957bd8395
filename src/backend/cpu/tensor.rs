//! Borrowed tensors: plain slices of the three dtypes.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::geometry::DType;

/// Keys, values or queries as the engine has them.
#[derive(Clone, Copy, Debug)]
pub enum CpuTensor<'t> {
    /// Single precision.
    F32(&'t [f32]),
    /// Half precision.
    F16(&'t [f16]),
    /// bfloat16.
    BF16(&'t [bf16]),
}

/// Where attention writes its output.
#[derive(Debug)]
pub enum CpuTensorMut<'t> {
    /// Single precision.
    F32(&'t mut [f32]),
    /// Half precision.
    F16(&'t mut [f16]),
    /// bfloat16.
    BF16(&'t mut [bf16]),
}

macro_rules! from_slices {
    ($($variant:ident: $element:ty),*) => {$(
        impl<'t> From<&'t [$element]> for CpuTensor<'t> {
            fn from(slice: &'t [$element]) -> Self {
                CpuTensor::$variant(slice)
            }
        }
        impl<'t> From<&'t Vec<$element>> for CpuTensor<'t> {
            fn from(vector: &'t Vec<$element>) -> Self {
                CpuTensor::$variant(vector)
            }
        }
        impl<'t> From<&'t mut [$element]> for CpuTensorMut<'t> {
            fn from(slice: &'t mut [$element]) -> Self {
                CpuTensorMut::$variant(slice)
            }
        }
        impl<'t> From<&'t mut Vec<$element>> for CpuTensorMut<'t> {
            fn from(vector: &'t mut Vec<$element>) -> Self {
                CpuTensorMut::$variant(vector)
            }
        }
    )*};
}
from_slices!(F32: f32, F16: f16, BF16: bf16);

impl CpuTensor<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            CpuTensor::F32(x) => x.len(),
            CpuTensor::F16(x) => x.len(),
            CpuTensor::BF16(x) => x.len(),
        }
    }

    /// Copies `into.len()` elements from element `at` on, as f32.
    pub(super) fn read(&self, at: usize, into: &mut [f32]) {
        let range = at..at + into.len();
        match self {
            CpuTensor::F32(x) => into.copy_from_slice(&x[range]),
            CpuTensor::F16(x) => x[range].convert_to_f32_slice(into),
            CpuTensor::BF16(x) => x[range].convert_to_f32_slice(into),
        }
    }

    /// Copies a row of elements from element `at` on into `into`, rounded to `dtype`. `scratch` has room for the row.
    pub(super) fn store(&self, at: usize, dtype: DType, into: &mut [u8], scratch: &mut [f32]) {
        let elements = into.len() / dtype.bytes();
        let range = at..at + elements;
        match (self, dtype) {
            (CpuTensor::F32(x), DType::F32) => into.copy_from_slice(bytemuck::cast_slice(&x[range])),
            (CpuTensor::F16(x), DType::F16) => into.copy_from_slice(bytemuck::cast_slice(&x[range])),
            (CpuTensor::BF16(x), DType::BF16) => into.copy_from_slice(bytemuck::cast_slice(&x[range])),
            (CpuTensor::F32(x), DType::F16) => {
                bytemuck::cast_slice_mut::<u8, f16>(into).convert_from_f32_slice(&x[range])
            }
            (CpuTensor::F32(x), DType::BF16) => {
                bytemuck::cast_slice_mut::<u8, bf16>(into).convert_from_f32_slice(&x[range])
            }
            (_, _) => {
                let row = &mut scratch[..elements];
                self.read(at, row);
                CpuTensor::F32(row).store(0, dtype, into, &mut []);
            }
        }
    }
}

impl CpuTensorMut<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            CpuTensorMut::F32(x) => x.len(),
            CpuTensorMut::F16(x) => x.len(),
            CpuTensorMut::BF16(x) => x.len(),
        }
    }
}

/// An output tensor that several threads write disjoint rows of.
#[derive(Clone, Copy)]
pub(super) struct SharedOut {
    address: *mut u8,
    dtype: DType,
    elements: usize,
}

// SAFETY: an address and a length; whoever writes through it promises disjoint rows.
unsafe impl Send for SharedOut {}
// SAFETY: as above.
unsafe impl Sync for SharedOut {}

impl SharedOut {
    /// The borrow ends, but the caller keeps the tensor borrowed for as long as it uses the result.
    pub(super) fn new(tensor: &mut CpuTensorMut<'_>) -> Self {
        let elements = tensor.len();
        let (address, dtype) = match tensor {
            CpuTensorMut::F32(x) => (x.as_mut_ptr().cast(), DType::F32),
            CpuTensorMut::F16(x) => (x.as_mut_ptr().cast(), DType::F16),
            CpuTensorMut::BF16(x) => (x.as_mut_ptr().cast(), DType::BF16),
        };
        SharedOut { address, dtype, elements }
    }

    /// Writes a row from element `at` on, rounded to the tensor's dtype.
    ///
    /// # Safety
    /// The tensor is still borrowed, and no other thread touches these elements.
    pub(super) unsafe fn write(self, at: usize, row: &[f32]) {
        debug_assert!(at + row.len() <= self.elements);
        let bytes = row.len() * self.dtype.bytes();
        // SAFETY: the row lies inside the tensor and is ours alone, by the caller's promise; its address is aligned for the dtype.
        let into = unsafe { std::slice::from_raw_parts_mut(self.address.add(at * self.dtype.bytes()), bytes) };
        CpuTensor::F32(row).store(0, self.dtype, into, &mut []);
    }
}
