//! Attention of one layer: what each head demands, what has to be fetched, and the arithmetic over what is there.
//!
//! 1. In parallel over the heads, [`demand`] scores and selects pages and asks the head's table: hits, misses, victims.
//! 2. [`waves`] cuts each head's pages into segments and the segments into waves, and lists the copies of each wave.
//! 3. In parallel over segments, attention runs over those whose pages are all there, then over the others as their
//!    copies come in, while the copies of the next wave are under way already.
//! 4. The partial results of each head merge in the order of its pages.
//!
//! Segments depend on the demand alone, and so do the bits of the result: not on the budget, not on what was resident,
//! not on the number of threads.

mod demand;
mod waves;

use std::ops::Range;
use std::time::{Duration, Instant};

use super::copy::Failed;
use super::kernels::{MAX_ROWS, PageView, State, Tile};
use super::tensor::SharedOut;
use super::threads::Shares;
use super::{CpuBackend, CpuTensor, CpuTensorMut, Parts};
use crate::backend::{HeadDemand, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::selection::PageLists;
use crate::table::{Place, TableError, Tally};

pub(super) use waves::max_segment;

/// Pages of one segment at most, so that a segment's views fit on the stack.
pub(super) const MAX_SEGMENT: usize = 64;

/// One KV head of one batch entry in the layer at hand.
#[derive(Debug)]
struct Lane {
    entry: usize,
    kv_head: usize,
    /// The head's index in the tables.
    head: usize,
    /// Query rows: new tokens × query heads of the group, the group innermost.
    rows: usize,
    /// Where the lane's queries `[rows, head_dim]` begin.
    queries: usize,
    /// The demand, ascending, and where each page is.
    pages: Vec<u32>,
    places: Vec<Place>,
    /// The arena slot each page is read from.
    slots: Vec<u32>,
    tally: Tally,
    error: Option<TableError>,
    /// Pages per segment.
    segment: usize,
    /// Whether all segments continue one state in their order, because a state per segment would be too large.
    running: bool,
    /// Where the lane's softmax states begin.
    states: usize,
    scoring: demand::Scoring,
}

/// Everything that is kept from layer to layer so that a step need not allocate.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    lanes: Vec<Lane>,
    /// Lanes in use, the first ones.
    live: usize,
    queries: Vec<f32>,
    states: Vec<f32>,
    schedule: waves::Schedule,
    /// Per thread, how long it has waited for copies.
    waited: Vec<Duration>,
    /// (lane, rows) whose states are merged and written by one task.
    endings: Vec<(u32, Range<u32>)>,
}

impl CpuBackend {
    pub(super) fn attend_layer(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        q: CpuTensor<'_>,
        pages: Option<PageLists<'_>>,
        mut out: CpuTensorMut<'_>,
    ) -> Result<(), Error> {
        let out = SharedOut::new(&mut out);
        self.lay_out_lanes(plan, layer);
        self.fetching = true;
        self.ask(plan, layer, q, pages)?;
        let (geometry, tables) = (&self.geometry, &self.tables);
        self.scratch.schedule(geometry, &self.parts, |lane, page| {
            let group = tables.groups(plan.entries[lane.entry].sequence)[page as usize];
            group * geometry.heads() as u32 + geometry.head(layer, lane.kv_head) as u32
        });
        if let Err(Failed) = self.run_waves(plan)? {
            return Err(self.parts.engine.failure());
        }
        self.fetching = false;
        self.end(plan, out)?;
        self.count(plan, layer);
        Ok(())
    }

    fn lay_out_lanes(&mut self, plan: &StepPlan, layer: usize) {
        let (kv_heads, group, dim) = (self.geometry.kv_heads(), self.geometry.group(), self.geometry.head_dim());
        let scratch = &mut self.scratch;
        scratch.live = plan.entries.len() * kv_heads;
        if scratch.lanes.len() < scratch.live {
            scratch.lanes.resize_with(scratch.live, Lane::new);
        }
        let mut queries = 0;
        for (index, lane) in scratch.lanes[..scratch.live].iter_mut().enumerate() {
            let entry = &plan.entries[index / kv_heads];
            lane.entry = index / kv_heads;
            lane.kv_head = index % kv_heads;
            lane.head = self.tables.index(entry.sequence, layer, lane.kv_head);
            lane.rows = entry.tokens * group;
            lane.queries = queries;
            lane.places.clear();
            queries += lane.rows * dim;
        }
        grow(&mut scratch.queries, queries);
        scratch.waited.clear();
        scratch.waited.resize(self.threads.count(), Duration::ZERO);
    }

