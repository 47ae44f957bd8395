//! The settings of the CUDA backend, and setting it up.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::copies::{CopyEngine, Events, FetchPath};
use super::driver::{Called, Driver};
use super::frames::Frames;
use super::kernels::{FREE_SHARED, HEAD_DIMS, Kernels};
use super::memory::DeviceMemory;
use super::reservoir::HostPages;
use super::scratch::Scratch;
use super::shape::{StepShape, check_score, digest_stride, score_shared};
use super::tables::Tables;
use super::{Copies, CudaBackend, Staging, compile, images};
use crate::backend::{Device, Setup, StepCounts};
use crate::error::Error;
use crate::geometry::{DType, Geometry};
use crate::reservoir::Reservoir;
use crate::residency::Rule;
use crate::stats::PhaseCounts;

/// Settings of the CUDA backend.
///
/// Keys and values are stored as f16 or bf16; head dims are 64, 80, 96, 128 and 256, pages have 8 to 64 tokens. The reservoir is
/// [`Reservoir::memory`], which is pinned. Tensors are [`CudaTensor`](crate::CudaTensor)s.
#[derive(Clone, Debug)]
#[must_use]
pub struct Cuda {
    place: Place,
    image: Option<Vec<u8>>,
    kernel_cache: Option<PathBuf>,
    fetch_path: FetchPath,
    copy_priority: Option<i32>,
    copy_blocks: usize,
    staging_pages: Option<usize>,
    pin_in_background: bool,
    numa_node: Option<usize>,
}

#[derive(Clone, Debug)]
enum Place {
    Ordinal(usize),
    Stream(Arc<CudaStream>),
}

/// Numbers the backends of the process.
static BACKENDS: AtomicU64 = AtomicU64::new(0);
/// Blocks of the copy kernels: few beside a device's multiprocessors. How many keep a bus busy is for a device to say;
/// `tests/gpu` measures it.
const COPY_BLOCKS: usize = 24;
/// The handle that stands for another stream on every thread.
const PER_THREAD_STREAM: usize = 2;
/// Device memory that the staging slots take unless the user says otherwise.
const STAGING_BYTES: usize = 64 << 20;
const LEAST_STAGING_PAGES: usize = 256;

impl Cuda {
    /// The device with this number, on a stream of the cache's own: [`Cache::stream`](crate::Cache::stream), on which tensors are
    /// to be allocated.
    pub fn new(ordinal: usize) -> Self {
        Self::at(Place::Ordinal(ordinal))
    }

    /// The engine's device, with its stream (any but the per-thread default) as the compute stream: what the engine puts there
    /// before a call is done before, what it puts there after a call is done after.
    pub fn from_stream(stream: Arc<CudaStream>) -> Self {
        Self::at(Place::Stream(stream))
    }

    fn at(place: Place) -> Self {
        Cuda {
            place,
            image: None,
            kernel_cache: compile::default_folder(),
            fetch_path: FetchPath::Auto,
            copy_priority: None,
            copy_blocks: COPY_BLOCKS,
            staging_pages: None,
            pin_in_background: false,
            numa_node: None,
        }
    }

    /// A module image with all kernels (cubin, fat binary or PTX) instead of those that the crate was built with or compiles at first
    /// use.
    pub fn kernel_image(mut self, image: impl Into<Vec<u8>>) -> Self {
        let mut image = image.into();
        image.push(0); // PTX is text, and the driver takes a C string
        self.image = Some(image);
        self
    }

    /// Where kernels that had to be compiled at first use are kept; `None` keeps none. Default: `wakekv/kernels` in the user's folder
    /// for caches.
    pub fn kernel_cache(mut self, folder: Option<PathBuf>) -> Self {
        self.kernel_cache = folder;
        self
    }

    /// How pages move between host and device. Default [`FetchPath::Auto`].
    pub fn fetch_path(mut self, path: FetchPath) -> Self {
        self.fetch_path = path;
        self
    }

