//! The CPU backend: arenas, SIMD kernels, a pool of threads and a copy worker.
//!
//! "Device" memory is an arena of bounded size, so this serves CPU inference whose hot set must stay small, with the reservoir in a
//! file, say. It is also the oracle for other backends.

mod append;
mod arena;
mod attend;
mod copy;
mod digests;
mod kernels;
mod store;
mod tables;
mod tensor;
#[cfg(all(test, not(loom)))]
mod tests;
mod threads;

use std::sync::Arc;
use std::time::Duration;

pub use kernels::Isa;
pub use tensor::{CpuTensor, CpuTensorMut};

use arena::Arena;
use copy::{CopyEngine, Job, Kind};
use digests::Digests;
use kernels::{Kernels, PageShape};
use tables::Tables;
use threads::Threads;

use crate::backend::{Backend, Device, HeadDemand, Setup, StepCounts, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::selection::{PageLists, Selection};
use crate::stats::{Counts, PhaseCounts};
use crate::table::Pins;

/// Settings of the CPU backend.
///
/// ```
/// use wakekv::{Cache, Cpu, Geometry};
/// let geometry = Geometry::builder().layers(2).head_dim(64).build()?;
/// let cache = Cache::builder(geometry).pages_per_head(4).build(Cpu::new().threads(1))?;
/// # Ok::<(), wakekv::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Cpu {
    threads: Option<usize>,
    isa: Option<Isa>,
    queue_depth: Option<usize>,
    staging_pages: Option<usize>,
}

/// Copies that may be under way at once, unless the user says otherwise.
const QUEUE_DEPTH: usize = 4096;

impl Cpu {
    /// All cores, the best instructions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Threads that attention is shared among, the calling one included; the copy worker comes on top. Default: the cores that the
    /// process may use.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Instructions to use. Default: the best that the processor has.
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// Copies that may be under way at once. Default 4096.
    pub fn queue_depth(mut self, copies: usize) -> Self {
        self.queue_depth = Some(copies);
        self
    }

    /// Pages that pass the ways by, on their way to or from the reservoir, have this many slots in addition to the device pool. Default:
    /// about 2 MiB.
    pub fn staging_pages(mut self, pages: usize) -> Self {
        self.staging_pages = Some(pages);
        self
    }

    fn checked_threads(&self) -> Result<usize, Error> {
        let threads = self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        at_least("threads", threads, 1).and_then(|threads| at_most("threads", threads, 1024))
    }
}

fn at_least(knob: &'static str, value: usize, least: usize) -> Result<usize, Error> {
    if value >= least {
        return Ok(value);
    }
    Err(Error::Setting { knob, value: value.to_string(), rule: format!("must be at least {least}") })
}

fn at_most(knob: &'static str, value: usize, most: usize) -> Result<usize, Error> {
    if value <= most {
        return Ok(value);
    }
    Err(Error::Setting { knob, value: value.to_string(), rule: format!("must be at most {most}") })
}

impl Device for Cpu {
    type Backend = CpuBackend;

