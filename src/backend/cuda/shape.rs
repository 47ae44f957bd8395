//! How large a step is, and with it every launch.

use super::CudaBackend;
use super::kernels::CHUNK_ROWS;
use super::layout;
use crate::backend::{EntryPlan, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::selection::{Digest, Selection};
use crate::table::Phase;

/// What a step's launches are made from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepShape {
    pub entries: usize,
    pub lanes: usize,
    /// Most new tokens of an entry.
    pub tokens: usize,
    /// Pages of the longest sequence after the step, rounded up, so that a captured step stays valid while sequences grow.
    pub room: usize,
    /// Ways of the head that has most, rounded up.
    pub ways: usize,
    /// Pages of one entry that its new tokens are written to, at most.
    pub touched: usize,
    /// Pages of one entry that one launch of append covers.
    pub appended: usize,
    /// Whether pages that the step opens may lose their ways again before its end.
    pub loses: bool,
    /// Whether pages seal.
    pub seals: bool,
    /// Staging slots of each lane.
    pub ring: usize,
    /// Waves of attention, that over the hits included.
    pub waves: usize,
    /// Parts that each page list is cut into.
    pub splits: usize,
    /// New tokens of each entry that are attended at once.
    pub window: usize,
    /// Ways that the step grants.
    pub grants: usize,
}

impl StepShape {
    /// Threads of a block that works on one head's tables.
    pub fn threads(&self) -> usize {
        self.room.max(self.ways).clamp(32, 256).next_multiple_of(32)
    }

    /// Query rows of a tile, given those of a decode step's kernel.
    pub fn tile_rows(&self, decode_rows: usize) -> usize {
        if self.tokens > 1 { CHUNK_ROWS } else { decode_rows }
    }
}

/// Ways that the residency kernel can sort in shared memory.
const MOST_WAYS: usize = 4096;
/// Page numbers have 20 bits in the residency kernel's keys.
const MOST_PAGES: usize = 1 << 20;
/// Bounds of a grid's second and third dimension.
const MOST_BLOCKS: usize = 65_535;
/// Device memory for the partial states of a chunk, beyond which it is attended in windows.
const PARTIAL_BYTES: usize = 64 << 20;
/// A part of a page list is worth a block from so many pages on.
const PAGES_PER_SPLIT: usize = 8;
const MOST_SPLITS: usize = 64;

impl CudaBackend {
    /// # Errors
    /// The batch does not suit the device; nothing has changed.
    pub(super) fn shape_of(&self, plan: &StepPlan) -> Result<StepShape, Error> {
        self.shape_for(plan, None)
    }

    /// The shape of a step like this one whose sequences may grow to `pages` pages.
    pub(super) fn shape_for(&self, plan: &StepPlan, pages: Option<usize>) -> Result<StepShape, Error> {
        let geometry = &self.geometry;
        let (entries, kv_heads) = (plan.entries.len(), geometry.kv_heads());
        let lanes = entries * kv_heads;
        if entries > MOST_BLOCKS {
            return Err(Error::Batch { entry: MOST_BLOCKS, reason: "a CUDA step takes at most 65,535 sequences" });
        }
        let ring = self.staging.count / lanes;
        let mut shape = StepShape {
            entries,
            lanes,
            ring,
            seals: !plan.groups.is_empty(),
            grants: plan.ways.len(),
            ..StepShape::default()
        };
        let (mut overflow, mut demanded) = (0, 1);
        for entry in &plan.entries {
            let all = pages.unwrap_or(0).max(geometry.pages(entry.start + entry.tokens));
            if all > MOST_PAGES {
                return Err(Error::TooLong {
                    tokens: entry.start + entry.tokens,
                    limit: MOST_PAGES * geometry.page_tokens(),
                });
            }
            let (most, fewest) = self.tables.ways_after(plan, entry);
            let touched = geometry.pages(entry.start + entry.tokens) - entry.start / geometry.page_tokens();
            let read = self.most_demanded(entry, all);
            let pinned = self.pins.sinks as usize + self.pins.recent as usize;
            shape.tokens = shape.tokens.max(entry.tokens);
            shape.room = shape.room.max(all);
            shape.ways = shape.ways.max(most);
            shape.touched = shape.touched.max(touched);
            // Each page that opens takes an older one's way as long as there is one that is neither pinned nor the step's.
            shape.loses |= touched > 1 && touched + pinned + 1 > fewest;
            overflow = overflow.max(read.saturating_sub(fewest));
            demanded = demanded.max(read);
        }
        if shape.ways > MOST_WAYS {
            return Err(Error::Setting {
                knob: "pages_per_head",
                value: shape.ways.to_string(),
                rule: format!("a head has at most {MOST_WAYS} ways on CUDA: set a lower limit"),
            });
        }
        if ring == 0 && (shape.loses || overflow > 0) {
            return Err(Error::Setting {
                knob: "staging_pages",
                value: self.staging.count.to_string(),
                rule: format!("a step of {entries} sequences needs {lanes}, one for each KV head of a layer"),
            });
        }
        shape.room = shape.room.next_power_of_two();
        shape.ways = shape.ways.next_power_of_two();
        shape.appended = if shape.loses { ring.min(shape.touched) } else { shape.touched };
        shape.waves = 2 + overflow.div_ceil(ring.max(1));
        self.check_waves(&shape, overflow)?;
        self.divide(&mut shape, demanded);
        self.kernels.demand.allow_shared(self.demand_shared(&shape))?;
        Ok(shape)
    }

