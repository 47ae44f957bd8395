//! Where every sealed page also lives.

use std::io;
use std::path::PathBuf;

/// The host memory, file or other store that keeps every sealed page of every sequence.
///
/// The size is a hard limit: it bounds the tokens of all live sequences together, in whole pages of all heads
/// ([`Geometry::group_bytes`](crate::Geometry::group_bytes)). All of it is set aside when the cache is built.
#[derive(Debug)]
#[non_exhaustive]
pub enum Reservoir {
    /// Host memory.
    Memory {
        /// Size.
        bytes: u64,
    },
    /// A file. It must not exist yet; it is created with mode 0600 and is gone with the cache, however that ends.
    File {
        /// Where.
        path: PathBuf,
        /// Size.
        bytes: u64,
    },
    /// A store of the caller's.
    Custom(Box<dyn Store>),
}

impl Reservoir {
    /// Host memory of `bytes` bytes.
    pub const fn memory(bytes: u64) -> Self {
        Reservoir::Memory { bytes }
    }

    /// A new file of `bytes` bytes at `path`, so that a context larger than memory runs in a bounded hot set.
    pub fn file(path: impl Into<PathBuf>, bytes: u64) -> Self {
        Reservoir::File { path: path.into(), bytes }
    }

    /// A store of the caller's.
    pub fn custom(store: impl Store + 'static) -> Self {
        Reservoir::Custom(Box::new(store))
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Reservoir::Memory { bytes } | Reservoir::File { bytes, .. } => *bytes,
            Reservoir::Custom(store) => store.bytes(),
        }
    }
}

/// Random-access bytes that the copy worker reads and writes whole pages of.
///
/// # What the cache guarantees
/// * One call at a time, from one thread; offsets are multiples of the page size and stay below [`bytes`](Self::bytes).
/// * A page is read only after a write of it has succeeded.
///
/// # What the store guarantees
/// * `bytes` never changes.
/// * `read` fills the whole slice with what `write` last stored there, or fails. After a failure the stored bytes are still
///   there, and the same read may be tried again.
/// * A failed `write` leaves other pages as they are.
///
/// A store that panics takes the copy worker with it: from then on every step fails with
/// [`Error::CopyWorkerDead`](crate::Error::CopyWorkerDead).
pub trait Store: Send + std::fmt::Debug {
    /// Size of the store.
    fn bytes(&self) -> u64;

    /// Fills `into` from `offset`.
    ///
    /// # Errors
    /// Whatever kept the store from it; the step that needed the page fails with it.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Stores `from` at `offset`.
    ///
    /// # Errors
    /// Whatever kept the store from it; the step that sealed the page fails with it.
    fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()>;
}