    fn open(self, setup: Setup) -> Result<CpuBackend, Error> {
        let geometry = setup.geometry;
        let threads = self.checked_threads()?;
        // Each half of the staging slots takes at least one segment, and each thread at least one slot.
        let segment = attend::max_segment(&geometry);
        let least = (2 * segment).max(threads);
        let staging_pages = self.staging_pages.unwrap_or((8 * segment).max(threads));
        let staging_pages = at_least("staging_pages", staging_pages, least)?;
        let queue_depth = at_least("queue_depth", self.queue_depth.unwrap_or(QUEUE_DEPTH), 2 * attend::MAX_SEGMENT)?;
        let queue_depth = at_most("queue_depth", queue_depth, 1 << 20)?;
        let staging_pages = at_most("staging_pages", staging_pages, 1 << 20)?;
        let isa = self.isa.unwrap_or_else(Isa::detect);
        let shape =
            PageShape { head_dim: geometry.head_dim(), page_tokens: geometry.page_tokens(), dtype: geometry.dtype() };
        let kernels = Kernels::new(isa, shape).ok_or(Error::Isa { isa })?;
        let slots = setup.device_slots as usize + staging_pages;
        at_most("device_pool", slots, u32::MAX as usize - 1)?;
        let hosts = (setup.reservoir_groups as usize).saturating_mul(geometry.heads());
        at_most("reservoir", hosts, u32::MAX as usize - 1)?;
        let arena = Arc::new(Arena::new("device_pool", slots, geometry.page_bytes())?);
        let digests = match setup.selection.digest() {
            Some(digest) => Some(Digests::new(digest, isa, &geometry, shape, hosts)?),
            None => None,
        };
        let store = store::open(setup.reservoir)?;
        let engine = CopyEngine::start(arena.clone(), slots, store, queue_depth)?;
        Ok(CpuBackend {
            geometry,
            selection: setup.selection,
            stickiness: setup.stickiness,
            scrub_on_free: setup.scrub_on_free,
            parts: Parts {
                arena,
                engine,
                digests,
                kernels,
                staging: Staging { first: setup.device_slots, count: staging_pages as u32 },
                wave_jobs: queue_depth / 2,
                pins: setup.pins,
                scale: setup.scale,
            },
            threads: Threads::start(threads)?,
            tables: Tables::new(&geometry, setup.replacement),
            counts: vec![PhaseCounts::default(); geometry.heads()],
            stall: Duration::ZERO,
            fetching: false,
            lane_counts: Vec::new(),
            scratch: Default::default(),
        })
    }
}

/// A CPU that has been set up. Made by [`CacheBuilder::build`](crate::CacheBuilder::build) from [`Cpu`].
#[derive(Debug)]
pub struct CpuBackend {
    geometry: Geometry,
    selection: Selection,
    stickiness: f32,
    scrub_on_free: bool,
    parts: Parts,
    threads: Threads,
    tables: Tables,
    /// What the step at hand has counted, per head.
    counts: Vec<PhaseCounts>,
    stall: Duration,
    /// The same of the layer at hand, per (entry, KV head).
    lane_counts: Vec<Counts>,
    /// Tables may claim pages whose fetch has not been waited for.
    fetching: bool,
    scratch: attend::Scratch,
}

/// What the threads of a step share, and none of them changes.
#[derive(Debug)]
struct Parts {
    /// The device pool, and behind it the staging slots.
    arena: Arc<Arena>,
    engine: CopyEngine,
    digests: Option<Digests>,
    kernels: Kernels,
    staging: Staging,
    /// Copies of one wave at most, so that two waves fit the queue.
    wave_jobs: usize,
    pins: Pins,
    scale: f32,
}

/// Slots of the arena that no head owns.
#[derive(Clone, Copy, Debug)]
struct Staging {
    first: u32,
    count: u32,
}

impl Staging {
    fn slots(self) -> impl Iterator<Item = u32> {
        self.first..self.first + self.count
    }
}

impl Backend for CpuBackend {
    type Tensor<'t> = CpuTensor<'t>;
    type TensorMut<'t> = CpuTensorMut<'t>;

    fn elements(tensor: &CpuTensor<'_>) -> usize {
        tensor.len()
    }

    fn elements_mut(tensor: &CpuTensorMut<'_>) -> usize {
        tensor.len()
    }

    fn insert(&mut self, sequence: u32, tokens: usize, ways: usize) {
        let selected = match self.selection {
            Selection::TopPages { count, .. } => count,
            _ => 0,
        };
        self.tables.insert(sequence, self.geometry.pages(tokens), ways, selected);
    }

    fn remove(&mut self, sequence: u32) -> Result<(), Error> {
        let mut result = Ok(());
        if self.scrub_on_free {
            let heads = self.tables.heads(sequence);
            let slots = heads.iter().flat_map(|head| head.table.slots());
            scrub_slots(&self.parts.arena, slots.chain(self.parts.staging.slots()));
            result = self.scrub_groups(self.tables.groups(sequence));
        }
        self.tables.remove(sequence);
        result
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), Error> {
        self.tables.grant(plan);
        self.counts.fill(PhaseCounts::default());
        self.stall = Duration::ZERO;
        Ok(())
    }

