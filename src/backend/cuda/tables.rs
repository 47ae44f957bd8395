//! Page tables in device memory, and what the host remembers of them.
//!
//! The device decides about residency. The host decides how many ways a head has and where a sequence's tables lie, and knows the
//! reservoir groups; it changes these between steps, in the order of the compute stream.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::driver::Called;
use super::kernels::{Grid, Kernels};
use super::layout;
use super::memory::DeviceMemory;
use super::regions::{Arrays, KNOB, enlarge, region_units};
use crate::backend::{EntryPlan, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;

/// The arrays that [`layout::Tables`] points at, and who has which part of them.
#[derive(Debug)]
pub(super) struct Tables {
    context: Arc<CudaContext>,
    heads: usize,
    seats: Seats,
    /// slot_of_way, page_of_way, stamp_of_way.
    ways: Arrays,
    /// way_of_page, selected, and a second list of those where scores are sticky.
    pages: Arrays,
    groups: Arrays,
    live: Vec<Live>,
    /// Counts the times that an array has moved: whoever has noted its address has to look again.
    pub generation: u64,
}

/// Arrays with an element per sequence, and one per head of each.
#[derive(Debug)]
struct Seats {
    sequences: DeviceMemory,
    heads: DeviceMemory,
    room: usize,
}

/// What the host remembers of a sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct Live {
    place: Option<layout::Sequence>,
    /// The device has not heard of it yet.
    fresh: bool,
    /// Ways of each head.
    pub ways: Vec<u32>,
    /// Device slots of all heads, in the order in which they were granted.
    pub slots: Vec<u32>,
    /// Reservoir groups of the sealed pages.
    pub groups: Vec<u32>,
}

impl Live {
    /// The most and the fewest ways of a head, once `granted` more are granted.
    fn ways_with(&self, granted: &[crate::backend::WayGrant]) -> (usize, usize) {
        let mut granted = granted.iter().peekable();
        let mut bounds = (0, usize::MAX);
        for (head, &ways) in self.ways.iter().enumerate() {
            let mut ways = ways as usize;
            while granted.next_if(|way| way.head as usize == head).is_some() {
                ways += 1;
            }
            bounds = (bounds.0.max(ways), bounds.1.min(ways));
        }
        bounds
    }
}

const LEAST_SEATS: usize = 16;
const GROUP_BYTES: u64 = 4;

impl Tables {
    pub fn new(context: &Arc<CudaContext>, geometry: &Geometry, sticky: bool) -> Result<Self, Error> {
        let heads = geometry.heads();
        let seats = || DeviceMemory::new(context, KNOB, 0);
        Ok(Tables {
            context: context.clone(),
            heads,
            seats: Seats { sequences: seats()?, heads: seats()?, room: 0 },
            ways: Arrays::new(context, &[4, 4, 8], heads)?,
            pages: Arrays::new(context, if sticky { &[4, 4, 4] } else { &[4, 4] }, heads)?,
            groups: Arrays::new(context, &[GROUP_BYTES as usize], 1)?,
            live: Vec::new(),
            generation: 0,
        })
    }

    /// What the kernels are given.
    pub fn view(&self) -> layout::Tables {
        layout::Tables {
            sequences: self.seats.sequences.at(0),
            heads: self.seats.heads.at(0),
            slot_of_way: self.ways.at(0, 0),
            page_of_way: self.ways.at(1, 0),
            stamp_of_way: self.ways.at(2, 0),
            way_of_page: self.pages.at(0, 0),
            selected: [self.pages.at(1, 0), self.pages.at(self.pages.count() - 1, 0)],
            groups: self.groups.at(0, 0),
        }
    }

    pub fn insert(&mut self, sequence: u32) {
        let count = (sequence as usize + 1).max(self.live.len());
        self.live.resize_with(count, Live::default);
        self.live[sequence as usize] = Live { fresh: true, ways: vec![0; self.heads], ..Live::default() };
    }

    pub fn remove(&mut self, sequence: u32) {
        let live = std::mem::take(&mut self.live[sequence as usize]);
        if let Some(place) = live.place {
            self.give_back(&place);
        }
    }

    pub fn live(&self, sequence: u32) -> &Live {
        &self.live[sequence as usize]
    }

    fn give_back(&mut self, place: &layout::Sequence) {
        self.ways.give_back(place.ways_at, place.ways_room as usize);
        self.pages.give_back(place.pages_at, place.pages_room as usize);
        self.groups.give_back(place.groups_at, place.pages_room as usize);
    }

    /// The most and the fewest ways of a head of the entry's sequence, once the plan's are granted.
    pub fn ways_after(&self, plan: &StepPlan, entry: &EntryPlan) -> (usize, usize) {
        self.live(entry.sequence).ways_with(&plan.ways[entry.ways.clone()])
    }

    /// Whether the entry's sequence needs larger tables for so many pages, and then how large: ways and pages per head.
    fn outgrown(&self, plan: &StepPlan, entry: &EntryPlan, pages: usize) -> Option<(usize, usize)> {
        let (ways, _) = self.ways_after(plan, entry);
        let place = self.live(entry.sequence).place.unwrap_or_default();
        let fits = ways <= place.ways_room as usize && pages <= place.pages_room as usize;
        (!fits).then_some((ways.max(place.ways_room as usize), pages.max(place.pages_room as usize)))
    }

