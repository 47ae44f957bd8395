//! The launches of a layer, on both streams.
//!
//! ```text
//! compute   open → append ──┬─ score → select → demand ──┬─ attend 0 ───────┬─ attend 1 ─┬─ attend 2 … → merge
//!                           │                            │ decided          │ fetched    │ attended
//! copy                      └─ (mirror, if pages ────────┴─ gather 1 ───────┴─ mirror ───┴─ gather 2 …
//!                               lose their ways)
//! ```
//!
//! The next layer's append waits for all of the copy stream, because it uses the same lists and staging slots. A page that a
//! mirror reads keeps its way until then, for ways change hands in the same layer only, a step later.

use std::f32::consts::LOG2_E;

use cudarc::driver::result;

use super::CudaBackend;
use super::copies::{CopyDirection, HostList, Pool, order};
use super::driver::Called;
use super::kernels::{Grid, Parameter};
use super::layout;
use super::shape::append_shared;
use super::tensor::{CudaTensor, CudaTensorMut, Lent};
use crate::backend::StepPlan;
use crate::error::Error;
use crate::selection::{Digest, PageLists, Selection};
use crate::table::Phase;

const APPEND_THREADS: usize = 128;
const SCORE_WARPS: usize = 4;
const SELECT_SHARED: usize = 1064;
const ATTEND_THREADS: usize = 128;
/// Blocks of a lane that score its pages: enough to keep the device busy with few sequences, and no more than there are pages for.
const MOST_SCORE_BLOCKS: usize = 32;

impl CudaBackend {
    pub(super) fn append_layer(&mut self, layer: usize, k: &CudaTensor<'_>, v: &CudaTensor<'_>) -> Result<(), Error> {
        let compute = self.compute.clone();
        let (k, v) = (k.lend("k", &compute)?, v.lend("v", &compute)?);
        if k.dtype != v.dtype {
            return Err(Error::Setting {
                knob: "v",
                value: v.dtype.to_string(),
                rule: format!("must have the dtype of k, {}", k.dtype),
            });
        }
        // Of an earlier layer, if its attention was left out.
        self.mirror_if_due()?;
        self.join_copies()?;
        let (counters, bytes) = self.scratch.counters();
        // SAFETY: counters inside the scratch memory, which the copy stream has done with.
        unsafe { result::memset_d8_async(counters, 0, bytes, self.compute.cu_stream()) }.called("cuMemsetD8Async")?;
        let step = self.shape;
        let (tables, shape) = (self.tables.view(), self.kernel_shape(layer));
        let (entries, number) = (self.scratch.entries(), self.scratch.step_number());
        let (pins, fault) = (self.kernel_pins(), self.scratch.fault());
        let tallies = self.tallies(layer);
        let lanes = Grid {
            blocks: (self.geometry.kv_heads(), step.entries, 1),
            threads: step.threads(),
            shared: 8 * step.threads() / 32,
        };
        // SAFETY: wakekv_open's parameters; the views are of memory that the backend owns.
        unsafe {
            let parameters: [&dyn Parameter; 7] = [&tables, &shape, &entries, &number, &pins, &tallies, &fault];
            self.kernels.open.launch(&self.compute, lanes, &parameters)
        }?;
        let mut first = 0;
        while first < step.touched {
            if first > 0 {
                self.mirror()?;
                self.join_copies()?;
                let (counters, bytes) = self.scratch.mirror_counters();
                // SAFETY: as above.
                unsafe { result::memset_d8_async(counters, 0, bytes, self.compute.cu_stream()) }
                    .called("cuMemsetD8Async")?;
            }
            self.append_pages(layer, first, step.appended.min(step.touched - first), &k, &v)?;
            self.copies.mirrors_due = step.seals || self.copies.capturing;
            first += step.appended;
        }
        Ok(())
    }

