//! Heads on the device and the same heads as `HeadTable`s, step by step.

mod compare;

use rand::Rng;
use rand::rngs::SmallRng;
use wakekv::table::{HeadTable, Phase, Pins, Place, Tally};

use super::common::layout::{self, Demand, Entry, Fault, PageCopy, Tables, WayGrant};
use super::common::{Buffer, Gpu};

const PAGE_TOKENS: u32 = 8;
const WAVES: usize = 2000;
/// The test's reservoir: the group of a page is this much above its number.
const FIRST_GROUP: u32 = 5;

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub entries: u32,
    pub kv_heads: u32,
    pub sinks: u32,
    pub recent: u32,
    /// Ways per head at most.
    pub budget: u32,
    pub most_pages: u32,
    pub threads: usize,
    /// Staging slots per lane.
    pub ring: u32,
}

/// A sequence, and its heads as the Rust table has them.
struct Sequence {
    tokens: u32,
    prefilled: bool,
    heads: Vec<HeadTable>,
}

pub struct World<'g> {
    gpu: &'g Gpu,
    shape: Shape,
    sequences: Vec<Sequence>,
    step: u64,
    next_slot: u32,
    tables: Tables,
    device: DeviceTables,
}

struct DeviceTables {
    _sequences: Buffer<layout::Sequence>,
    heads: Buffer<layout::Head>,
    slot_of_way: Buffer<u32>,
    page_of_way: Buffer<u32>,
    stamp_of_way: Buffer<u64>,
    way_of_page: Buffer<u32>,
    _groups: Buffer<u32>,
    entries: Buffer<Entry>,
    step_number: Buffer<u64>,
    demand_pages: Buffer<u32>,
    demand_counts: Buffer<u32>,
    places: Buffer<layout::Place>,
    copies: Buffer<PageCopy>,
    copy_counts: Buffer<u32>,
    tallies: Buffer<layout::Tally>,
    fault: Buffer<Fault>,
}

impl<'g> World<'g> {
    pub fn new(gpu: &'g Gpu, shape: Shape) -> Self {
        let Shape { entries, kv_heads, budget, most_pages, .. } = shape;
        let lanes = (entries * kv_heads) as usize;
        let sequences: Vec<_> = (0..entries)
            .map(|index| layout::Sequence {
                ways_at: u64::from(index * kv_heads * budget),
                pages_at: u64::from(index * kv_heads * most_pages),
                groups_at: 0,
                ways_room: budget,
                pages_room: most_pages,
            })
            .collect();
        let groups: Vec<u32> = (0..most_pages).map(|page| page + FIRST_GROUP).collect();
        let (ways, pages) = (lanes * budget as usize, lanes * most_pages as usize);
        let device = DeviceTables {
            _sequences: gpu.upload(&sequences),
            heads: gpu.zeros(lanes),
            slot_of_way: gpu.alloc(ways),
            page_of_way: gpu.alloc(ways),
            stamp_of_way: gpu.alloc(ways),
            way_of_page: gpu.alloc(pages),
            _groups: gpu.upload(&groups),
            entries: gpu.alloc(entries as usize),
            step_number: gpu.alloc(1),
            demand_pages: gpu.alloc(pages),
            demand_counts: gpu.alloc(lanes),
            places: gpu.alloc(pages),
            copies: gpu.alloc(ways + (WAVES - 2) * lanes * shape.ring as usize),
            copy_counts: gpu.zeros(WAVES),
            tallies: gpu.alloc(lanes),
            fault: gpu.zeros(1),
        };
        let tables = Tables {
            sequences: device._sequences.ptr(),
            heads: device.heads.ptr(),
            slot_of_way: device.slot_of_way.ptr(),
            page_of_way: device.page_of_way.ptr(),
            stamp_of_way: device.stamp_of_way.ptr(),
            way_of_page: device.way_of_page.ptr(),
            selected: [device.way_of_page.ptr(); 2],
            groups: device._groups.ptr(),
        };
        let empty =
            || Sequence { tokens: 0, prefilled: false, heads: (0..kv_heads).map(|_| HeadTable::new()).collect() };
        let sequences = (0..entries).map(|_| empty()).collect();
        World { gpu, shape, sequences, step: 0, next_slot: 100, tables, device }
    }