    /// wakekv_demand keeps a word of shared memory for each wave in which the `overflow` of the entry that has most passes through the ring.
    fn check_waves(&self, shape: &StepShape, overflow: usize) -> Result<(), Error> {
        let (needed, limit) = (self.demand_shared(shape), self.most_shared);
        if needed <= limit {
            return Ok(());
        }
        // That of the most ways leaves room for some.
        let most_waves = shape.waves - (needed - limit).div_ceil(4);
        let least = shape.lanes * overflow.div_ceil(most_waves - 2);
        Err(Error::Setting {
            knob: "staging_pages",
            value: self.staging.count.to_string(),
            rule: format!(
                "a step of {} sequences needs {least} at least, or more pages_per_head: an entry may read {overflow} pages beyond its \
                 ways, which makes {} waves; that takes {needed} bytes of shared memory, and a block of this device has at most {limit}",
                shape.entries, shape.waves
            ),
        })
    }

    /// Pages that an entry may demand, of `all` that it may have.
    fn most_demanded(&self, entry: &EntryPlan, all: usize) -> usize {
        match self.selection {
            Selection::TopPages { count, sink_pages, recent_pages, .. } if entry.phase == Phase::Decode => {
                // The window before the last page, and whatever the step's tokens are written to.
                let new = entry.tokens.div_ceil(self.geometry.page_tokens()) + 1;
                all.min(sink_pages.saturating_add(count).saturating_add(recent_pages).saturating_add(new + 1))
            }
            _ => all,
        }
    }

    /// Windows, so that the partial states stay within bounds, and splits, so that there are blocks for all multiprocessors.
    fn divide(&self, shape: &mut StepShape, demanded: usize) {
        let group = self.geometry.group();
        let rows = shape.tile_rows(self.kernels.rows);
        let tiles = |window: usize| (window * group).div_ceil(rows);
        let blocks = |window: usize| shape.lanes * tiles(window);
        let state_bytes = 4 * self.geometry.head_dim() + 8;
        let token_bytes = 2 * shape.lanes * group * state_bytes;
        let fitting = (PARTIAL_BYTES / token_bytes).max(1).min(shape.tokens);
        let addressable = (MOST_BLOCKS / self.geometry.kv_heads()).max(1) * rows / group;
        let window = fitting.min(addressable.max(1));
        let wanted = (2 * self.multiprocessors).div_ceil(blocks(window)).min(MOST_SPLITS);
        let useful = demanded.div_ceil(PAGES_PER_SPLIT);
        let affordable = (PARTIAL_BYTES / (token_bytes * window)).max(1);
        shape.window = window;
        shape.splits = wanted.min(useful).min(affordable).max(1);
    }

