//! What can go wrong, each with the quantity, the limit and the knob that changes it.

use std::io;

use crate::table::TableError;

/// Why a call was refused or failed.
///
/// A refused call has changed nothing. A step that failed leaves every sequence as it was before the step; see
/// [`is_refusal`](Error::is_refusal) for which is which.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number of the [`Geometry`](crate::Geometry) is out of range.
    #[error("geometry: {quantity} is {value}, but {rule}")]
    Geometry {
        /// The builder's method.
        quantity: &'static str,
        /// What it was given.
        value: usize,
        /// What it has to be.
        rule: &'static str,
    },

    /// A setting of the cache or of its device is out of range.
    #[error("setting {knob} is {value}, but {rule}")]
    Setting {
        /// The builder's method.
        knob: &'static str,
        /// What it was given.
        value: String,
        /// What it has to be.
        rule: String,
    },

    /// The budget cannot hold what the selection pins.
    #[error(
        "pages_per_head is {budget}, but {pinned} pages per head must be able to stay (sinks, recent pages, the last page and \
         the one before it): raise pages_per_head or pin fewer"
    )]
    BudgetBelowPins {
        /// Ways per head.
        budget: usize,
        /// Pages that must stay resident.
        pinned: usize,
    },

    /// The reservoir cannot take the pages that the step would seal.
    #[error(
        "reservoir full: the step seals {needed} pages in each of {heads} heads, {free} of {total} are free \
         ({bytes} bytes in all): remove sequences or enlarge Cache::builder().reservoir(..)"
    )]
    ReservoirFull {
        /// Logical pages that the step needs.
        needed: usize,
        /// Logical pages that are free.
        free: usize,
        /// Logical pages that the reservoir holds.
        total: usize,
        /// Heads of a sequence.
        heads: usize,
        /// Size of the reservoir.
        bytes: u64,
    },

    /// The device pool has too few free slots for the ways that the step's sequences are due.
    #[error(
        "device pool full: the step needs {needed} more ways, {free} of {total} slots are free: remove sequences, lower \
         pages_per_head or enlarge Cache::builder().device_pool(..)"
    )]
    DevicePoolFull {
        /// Ways that the step needs.
        needed: usize,
        /// Slots that are free.
        free: usize,
        /// Slots in all.
        total: usize,
    },

    /// The handle names no live sequence of this cache: it was removed, or belongs to another cache.
    #[error("unknown sequence: the handle (index {index}, generation {generation}) was removed or is another cache's")]
    UnknownSequence {
        /// The handle's place.
        index: u32,
        /// The handle's generation.
        generation: u32,
    },

    /// A batch is empty, names a sequence twice or gives one no tokens.
    #[error("batch entry {entry}: {reason}")]
    Batch {
        /// Index in the batch.
        entry: usize,
        /// What is wrong.
        reason: &'static str,
    },

    /// A sequence would grow past the longest length that positions can count.
    #[error("sequence too long: {tokens} tokens, the limit is {limit}")]
    TooLong {
        /// Tokens that the sequence would have.
        tokens: usize,
        /// Tokens that it may have.
        limit: usize,
    },

    /// The calls of a step came in the wrong order.
    #[error("step out of order: {call} for layer {layer}, but {expected}")]
    Order {
        /// The call.
        call: &'static str,
        /// The layer it named.
        layer: usize,
        /// What should have come.
        expected: String,
    },

    /// A tensor has the wrong number of elements.
    #[error("{tensor} has {got} elements, but {shape} is {expected}")]
    Shape {
        /// Which argument.
        tensor: &'static str,
        /// Its shape in words.
        shape: &'static str,
        /// Elements it should have.
        expected: usize,
        /// Elements it has.
        got: usize,
    },

    /// Page lists do not fit the step.
    #[error("page lists: {reason}")]
    PageLists {
        /// What is wrong, with the batch entry, head and page.
        reason: String,
    },

    /// An earlier call of this step failed. Drop the step; its sequences are as before it.
    #[error("the step has failed before: drop it and begin another")]
    StepFailed,

    /// Memory for an arena could not be had.
    #[error("{knob}: {bytes} bytes could not be allocated")]
    OutOfMemory {
        /// The builder's method that sets the size.
        knob: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },

    /// The reservoir's file could not be made.
    #[error("reservoir file {path}: {bytes} bytes could not be set aside: {cause}")]
    ReservoirFile {
        /// The path asked for.
        path: String,
        /// Bytes asked for.
        bytes: u64,
        /// Why.
        cause: io::Error,
    },

    /// A page could not be copied. The page itself is not lost: a fetch can be tried again, a mirror leaves the page on the device.
    #[error("{direction} of {bytes} bytes at reservoir offset {offset} failed: {cause}")]
    Copy {
        /// `fetch` or `mirror`.
        direction: &'static str,
        /// Offset in the reservoir.
        offset: u64,
        /// Bytes of the page.
        bytes: usize,
        /// Why.
        cause: io::Error,
    },

    /// The copy worker is gone, so nothing can be fetched or mirrored any more. Sequences keep what they hold.
    #[error("the copy worker has died (a reservoir store panicked): build a new cache")]
    CopyWorkerDead,

    /// A thread of the pool panicked in a kernel.
    #[error("a worker thread panicked: please report it")]
    ThreadPanicked,

    /// A thread could not be started.
    #[error("thread {name} could not be started: {cause}")]
    Thread {
        /// The thread's name.
        name: &'static str,
        /// Why.
        cause: io::Error,
    },

    /// The processor lacks the instructions that were asked for.
    #[error("instruction set {isa} was asked for, but this processor does not have it: name another in Cpu::isa")]
    Isa {
        /// The instruction set.
        isa: crate::Isa,
    },

    /// There is no CUDA device to be used: no driver, one that is too old, or no such device.
    #[cfg(feature = "cuda")]
    #[error("CUDA cannot be used: {reason}")]
    CudaUnavailable {
        /// What is missing.
        reason: String,
    },

    /// No machine code of the kernels can be had for the device.
    #[cfg(feature = "cuda")]
    #[error("CUDA kernels: {reason}")]
    CudaKernels {
        /// Why.
        reason: String,
    },

    /// A call of the CUDA driver failed.
    #[cfg(feature = "cuda")]
    #[error("{call} failed: {cause}")]
    Cuda {
        /// The driver's function.
        call: &'static str,
        /// The driver's own words.
        cause: String,
    },

    /// Host memory could not be pinned. Nothing falls back to memory that is not pinned.
    #[cfg(feature = "cuda")]
    #[error(
        "{bytes} bytes of host memory could not be pinned ({pinned} bytes were): {cause}: make Cache::builder().reservoir(..) smaller,          or raise the system's limit on locked memory"
    )]
    Pinning {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that could be had.
        pinned: u64,
        /// The driver's own words.
        cause: String,
    },

    /// A tensor in device memory is not aligned.
    #[cfg(feature = "cuda")]
    #[error("{tensor} lies at address {address:#x}, but must be aligned to {bytes} bytes")]
    Alignment {
        /// Which argument.
        tensor: &'static str,
        /// Where it lies.
        address: u64,
        /// The alignment.
        bytes: u64,
    },

    /// A step cannot be captured, or a captured one does not fit.
    #[cfg(feature = "cuda")]
    #[error("captured step: {reason}")]
    Capture {
        /// Why.
        reason: String,
    },

    /// A kernel of an earlier step has met a state that must not be. The outputs of that step are NaN from that layer on, and the
    /// cache cannot be used any more.
    #[cfg(feature = "cuda")]
    #[error(
        "a kernel has raised a fault: {reason} (sequence {sequence}, layer {layer}, KV head {kv_head}, page {page:?}): please report it, and build a new cache"
    )]
    DeviceFault {
        /// What it met.
        reason: &'static str,
        /// The place of the sequence.
        sequence: u32,
        /// The layer.
        layer: usize,
        /// The KV head.
        kv_head: usize,
        /// The logical page, if it was about one.
        page: Option<u32>,
    },

    /// The device failed earlier in a way that what it holds cannot be trusted.
    #[cfg(feature = "cuda")]
    #[error("the device cannot be used any more ({cause}): build a new cache")]
    DeviceLost {
        /// What happened.
        cause: String,
    },

    /// A page table refused a call that the cache had admitted.
    #[error(transparent)]
    Table(#[from] TableError),
}

impl Error {
    /// Whether the call was refused before it changed anything, so that the step, if there was one, can go on. A
    /// [`finish`](crate::Step::finish) that is refused has ended its step all the same, for it takes the step by value.
    pub fn is_refusal(&self) -> bool {
        #[cfg(feature = "cuda")]
        if matches!(
            self,
            Error::Cuda { .. } | Error::Alignment { .. } | Error::DeviceFault { .. } | Error::DeviceLost { .. }
        ) {
            return false;
        }
        !matches!(
            self,
            Error::Copy { .. } | Error::CopyWorkerDead | Error::ThreadPanicked | Error::Table(_) | Error::StepFailed
        )
    }
}