    /// One step of all sequences, on both sides. Returns how many demands were compared, or what differs.
    pub fn step(&mut self, rng: &mut SmallRng) -> Result<u64, String> {
        self.step += 1;
        let entries = self.plan(rng);
        let granted = self.grant(&entries, rng);
        let wanted = self.open_and_ask(&entries, rng);
        self.launch(&entries, &wanted, WAVES)?;
        self.compare(&entries, &wanted)?;
        if rng.random_ratio(1, 8) {
            self.undo(&entries, &granted)?;
        } else {
            for (sequence, entry) in self.sequences.iter_mut().zip(&entries) {
                sequence.tokens += entry.tokens;
                sequence.prefilled |= entry.decode == 1;
            }
        }
        Ok(wanted.len() as u64)
    }

    fn plan(&self, rng: &mut SmallRng) -> Vec<Entry> {
        let most = self.shape.most_pages * PAGE_TOKENS;
        let plan = |(index, sequence): (usize, &Sequence)| {
            let decode =
                sequence.tokens > 0 && (sequence.prefilled || rng.random_ratio(1, 3)) && rng.random_ratio(15, 16);
            let longest = if decode { 2 } else { (most / 4).max(2) };
            let tokens = rng.random_range(1..=longest).min(most - sequence.tokens);
            (index, sequence.tokens, tokens, decode)
        };
        let planned: Vec<_> = self.sequences.iter().enumerate().map(plan).collect();
        let entry = |(index, start, tokens, decode)| Entry {
            sequence: index as u32,
            start,
            tokens,
            row: 0,
            decode: u32::from(decode),
            reselect: 1,
        };
        planned.into_iter().map(entry).collect()
    }

    /// Heads get ways as their pages grow, sometimes ahead of need. Returns how many each lane had before.
    fn grant(&mut self, entries: &[Entry], rng: &mut SmallRng) -> Vec<u32> {
        let mut grants = Vec::new();
        let mut before = Vec::new();
        for entry in entries {
            for head in 0..self.shape.kv_heads as usize {
                let table = &mut self.sequences[entry.sequence as usize].heads[head];
                let lane = entry.sequence * self.shape.kv_heads + head as u32;
                let due = (pages(entry.start + entry.tokens) + rng.random_range(0..3)).min(self.shape.budget);
                before.push(table.ways() as u32);
                while table.ways() < due as usize {
                    let way = table.ways() as u32;
                    grants.push(WayGrant {
                        way: u64::from(lane * self.shape.budget + way),
                        head: lane,
                        slot: self.next_slot,
                        ways: way + 1,
                        last: u32::from(way + 1 == due),
                    });
                    table.grant(self.next_slot);
                    self.next_slot += 1;
                }
            }
        }
        self.grant_on_device(&grants);
        before
    }

    fn grant_on_device(&self, grants: &[WayGrant]) {
        if grants.is_empty() {
            return;
        }
        let (list, count) = (self.gpu.upload(grants), grants.len() as u32);
        let blocks = grants.len().div_ceil(64);
        self.gpu.launch("wakekv_grant", (blocks, 1, 1), 64, 0, &[&self.tables, &list.ptr(), &count]);
        self.gpu.synchronize().expect("granting cannot fail");
    }

    /// What the Rust tables say, lane by lane.
    fn open_and_ask(&mut self, entries: &[Entry], rng: &mut SmallRng) -> Vec<Wanted> {
        let pins = Pins { sinks: self.shape.sinks, recent: self.shape.recent };
        let mut wanted = Vec::new();
        for entry in entries {
            let phase = if entry.decode == 1 { Phase::Decode } else { Phase::Prefill };
            let (before, last) = (pages(entry.start), pages(entry.start + entry.tokens) - 1);
            let keep = (entry.start % PAGE_TOKENS != 0).then(|| before - 1);
            let first_written = entry.start / PAGE_TOKENS;
            for table in &mut self.sequences[entry.sequence as usize].heads {
                let mut evictions = 0;
                for _ in before..=last {
                    let opened = table.open(self.step, phase, pins, keep).expect("the budget holds the pins");
                    evictions += u32::from(opened.evicted.is_some());
                }
                let percent = [0, 5, 30, 90][rng.random_range(0..4)];
                let pinned = |page| page >= first_written || pins.contain(page, last);
                let demand: Vec<u32> = (0..=last)
                    .filter(|&page| phase == Phase::Prefill || pinned(page) || rng.random_range(0..100) < percent)
                    .collect();
                let mut places = Vec::new();
                let tally = table.demand(self.step, phase, &demand, &mut places).expect("the demand is good");
                wanted.push(Wanted {
                    demand,
                    places,
                    tally: Tally { evictions: tally.evictions + evictions, ..tally },
                });
            }
        }
        wanted
    }

