//! The CUDA backend: page tables in device memory, a pinned reservoir, and a copy engine on a stream of its own.
//!
//! No host is in the loop of a step. The host decides admission and puts launches on two streams; what is demanded, found, evicted and
//! fetched is decided by kernels (`kernels/*.cu`) that make the decisions of [`HeadTable`](crate::table::HeadTable). What they count, and
//! what went wrong, comes back a step or two later.
//!
//! ```no_run
//! use wakekv::{Cache, Cuda, Geometry, Reservoir};
//! let geometry = Geometry::builder().layers(32).query_heads(32).kv_heads(8).head_dim(128).build()?;
//! let cache = Cache::builder(geometry)
//!     .pages_per_head(64)
//!     .device_pool(4 << 30)
//!     .reservoir(Reservoir::memory(64 << 30))
//!     .build(Cuda::new(0))?;
//! # Ok::<(), wakekv::Error>(())
//! ```

mod calibrate;
mod capture;
mod check;
mod compile;
mod copies;
mod driver;
mod frames;
mod images;
mod kernels;
mod layer;
mod layout;
mod memory;
mod nvrtc;
mod open;
mod regions;
mod reservoir;
mod scratch;
mod shape;
mod tables;
mod tensor;

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

pub use calibrate::{Calibration, CopyPath, CopyTimer, Measured};
pub use capture::CapturedStep;
pub use copies::{CopyDirection, Crossover, FetchPath};
pub use open::Cuda;
pub use tensor::{CudaTensor, CudaTensorMut};

use copies::{CopyEngine, Events, order};
use driver::Called;
use frames::{Frames, result_bytes};
use kernels::{Grid, Kernels};
use memory::DeviceMemory;
use reservoir::HostPages;
use scratch::{FRAME_HEAD, Scratch};
use shape::StepShape;
use tables::Tables;

use crate::backend::{Backend, EntryPlan, StepCounts, StepPlan};
use crate::cache::Cache;
use crate::error::Error;
use crate::geometry::Geometry;
use crate::selection::{PageLists, Selection};
use crate::step::Step;
use crate::table::{Phase, Pins};

/// A CUDA device that has been set up. Made by [`CacheBuilder::build`](crate::CacheBuilder::build) from [`Cuda`].
#[derive(Debug)]
pub struct CudaBackend {
    geometry: Geometry,
    selection: Selection,
    stickiness: f32,
    pins: Pins,
    scale: f32,
    scrub_on_free: bool,
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    engine: CopyEngine,
    events: Events,
    kernels: Kernels,
    multiprocessors: usize,
    /// Bytes of shared memory that a block can have if it asks.
    most_shared: usize,
    /// The device pool, and behind it the staging slots.
    pool: DeviceMemory,
    staging: Staging,
    /// Of every page that the reservoir can hold.
    digests: DeviceMemory,
    reservoir: HostPages,
    tables: Tables,
    scratch: Scratch,
    frames: Frames,
    /// The step at hand.
    shape: StepShape,
    copies: Copies,
    /// A step has begun and has neither been finished nor undone.
    open: bool,
    /// Tells this backend from others of the process.
    id: u64,
    /// Counters of earlier steps that have come in and not been told yet.
    collected: StepCounts,
    /// Why nothing works any more.
    broken: Option<String>,
}

/// Slots of the pool that no head owns.
#[derive(Clone, Copy, Debug)]
struct Staging {
    first: usize,
    count: usize,
}

/// What the copy stream has been asked for, or has to be.
#[derive(Clone, Copy, Debug, Default)]
struct Copies {
    /// Pages have sealed in the layer that was appended last, and nobody has asked for their mirrors.
    mirrors_due: bool,
    /// The copy stream has work that the compute stream has not waited for.
    under_way: bool,
    /// The launches are being captured: nothing may wait, and all that a later step may need is put in.
    capturing: bool,
}

impl Backend for CudaBackend {
    type Tensor<'t> = CudaTensor<'t>;
    type TensorMut<'t> = CudaTensorMut<'t>;

