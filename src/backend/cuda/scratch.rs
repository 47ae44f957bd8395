//! What a step works with on the device, beside pages and tables. It grows between steps and is never smaller than before.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::driver::Called;
use super::frames::result_bytes;
use super::layout;
use super::memory::DeviceMemory;
use super::shape::StepShape;
use crate::error::Error;
use crate::geometry::Geometry;

/// Byte offsets in the scratch memory.
#[derive(Clone, Copy, Debug, Default)]
struct Offsets {
    demand_pages: usize,
    demand_places: usize,
    demand_counts: usize,
    scores: usize,
    fetches: usize,
    counts: usize,
    mirrors: usize,
    list_offsets: usize,
    list_pages: usize,
    acc: usize,
    state: usize,
    end: usize,
}

/// Elements of each part. Products, for a step of many sequences seldom has many tokens of each.
#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    lanes: usize,
    pairs: usize,
    fetches: usize,
    waves: usize,
    mirrors: usize,
    partials: usize,
}

#[derive(Debug)]
pub(super) struct Scratch {
    memory: DeviceMemory,
    sizes: Sizes,
    at: Offsets,
    /// The step's number and entries, the ways to leave when it is undone, its grants, and its fault and tallies.
    frame: DeviceMemory,
    frame_at: FrameOffsets,
    entries: usize,
    grants: usize,
    /// Counts the times that something has moved.
    pub generation: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct FrameOffsets {
    kept_ways: usize,
    grants: usize,
    results: usize,
    end: usize,
}

/// The step's number, and what aligns the entries behind it.
pub(super) const FRAME_HEAD: usize = 16;

/// The settings that a step's size follows from.
const KNOB: &str = "the step's batch: its sequences, their new tokens and pages";

/// Counters of waves are cleared and read as a whole.
const LEAST_WAVES: usize = 3;

impl Scratch {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
        Ok(Scratch {
            memory: DeviceMemory::new(context, KNOB, 0)?,
            sizes: Sizes::default(),
            at: Offsets::default(),
            frame: DeviceMemory::new(context, KNOB, 0)?,
            frame_at: FrameOffsets::default(),
            entries: 0,
            grants: 0,
            generation: 0,
        })
    }

    /// Makes room for a step. Waits for the stream if something has to move; what fails has changed nothing.
    pub fn reserve(
        &mut self,
        context: &Arc<CudaContext>,
        stream: &CudaStream,
        geometry: &Geometry,
        shape: &StepShape,
    ) -> Result<(), Error> {
        if shape.entries > self.entries || shape.grants > self.grants {
            let entries = shape.entries.next_power_of_two().max(self.entries);
            let grants = shape.grants.next_power_of_two().max(self.grants);
            let at = FrameOffsets::new(geometry, entries, grants);
            let frame = DeviceMemory::new(context, KNOB, at.end)?;
            let results = result_bytes(geometry, entries);
            // SAFETY: the range lies inside the frame.
            unsafe { result::memset_d8_async(frame.at(at.results), 0, results, stream.cu_stream()) }
                .called("cuMemsetD8Async")?;
            stream.synchronize().called("cuStreamSynchronize")?;
            (self.frame, self.frame_at, self.entries, self.grants) = (frame, at, entries, grants);
            self.generation += 1;
        }
        let needed = Sizes::of(geometry, shape);
        if !needed.within(&self.sizes) {
            let sizes = needed.rounded_up().joined(&self.sizes);
            let at = Offsets::new(&sizes, geometry.head_dim());
            let memory = DeviceMemory::new(context, KNOB, at.end)?;
            stream.synchronize().called("cuStreamSynchronize")?;
            (self.memory, self.at, self.sizes) = (memory, at, sizes);
            self.generation += 1;
        }
        Ok(())
    }

    pub fn step_number(&self) -> u64 {
        self.frame.at(0)
    }

    /// The fault, and behind it the tallies, by layer and lane.
    pub fn results(&self) -> u64 {
        self.frame.at(self.frame_at.results)
    }

    pub fn fault(&self) -> u64 {
        self.results()
    }

    pub fn tallies(&self, first: usize) -> u64 {
        self.results() + (size_of::<layout::Fault>() + first * size_of::<layout::Tally>()) as u64
    }

    pub fn entries(&self) -> u64 {
        self.frame.at(FRAME_HEAD)
    }

    /// Ways that each head of each entry keeps when the step is undone.
    pub fn kept_ways(&self) -> u64 {
        self.frame.at(self.frame_at.kept_ways)
    }

    pub fn grants(&self) -> u64 {
        self.frame.at(self.frame_at.grants)
    }

    pub fn demand(&self, shape: &StepShape) -> layout::Demand {
        layout::Demand {
            pages: self.memory.at(self.at.demand_pages),
            places: self.memory.at(self.at.demand_places),
            counts: self.memory.at(self.at.demand_counts),
            room: shape.room as u32,
            unused: 0,
        }
    }