    /// Writes the new tokens of `count` pages of each entry, from the `first` one that has any.
    fn append_pages(&self, layer: usize, first: usize, count: usize, k: &Lent<'_>, v: &Lent<'_>) -> Result<(), Error> {
        let (tables, shape) = (self.tables.view(), self.kernel_shape(layer));
        let (entries, digests) = (self.scratch.entries(), self.kernel_digests());
        let (pool, staging, mirrors) = (self.pool.at(0), self.kernel_staging(), self.scratch.mirrors());
        let grid = Grid {
            blocks: (count, self.geometry.kv_heads(), self.shape.entries),
            threads: APPEND_THREADS,
            shared: append_shared(&self.geometry, self.selection),
        };
        let (dtype, first) = (k.dtype_code(), first as u32);
        let parameters: [&dyn Parameter; 11] =
            [&tables, &shape, &entries, &k.address, &v.address, &dtype, &pool, &digests, &staging, &mirrors, &first];
        // SAFETY: wakekv_append's parameters; the engine's tensors have the shape of the plan, and the other views are of memory that the
        // backend owns.
        unsafe { self.kernels.append.launch(&self.compute, grid, &parameters) }
    }

    pub(super) fn attend_layer(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        q: &CudaTensor<'_>,
        pages: Option<PageLists<'_>>,
        out: &mut CudaTensorMut<'_>,
    ) -> Result<(), Error> {
        let compute = self.compute.clone();
        let (q, out) = (q.lend("q", &compute)?, out.lend("out", &compute)?);
        if let Some(lists) = pages {
            self.upload_lists(lists)?;
        }
        self.choose(plan, layer, &q)?;
        let list = self.start_copies()?;
        let step = self.shape;
        for first_token in (0..step.tokens).step_by(step.window) {
            for wave in 0..step.waves {
                match wave {
                    0 => {}
                    1 => compute.wait(&self.events.fetched).called("cuStreamWaitEvent")?,
                    _ => self.fetch_overflow(wave, list.as_ref())?,
                }
                self.attend_wave(layer, wave, first_token, &q)?;
            }
            self.merge(layer, first_token, &q, &out)?;
        }
        Ok(())
    }

    fn upload_lists(&mut self, lists: PageLists<'_>) -> Result<(), Error> {
        if self.copies.capturing {
            let reason = "page lists lie on the host, and a captured step reads nothing there".into();
            return Err(Error::Capture { reason });
        }
        let (offsets, pages) = (self.scratch.list_offsets(), self.scratch.list_pages());
        self.frames.upload(&self.compute, offsets, bytemuck::cast_slice(lists.offsets))?;
        match lists.pages {
            [] => Ok(()),
            list => self.frames.upload(&self.compute, pages, bytemuck::cast_slice(list)),
        }
    }

    /// What each head reads, where it is, and what has to be fetched: score, select, demand.
    fn choose(&mut self, plan: &StepPlan, layer: usize, q: &Lent<'_>) -> Result<(), Error> {
        let (step, kv_heads) = (self.shape, self.geometry.kv_heads());
        let (tables, shape) = (self.tables.view(), self.kernel_shape(layer));
        let (entries, number) = (self.scratch.entries(), self.scratch.step_number());
        let (selection, scores) = (self.kernel_selection(), self.scratch.scores());
        let (demand, fault) = (self.scratch.demand(&step), self.scratch.fault());
        if self.scores(plan) {
            let blocks = step.room.div_ceil(SCORE_WARPS).min(MOST_SCORE_BLOCKS);
            let grid = Grid {
                blocks: (blocks, kv_heads, step.entries),
                threads: SCORE_WARPS * 32,
                shared: self.score_shared(),
            };
            let (digests, dtype, room) = (self.kernel_digests(), q.dtype_code(), demand.room);
            let parameters: [&dyn Parameter; 10] =
                [&tables, &shape, &entries, &selection, &digests, &q.address, &dtype, &self.scale, &scores, &room];
            // SAFETY: wakekv_score's parameters; the engine's tensor has the shape of the plan, and the other views are of memory that the
            // backend owns.
            unsafe { self.kernels.score.launch(&self.compute, grid, &parameters) }?;
        }
        let lanes = |shared| Grid { blocks: (kv_heads, step.entries, 1), threads: step.threads(), shared };
        let (offsets, pages) = (self.scratch.list_offsets(), self.scratch.list_pages());
        let parameters: [&dyn Parameter; 10] =
            [&tables, &shape, &entries, &number, &selection, &scores, &offsets, &pages, &demand, &fault];
        // SAFETY: wakekv_select's parameters; the views are of memory that the backend owns.
        unsafe { self.kernels.select.launch(&self.compute, lanes(SELECT_SHARED), &parameters) }?;
        let (fetches, staging) = (self.scratch.fetches(&step), self.kernel_staging());
        let (waves, tallies) = (step.waves as u32, self.tallies(layer));
        let parameters: [&dyn Parameter; 10] =
            [&tables, &shape, &entries, &number, &demand, &fetches, &staging, &waves, &tallies, &fault];
        // SAFETY: wakekv_demand's parameters; the views are of memory that the backend owns.
        unsafe { self.kernels.demand.launch(&self.compute, lanes(self.demand_shared(&step)), &parameters) }
    }