    fn elements(tensor: &CudaTensor<'_>) -> usize {
        tensor.len()
    }

    fn elements_mut(tensor: &CudaTensorMut<'_>) -> usize {
        tensor.len()
    }

    fn insert(&mut self, sequence: u32, _tokens: usize, _ways: usize) {
        // Its tables are made with its first step, when it is known how large they have to be.
        self.tables.insert(sequence);
    }

    fn remove(&mut self, sequence: u32) -> Result<(), Error> {
        let scrubbed = if self.scrub_on_free {
            let live = self.tables.live(sequence);
            let (slots, groups) = (live.slots.clone(), live.groups.clone());
            self.check_whole().and_then(|()| self.scrub(slots, &groups))
        } else {
            Ok(())
        };
        self.tables.remove(sequence);
        scrubbed
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), Error> {
        self.check_whole()?;
        self.context.bind_to_thread().called("cuCtxSetCurrent")?;
        let shape = self.shape_of(plan)?;
        let groups = plan.groups.iter().max().map_or(0, |&group| group as usize + 1);
        self.reservoir.wait_for(groups * self.geometry.heads())?;
        self.collect(true, Some(1))?;
        let geometry = self.geometry;
        let pages = |entry: &EntryPlan| geometry.pages(entry.start + entry.tokens);
        self.tables.reserve(plan, &self.compute, pages)?;
        self.scratch.reserve(&self.context, &self.compute, &geometry, &shape)?;
        self.frames.turn(&self.context, self.upload_bytes(plan, &shape), result_bytes(&geometry, shape.entries))?;
        if let Err(error) = self.upload_step(plan, pages) {
            // Whatever has been uploaded is read before the frame is used again.
            if let Err(lost) = self.frames.give_up(&self.compute) {
                self.broken.get_or_insert_with(|| lost.to_string());
            }
            return Err(error);
        }
        self.tables.granted(plan);
        self.shape = shape;
        self.copies = Copies::default();
        self.open = true;
        Ok(())
    }

    fn append(&mut self, _plan: &StepPlan, layer: usize, k: CudaTensor<'_>, v: CudaTensor<'_>) -> Result<(), Error> {
        let _span = tracing::trace_span!("append", layer).entered();
        self.context.bind_to_thread().called("cuCtxSetCurrent")?;
        self.append_layer(layer, &k, &v)
    }

    fn attend(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        q: CudaTensor<'_>,
        pages: Option<PageLists<'_>>,
        mut out: CudaTensorMut<'_>,
    ) -> Result<(), Error> {
        let _span = tracing::trace_span!("attend", layer).entered();
        self.context.bind_to_thread().called("cuCtxSetCurrent")?;
        self.attend_layer(plan, layer, &q, pages, &mut out)
    }

    fn finish(&mut self, plan: &StepPlan, counts: &mut StepCounts) -> Result<(), Error> {
        self.check_whole()?;
        self.context.bind_to_thread().called("cuCtxSetCurrent")?;
        self.mirror_if_due()?;
        self.join_copies()?;
        let bytes = result_bytes(&self.geometry, plan.entries.len());
        self.frames.ask(&self.compute, plan, self.scratch.results(), bytes)?;
        self.collect(false, None)?;
        self.tell(counts);
        self.open = false;
        Ok(())
    }

    fn abort(&mut self, plan: &StepPlan) {
        self.open = false;
        if let Err(error) = self.undo(plan) {
            tracing::error!(%error, "a step could not be undone");
            self.broken.get_or_insert_with(|| error.to_string());
        }
        self.tables.revoke(plan);
    }

    fn synchronize(&mut self, counts: &mut StepCounts) -> Result<(), Error> {
        self.check_whole()?;
        self.engine.stream.synchronize().called("cuStreamSynchronize")?;
        self.compute.synchronize().called("cuStreamSynchronize")?;
        self.collect(true, None)?;
        self.tell(counts);
        Ok(())
    }