    /// Priority of the copy stream: lower numbers go first, within what the device has. Default: that of a stream with no priority set.
    pub fn copy_priority(mut self, priority: i32) -> Self {
        self.copy_priority = Some(priority);
        self
    }

    /// Blocks of the kernels that copy pages, at least 1. More of them take multiprocessors from attention. Default 24.
    pub fn copy_blocks(mut self, blocks: usize) -> Self {
        self.copy_blocks = blocks;
        self
    }

    /// Pages that pass the ways by, on their way to or from the reservoir, have this many slots in addition to the device pool. They are
    /// shared among the sequences and KV heads of a step. Default: as many as the device pool has, at least 256, up to 64 MiB.
    pub fn staging_pages(mut self, pages: usize) -> Self {
        self.staging_pages = Some(pages);
        self
    }

    /// Pins the reservoir while the cache is already in use, for pinning much memory takes long. A step whose pages lie beyond
    /// what is pinned waits. Default: [`CacheBuilder::build`](crate::CacheBuilder::build) waits.
    pub fn pin_in_background(mut self, yes: bool) -> Self {
        self.pin_in_background = yes;
        self
    }

    /// The NUMA node whose memory the reservoir is pinned in: that of the device, best of all. Linux only. Default: the system's choice.
    pub fn numa_node(mut self, node: usize) -> Self {
        self.numa_node = Some(node);
        self
    }

    /// The context for the cache's own streams and memory, and the compute stream.
    fn context(&self) -> Result<(Arc<CudaContext>, Arc<CudaStream>), Error> {
        Driver::get()?;
        match &self.place {
            Place::Stream(stream) if stream.cu_stream() as usize == PER_THREAD_STREAM => {
                refuse("from_stream", "the per-thread default stream", "must be one stream for all threads: make one")
            }
            Place::Ordinal(ordinal) => {
                result::init().called("cuInit")?;
                let count = result::device::get_count().called("cuDeviceGetCount")?;
                if *ordinal >= count.max(0) as usize {
                    let reason = format!("there is no device {ordinal}: the driver knows {count}");
                    return Err(Error::CudaUnavailable { reason });
                }
                let context = own_context(*ordinal)?;
                let compute = context.new_stream().called("cuStreamCreate")?;
                Ok((context, compute))
            }
            // A context object of our own, on the same primary context: streams made on the engine's would change how its slices
            // synchronise.
            Place::Stream(stream) if stream.context().is_primary() => {
                Ok((own_context(stream.context().ordinal())?, stream.clone()))
            }
            Place::Stream(stream) => Ok((stream.context().clone(), stream.clone())),
        }
    }

    fn kernels(&self, context: &Arc<CudaContext>, geometry: &Geometry) -> Result<Kernels, Error> {
        if let Some(image) = &self.image {
            return Kernels::load(context, &[image], geometry);
        }
        let (major, minor) = context.compute_capability().called("cuDeviceGetAttribute")?;
        let capability = (10 * major + minor).max(0) as u32;
        for images in images::sets_for(capability) {
            match Kernels::load(context, &images, geometry) {
                Ok(kernels) => return Ok(kernels),
                // Built by a compiler that is newer than the driver, as a rule.
                Err(error) => tracing::warn!(%error, "built-in kernels do not load"),
            }
        }
        let images = compile::compile(capability, geometry, self.kernel_cache.as_deref())?;
        Kernels::load(context, &images.iter().map(Vec::as_slice).collect::<Vec<_>>(), geometry)
    }
}

