//! NVIDIA's run-time compiler, loaded by name. The few calls it takes are bound here, because a binding that links it, or panics where
//! it is missing, will not do.

use std::ffi::{CString, c_char, c_int, c_void};

use libloading::{Library, Symbol};

use crate::error::Error;

#[cfg(windows)]
const NAMES: [&str; 2] = ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
#[cfg(not(windows))]
const NAMES: [&str; 3] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];

type Program = *mut c_void;
type Status = c_int;
type CreateProgram = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;
type CompileProgram = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
type DestroyProgram = unsafe extern "C" fn(*mut Program) -> Status;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Status;
type Bytes = unsafe extern "C" fn(Program, *mut c_char) -> Status;

pub(super) struct Nvrtc {
    library: Library,
    version: String,
}

impl Nvrtc {
    pub fn load() -> Result<Self, Error> {
        // SAFETY: NVRTC's initialisers have no requirements of ours to meet.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok()).ok_or_else(|| {
            let reason = format!(
                "the crate was built without nvcc, so its kernels have to be compiled by NVRTC, and {} is not installed: install \
                 CUDA's NVRTC, build with nvcc on the PATH, or give Cuda::kernel_image an image",
                NAMES[0]
            );
            Error::CudaKernels { reason }
        })?;
        let mut nvrtc = Nvrtc { library, version: String::new() };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the symbol's type, and two places to write to.
        nvrtc.check(unsafe {
            let version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status> =
                nvrtc.symbol("nvrtcVersion")?;
            version(&mut major, &mut minor)
        })?;
        nvrtc.version = format!("{major}.{minor}");
        Ok(nvrtc)
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    /// Architectures that it compiles for, as 10 × major + minor.
    pub fn architectures(&self) -> Result<Vec<u32>, Error> {
        let mut count = 0;
        // SAFETY: the symbol's type, and a place to write to.
        self.check(unsafe {
            self.symbol::<unsafe extern "C" fn(*mut c_int) -> Status>("nvrtcGetNumSupportedArchs")?(&mut count)
        })?;
        let mut archs: Vec<c_int> = vec![0; count.max(0) as usize];
        // SAFETY: the symbol's type, and as many places as it has just asked for.
        self.check(unsafe {
            self.symbol::<unsafe extern "C" fn(*mut c_int) -> Status>("nvrtcGetSupportedArchs")?(archs.as_mut_ptr())
        })?;
        Ok(archs.into_iter().map(|arch| arch as u32).collect())
    }

    /// Compiles one file, to machine code or to PTX.
    pub fn compile(
        &self,
        file: &str,
        source: &str,
        headers: &[(&str, &str)],
        arch: u32,
        machine_code: bool,
    ) -> Result<Vec<u8>, Error> {
        let text = |text: &str| CString::new(text).map_err(|_| failed(format!("{file} holds a zero byte")));
        let (name, source) = (text(file)?, text(source)?);
        let names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let texts = headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
        let [names, texts] = [&names, &texts].map(|list| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>());
        let mut program = std::ptr::null_mut();
        // SAFETY: the symbol's type; all strings end with a zero and outlive the program.
        self.check(unsafe {
            let create = self.symbol::<CreateProgram>("nvrtcCreateProgram")?;
            create(&mut program, source.as_ptr(), name.as_ptr(), names.len() as c_int, texts.as_ptr(), names.as_ptr())
        })?;
        let result = self.compile_program(program, file, arch, machine_code);
        // SAFETY: the symbol's type, and a program that was created above.
        unsafe { self.symbol::<DestroyProgram>("nvrtcDestroyProgram")?(&mut program) };
        result
    }

    fn compile_program(&self, program: Program, file: &str, arch: u32, machine_code: bool) -> Result<Vec<u8>, Error> {
        let target = if machine_code { "sm" } else { "compute" };
        let options = [format!("--gpu-architecture={target}_{arch}"), "--std=c++17".into()];
        let options = options.map(|option| CString::new(option).unwrap_or_default());
        let options = [options[0].as_ptr(), options[1].as_ptr()];
        // SAFETY: the symbol's type; the options outlive the call.
        let status = unsafe { self.symbol::<CompileProgram>("nvrtcCompileProgram")?(program, 2, options.as_ptr()) };
        if status != 0 {
            let log = self.bytes(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
            let log = String::from_utf8_lossy(&log);
            let error = log.lines().find(|line| line.contains("error")).unwrap_or_default();
            return Err(failed(format!("NVRTC {} does not compile {file}: {error}", self.version)));
        }
        match machine_code {
            true => self.bytes(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"),
            false => self.bytes(program, "nvrtcGetPTXSize", "nvrtcGetPTX"),
        }
    }

    fn bytes(&self, program: Program, size: &str, get: &str) -> Result<Vec<u8>, Error> {
        let mut count = 0;
        // SAFETY: the type of all size queries, and a live program.
        self.check(unsafe { self.symbol::<Size>(size)?(program, &mut count) })?;
        let mut bytes = vec![0_u8; count];
        // SAFETY: the type of all getters, and as many bytes as it has just asked for.
        self.check(unsafe { self.symbol::<Bytes>(get)?(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    /// # Safety
    /// `F` is the symbol's type.
    unsafe fn symbol<F>(&self, name: &str) -> Result<Symbol<'_, F>, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name.as_bytes()) }
            .map_err(|_| failed(format!("this NVRTC is too old: it lacks {name}")))
    }

    fn check(&self, status: Status) -> Result<(), Error> {
        if status == 0 { Ok(()) } else { Err(failed(format!("NVRTC {} failed with status {status}", self.version))) }
    }
}

fn failed(reason: String) -> Error {
    Error::CudaKernels { reason }
}
