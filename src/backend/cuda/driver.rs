//! The driver library: whether it is there and has what is needed, and its results as errors.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::{DriverError, sys};
use libloading::Library;

use crate::error::Error;

/// What the names of the driver's entry points lead to. A point that is missing would panic in cudarc at its first use.
const NEEDED: [&str; 47] = [
    "cuInit",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

#[cfg(windows)]
const NAMES: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// The driver library, with those of its entry points that only newer ones have.
#[derive(Debug)]
pub(super) struct Driver {
    _library: Library,
    pub copy_batch: Option<CopyBatch>,
    pub parameter: Option<ParameterInfo>,
    pub elapsed: Option<Elapsed>,
}

/// `cuMemcpyBatchAsync` of CUDA 12.8: destinations, sources, sizes, count, attributes, index of the first copy of each, number of
/// attributes, index of the copy that failed, stream.
pub(super) type CopyBatch = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> sys::CUresult;

/// `CUmemcpyAttributes`, for copies between host and device, whose location hints are ignored.
#[repr(C)]
pub(super) struct CopyAttributes {
    pub source_access_order: c_uint,
    pub source: [c_int; 2],
    pub destination: [c_int; 2],
    pub flags: c_uint,
}

/// `cuFuncGetParamInfo` of CUDA 12.4: function, index of the parameter, its offset, its size.
pub(super) type ParameterInfo = unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;

/// `cuEventElapsedTime`: milliseconds, start, end. Newer headers give the name another meaning; the symbol has kept this one.
pub(super) type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

impl Driver {
    /// Looks for the driver, once per process.
    ///
    /// # Errors
    /// There is none, or it is too old.
    pub fn get() -> Result<&'static Driver, Error> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        let driver = DRIVER.get_or_init(Driver::load);
        driver.as_ref().map_err(|reason| Error::CudaUnavailable { reason: reason.clone() })
    }

    fn load() -> Result<Driver, String> {
        // SAFETY: the driver's initialisers have no requirements of ours to meet.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = library.ok_or_else(|| format!("no NVIDIA driver is installed ({} was not found)", NAMES[0]))?;
        let missing = |name: &&str| {
            // SAFETY: the address is only asked for, never called.
            unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err()
        };
        if let Some(name) = NEEDED.iter().find(|name| missing(name)) {
            return Err(format!("the NVIDIA driver is too old: it lacks {name}; CUDA 12.0 or newer is needed"));
        }
        // SAFETY: the symbol has kept this type since it came.
        let copy_batch = unsafe { library.get::<CopyBatch>(b"cuMemcpyBatchAsync") }.ok().map(|symbol| *symbol);
        // SAFETY: as above.
        let parameter = unsafe { library.get::<ParameterInfo>(b"cuFuncGetParamInfo") }.ok().map(|symbol| *symbol);
        // SAFETY: as above.
        let elapsed = unsafe { library.get::<Elapsed>(b"cuEventElapsedTime") }.ok().map(|symbol| *symbol);
        Ok(Driver { _library: library, copy_batch, parameter, elapsed })
    }
}

/// Gives a result of the driver the name of the call.
pub(super) trait Called<T> {
    fn called(self, call: &'static str) -> Result<T, Error>;
}

impl<T> Called<T> for Result<T, DriverError> {
    fn called(self, call: &'static str) -> Result<T, Error> {
        self.map_err(|error| Error::Cuda { call, cause: describe(error) })
    }
}

/// The driver's own words.
pub(super) fn describe(error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{name} ({text})"),
        (Ok(name), Err(_)) => name,
        _ => format!("{error:?}"),
    }
}

/// Whether device or host memory has run out, which leaves the context whole.
pub(super) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
}