    /// Makes room for all that the plan may need; `pages` are those that an entry's sequence has after it. What fails has changed
    /// nothing that shows.
    pub fn reserve(
        &mut self,
        plan: &StepPlan,
        stream: &CudaStream,
        pages: impl Fn(&EntryPlan) -> usize,
    ) -> Result<(), Error> {
        self.reserve_seats(plan, stream)?;
        let outgrown = plan.entries.iter().filter_map(|entry| self.outgrown(plan, entry, pages(entry)));
        let (ways, pages): (Vec<usize>, Vec<usize>) = outgrown.unzip();
        // One after the other, for what has moved has moved, also if the next one fails.
        self.generation += u64::from(self.ways.reserve(ways.into_iter(), stream)?);
        self.generation += u64::from(self.pages.reserve(pages.iter().copied(), stream)?);
        self.generation += u64::from(self.groups.reserve(pages.iter().copied(), stream)?);
        Ok(())
    }

    fn reserve_seats(&mut self, plan: &StepPlan, stream: &CudaStream) -> Result<(), Error> {
        let needed = plan.entries.iter().map(|entry| entry.sequence as usize + 1).max().unwrap_or(0);
        if needed <= self.seats.room {
            return Ok(());
        }
        let (kept, room) = (self.seats.room, needed.next_power_of_two().max(LEAST_SEATS));
        let larger = |old: &DeviceMemory, size| enlarge(&self.context, stream, old, kept * size, room * size);
        self.seats = Seats {
            sequences: larger(&self.seats.sequences, size_of::<layout::Sequence>())?,
            heads: larger(&self.seats.heads, self.heads * size_of::<layout::Head>())?,
            room,
        };
        self.generation += 1;
        Ok(())
    }