    /// Whether some entry may have to choose pages by their digests. In a layer that was left out when a selection was due, one
    /// that does not reselect has to as well; a kernel without work costs little.
    fn scores(&self, plan: &StepPlan) -> bool {
        let top = matches!(self.selection, Selection::TopPages { .. });
        top && (self.copies.capturing || plan.entries.iter().any(|entry| entry.phase == Phase::Decode))
    }

    /// Has the copy stream fetch what found a way, and mirror what has sealed. Pages that have lost their ways may be fetched in the very
    /// step that seals them, so those are mirrored first; else attention does not wait for mirrors. The list is on the host where
    /// DMA has needed it.
    fn start_copies(&mut self) -> Result<Option<HostList>, Error> {
        let step = self.shape;
        order(&self.compute, &self.events.decided, &self.engine.stream)?;
        self.copies.under_way = true;
        if step.loses {
            self.mirror_if_due()?;
        }
        let list = self.scratch.fetches(&step);
        let host_list = if self.engine.prefers_dma(CopyDirection::Fetch, 0, !self.copies.capturing) {
            let capacity = list.first_room as usize + step.waves.saturating_sub(2) * list.wave_room as usize;
            Some(self.engine.read(&list, step.waves, capacity)?)
        } else {
            None
        };
        self.fetch(1, host_list.as_ref())?;
        self.events.fetched.record(&self.engine.stream).called("cuEventRecord")?;
        self.mirror_if_due()?;
        Ok(host_list)
    }

    /// Puts one wave's fetches on the copy stream.
    fn fetch(&mut self, wave: usize, list: Option<&HostList>) -> Result<(), Error> {
        let (fetches, places) = (self.scratch.fetches(&self.shape), self.scratch.demand(&self.shape).places);
        let CudaBackend { engine, kernels, reservoir, .. } = self;
        let pool = Pool { address: self.pool.at(0), page_bytes: self.geometry.page_bytes() };
        match list {
            // SAFETY: the list and the places are the scratch memory's; the kernels have put nothing into the list that is outside the
            // pool or the reservoir.
            None => unsafe { engine.gather(kernels, &fetches, wave as u32, reservoir, pool, places) },
            // SAFETY: as above.
            Some(list) => unsafe {
                engine.copy(list, wave, CopyDirection::Fetch, reservoir, pool)?;
                engine.arrive(kernels, &fetches, wave, list.wave(wave).len(), places)
            },
        }
    }

    /// Fetches a wave into the staging slots, once the wave before it has been read, and lets attention wait for it.
    fn fetch_overflow(&mut self, wave: usize, list: Option<&HostList>) -> Result<(), Error> {
        order(&self.compute, &self.events.attended, &self.engine.stream)?;
        self.fetch(wave, list)?;
        order(&self.engine.stream, &self.events.fetched, &self.compute)
    }