    fn append(&mut self, plan: &StepPlan, layer: usize, k: CpuTensor<'_>, v: CpuTensor<'_>) -> Result<(), Error> {
        let _span = tracing::trace_span!("append", layer).entered();
        self.append_layer(plan, layer, k, v)
    }

    fn attend(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        q: CpuTensor<'_>,
        pages: Option<PageLists<'_>>,
        out: CpuTensorMut<'_>,
    ) -> Result<(), Error> {
        let _span = tracing::trace_span!("attend", layer).entered();
        self.attend_layer(plan, layer, q, pages, out)
    }

    fn demand(&self, lane: usize) -> Option<HeadDemand<'_>> {
        self.scratch.demand(lane)
    }

    fn finish(&mut self, plan: &StepPlan, counts: &mut StepCounts) -> Result<(), Error> {
        // A page that was sealed in this step may lose its way in the next one.
        self.parts.engine.settle()?;
        if self.stickiness > 0.0 {
            self.tables.keep_selections(plan);
        }
        for (total, &step) in counts.heads.iter_mut().zip(&self.counts) {
            *total += step;
        }
        counts.stall += self.stall;
        Ok(())
    }

    fn abort(&mut self, plan: &StepPlan) {
        // The failure, if there was one, has been reported by the call that met it.
        let _ = self.parts.engine.settle();
        self.forget_fetches();
        for entry in &plan.entries {
            self.tables.revoke(plan, entry, self.geometry.pages(entry.start));
        }
        if self.scrub_on_free {
            let slots = plan.ways.iter().map(|way| way.slot);
            scrub_slots(&self.parts.arena, slots.chain(self.parts.staging.slots()));
            if let Err(error) = self.scrub_groups(&plan.groups) {
                tracing::warn!(%error, "pages of an undone step could not be scrubbed");
            }
        }
    }

    fn table_bytes(&self) -> usize {
        self.tables.table_bytes()
    }

    fn check(&self, sequences: &[(u32, usize)]) -> Result<(), String> {
        let mut owned = vec![false; self.parts.staging.first as usize];
        for &(sequence, tokens) in sequences {
            for (index, head) in self.tables.heads(sequence).iter().enumerate() {
                let context = |what: String| format!("sequence {sequence}, head {index}: {what}");
                head.table.check().map_err(context)?;
                for slot in head.table.slots() {
                    if std::mem::replace(&mut owned[slot as usize], true) {
                        return Err(context(format!("slot {slot} is owned twice")));
                    }
                }
                let last = self.geometry.pages(tokens).checked_sub(1);
                let open = last.filter(|_| tokens % self.geometry.page_tokens() != 0);
                if open.is_some_and(|page| head.table.slot_of(page as u32).is_none()) {
                    return Err(context("the open page is not on the device".into()));
                }
            }
        }
        Ok(())
    }
}

impl CpuBackend {
    /// Overwrites every page of some reservoir groups, and their digests.
    fn scrub_groups(&self, groups: &[u32]) -> Result<(), Error> {
        let heads = self.geometry.heads() as u32;
        for &group in groups {
            for host in group * heads..(group + 1) * heads {
                if let Some(digests) = &self.parts.digests {
                    digests.scrub(host);
                }
                if self.parts.engine.submit(&[Job { kind: Kind::Scrub, host, device: 0 }]).is_err() {
                    return Err(self.parts.engine.failure());
                }
            }
        }
        self.parts.engine.settle()
    }
}

fn scrub_slots(arena: &Arena, slots: impl Iterator<Item = u32>) {
    for slot in slots {
        // SAFETY: the slot belonged to a sequence or step that is just ending, and between steps nothing is under way.
        unsafe { arena.slot(slot).write_bytes(0, arena.slot_bytes()) };
    }
}