    /// Steps through the waves: the next wave's copies are queued before this one's attention begins.
    fn run_waves(&mut self, plan: &StepPlan) -> Result<Result<(), Failed>, Error> {
        let Scratch { lanes, live, queries, states, schedule, waited, .. } = &mut self.scratch;
        let lanes = &lanes[..*live];
        let attention = Attention {
            geometry: &self.geometry,
            parts: &self.parts,
            plan,
            lanes,
            queries,
            states: Shares::new(states),
            waited: Shares::new(waited),
        };
        let failed = std::sync::atomic::AtomicBool::new(false);
        for wave in 0..schedule.waves() {
            // The wave after next reuses the staging slots of this one, so its copies have to wait until this one is done.
            let ready = if wave == 0 { 0..2 } else { wave + 1..wave + 2 };
            for next in ready.filter(|&next| next < schedule.waves()) {
                if self.parts.engine.submit(schedule.jobs(next)).is_err() {
                    return Ok(Err(Failed));
                }
            }
            let tasks = schedule.tasks(wave);
            self.threads.run(tasks.len(), &|thread, task| {
                if !failed.load(std::sync::atomic::Ordering::Relaxed) && attention.run(thread, &tasks[task]).is_err() {
                    failed.store(true, std::sync::atomic::Ordering::Relaxed);
                }
            })?;
            if failed.load(std::sync::atomic::Ordering::Relaxed) {
                return Ok(Err(Failed));
            }
        }
        self.stall += waited.iter().max().copied().unwrap_or_default();
        Ok(Ok(()))
    }

    /// Merges each lane's states in the order of its segments and writes the output.
    fn end(&mut self, plan: &StepPlan, out: SharedOut) -> Result<(), Error> {
        let Scratch { lanes, live, states, endings, .. } = &mut self.scratch;
        let lanes = &lanes[..*live];
        endings.clear();
        for (index, lane) in (0u32..).zip(lanes) {
            for from in (0..lane.rows).step_by(waves::ROW_BLOCK) {
                endings.push((index, from as u32..(from + waves::ROW_BLOCK).min(lane.rows) as u32));
            }
        }
        let (geometry, states) = (&self.geometry, Shares::new(states));
        let (dim, group) = (geometry.head_dim(), geometry.group());
        self.threads.run(endings.len(), &|_, task| {
            let (lane, rows) = &endings[task];
            let lane = &lanes[*lane as usize];
            let rows = rows.start as usize..rows.end as usize;
            // SAFETY: tasks have disjoint rows, and different segments are different states.
            let mut total = unsafe { lane.state(&states, dim, 0, rows.clone()) };
            for segment in 1..lane.states() {
                // SAFETY: as above.
                let part = unsafe { lane.state(&states, dim, segment, rows.clone()) };
                total.merge(&part);
            }
            let mut row_out = [0.0; 256];
            for (index, row) in rows.clone().enumerate() {
                let single = State {
                    max: &mut total.max[index..index + 1],
                    sum: &mut total.sum[index..index + 1],
                    acc: &mut total.acc[index * dim..(index + 1) * dim],
                };
                single.finish(&mut row_out[..dim]);
                let token = plan.entries[lane.entry].row + row / group;
                let at = (token * geometry.query_heads() + lane.kv_head * group + row % group) * dim;
                // SAFETY: `out` is borrowed by `attend_layer`, and rows are disjoint.
                unsafe { out.write(at, &row_out[..dim]) };
            }
        })
    }

    fn count(&mut self, plan: &StepPlan, layer: usize) {
        let page_bytes = self.geometry.page_bytes() as u64;
        for lane in &self.scratch.lanes[..self.scratch.live] {
            let phase = plan.entries[lane.entry].phase;
            let counts = self.counts[self.geometry.head(layer, lane.kv_head)].of_mut(phase);
            let Tally { hits, compulsory, capacity, overflow, evictions } = lane.tally;
            counts.demanded += lane.pages.len() as u64;
            counts.hits += u64::from(hits);
            counts.compulsory += u64::from(compulsory);
            counts.capacity += u64::from(capacity);
            counts.overflow += u64::from(overflow);
            counts.evictions += u64::from(evictions);
            counts.fetched_bytes += u64::from(compulsory + capacity) * page_bytes;
        }
    }

    /// After a failure or a panic, and with nothing under way: no page that a layer was to fetch counts as resident. They are all
    /// still reserved.
    pub(super) fn forget_fetches(&mut self) {
        if !std::mem::take(&mut self.fetching) {
            return;
        }
        let (heads, _) = self.tables.all();
        for lane in &self.scratch.lanes[..self.scratch.live] {
            for (&page, place) in lane.pages.iter().zip(&lane.places) {
                if matches!(place, Place::Fetch(_)) {
                    heads[lane.head].table.drop_page(page);
                }
            }
        }
    }
}

impl Scratch {
    /// What the head of a lane demanded in the layer attended last.
    pub(super) fn demand(&self, lane: usize) -> Option<HeadDemand<'_>> {
        let lane = self.lanes[..self.live].get(lane)?;
        let scores = lane.scoring.scores();
        Some(HeadDemand { pages: &lane.pages, places: &lane.places, tally: lane.tally, scores })
    }
}