    pub fn scores(&self) -> u64 {
        self.memory.at(self.at.scores)
    }

    /// What has to be fetched, by wave.
    pub fn fetches(&self, shape: &StepShape) -> layout::CopyList {
        layout::CopyList {
            copies: self.memory.at(self.at.fetches),
            counts: self.memory.at(self.at.counts),
            first_room: first_room(shape) as u32,
            wave_room: (shape.lanes * shape.ring) as u32,
        }
    }

    /// What has to be mirrored, in wave 1.
    pub fn mirrors(&self) -> layout::CopyList {
        layout::CopyList {
            copies: self.memory.at(self.at.mirrors),
            counts: self.memory.at(self.at.counts + 4 * self.sizes.waves),
            first_room: 0,
            wave_room: 0,
        }
    }

    /// The counters of both lists, which are next to each other, and their bytes.
    pub fn counters(&self) -> (u64, usize) {
        (self.memory.at(self.at.counts), 4 * (self.sizes.waves + LEAST_WAVES))
    }

    /// The counters of the mirrors alone.
    pub fn mirror_counters(&self) -> (u64, usize) {
        (self.mirrors().counts, 4 * LEAST_WAVES)
    }

    pub fn list_offsets(&self) -> u64 {
        self.memory.at(self.at.list_offsets)
    }

    pub fn list_pages(&self) -> u64 {
        self.memory.at(self.at.list_pages)
    }

    pub fn acc(&self) -> u64 {
        self.memory.at(self.at.acc)
    }

    pub fn state(&self) -> u64 {
        self.memory.at(self.at.state)
    }

    pub fn bytes(&self) -> usize {
        self.memory.bytes() + self.frame.bytes()
    }
}

/// Fetches into ways: no lane can have more than pages or ways.
fn first_room(shape: &StepShape) -> usize {
    shape.lanes * shape.room.min(shape.ways)
}

impl Sizes {
    fn of(geometry: &Geometry, shape: &StepShape) -> Self {
        Sizes {
            lanes: shape.lanes + 1,
            pairs: shape.lanes * shape.room,
            // Every page of every lane, and for each lane a wave that is not full.
            fetches: first_room(shape) + shape.lanes * (shape.room + shape.ring),
            waves: shape.waves.max(LEAST_WAVES),
            mirrors: shape.lanes * shape.appended,
            partials: shape.lanes * shape.window * geometry.group() * 2 * shape.splits,
        }
    }

    fn each(&self, other: &Self, join: impl Fn(usize, usize) -> usize) -> Self {
        Sizes {
            lanes: join(self.lanes, other.lanes),
            pairs: join(self.pairs, other.pairs),
            fetches: join(self.fetches, other.fetches),
            waves: join(self.waves, other.waves),
            mirrors: join(self.mirrors, other.mirrors),
            partials: join(self.partials, other.partials),
        }
    }

    fn joined(&self, other: &Self) -> Self {
        self.each(other, usize::max)
    }

    fn rounded_up(&self) -> Self {
        self.each(self, |size, _| size.next_power_of_two())
    }

    fn within(&self, other: &Self) -> bool {
        let Sizes { lanes, pairs, fetches, waves, mirrors, partials } = *self;
        let small = lanes <= other.lanes && pairs <= other.pairs && fetches <= other.fetches;
        small && waves <= other.waves && mirrors <= other.mirrors && partials <= other.partials
    }
}

/// Lays parts out one behind the other, each aligned for any access.
struct Layout(usize);

impl Layout {
    fn part(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 = (at + bytes).next_multiple_of(256);
        at
    }
}

impl Offsets {
    fn new(sizes: &Sizes, head_dim: usize) -> Self {
        let mut layout = Layout(0);
        Offsets {
            demand_pages: layout.part(4 * sizes.pairs),
            demand_places: layout.part(size_of::<layout::Place>() * sizes.pairs),
            demand_counts: layout.part(4 * sizes.lanes),
            scores: layout.part(4 * sizes.pairs),
            fetches: layout.part(size_of::<layout::PageCopy>() * sizes.fetches),
            counts: layout.part(4 * (sizes.waves + LEAST_WAVES)),
            mirrors: layout.part(size_of::<layout::PageCopy>() * sizes.mirrors),
            list_offsets: layout.part(4 * sizes.lanes),
            list_pages: layout.part(4 * sizes.pairs),
            acc: layout.part(4 * sizes.partials * head_dim),
            state: layout.part(8 * sizes.partials),
            end: layout.0,
        }
    }
}

impl FrameOffsets {
    fn new(geometry: &Geometry, entries: usize, grants: usize) -> Self {
        let mut layout = Layout(0);
        layout.part(FRAME_HEAD + size_of::<layout::Entry>() * entries);
        FrameOffsets {
            kept_ways: layout.part(4 * entries * geometry.heads()),
            grants: layout.part(size_of::<layout::WayGrant>() * grants),
            results: layout.part(result_bytes(geometry, entries)),
            end: layout.0,
        }
    }
}