    fn launch(&self, entries: &[Entry], wanted: &[Wanted], waves: usize) -> Result<(), String> {
        let Shape { kv_heads, budget, most_pages, threads, ring, sinks, recent, .. } = self.shape;
        let (gpu, device) = (self.gpu, &self.device);
        let lanes = wanted.len();
        device.entries.write(0, entries);
        device.step_number.write(0, &[self.step]);
        device.copy_counts.fill(0);
        for (lane, wanted) in wanted.iter().enumerate() {
            device.demand_pages.write(lane * most_pages as usize, &wanted.demand);
        }
        device.demand_counts.write(0, &wanted.iter().map(|wanted| wanted.demand.len() as u32).collect::<Vec<_>>());
        let grid = (kv_heads as usize, entries.len(), 1);
        let shape = self.device_shape();
        let (entries, step) = (device.entries.ptr(), device.step_number.ptr());
        let pins = layout::Pins { sinks, recent };
        let shared = threads / 32 * 8;
        let (tallies, fault) = (device.tallies.ptr(), device.fault.ptr());
        gpu.launch(
            "wakekv_open",
            grid,
            threads,
            shared,
            &[&self.tables, &shape, &entries, &step, &pins, &tallies, &fault],
        );
        let demand = Demand {
            pages: device.demand_pages.ptr(),
            places: device.places.ptr(),
            counts: device.demand_counts.ptr(),
            room: most_pages,
            unused: 0,
        };
        let fetches = layout::CopyList {
            copies: device.copies.ptr(),
            counts: device.copy_counts.ptr(),
            first_room: lanes as u32 * budget,
            wave_room: lanes as u32 * ring,
        };
        let staging = layout::Staging { first: 1 << 20, ring };
        let shared = (budget.next_power_of_two() as usize) * 8 + (8 + 4 + WAVES) * 4;
        let waves = waves as u32;
        gpu.launch(
            "wakekv_demand",
            grid,
            threads,
            shared,
            &[&self.tables, &shape, &entries, &step, &demand, &fetches, &staging, &waves, &tallies, &fault],
        );
        gpu.synchronize()
    }

    fn device_shape(&self) -> layout::Shape {
        let kv_heads = self.shape.kv_heads;
        layout::Shape { kv_heads, group: 1, page_tokens: PAGE_TOKENS, heads: kv_heads, first_head: 0, head_dim: 16 }
    }

    /// What the device says to a first step of so many tokens, with so many ways and this demand.
    pub fn fault_of(&mut self, ways: u32, tokens: u32, demand: &[u32], waves: usize) -> Fault {
        self.step = 1;
        let entry = Entry { sequence: 0, start: 0, tokens, row: 0, decode: 1, reselect: 1 };
        let grants = (0..ways).map(|way| WayGrant {
            way: u64::from(way),
            head: 0,
            slot: way,
            ways: way + 1,
            last: u32::from(way + 1 == ways),
        });
        self.grant_on_device(&grants.collect::<Vec<_>>());
        let wanted = Wanted { demand: demand.to_vec(), places: Vec::new(), tally: Tally::default() };
        self.launch(&[entry], &[wanted], waves).expect("faults are told, the kernels end well");
        self.device.fault.read()[0]
    }

    /// The device forgets what the step used, and so does the Rust table, page by page.
    fn undo(&mut self, entries: &[Entry], ways: &[u32]) -> Result<(), String> {
        let list = self.gpu.upload(ways);
        let shape = self.device_shape();
        let (device_entries, step) = (self.device.entries.ptr(), self.device.step_number.ptr());
        let grid = (self.shape.kv_heads as usize, entries.len(), 1);
        self.gpu.launch(
            "wakekv_undo",
            grid,
            self.shape.threads,
            0,
            &[&self.tables, &shape, &device_entries, &step, &list.ptr()],
        );
        self.gpu.synchronize()?;
        let mut before = ways.iter();
        for entry in entries {
            let sealed = entry.start / PAGE_TOKENS;
            for table in &mut self.sequences[entry.sequence as usize].heads {
                let used: Vec<u32> = table
                    .residents()
                    .filter(|&(page, _, stamp)| stamp == self.step && page < sealed)
                    .map(|(page, _, _)| page)
                    .collect();
                used.into_iter().for_each(|page| table.drop_page(page));
                while table.pages() > pages(entry.start) as usize {
                    table.close();
                }
                let before = *before.next().expect("one count per lane") as usize;
                while table.ways() > before {
                    table.revoke();
                }
            }
        }
        self.compare_tables(entries)
    }
}

/// What the Rust table makes of a lane's demand.
struct Wanted {
    demand: Vec<u32>,
    places: Vec<Place>,
    tally: Tally,
}

fn pages(tokens: u32) -> u32 {
    tokens.div_ceil(PAGE_TOKENS)
}