fn own_context(ordinal: usize) -> Result<Arc<CudaContext>, Error> {
    let context = CudaContext::new(ordinal).called("cuDevicePrimaryCtxRetain")?;
    // SAFETY: the backend orders its streams by events of its own, and takes slices of other streams only where their contexts keep
    // events; slices that are allocated on this context's compute stream are used on that stream.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

impl Device for Cuda {
    type Backend = CudaBackend;

    fn open(self, setup: Setup) -> Result<CudaBackend, Error> {
        let geometry = setup.geometry;
        check_geometry(&geometry)?;
        let Reservoir::Memory { .. } = setup.reservoir else {
            return refuse("reservoir", "a file or a store", "CUDA fetches pages from Reservoir::memory only");
        };
        if self.copy_blocks == 0 || self.copy_blocks > 65_535 {
            return refuse("copy_blocks", self.copy_blocks, "must be from 1 to 65,535");
        }
        if setup.replacement != Rule::Lru {
            return refuse("replacement", setup.replacement, "must be lru on CUDA");
        }
        let slots = setup.device_slots as usize;
        let most = (STAGING_BYTES / geometry.page_bytes()).max(LEAST_STAGING_PAGES);
        let staging = self.staging_pages.unwrap_or(slots.clamp(LEAST_STAGING_PAGES, most));
        let pool_slots = slots.saturating_add(staging);
        let hosts = (setup.reservoir_groups as usize).saturating_mul(geometry.heads());
        for (knob, count) in [("staging_pages", pool_slots), ("reservoir", hosts)] {
            if count >= u32::MAX as usize {
                return refuse(knob, count, "makes more than 2^32 − 2 pages");
            }
        }
        let (context, compute) = self.context()?;
        let attribute = |attribute| context.attribute(attribute).called("cuDeviceGetAttribute");
        let multiprocessors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let most_shared = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let most_shared = FREE_SHARED.max(usize::try_from(most_shared).unwrap_or(0));
        check_score(&geometry, setup.selection, most_shared)?;
        let kernels = self.kernels(&context, &geometry)?;
        let stride = digest_stride(&geometry, setup.selection);
        kernels.score.allow_shared(score_shared(&geometry, setup.selection))?;
        let is_sticky = setup.stickiness > 0.0 && setup.selection.digest().is_some();
        let mut collected = StepCounts::default();
        collected.heads.resize(geometry.heads(), PhaseCounts::default());
        Ok(CudaBackend {
            geometry,
            selection: setup.selection,
            stickiness: setup.stickiness,
            pins: setup.pins,
            scale: setup.scale,
            scrub_on_free: setup.scrub_on_free,
            engine: CopyEngine::new(
                &context,
                self.copy_priority,
                self.fetch_path,
                self.copy_blocks,
                geometry.page_bytes(),
            )?,
            events: Events::new(&context)?,
            kernels,
            multiprocessors: multiprocessors.max(1) as usize,
            most_shared,
            pool: DeviceMemory::new(&context, "device_pool", pool_slots * geometry.page_bytes())?,
            staging: Staging { first: slots, count: staging },
            digests: DeviceMemory::new(&context, "reservoir (its pages' digests)", hosts * stride)?,
            reservoir: HostPages::pin(&context, geometry.page_bytes(), hosts, self.pin_in_background, self.numa_node)?,
            tables: Tables::new(&context, &geometry, is_sticky)?,
            scratch: Scratch::new(&context)?,
            frames: Frames::new(&context)?,
            shape: StepShape::default(),
            copies: Copies::default(),
            open: false,
            id: BACKENDS.fetch_add(1, Ordering::Relaxed),
            collected,
            broken: None,
            context,
            compute,
        })
    }
}

fn check_geometry(geometry: &Geometry) -> Result<(), Error> {
    if !HEAD_DIMS.contains(&geometry.head_dim()) {
        return refuse("head_dim", geometry.head_dim(), "has no CUDA kernels: they are for 64, 80, 96, 128 and 256");
    }
    if geometry.page_tokens() > 64 {
        return refuse("page_tokens", geometry.page_tokens(), "must be at most 64 on CUDA");
    }
    if geometry.dtype() == DType::F32 {
        return refuse("dtype", geometry.dtype(), "must be f16 or bf16 on CUDA");
    }
    Ok(())
}

fn refuse<T>(knob: &'static str, value: impl ToString, rule: &str) -> Result<T, Error> {
    Err(Error::Setting { knob, value: value.to_string(), rule: rule.into() })
}