    /// Has the copy stream mirror the pages of the layer that have sealed, if nobody has asked for it yet.
    pub(super) fn mirror_if_due(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.copies.mirrors_due) {
            self.mirror()?;
        }
        Ok(())
    }

    fn mirror(&mut self) -> Result<(), Error> {
        order(&self.compute, &self.events.decided, &self.engine.stream)?;
        self.copies.under_way = true;
        let list = self.scratch.mirrors();
        let CudaBackend { engine, kernels, reservoir, .. } = self;
        let pool = Pool { address: self.pool.at(0), page_bytes: self.geometry.page_bytes() };
        let capacity = self.shape.lanes * self.shape.appended;
        let may_wait = self.shape.tokens > 1 && !self.copies.capturing;
        if engine.prefers_dma(CopyDirection::Mirror, capacity, may_wait) {
            let list = engine.read(&list, 2, capacity)?;
            // SAFETY: the kernels have put nothing into the list that is outside the pool or the reservoir.
            return unsafe { engine.copy(&list, 1, CopyDirection::Mirror, reservoir, pool) };
        }
        // SAFETY: as above, and the list is the scratch memory's.
        unsafe { engine.mirror(kernels, &list, reservoir, pool) }
    }

    /// Attends the pages of one wave, for the window of new tokens that begins with `first_token`.
    fn attend_wave(&self, layer: usize, wave: usize, first_token: usize, q: &Lent<'_>) -> Result<(), Error> {
        let step = &self.shape;
        let (kernel, rows) = match step.tokens {
            1 => (&self.kernels.attend, self.kernels.rows),
            _ => (&self.kernels.attend_chunk, step.tile_rows(self.kernels.rows)),
        };
        let tiles = (step.window * self.geometry.group()).div_ceil(rows);
        let grid = Grid {
            blocks: (step.splits, self.geometry.kv_heads() * tiles, step.entries),
            threads: ATTEND_THREADS,
            shared: 16 * rows * (self.geometry.head_dim() + 2),
        };
        let (shape, entries) = (self.kernel_shape(layer), self.scratch.entries());
        let (demand, attention) = (self.scratch.demand(step), self.attention(wave, first_token, q));
        // SAFETY: wakekv_attend's parameters; the engine's tensor has the shape of the plan, and the other views are of memory that the
        // backend owns.
        unsafe { kernel.launch(&self.compute, grid, &[&shape, &entries, &demand, &attention]) }
    }

    fn merge(&self, layer: usize, first_token: usize, q: &Lent<'_>, out: &Lent<'_>) -> Result<(), Error> {
        let rows = self.shape.lanes * self.shape.window * self.geometry.group();
        let threads = self.geometry.head_dim().next_multiple_of(32);
        let grid = Grid { blocks: (rows, 1, 1), threads, shared: 0 };
        let (shape, entries) = (self.kernel_shape(layer), self.scratch.entries());
        let (attention, dtype) = (self.attention(1, first_token, q), out.dtype_code());
        // SAFETY: wakekv_merge's parameters; the engine's tensor has the shape of the plan, and the other views are of memory that the
        // backend owns.
        unsafe { self.kernels.merge.launch(&self.compute, grid, &[&shape, &entries, &attention, &out.address, &dtype]) }
    }

    fn attention(&self, wave: usize, first_token: usize, q: &Lent<'_>) -> layout::Attention {
        layout::Attention {
            q: q.address,
            pool: self.pool.at(0),
            acc: self.scratch.acc(),
            state: self.scratch.state(),
            copies_per_wave: self.scratch.fetches(&self.shape).counts,
            fault: self.scratch.fault(),
            scale: self.scale * LOG2_E,
            dtype: q.dtype_code(),
            splits: self.shape.splits as u32,
            wave: wave as u32,
            first_token: first_token as u32,
            window: self.shape.window as u32,
        }
    }

    fn tallies(&self, layer: usize) -> u64 {
        self.scratch.tallies(layer * self.shape.lanes)
    }

    fn kernel_pins(&self) -> layout::Pins {
        layout::Pins { sinks: self.pins.sinks, recent: self.pins.recent }
    }

    fn kernel_staging(&self) -> layout::Staging {
        layout::Staging { first: self.staging.first as u32, ring: self.shape.ring as u32 }
    }

    fn kernel_digests(&self) -> layout::Digests {
        let kind = match self.selection.digest() {
            None => layout::DIGEST_NONE,
            Some(Digest::MinMax) => layout::DIGEST_MIN_MAX,
            Some(Digest::KeySketch2) => layout::DIGEST_SKETCH,
            Some(Digest::RotatedSketch1) => layout::DIGEST_ROTATED,
            Some(Digest::RotatedSketch2) => layout::DIGEST_ROTATED + 1,
            Some(Digest::RotatedSketch3) => layout::DIGEST_ROTATED + 2,
            Some(Digest::CuboidMean) => layout::DIGEST_CUBOID,
        };
        layout::Digests { bytes: self.digests.at(0), stride: self.digest_stride() as u64, kind, unused: 0 }
    }

    fn kernel_selection(&self) -> layout::Selection {
        let (mode, count) = match self.selection {
            Selection::All => (layout::SELECT_ALL, 0),
            Selection::TopPages { count, .. } => (layout::SELECT_TOP, u32::try_from(count).unwrap_or(u32::MAX)),
            Selection::Explicit { .. } => (layout::SELECT_LISTED, 0),
        };
        layout::Selection { mode, count, sinks: self.pins.sinks, recent: self.pins.recent, stickiness: self.stickiness }
    }
}
