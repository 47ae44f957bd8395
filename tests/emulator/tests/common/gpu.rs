//! The emulated device through cudarc's driver API: just enough to launch a kernel by name.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use wakekv_emulator::{Session, emulator};

/// A context with two streams and the library's kernels, or those with a planted bug.
pub struct Gpu {
    pub compute: Arc<CudaStream>,
    pub copy: Arc<CudaStream>,
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    bug: Option<&'static str>,
    functions: RefCell<HashMap<String, (sys::CUfunction, Vec<usize>)>>,
    /// Last, because the other tests go on when it is dropped.
    pub session: Session,
}

/// Why a launch was refused.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The parameters are not those of the kernel: what was given, what it takes.
    Signature(Vec<usize>, Vec<usize>),
    Driver(DriverError),
}

impl Gpu {
    /// `None` where there is no emulator; the test then has nothing to do.
    pub fn new() -> Option<Gpu> {
        Self::open(None)
    }

    pub fn seeded(bug: &'static str) -> Option<Gpu> {
        Self::open(Some(bug))
    }

    fn open(bug: Option<&'static str>) -> Option<Gpu> {
        let session = emulator()?.session();
        let context = CudaContext::new(0).unwrap();
        let image = bug.map_or_else(|| session.image(), |bug| session.seeded_image(bug));
        let image = CString::new(image).unwrap();
        // SAFETY: the image is text that ends with a zero byte.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.unwrap();
        let (compute, copy) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        Some(Gpu { compute, copy, context, module, bug, functions: RefCell::default(), session })
    }

    /// Launches a kernel on a stream. The parameters' sizes are compared with the kernel's.
    pub fn launch_on(
        &self,
        stream: &CudaStream,
        name: &str,
        grid: (usize, usize, usize),
        threads: usize,
        shared_bytes: usize,
        parameters: &[&dyn Parameter],
    ) -> Result<(), Refused> {
        let mut functions = self.functions.borrow_mut();
        let (function, sizes) = functions.entry(name.into()).or_insert_with(|| {
            // SAFETY: the module is loaded for as long as the context lives.
            let function = unsafe { result::module::get_function(self.module, CString::new(name).unwrap()) };
            let sizes = self.session.parameter_sizes(self.bug, name);
            (function.unwrap_or_else(|error| panic!("{name}: {error}")), sizes)
        });
        let given: Vec<usize> = parameters.iter().map(|parameter| parameter.size()).collect();
        if given != *sizes {
            return Err(Refused::Signature(given, sizes.clone()));
        }
        let mut addresses: Vec<*mut c_void> = parameters.iter().map(|parameter| parameter.address()).collect();
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        // SAFETY: as many parameters of the sizes that the kernel takes; they are copied by the call. That the pointers among them are
        // good is what the tests are about.
        let launched = unsafe {
            let (threads, shared) = ((threads as u32, 1, 1), shared_bytes as u32);
            result::launch_kernel(*function, grid, threads, shared, stream.cu_stream(), &mut addresses)
        };
        launched.map_err(Refused::Driver)
    }

    /// Launches on the compute stream.
    pub fn launch(
        &self,
        name: &str,
        grid: (usize, usize, usize),
        threads: usize,
        shared_bytes: usize,
        parameters: &[&dyn Parameter],
    ) {
        self.launch_on(&self.compute, name, grid, threads, shared_bytes, parameters)
            .unwrap_or_else(|refused| panic!("{name}: {refused:?}"));
    }

    /// Waits for both streams.
    pub fn synchronize(&self) -> Result<(), String> {
        let done = self.compute.synchronize().and_then(|()| self.copy.synchronize());
        done.map_err(|error| format!("{error}: {}", self.session.last_fault()))
    }

    /// Device memory that is all ones.
    pub fn alloc<T: Pod>(&self, len: usize) -> Buffer<T> {
        self.context.bind_to_thread().unwrap();
        // SAFETY: at least one byte.
        let address = unsafe { result::malloc_sync((len * size_of::<T>()).max(1)) }.unwrap();
        Buffer { address, len, element: PhantomData }
    }

    pub fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let buffer = self.alloc(values.len());
        buffer.write(0, values);
        buffer
    }

    pub fn zeros<T: Pod>(&self, len: usize) -> Buffer<T> {
        let buffer = self.alloc(len);
        buffer.fill(0);
        buffer
    }

    /// Mapped pinned memory that is all ones.
    pub fn pin<T: Pod>(&self, len: usize) -> Pinned<T> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: at least one byte.
        let address = unsafe { result::malloc_host((len * size_of::<T>()).max(1), flags) }.unwrap();
        Pinned { address: address.cast(), len }
    }
}

/// A kernel parameter.
pub trait Parameter {
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

/// Device memory. The copies here do not wait for the streams: that is up to the test.
pub struct Buffer<T> {
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// The device address of an element.
    pub fn at(&self, index: usize) -> u64 {
        assert!(index <= self.len);
        self.address + (index * size_of::<T>()) as u64
    }

    pub fn ptr(&self) -> u64 {
        self.address
    }

    pub fn write(&self, from: usize, values: &[T]) {
        assert!(from + values.len() <= self.len);
        if !values.is_empty() {
            // SAFETY: the range lies inside the buffer.
            unsafe { result::memcpy_htod_sync(self.at(from), values) }.unwrap();
        }
    }

    pub fn read(&self) -> Vec<T> {
        self.read_range(0, self.len)
    }

    pub fn read_range(&self, from: usize, len: usize) -> Vec<T> {
        assert!(from + len <= self.len);
        let mut values = vec![T::zeroed(); len];
        if len > 0 {
            // SAFETY: the range lies inside the buffer, and every bit pattern is a value.
            unsafe { result::memcpy_dtoh_sync(&mut values, self.at(from)) }.unwrap();
        }
        values
    }

    pub fn fill(&self, byte: u8) {
        if self.len > 0 {
            // SAFETY: all of the buffer.
            unsafe { result::memset_d8_sync(self.address, byte, self.len * size_of::<T>()) }.unwrap();
        }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `alloc`, freed once. It fails if a planted fault has broken the context.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Mapped pinned memory, which kernels and host both reach.
pub struct Pinned<T> {
    address: *mut T,
    len: usize,
}

impl<T: Pod> Pinned<T> {
    pub fn ptr(&self) -> u64 {
        self.address as u64
    }

    /// Nothing on the device may write meanwhile.
    pub fn read(&self) -> Vec<T> {
        // SAFETY: as long as it says, and every bit pattern is a value.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }.to_vec()
    }

    /// Nothing on the device may read meanwhile.
    pub fn write(&mut self, from: usize, values: &[T]) {
        assert!(from + values.len() <= self.len);
        // SAFETY: the range lies inside the memory.
        unsafe { self.address.add(from).copy_from_nonoverlapping(values.as_ptr(), values.len()) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `pin`, freed once.
        let _ = unsafe { result::free_host(self.address.cast()) };
    }
}
