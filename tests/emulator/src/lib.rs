//! Runs wakekv's CUDA kernels and driver calls on a machine without a GPU.
//!
//! The build script compiles `kernels/*.cu` with the machine's C++ compiler, against a shim of CUDA's built-ins, into a `libcuda.so`
//! that has real asynchronous streams. [`emulator`] loads it, and from then on cudarc finds this driver by name.
//!
//! ```
//! let Some(emulator) = wakekv_emulator::emulator() else { return };
//! let session = emulator.session();               // one test at a time
//! session.order(wakekv_emulator::Order::Reverse);
//! // cudarc calls go here; modules are loaded from `session.image()`
//! ```
//!
//! What it shows: wrong results, missing barriers and waits, wrong masks, deadlocks within a block, use of freed memory, launches that
//! have drifted from their kernel. What it cannot show: weak memory order, approximate arithmetic, anything about speed.

mod seeded;

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
pub use seeded::{BUGS, Bug};

/// The loaded driver.
#[derive(Debug)]
pub struct Emulator {
    library: Library,
    sessions: Mutex<()>,
}

/// Loads the driver, once per process. `None`, with a line on standard error, where it could not be built.
///
/// # Panics
/// If it is missing and `WAKEKV_REQUIRE_ALL=1` asks for every test to run, or if it cannot be loaded.
pub fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
    let emulator = EMULATOR.get_or_init(|| {
        let folder = match folder() {
            Ok(folder) => folder,
            Err(missing) => {
                assert!(std::env::var_os("WAKEKV_REQUIRE_ALL").is_none_or(|value| value != "1"), "{missing}");
                return None;
            }
        };
        // SAFETY: the library's initialisers only register kernels in its own tables. It is loaded globally, under the name that cudarc
        // will ask for, and never unloaded.
        let library = unsafe { Library::open(Some(folder.join("libcuda.so")), RTLD_NOW | RTLD_GLOBAL) };
        Some(Emulator { library: library.expect("the driver that was just built loads"), sessions: Mutex::new(()) })
    });
    if emulator.is_none() {
        eprintln!("skipped: {}", env!("WAKEKV_EMULATOR_MISSING"));
    }
    emulator.as_ref()
}

/// Where the driver and the seeded bugs are.
///
/// # Errors
/// Why it could not be built.
pub fn folder() -> Result<&'static Path, &'static str> {
    let missing = env!("WAKEKV_EMULATOR_MISSING");
    if missing.is_empty() { Ok(Path::new(env!("WAKEKV_EMULATOR_DIR"))) } else { Err(missing) }
}

impl Emulator {
    /// The driver as if freshly loaded, for one test alone: the others wait until the session ends.
    pub fn session(&'static self) -> Session {
        let guard = self.sessions.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let session = Session { emulator: self, _guard: guard };
        session.reset();
        session
    }

    /// A hook of the driver.
    ///
    /// # Safety
    /// `F` is the hook's type.
    unsafe fn hook<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller's promise.
        unsafe { *self.library.get::<F>(name.as_bytes()).expect("the driver has all its hooks") }
    }
}

/// In which order the warps of a block run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The first as far as it gets, then the second.
    Forward,
    /// The last as far as it gets, then the one before.
    Reverse,
    /// Any of them for a while, by this seed.
    Random(u64),
}

impl Order {
    /// Forward, reverse, and two at random.
    pub const ALL: [Order; 4] = [Order::Forward, Order::Reverse, Order::Random(1), Order::Random(2)];
}

/// A failure that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Device memory cannot be had.
    DeviceMemory,
    /// Host memory cannot be pinned.
    PinnedMemory,
    /// A copy is refused.
    Copy,
    /// A kernel fails while it runs, and with it the context.
    Launch,
    /// The device goes away: from then on every call fails.
    DeviceLost,
}

/// The driver, lent to one test. When it ends, whatever the test has set is as before.
#[derive(Debug)]
pub struct Session {
    emulator: &'static Emulator,
    _guard: MutexGuard<'static, ()>,
}

impl Session {
    fn reset(&self) {
        self.release_all();
        self.order(Order::Forward);
        self.delay(Duration::ZERO);
        self.heal();
        self.shared_memory(0);
    }

    /// Forgets planted failures. A context that was broken is whole again, and its memory is gone, as if the process had made a new one.
    pub fn heal(&self) {
        // SAFETY: the hook takes nothing.
        unsafe { self.emulator.hook::<unsafe extern "C" fn()>("fakecuda_heal")() }
    }

    /// A module image that stands for the library's kernels.
    pub fn image(&self) -> String {
        "// host kernels\n".into()
    }

    /// A module image with a planted bug, one of [`BUGS`].
    ///
    /// # Panics
    /// If there is no such bug.
    pub fn seeded_image(&self, bug: &str) -> String {
        format!("// host kernels in {}\n", Self::seeded_library(bug).display())
    }

    fn seeded_library(bug: &str) -> PathBuf {
        assert!(BUGS.iter().any(|known| known.name == bug), "there is no seeded bug {bug}");
        Path::new(env!("WAKEKV_EMULATOR_DIR")).join(format!("{bug}.so"))
    }