impl Lane {
    fn new() -> Self {
        Lane {
            entry: 0,
            kv_head: 0,
            head: 0,
            rows: 0,
            queries: 0,
            pages: Vec::new(),
            places: Vec::new(),
            slots: Vec::new(),
            tally: Tally::default(),
            error: None,
            segment: 1,
            running: false,
            states: 0,
            scoring: Default::default(),
        }
    }

    fn segments(&self) -> usize {
        self.pages.len().div_ceil(self.segment)
    }

    /// Softmax states that the lane keeps per row.
    fn states(&self) -> usize {
        if self.running { 1 } else { self.segments() }
    }

    fn segment_pages(&self, segment: usize) -> Range<usize> {
        segment * self.segment..((segment + 1) * self.segment).min(self.pages.len())
    }

    /// Floats that the lane's states take.
    fn state_floats(&self, dim: usize) -> usize {
        self.states() * self.rows * (dim + 2)
    }

    /// A view of some rows of one state.
    ///
    /// # Safety
    /// No other view of these rows of this state is alive.
    unsafe fn state<'s>(&self, states: &'s Shares<'_, f32>, dim: usize, index: usize, rows: Range<usize>) -> State<'s> {
        let base = self.states + index * self.rows * (dim + 2);
        // SAFETY: the three ranges are disjoint, and no one else has them by the caller's promise.
        unsafe {
            State {
                max: states.range(base + rows.start, rows.len()),
                sum: states.range(base + self.rows + rows.start, rows.len()),
                acc: states.range(base + 2 * self.rows + rows.start * dim, rows.len() * dim),
            }
        }
    }
}

/// The arithmetic of one layer, shared by the threads.
struct Attention<'a> {
    geometry: &'a Geometry,
    parts: &'a Parts,
    plan: &'a StepPlan,
    lanes: &'a [Lane],
    queries: &'a [f32],
    states: Shares<'a, f32>,
    waited: Shares<'a, Duration>,
}

impl Attention<'_> {
    /// Attends some rows of a lane over some of its segments, in their order.
    fn run(&self, thread: usize, task: &waves::Task) -> Result<(), Failed> {
        let lane = &self.lanes[task.lane as usize];
        let dim = self.geometry.head_dim();
        let entry = &self.plan.entries[lane.entry];
        let group = self.geometry.group();
        for segment in task.segments.start as usize..task.segments.end as usize {
            let range = lane.segment_pages(segment);
            let mut views = [PageView { data: std::ptr::null(), first: 0, tokens: 0 }; MAX_SEGMENT];
            let views = &mut views[..range.len()];
            self.view_pages(thread, lane, range, entry.start + entry.tokens, views)?;
            let rows = task.rows.start as usize..task.rows.end as usize;
            let tile_rows = rows.len().div_ceil(rows.len().div_ceil(MAX_ROWS));
            for from in rows.clone().step_by(tile_rows) {
                let tile = from..(from + tile_rows).min(rows.end);
                let mut visible = [0; MAX_ROWS];
                for (visible, row) in visible.iter_mut().zip(tile.clone()) {
                    *visible = (entry.start + row / group + 1) as u32;
                }
                let state_index = if lane.running { 0 } else { segment };
                // SAFETY: tasks of a wave differ in lane, state or rows, and waves run one after the other.
                let mut state = unsafe { lane.state(&self.states, dim, state_index, tile.clone()) };
                if !lane.running || segment == 0 {
                    state.clear();
                }
                let queries = &self.queries[lane.queries + tile.start * dim..lane.queries + tile.end * dim];
                let tile = Tile { queries, visible: &visible[..tile.len()] };
                // SAFETY: `view_pages` has made sure that every page's bytes are there, and nobody writes them before the wave ends:
                // copies go to ways outside of the demand and to the other half of the staging slots. The tile's and the state's
                // lengths follow from its rows.
                unsafe { self.parts.kernels.attend(&tile, views, &mut state) };
            }
        }
        Ok(())
    }

    /// Waits for the pages that are under way and says where they are.
    fn view_pages(
        &self,
        thread: usize,
        lane: &Lane,
        range: Range<usize>,
        end: usize,
        views: &mut [PageView],
    ) -> Result<(), Failed> {
        let page_tokens = self.geometry.page_tokens();
        for (index, view) in range.zip(views) {
            let slot = lane.slots[index];
            if !matches!(lane.places[index], Place::Hit(_)) {
                self.wait_for(thread, slot)?;
            }
            let first = lane.pages[index] as usize * page_tokens;
            *view = PageView {
                data: self.parts.arena.slot(slot),
                first: first as u32,
                tokens: page_tokens.min(end - first) as u32,
            };
        }
        Ok(())
    }

    fn wait_for(&self, thread: usize, slot: u32) -> Result<(), Failed> {
        if self.parts.engine.is_quiet(slot) {
            return self.parts.engine.wait_for(slot);
        }
        let begin = Instant::now();
        let result = self.parts.engine.wait_for(slot);
        // SAFETY: each thread has an element of its own.
        unsafe { *self.waited.element(thread) += begin.elapsed() };
        result
    }
}

/// Makes room without giving any back, and without a meaning for what is in it.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}