    fn table_bytes(&self) -> usize {
        self.tables.bytes() + self.reservoir.table_bytes()
    }

    fn check(&self, sequences: &[(u32, usize)]) -> Result<(), String> {
        self.check_tables(sequences)
    }
}

impl CudaBackend {
    fn check_whole(&self) -> Result<(), Error> {
        match &self.broken {
            Some(cause) => Err(Error::DeviceLost { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Bytes that the step uploads at most, as far as they are to find room without waiting.
    fn upload_bytes(&self, plan: &StepPlan, shape: &StepShape) -> usize {
        let step = FRAME_HEAD + shape.entries * (size_of::<layout::Entry>() + size_of::<layout::Sequence>() + 16);
        let ways = shape.grants * size_of::<layout::WayGrant>() + 4 * shape.entries * self.geometry.heads();
        let groups = 4 * plan.groups.len() + 16 * shape.entries;
        let one_layer = match self.selection {
            Selection::Explicit { .. } => 4 * (shape.lanes + 1 + shape.lanes * shape.room) + 32,
            _ => 0,
        };
        let lists = one_layer.saturating_mul(self.geometry.layers()).min(one_layer.max(MOST_LIST_BYTES));
        step + ways + groups + lists + 64 * self.reservoir.chunks()
    }

    /// Puts everything on the stream that the step's kernels read, and at last the ways, with which it has begun.
    fn upload_step(&mut self, plan: &StepPlan, pages: impl Fn(&EntryPlan) -> usize) -> Result<(), Error> {
        let CudaBackend { compute, frames, tables, scratch, reservoir, kernels, .. } = self;
        let mut upload = |to: u64, bytes: &[u8]| frames.upload(compute, to, bytes);
        reservoir.publish(&mut upload)?;
        tables.settle(plan, compute, kernels, pages, &mut upload)?;
        let mut step = Vec::with_capacity(FRAME_HEAD + plan.entries.len() * size_of::<layout::Entry>());
        step.extend_from_slice(bytemuck::bytes_of(&[plan.number, 0]));
        for entry in &plan.entries {
            step.extend_from_slice(bytemuck::bytes_of(&layout::Entry {
                sequence: entry.sequence,
                start: entry.start as u32,
                tokens: entry.tokens as u32,
                row: entry.row as u32,
                decode: u32::from(entry.phase == Phase::Decode),
                reselect: u32::from(entry.reselect),
            }));
        }
        upload(scratch.step_number(), &step)?;
        let grants: Vec<layout::WayGrant> = tables.grants(plan).collect();
        if grants.is_empty() {
            return Ok(());
        }
        upload(scratch.grants(), bytemuck::cast_slice(&grants))?;
        let grid = Grid { blocks: (grants.len().div_ceil(256), 1, 1), threads: 256, shared: 0 };
        let (view, list, count) = (tables.view(), scratch.grants(), grants.len() as u32);
        // SAFETY: wakekv_grant's parameters; the list was just uploaded, and every way lies inside its sequence's tables.
        unsafe { kernels.grant.launch(compute, grid, &[&view, &list, &count]) }
    }

    /// The compute stream waits for whatever the copy stream has been given.
    fn join_copies(&mut self) -> Result<(), Error> {
        if self.copies.under_way {
            order(&self.engine.stream, &self.events.copied, &self.compute)?;
            self.copies.under_way = false;
        }
        Ok(())
    }

    /// Looks at the results that have come in, of at most so many steps.
    fn collect(&mut self, wait: bool, steps: Option<usize>) -> Result<(), Error> {
        let fault = self.frames.collect(&self.geometry, &mut self.collected, wait, steps)?;
        let Some(fault) = fault else { return Ok(()) };
        let error = shape::describe_fault(&fault, &self.geometry);
        self.broken = Some(error.to_string());
        Err(error)
    }

    fn tell(&mut self, counts: &mut StepCounts) {
        for (total, collected) in counts.heads.iter_mut().zip(&mut self.collected.heads) {
            *total += std::mem::take(collected);
        }
    }

    /// Takes the step back on the device, in the order of the streams.
    fn undo(&mut self, plan: &StepPlan) -> Result<(), Error> {
        self.check_whole()?;
        self.context.bind_to_thread().called("cuCtxSetCurrent")?;
        self.copies.mirrors_due = false;
        self.join_copies()?;
        let live = |entry: &EntryPlan| self.tables.live(entry.sequence).ways.clone();
        let mut kept: Vec<u32> = plan.entries.iter().flat_map(live).collect();
        for (index, entry) in plan.entries.iter().enumerate() {
            for way in &plan.ways[entry.ways.clone()] {
                kept[index * self.geometry.heads() + way.head as usize] -= 1;
            }
        }
        self.frames.upload(&self.compute, self.scratch.kept_ways(), bytemuck::cast_slice(&kept))?;
        let blocks = (self.geometry.heads(), plan.entries.len(), 1);
        let grid = Grid { blocks, threads: self.shape.threads(), shared: 0 };
        let (tables, shape) = (self.tables.view(), self.kernel_shape(0));
        let (entries, step, kept) = (self.scratch.entries(), self.scratch.step_number(), self.scratch.kept_ways());
        // SAFETY: wakekv_undo's parameters; the entries are those of the step that has begun, and the ways were just uploaded.
        unsafe { self.kernels.undo.launch(&self.compute, grid, &[&tables, &shape, &entries, &step, &kept]) }?;
        self.frames.give_up(&self.compute)?;
        if self.scrub_on_free {
            self.scrub(plan.ways.iter().map(|way| way.slot).collect(), &plan.groups)?;
        }
        Ok(())
    }

    /// Overwrites pages on the device and in the reservoir, and their digests, with zeros. Waits for the device.
    fn scrub(&mut self, mut slots: Vec<u32>, groups: &[u32]) -> Result<(), Error> {
        self.context.bind_to_thread().called("cuCtxSetCurrent")?;
        let page_bytes = self.geometry.page_bytes();
        slots.sort_unstable();
        let stage = (self.staging.first, self.staging.count);
        let runs = slots.chunk_by(|a, b| a + 1 == *b).map(|run| (run[0] as usize, run.len()));
        for (first, count) in runs.chain([stage]) {
            self.zero(self.pool.at(first * page_bytes), count * page_bytes)?;
        }
        let heads = self.geometry.heads();
        let stride = self.digest_stride();
        for &group in groups {
            self.zero(self.digests.at(group as usize * heads * stride), heads * stride)?;
        }
        self.compute.synchronize().called("cuStreamSynchronize")?;
        for &group in groups {
            self.reservoir.scrub(group as usize * heads..(group as usize + 1) * heads);
        }
        Ok(())
    }

    fn zero(&self, address: u64, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: a range of the pool or of the digests, which nobody reads any more in the order of the stream.
        unsafe { result::memset_d8_async(address, 0, bytes, self.compute.cu_stream()) }.called("cuMemsetD8Async")
    }
}

/// Lists of a step beyond this share their room, at the price of a wait.
const MOST_LIST_BYTES: usize = 8 << 20;

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // The memory must outlive its readers. In a context that is broken nothing runs any more.
        let _ = self.engine.stream.synchronize();
        let _ = self.compute.synchronize();
    }
}

impl Step<'_, CudaBackend> {
    /// The stream that the step runs on: the engine's, or the cache's own.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.backend().compute
    }
}

impl Cache<CudaBackend> {
    /// The stream that steps run on: the engine's, or the cache's own.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.backend.compute
    }

    /// Bytes of the reservoir that are pinned by now, and bytes that will be.
    pub fn pinned(&self) -> (u64, u64) {
        self.backend.reservoir.progress()
    }

    /// Device bytes that steps work with beside the pool, the digests and the tables. They grow to the largest step so far.
    pub fn scratch_bytes(&self) -> usize {
        self.backend.scratch.bytes()
    }
}