    /// The sizes of a kernel's parameters, in the library's kernels or in those with a planted bug. Empty if there is no such kernel.
    pub fn parameter_sizes(&self, bug: Option<&str>, kernel: &str) -> Vec<usize> {
        let library = bug.map_or(PathBuf::new(), Self::seeded_library);
        let library = CString::new(library.to_string_lossy().as_bytes()).expect("paths hold no zero byte");
        let kernel = CString::new(kernel).expect("names hold no zero byte");
        let mut sizes = [0; 64];
        type Hook = unsafe extern "C" fn(*const c_char, *const c_char, *mut c_uint, c_uint) -> c_uint;
        // SAFETY: both strings end with a zero byte, and the array is as long as it says.
        let count = unsafe {
            let hook = self.emulator.hook::<Hook>("fakecuda_parameters");
            hook(library.as_ptr(), kernel.as_ptr(), sizes.as_mut_ptr(), sizes.len() as c_uint)
        };
        sizes[..count as usize].iter().map(|&size| size as usize).collect()
    }

    /// The order of warps in kernels that are still to run.
    pub fn order(&self, order: Order) {
        let (order, seed) = match order {
            Order::Forward => (0, 0),
            Order::Reverse => (1, 0),
            Order::Random(seed) => (2, seed),
        };
        // SAFETY: the hook's type.
        unsafe { self.emulator.hook::<unsafe extern "C" fn(c_int, u64)>("fakecuda_order")(order, seed) }
    }

    /// Before each operation every stream pauses for a random time up to `longest`.
    pub fn delay(&self, longest: Duration) {
        let longest = c_uint::try_from(longest.as_micros()).unwrap_or(c_uint::MAX);
        // SAFETY: the hook's type.
        unsafe { self.emulator.hook::<unsafe extern "C" fn(c_uint)>("fakecuda_delay")(longest) }
    }

    /// Stops a stream, given as its driver handle, until the result is dropped. What it runs at the moment is waited for.
    pub fn hold<T>(&self, stream: *mut T) -> Held<'_> {
        let stream = stream.cast::<c_void>();
        // SAFETY: the driver looks the handle up and ignores what is no stream.
        unsafe { self.emulator.hook::<unsafe extern "C" fn(*mut c_void)>("fakecuda_hold")(stream) };
        Held { session: self, stream }
    }

    /// Stops every stream but this one, until the result is dropped.
    pub fn hold_others<T>(&self, stream: *mut T) -> HeldOthers<'_> {
        // SAFETY: the driver compares the handle and does no more with it.
        unsafe { self.emulator.hook::<unsafe extern "C" fn(*mut c_void)>("fakecuda_hold_others")(stream.cast()) };
        HeldOthers { session: self }
    }

    fn release_all(&self) {
        // SAFETY: the hook takes nothing.
        unsafe { self.emulator.hook::<unsafe extern "C" fn()>("fakecuda_release_all")() }
    }

    /// Lets the `nth` operation of this kind from now on fail, counted from 1.
    pub fn plant(&self, fault: Fault, nth: usize) {
        // SAFETY: the hook's type.
        unsafe {
            let hook = self.emulator.hook::<unsafe extern "C" fn(c_int, c_long)>("fakecuda_plant");
            hook(fault as c_int, nth as c_long)
        }
    }

    /// Calls of a function of the driver so far, by its exported name.
    ///
    /// # Panics
    /// If the name holds a zero byte.
    pub fn calls(&self, name: &str) -> usize {
        let name = CString::new(name).expect("names hold no zero byte");
        // SAFETY: the hook's type, and a string that ends with a zero byte.
        unsafe { self.emulator.hook::<unsafe extern "C" fn(*const c_char) -> usize>("fakecuda_calls")(name.as_ptr()) }
    }

    /// What broke the context, in words. Empty if it is whole.
    pub fn last_fault(&self) -> String {
        let mut text = [0u8; 512];
        // SAFETY: the array is as long as it says.
        let length = unsafe {
            let hook = self.emulator.hook::<unsafe extern "C" fn(*mut c_char, usize) -> usize>("fakecuda_last_fault");
            hook(text.as_mut_ptr().cast(), text.len())
        };
        String::from_utf8_lossy(&text[..length.min(text.len() - 1)]).into_owned()
    }

    /// Sets how much shared memory a block can ask for. A new session has that of an A100, as for 0.
    pub fn shared_memory(&self, bytes: usize) {
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the hook's type.
        unsafe { self.emulator.hook::<unsafe extern "C" fn(c_int)>("fakecuda_shared_memory")(bytes) }
    }

    /// Bytes of device and pinned memory that are allocated.
    pub fn live_bytes(&self) -> usize {
        // SAFETY: the hook takes nothing.
        unsafe { self.emulator.hook::<unsafe extern "C" fn() -> usize>("fakecuda_live_bytes")() }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.reset();
    }
}

/// Streams that are stopped.
#[derive(Debug)]
pub struct HeldOthers<'s> {
    session: &'s Session,
}

impl Drop for HeldOthers<'_> {
    fn drop(&mut self) {
        self.session.release_all();
    }
}

/// A stream that is stopped.
#[derive(Debug)]
pub struct Held<'s> {
    session: &'s Session,
    stream: *mut c_void,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: the driver looks the handle up and ignores what is no stream.
        unsafe { self.session.emulator.hook::<unsafe extern "C" fn(*mut c_void)>("fakecuda_release")(self.stream) }
    }
}
