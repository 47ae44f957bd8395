//! Heads to append to and to select for, and where a demand goes.
#![allow(dead_code, reason = "each test uses some of it")]

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::common::layout::{Demand, Entry, Fault, Head, NONE, Selection, Sequence, Shape, Tables};
use crate::common::{Buffer, Gpu};

/// Heads whose pages are all resident: way = page, in scattered slots. One layer, groups in reverse.
pub struct Heads {
    pub shape: Shape,
    pub slots: Vec<u32>,
    groups: Vec<u32>,
    room: usize,
    pub tables: Tables,
    pub heads: Buffer<Head>,
    /// The two lists, one behind the other.
    selected: Buffer<u32>,
    pub step_number: Buffer<u64>,
    _sequences: Buffer<Sequence>,
    _stamps: Buffer<u64>,
    _words: [Buffer<u32>; 4],
}

impl Heads {
    /// `resident` of the `room` pages of each head have a way.
    pub fn new(gpu: &Gpu, shape: Shape, sequences: usize, room: usize, resident: usize) -> Heads {
        let (per_sequence, mut rng) = (shape.heads as usize, SmallRng::seed_from_u64(5));
        let lanes = sequences * per_sequence;
        let sequence = |index: usize| Sequence {
            ways_at: (index * per_sequence * room) as u64,
            pages_at: (index * per_sequence * room) as u64,
            groups_at: (index * room) as u64,
            ways_room: room as u32,
            pages_room: room as u32,
        };
        let mut slots: Vec<u32> = (0..(lanes * room) as u32).collect();
        slots.shuffle(&mut rng);
        let groups: Vec<u32> = (0..(sequences * room) as u32).rev().collect();
        let way_of_page = (0..lanes * room).map(|i| if i % room < resident { (i % room) as u32 } else { NONE >> 1 });
        let head = Head { pages: room as u32, ways: room as u32, ..Head::default() };
        let sequences = gpu.upload(&(0..sequences).map(sequence).collect::<Vec<_>>());
        let heads = gpu.upload(&vec![head; lanes]);
        let (stamps, selected) = (gpu.zeros(lanes * room), gpu.alloc(2 * lanes * room));
        let words = [
            gpu.upload(&slots),
            gpu.zeros(lanes * room),
            gpu.upload(&way_of_page.collect::<Vec<_>>()),
            gpu.upload(&groups),
        ];
        let tables = Tables {
            sequences: sequences.ptr(),
            heads: heads.ptr(),
            slot_of_way: words[0].ptr(),
            page_of_way: words[1].ptr(),
            stamp_of_way: stamps.ptr(),
            way_of_page: words[2].ptr(),
            selected: [selected.ptr(), selected.at(lanes * room)],
            groups: words[3].ptr(),
        };
        Heads {
            shape,
            slots,
            groups,
            room,
            tables,
            heads,
            selected,
            step_number: gpu.upload(&[1]),
            _sequences: sequences,
            _stamps: stamps,
            _words: words,
        }
    }

    pub fn host(&self, sequence: usize, head: usize, page: usize) -> u32 {
        self.groups[sequence * self.room + page] * self.shape.heads + head as u32
    }

    /// What was last selected.
    pub fn selected(&self, lane: usize) -> Vec<u32> {
        let heads = self.heads.read();
        let first = (heads[lane].list as usize * heads.len() + lane) * self.room;
        self.selected.read_range(first, heads[lane].selected as usize)
    }
}

pub fn shape(dim: usize, page_tokens: usize, kv_heads: u32, group: u32) -> Shape {
    Shape { kv_heads, group, page_tokens: page_tokens as u32, heads: kv_heads, first_head: 0, head_dim: dim as u32 }
}

/// Where a demand goes.
pub struct DemandBuffers {
    pages: Buffer<u32>,
    counts: Buffer<u32>,
    pub scores: Buffer<f32>,
    pub fault: Buffer<Fault>,
    pub view: Demand,
}

impl DemandBuffers {
    pub fn new(gpu: &Gpu, lanes: usize, room: usize) -> DemandBuffers {
        let (pages, counts) = (gpu.alloc(lanes * room), gpu.alloc(lanes));
        let view = Demand { pages: pages.ptr(), places: 0, counts: counts.ptr(), room: room as u32, unused: 0 };
        DemandBuffers { pages, counts, scores: gpu.alloc(lanes * room), fault: gpu.zeros(1), view }
    }

    /// Each lane's demand.
    pub fn select(
        &self,
        gpu: &Gpu,
        heads: &Heads,
        entries: &Buffer<Entry>,
        selection: Selection,
        offsets: &[u32],
        lists: &[u32],
    ) -> Result<Vec<Vec<u32>>, String> {
        let (offsets, lists) = (gpu.upload(offsets), gpu.upload(lists));
        gpu.launch(
            "wakekv_select",
            (heads.shape.kv_heads as usize, 2, 1),
            64,
            (256 + 2 + 8) * 4,
            &[
                &heads.tables,
                &heads.shape,
                &entries.ptr(),
                &heads.step_number.ptr(),
                &selection,
                &self.scores.ptr(),
                &offsets.ptr(),
                &lists.ptr(),
                &self.view,
                &self.fault.ptr(),
            ],
        );
        gpu.synchronize()?;
        let room = self.view.room as usize;
        let counts = self.counts.read();
        Ok(counts.iter().enumerate().map(|(lane, &count)| self.pages.read_range(lane * room, count as usize)).collect())
    }
}