    /// Puts new sequences, larger tables and new groups on the stream. If it fails, nothing has changed that shows. `upload` copies bytes
    /// to a device address, in the order of the stream.
    pub fn settle(
        &mut self,
        plan: &StepPlan,
        stream: &CudaStream,
        kernels: &Kernels,
        pages: impl Fn(&EntryPlan) -> usize,
        upload: &mut impl FnMut(u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for entry in &plan.entries {
            let seat = entry.sequence as usize;
            if self.live[seat].fresh {
                self.clear_heads(seat, stream)?;
            }
            if let Some((ways, pages)) = self.outgrown(plan, entry, pages(entry)) {
                self.relocate(seat, ways, pages, stream, kernels, upload)?;
            }
            self.live[seat].fresh = false;
            let (live, groups) = (&self.live[seat], &plan.groups[entry.groups.clone()]);
            if let Some(place) = live.place.filter(|_| !groups.is_empty()) {
                let first = place.groups_at + live.groups.len() as u64;
                upload(self.groups.at(0, first), bytemuck::cast_slice(groups))?;
            }
        }
        Ok(())
    }

    fn clear_heads(&self, seat: usize, stream: &CudaStream) -> Result<(), Error> {
        let bytes = self.heads * size_of::<layout::Head>();
        let at = self.seats.heads.at(seat * bytes);
        // SAFETY: the heads of one sequence, inside the array.
        unsafe { result::memset_d8_async(at, 0, bytes, stream.cu_stream()) }.called("cuMemsetD8Async")
    }

    /// Gives a sequence tables of this size, and takes the old ones along.
    fn relocate(
        &mut self,
        seat: usize,
        ways: usize,
        pages: usize,
        stream: &CudaStream,
        kernels: &Kernels,
        upload: &mut impl FnMut(u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // `reserve` has made room.
        let room = |region: Option<u64>| region.ok_or(Error::StepFailed);
        let new = layout::Sequence {
            ways_at: room(self.ways.take(ways))?,
            pages_at: room(self.pages.take(pages))?,
            groups_at: room(self.groups.take(pages))?,
            ways_room: region_units(ways) as u32,
            pages_room: region_units(pages) as u32,
        };
        let at = self.seats.sequences.at(seat * size_of::<layout::Sequence>());
        let copied = self.copy_tables(seat, &new, stream, kernels);
        if let Err(error) = copied.and_then(|()| upload(at, bytemuck::bytes_of(&new))) {
            self.give_back(&new);
            return Err(error);
        }
        if let Some(old) = self.live[seat].place.replace(new) {
            self.give_back(&old);
        }
        Ok(())
    }

    fn copy_tables(
        &self,
        seat: usize,
        to: &layout::Sequence,
        stream: &CudaStream,
        kernels: &Kernels,
    ) -> Result<(), Error> {
        let Some(from) = self.live[seat].place else { return Ok(()) };
        let groups = self.live[seat].groups.len() * GROUP_BYTES as usize;
        if groups > 0 {
            let (old, new) = (self.groups.at(0, from.groups_at), self.groups.at(0, to.groups_at));
            // SAFETY: both ranges lie inside the array, and do not overlap.
            unsafe { result::memcpy_dtod_async(new, old, groups, stream.cu_stream()) }.called("cuMemcpyDtoDAsync")?;
        }
        let heads = self.seats.heads.at(seat * self.heads * size_of::<layout::Head>());
        let relocation = layout::Move {
            ways_from: from.ways_at,
            ways_to: to.ways_at,
            pages_from: from.pages_at,
            pages_to: to.pages_at,
            ways_room_from: from.ways_room,
            ways_room_to: to.ways_room,
            pages_room_from: from.pages_room,
            pages_room_to: to.pages_room,
        };
        let grid = Grid { blocks: (self.heads, 1, 1), threads: 256, shared: 0 };
        // SAFETY: wakekv_move's parameters; both places lie inside the arrays, and do not overlap.
        unsafe { kernels.relocate.launch(stream, grid, &[&self.view(), &heads, &relocation]) }
    }

    /// The plan's ways as wakekv_grant takes them. They are numbered within the tables that [`settle`](Self::settle) has seen to.
    pub fn grants<'p>(&'p self, plan: &'p StepPlan) -> impl Iterator<Item = layout::WayGrant> + 'p {
        plan.entries.iter().flat_map(move |entry| {
            let live = self.live(entry.sequence);
            let place = live.place.unwrap_or_default();
            let ways = &plan.ways[entry.ways.clone()];
            let mut last = (u32::MAX, 0);
            ways.iter().enumerate().map(move |(index, way)| {
                let nth = if way.head == last.0 { last.1 + 1 } else { live.ways[way.head as usize] };
                last = (way.head, nth);
                layout::WayGrant {
                    way: place.ways_at + u64::from(way.head) * u64::from(place.ways_room) + u64::from(nth),
                    head: entry.sequence * self.heads as u32 + way.head,
                    slot: way.slot,
                    ways: nth + 1,
                    last: u32::from(ways.get(index + 1).is_none_or(|next| next.head != way.head)),
                }
            })
        })
    }

    /// The plan's grants are on the stream.
    pub fn granted(&mut self, plan: &StepPlan) {
        for entry in &plan.entries {
            let live = &mut self.live[entry.sequence as usize];
            live.groups.extend_from_slice(&plan.groups[entry.groups.clone()]);
            for way in &plan.ways[entry.ways.clone()] {
                live.ways[way.head as usize] += 1;
                live.slots.push(way.slot);
            }
        }
    }

    /// Forgets what a plan has granted.
    pub fn revoke(&mut self, plan: &StepPlan) {
        for entry in &plan.entries {
            let live = &mut self.live[entry.sequence as usize];
            live.groups.truncate(live.groups.len() - entry.groups.len());
            live.slots.truncate(live.slots.len() - entry.ways.len());
            for way in &plan.ways[entry.ways.clone()] {
                live.ways[way.head as usize] -= 1;
            }
        }
    }

    /// Device bytes of the tables and host bytes of what is remembered of them.
    pub fn bytes(&self) -> usize {
        let seats = self.seats.sequences.bytes() + self.seats.heads.bytes();
        let remembered = |live: &Live| (live.ways.capacity() + live.slots.capacity() + live.groups.capacity()) * 4;
        let arrays = self.ways.bytes() + self.pages.bytes() + self.groups.bytes();
        seats + arrays + self.live.iter().map(remembered).sum::<usize>()
    }

    /// Copies of a sequence's tables, one per head. The streams are idle.
    pub fn download(&self, sequence: u32) -> Result<Vec<HeadCopy>, Error> {
        let Some(place) = self.live(sequence).place else { return Ok(Vec::new()) };
        let states: Vec<layout::Head> = fetch(&self.seats.heads, sequence as usize * self.heads, self.heads)?;
        let copy = |(head, state): (usize, layout::Head)| {
            let ways = place.ways_at as usize + head * place.ways_room as usize;
            let pages = place.pages_at as usize + head * place.pages_room as usize;
            Ok(HeadCopy {
                slots: fetch(self.ways.memory(0), ways, state.ways as usize)?,
                pages: fetch(self.ways.memory(1), ways, state.ways as usize)?,
                stamps: fetch(self.ways.memory(2), ways, state.ways as usize)?,
                way_of_page: fetch(self.pages.memory(0), pages, state.pages as usize)?,
                state,
            })
        };
        states.into_iter().enumerate().map(copy).collect()
    }
}

/// One head's tables, on the host.
#[derive(Debug)]
pub(super) struct HeadCopy {
    pub state: layout::Head,
    pub slots: Vec<u32>,
    pub pages: Vec<u32>,
    pub stamps: Vec<u64>,
    pub way_of_page: Vec<u32>,
}

fn fetch<T: bytemuck::Pod>(memory: &DeviceMemory, first: usize, count: usize) -> Result<Vec<T>, Error> {
    let mut values = vec![T::zeroed(); count];
    if count > 0 {
        let from = memory.at(first * size_of::<T>());
        // SAFETY: the range lies inside the memory, and every bit pattern is a value.
        unsafe { result::memcpy_dtoh_sync(&mut values, from) }.called("cuMemcpyDtoH")?;
    }
    Ok(values)
}