    /// What the kernels are told of the model, for one layer.
    pub(super) fn kernel_shape(&self, layer: usize) -> layout::Shape {
        layout::Shape {
            kv_heads: self.geometry.kv_heads() as u32,
            group: self.geometry.group() as u32,
            page_tokens: self.geometry.page_tokens() as u32,
            heads: self.geometry.heads() as u32,
            first_head: self.geometry.head(layer, 0) as u32,
            head_dim: self.geometry.head_dim() as u32,
        }
    }

    /// Shared memory of wakekv_demand.
    pub(super) fn demand_shared(&self, shape: &StepShape) -> usize {
        8 * shape.ways + 4 * (12 + shape.waves)
    }

    /// Shared memory of wakekv_score.
    pub(super) fn score_shared(&self) -> usize {
        score_shared(&self.geometry, self.selection)
    }

    pub(super) fn digest_stride(&self) -> usize {
        digest_stride(&self.geometry, self.selection)
    }
}

/// Shared memory of wakekv_append, in which a sealed page's digest is made.
pub(super) fn append_shared(geometry: &Geometry, selection: Selection) -> usize {
    let dim = geometry.head_dim();
    if is_rotated(selection) { 4 * (17 * dim + geometry.page_tokens()) } else { 8 * dim }
}

fn is_rotated(selection: Selection) -> bool {
    let digest = selection.digest();
    matches!(digest, Some(Digest::RotatedSketch1 | Digest::RotatedSketch2 | Digest::RotatedSketch3))
}

/// Shared memory of wakekv_score: the queries, rotated sketches' copy of them, and per warp a digest and the queries in bytes. None where
/// nothing is scored.
pub(super) fn score_shared(geometry: &Geometry, selection: Selection) -> usize {
    match selection.digest() {
        Some(_) => geometry.group().max(4) * query_shared(geometry, selection) + digests_shared(geometry, selection),
        None => 0,
    }
}

/// The part of each query head.
fn query_shared(geometry: &Geometry, selection: Selection) -> usize {
    let copies = if is_rotated(selection) { 2 } else { 1 };
    copies * 4 * geometry.head_dim()
}

/// The part of the warps.
fn digests_shared(geometry: &Geometry, selection: Selection) -> usize {
    4 * (digest_stride(geometry, selection) + 4 * geometry.head_dim())
}

/// Whether a block of the device has the shared memory that scoring takes.
pub(super) fn check_score(geometry: &Geometry, selection: Selection, limit: usize) -> Result<(), Error> {
    let (needed, group) = (score_shared(geometry, selection), geometry.group());
    if needed <= limit {
        return Ok(());
    }
    let most = limit.saturating_sub(digests_shared(geometry, selection)) / query_shared(geometry, selection);
    Err(Error::Setting {
        knob: "query_heads",
        value: geometry.query_heads().to_string(),
        rule: format!(
            "a KV head can have {most} of them at most with this head_dim and digest, not {group}: scoring takes {needed} bytes of \
             shared memory, and a block of this device has at most {limit}"
        ),
    })
}

/// Bytes from one digest to the next.
pub(super) fn digest_stride(geometry: &Geometry, selection: Selection) -> usize {
    selection.digest().map_or(0, |digest| digest.bytes(geometry).next_multiple_of(16))
}

/// A kernel's fault in words. None of them is the engine's doing.
pub(super) fn describe_fault(fault: &layout::Fault, geometry: &Geometry) -> Error {
    let reason = match fault.kind {
        layout::FAULT_NO_WAY => "no way was left for a page to open in",
        layout::FAULT_NOT_THERE => "a demanded page had not arrived when it was to be attended",
        layout::FAULT_BAD_DEMAND => "a demand was not an ascending list of pages that the head has",
        layout::FAULT_TOO_MANY => "a demand needed more waves than the step has",
        _ => "an unknown fault",
    };
    let (head, kv_heads) = (fault.head as usize, geometry.kv_heads());
    Error::DeviceFault {
        reason,
        sequence: fault.sequence,
        layer: head / kv_heads,
        kv_head: head % kv_heads,
        page: (fault.page != layout::NONE).then_some(fault.page),
    }
}
