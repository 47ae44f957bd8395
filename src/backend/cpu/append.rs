//! Writes the new tokens of one layer into open pages, opens and seals pages, and sends sealed ones to the reservoir.
//!
//! A page that has lost its way before its tokens are written (a prefill chunk with more pages than ways) passes through the
//! staging slots: written, mirrored, gone.

use super::copy::{Job, Kind};
use super::tables::Head;
use super::threads::Shares;
use super::{CpuBackend, CpuTensor};
use crate::backend::{EntryPlan, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::stats::Counts;
use crate::table::TableError;

/// What keeps an append of one head from going on.
enum Stop {
    Table(TableError),
    /// The engine knows why.
    Copy,
}

impl CpuBackend {
    pub(super) fn append_layer(
        &mut self,
        plan: &StepPlan,
        layer: usize,
        k: CpuTensor<'_>,
        v: CpuTensor<'_>,
    ) -> Result<(), Error> {
        let kv_heads = self.geometry.kv_heads();
        let tasks = plan.entries.len() * kv_heads;
        self.lane_counts.clear();
        self.lane_counts.resize(tasks, Counts::default());
        let first_head = self.tables.index(0, layer, 0);
        let stride = self.tables.index(1, layer, 0) - first_head;
        let (heads, groups) = self.tables.all();
        let heads = Shares::new(heads);
        let counts = Shares::new(&mut self.lane_counts);
        let stop = parking_lot::Mutex::new(None);
        let writer = Writer {
            geometry: &self.geometry,
            parts: &self.parts,
            layer,
            k,
            v,
            staging_per_thread: self.parts.staging.count / self.threads.count() as u32,
        };
        self.threads.run(tasks, &|thread, task| {
            let entry = &plan.entries[task / kv_heads];
            let kv_head = task % kv_heads;
            // SAFETY: sequences of a plan are distinct, so each task has a head of its own.
            let head = unsafe { heads.element(first_head + entry.sequence as usize * stride + kv_head) };
            // SAFETY: each task runs once.
            let counts = unsafe { counts.element(task) };
            let groups = &groups[entry.sequence as usize];
            let result = writer
                .open_pages(plan.number, entry, head, counts)
                .and_then(|()| writer.write_pages(thread as u32, entry, kv_head, head, groups, counts));
            if let Err(error) = result {
                stop.lock().get_or_insert(error);
            }
        })?;
        for (task, &counts) in self.lane_counts.iter().enumerate() {
            let entry = &plan.entries[task / kv_heads];
            *self.counts[self.geometry.head(layer, task % kv_heads)].of_mut(entry.phase) += counts;
        }
        match stop.into_inner() {
            None => Ok(()),
            Some(Stop::Table(error)) => Err(error.into()),
            Some(Stop::Copy) => Err(self.parts.engine.failure()),
        }
    }
}

/// The batch's tokens in one layer on their way into pages.
struct Writer<'a> {
    geometry: &'a Geometry,
    parts: &'a super::Parts,
    layer: usize,
    k: CpuTensor<'a>,
    v: CpuTensor<'a>,
    /// Each thread has staging slots of its own, so that it need not ask the others.
    staging_per_thread: u32,
}

impl Writer<'_> {
    /// Opens the pages that the entry's tokens begin. Evicted pages are all sealed and mirrored, or of this very step and
    /// not written yet: the page that was open when the step began keeps its way, in case the step is undone.
    fn open_pages(&self, step: u64, entry: &EntryPlan, head: &mut Head, counts: &mut Counts) -> Result<(), Stop> {
        let (before, after) = (self.geometry.pages(entry.start), self.geometry.pages(entry.start + entry.tokens));
        let open = (self.geometry.sealed_pages(entry.start) as u32..before as u32).next();
        for _ in before..after {
            let opened = head.table.open(step, entry.phase, self.parts.pins, open).map_err(Stop::Table)?;
            counts.evictions += u64::from(opened.evicted.is_some());
        }
        Ok(())
    }

    /// Writes the tokens, page by page.
    fn write_pages(
        &self,
        thread: u32,
        entry: &EntryPlan,
        kv_head: usize,
        head: &Head,
        groups: &[u32],
        counts: &mut Counts,
    ) -> Result<(), Stop> {
        let page_tokens = self.geometry.page_tokens();
        let end = entry.start + entry.tokens;
        let mut staged = 0;
        #[allow(
            clippy::needless_range_loop,
            reason = "a page is a number of tokens first, and an index of groups only once full"
        )]
        for page in self.geometry.sealed_pages(entry.start)..self.geometry.pages(end) {
            let slot = head.table.slot_of(page as u32).unwrap_or_else(|| {
                let turn = staged % self.staging_per_thread;
                staged += 1;
                self.parts.staging.first + thread * self.staging_per_thread + turn
            });
            // A staging slot may still be on its way to the reservoir.
            self.parts.engine.wait_for(slot).map_err(|_| Stop::Copy)?;
            let from = entry.start.max(page * page_tokens);
            let to = end.min((page + 1) * page_tokens);
            for position in from..to {
                self.write_token(slot, position % page_tokens, entry.row + position - entry.start, kv_head);
            }
            if to == (page + 1) * page_tokens {
                self.seal(slot, groups[page], kv_head)?;
                counts.mirrored_bytes += self.geometry.page_bytes() as u64;
            }
        }
        Ok(())
    }

    fn write_token(&self, slot: u32, token: usize, row: usize, kv_head: usize) {
        let dim = self.geometry.head_dim();
        let (bytes, dtype) = (dim * self.geometry.dtype().bytes(), self.geometry.dtype());
        let at = (row * self.geometry.kv_heads() + kv_head) * dim;
        let mut scratch = [0.0; MAX_HEAD_DIM];
        for (tensor, block) in [(&self.k, 0), (&self.v, self.geometry.block_bytes())] {
            // SAFETY: the token's row lies inside the slot. The slot is a way of this task's head or a staging slot of this thread,
            // no copy touches it (`wait_for`), and attention does not run.
            let into = unsafe {
                let address = self.parts.arena.slot(slot).add(block + token * bytes);
                std::slice::from_raw_parts_mut(address, bytes)
            };
            tensor.store(at, dtype, into, &mut scratch);
        }
    }

    /// The page is full: it leaves a digest, and goes to the reservoir.
    fn seal(&self, slot: u32, group: u32, kv_head: usize) -> Result<(), Stop> {
        let host = group * self.geometry.heads() as u32 + self.geometry.head(self.layer, kv_head) as u32;
        if let Some(digests) = &self.parts.digests {
            // SAFETY: the page is full, and only this task writes it. The digest belongs to the page's host slot, which is this head's.
            unsafe { digests.build(host, self.parts.arena.slot(slot)) };
        }
        self.parts.engine.submit(&[Job { kind: Kind::Mirror, host, device: slot }]).map_err(|_| Stop::Copy)
    }
}

const MAX_HEAD_DIM: usize = 256;
