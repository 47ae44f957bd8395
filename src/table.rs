//! The rule: what a head's demand finds, fetches and evicts. Pure logic, no memory, no clock of its own.
//!
//! One [`HeadTable`] belongs to one head of one sequence. A step first [opens](HeadTable::open) the pages that its new tokens
//! begin, then asks for its [demand](HeadTable::demand). The CPU backend runs this very code; another
//! backend has to make the same decisions.

#![forbid(unsafe_code)]

use crate::growth::make_room;
use crate::residency::{Lru, Replacement, Scores};

/// Pages that are always demanded and never evicted, beside the last page: the attention sinks and the recent window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// Pages at the start of the sequence.
    pub sinks: u32,
    /// Pages before the last one.
    pub recent: u32,
}

impl Pins {
    /// Whether a page is pinned while `last` is the sequence's last page.
    pub const fn contain(self, page: u32, last: u32) -> bool {
        page < self.sinks || page.saturating_add(self.recent) >= last
    }

    /// Ways that must not be taken away while pages open: the pins, the last page, and the page that was open when a step of
    /// several pages began. No budget may be smaller.
    pub const fn ways(self) -> usize {
        self.sinks as usize + self.recent as usize + 2
    }
}

/// Where a demanded page is, or will be once its fetch is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It was resident in this device slot.
    Hit(u32),
    /// It was not, and has been given this device slot: it has to be fetched.
    Fetch(u32),
    /// It was not, and the demand is larger than the budget: it has to be streamed past the ways.
    Overflow,
}

/// What one demand came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pages that were resident.
    pub hits: u32,
    /// First demands by a decode step of prompt pages that prefill had left only in the reservoir.
    pub compulsory: u32,
    /// All other misses.
    pub capacity: u32,
    /// Misses, of either kind, that found no way and are streamed.
    pub overflow: u32,
    /// Pages that gave up their way.
    pub evictions: u32,
}

/// A page that has just been opened, and the way it got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The logical page.
    pub page: u32,
    /// Its device slot.
    pub slot: u32,
    /// The page that gave the slot up.
    pub evicted: Option<u32>,
}

/// A way that has been taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Released {
    /// Its device slot.
    pub slot: u32,
    /// The page that was in it.
    pub evicted: Option<u32>,
}

/// Whether a step reads the prompt or generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Prompt tokens: attention is exact, whatever the selection.
    Prefill,
    /// Generated tokens: attention reads what the selection demands.
    Decode,
}

/// Why a table refused a call. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// Every way holds a pinned page, or there is none.
    #[error("no way is free and none of {ways} may be evicted: the budget is smaller than what is pinned")]
    NoWay {
        /// Ways that the head owns.
        ways: usize,
    },
    /// The demand names a page that the head does not have.
    #[error("page {page} is demanded, but the head has {pages} pages")]
    OutOfRange {
        /// The page.
        page: u32,
        /// Pages that the head has.
        pages: usize,
    },
    /// The demand is not strictly ascending.
    #[error("the demand is not strictly ascending at page {page}")]
    NotAscending {
        /// The first page that is not above its predecessor.
        page: u32,
    },
}

/// Which pages of one head are resident, in which way, and who has to go next.
///
/// ```
/// use wakekv::table::{HeadTable, Phase, Pins, Place};
/// let mut table: HeadTable = HeadTable::new();
/// table.grant(70);                                            // two ways, in device slots 70 and 71
/// table.grant(71);
/// let pins = Pins::default();
/// for step in 1..=3 {
///     table.open(step, Phase::Prefill, pins, None)?;              // pages 0, 1, 2: page 0 has to go
/// }
/// let mut places = Vec::new();
/// let tally = table.demand(4, Phase::Decode, &[0, 2], &mut places)?;
/// assert_eq!(places, [Place::Fetch(71), Place::Hit(70)]);
/// assert_eq!((tally.hits, tally.compulsory, tally.evictions), (1, 1, 1));
/// # Ok::<(), wakekv::table::TableError>(())
/// ```
///
/// # Cost
/// 4 bytes and a bit per logical page, 24 bytes per way with [`Lru`]. A demanded page costs a few nanoseconds, and
/// [`demand`](Self::demand) does not allocate once `places` has room.
#[derive(Clone, Debug)]
pub struct HeadTable<R = Lru> {
    /// Per logical page its way, or [`NONE`].
    way_of: Vec<u32>,
    ways: Vec<Way>,
    /// Ways without a page, highest first, so that the lowest is taken next.
    free: Vec<u32>,
    /// One bit per logical page: a prompt page that prefill left off the device and no decode step has demanded.
    cold: Vec<u64>,
    /// Whether prefill has fetched cold pages, so that decode can hit one.
    cold_residents: bool,
    /// The first page that prefill opened since the last decode step.
    prompt_from: Option<u32>,
    /// The step that last opened pages, and the first of them.
    opened: (u64, u32),
    order: R,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    page: u32,
    slot: u32,
    /// The last step that used the page.
    stamp: u64,
}

const NONE: u32 = u32::MAX;

impl<R: Replacement> Default for HeadTable<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: Replacement> HeadTable<R> {
    /// A head without pages and without ways.
    pub fn new() -> Self {
        Self::with_order(R::new())
    }

    /// The same with a policy that is made otherwise, and owns no ways yet.
    pub fn with_order(order: R) -> Self {
        HeadTable {
            way_of: Vec::new(),
            ways: Vec::new(),
            free: Vec::new(),
            cold: Vec::new(),
            cold_residents: false,
            prompt_from: None,
            opened: (0, 0),
            order,
        }
    }

    /// Makes room for `pages` logical pages and `ways` ways, so that opening and granting up to that many allocates nothing.
    pub fn reserve(&mut self, pages: usize, ways: usize) {
        self.way_of.reserve_exact(pages.saturating_sub(self.way_of.len()));
        self.cold.reserve_exact(pages.div_ceil(64).saturating_sub(self.cold.len()));
        self.ways.reserve_exact(ways.saturating_sub(self.ways.len()));
        self.free.reserve_exact(ways.saturating_sub(self.free.len()));
        self.order.reserve(pages, ways);
    }

    /// Logical pages of the head, the open one included.
    pub fn pages(&self) -> usize {
        self.way_of.len()
    }

    /// Ways that the head owns.
    pub fn ways(&self) -> usize {
        self.ways.len()
    }

    /// Pages that are resident.
    pub fn resident(&self) -> usize {
        self.ways.len() - self.free.len()
    }

    /// The device slot of a page, if it is resident.
    pub fn slot_of(&self, page: u32) -> Option<u32> {
        let way = *self.way_of.get(page as usize)?;
        self.ways.get(way as usize).map(|way| way.slot)
    }

    /// Gives the head one more way, in the device slot `slot`.
    pub fn grant(&mut self, slot: u32) {
        let way = self.ways.len() as u32;
        make_room(&mut self.ways, 1);
        self.ways.push(Way { page: NONE, slot, stamp: 0 });
        self.order.grow();
        // Any number of ways may come free at once, and none of them may allocate then.
        let occupied = self.ways.len() - self.free.len();
        make_room(&mut self.free, occupied);
        self.free.insert(0, way);
    }

    /// The device slots of all ways, with pages or without.
    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.ways.iter().map(|way| way.slot)
    }

    /// Takes back the way that was granted last and returns its slot. A page in it stops being resident; the caller sees to it
    /// that the page is reserved.
    pub fn revoke(&mut self) -> Option<u32> {
        let way = self.ways.len().checked_sub(1)? as u32;
        self.vacate(way);
        self.free.retain(|&free| free != way);
        self.order.shrink();
        self.ways.pop().map(|way| way.slot)
    }

    /// Takes back the way that the head can spare best: a free one, else that of the page which has to go next among those that `pins`
    /// do not hold. `None` when there is no such way. Meant for between steps: a way that moves to another head. No page moves.
    pub fn release(&mut self, pins: Pins) -> Option<Released> {
        let newest = self.way_of.len().saturating_sub(1) as u32;
        let (way, evicted) = if self.free.is_empty() {
            let (ways, mut victim) = (&self.ways, None);
            self.order.evict(1, |way| !pins.contain(ways[way as usize].page, newest), |way| victim = Some(way));
            let way = victim?;
            let page = self.ways[way as usize].page;
            self.forget(way);
            (way, Some(page))
        } else {
            (self.free.remove(0), None)
        };
        // The last way takes the place of the one that goes. The free way with the highest index went, so the last one is occupied.
        let slot = self.ways.swap_remove(way as usize).slot;
        let last = self.ways.len() as u32;
        if way != last {
            self.way_of[self.ways[way as usize].page as usize] = way;
            self.order.rename(last, way);
        }
        self.order.shrink();
        Some(Released { slot, evicted })
    }

    /// Begins the next logical page. It takes a free way, else that of the page with the smallest (stamp, logical page) that
    /// `pins` do not hold, and that is not `keep`: the page that was open when the step began, which undoing the step needs.
    ///
    /// # Errors
    /// [`TableError::NoWay`] when every way is pinned.
    pub fn open(&mut self, step: u64, phase: Phase, pins: Pins, keep: Option<u32>) -> Result<Opened, TableError> {
        let page = self.way_of.len() as u32;
        let (way, evicted) = match self.free.pop() {
            Some(way) => (way, None),
            None => {
                let ways = &self.ways;
                let mut victim = None;
                let eligible = |way: u32| {
                    let old = ways[way as usize].page;
                    !pins.contain(old, page) && keep != Some(old)
                };
                self.order.evict(1, eligible, |way| victim = Some(way));
                let victim = victim.ok_or(TableError::NoWay { ways: ways.len() })?;
                (victim, Some(ways[victim as usize].page))
            }
        };
        // Before the victim goes: it was resident when the prompt ended.
        self.settle_prompt(phase);
        if evicted.is_some() {
            self.forget(way);
        }
        if phase == Phase::Prefill && self.prompt_from.is_none() {
            self.prompt_from = Some(page);
        }
        if self.opened.0 != step {
            self.opened = (step, page);
        }
        make_room(&mut self.way_of, 1);
        self.way_of.push(NONE);
        if page.is_multiple_of(64) {
            self.cold.push(0);
        }
        self.place(way, page, step);
        self.order.admit(way, page);
        Ok(Opened { page, slot: self.ways[way as usize].slot, evicted })
    }

    /// Undoes the last [`open`](Self::open): the logical page is gone, its way is free.
    pub fn close(&mut self) {
        let Some(&way) = self.way_of.last() else { return };
        if way != NONE {
            self.vacate(way);
        }
        self.way_of.pop();
        let pages = self.way_of.len();
        self.cold.truncate(pages.div_ceil(64));
        if let Some(word) = self.cold.last_mut().filter(|_| !pages.is_multiple_of(64)) {
            *word &= (1 << (pages % 64)) - 1;
        }
        self.prompt_from = self.prompt_from.filter(|&from| (from as usize) < pages);
    }

    /// Tells the policy what the selection found pages to be worth that is going to [`demand`](Self::demand) these `pages`, in the same
    /// step. Scores of pages that the head does not have are left out.
    pub fn rate(&mut self, scores: Scores<'_>, pages: &[u32]) {
        let exist = self.way_of.len().saturating_sub(scores.first as usize).min(scores.scores.len());
        self.order.rate(Scores { scores: &scores.scores[..exist], ..scores }, pages);
    }

    /// Asks for `pages`, strictly ascending, as the demand of step `step`. Afterwards `places` has one place per page.
    ///
    /// Every resident page is a hit. Every other page is a miss: it takes the free way with the lowest index, else that of the
    /// page with the smallest (stamp, logical page) which is neither demanded nor opened in this step. Pinned pages must be part
    /// of the demand, and so must the page that [`open`](Self::open) was told to keep. Steps are numbered from 1, numbers grow, and
    /// a step asks once.
    ///
    /// # Errors
    /// [`TableError::OutOfRange`] and [`TableError::NotAscending`]; the table has not changed then.
    pub fn demand(
        &mut self,
        step: u64,
        phase: Phase,
        pages: &[u32],
        places: &mut Vec<Place>,
    ) -> Result<Tally, TableError> {
        self.check_demand(pages)?;
        self.settle_prompt(phase);
        places.clear();
        let mut hits = 0;
        let (ways, way_of) = (&mut self.ways, &self.way_of);
        places.extend(pages.iter().map(|&page| match ways.get_mut(way_of[page as usize] as usize) {
            Some(way) => {
                way.stamp = step;
                hits += 1;
                Place::Hit(way.slot)
            }
            None => Place::Overflow,
        }));
        let mut tally = Tally { hits, ..Tally::default() };
        if phase == Phase::Decode && self.cold_residents {
            self.warm(pages);
        }
        let misses = pages.len() - tally.hits as usize;
        if misses > 0 {
            self.admit(step, phase, pages, places, &mut tally);
        }
        // In ascending order, so that the order of eviction is that of (stamp, logical page). Pages that this step has opened
        // carry its stamp as well; they are the last ones, so they take their turn behind the demanded pages below them.
        let opened_from = if self.opened.0 == step { self.opened.1 } else { u32::MAX };
        let below = pages.iter().copied().take_while(|&page| page < opened_from);
        let way_of = &self.way_of;
        let used = below.chain(opened_from..way_of.len() as u32).map(|page| way_of[page as usize]);
        let used = used.filter(|&way| way != NONE);
        match phase {
            Phase::Prefill => self.order.touch_prompt(used),
            Phase::Decode => self.order.touch(used),
        }
        Ok(tally)
    }

    /// Gives ways to the misses of a demand whose hits carry this step's stamp already.
    fn admit(&mut self, step: u64, phase: Phase, pages: &[u32], places: &mut [Place], tally: &mut Tally) {
        let misses = pages.len() - tally.hits as usize;
        let wanted = misses.saturating_sub(self.free.len());
        // Victims join the free ways below them: free ways are taken first, then victims in the order of their eviction.
        let kept = self.free.len();
        let (ways, free, way_of) = (&mut self.ways, &mut self.free, &mut self.way_of);
        if wanted > 0 {
            // The stamps are read while the victims are collected, so the pages are taken out in a second pass.
            self.order.evict(wanted, |way| ways[way as usize].stamp != step, |way| free.push(way));
            for &way in &free[kept..] {
                let page = std::mem::replace(&mut ways[way as usize].page, NONE);
                way_of[page as usize] = NONE;
            }
            tally.evictions += (free.len() - kept) as u32;
            free[kept..].reverse();
            free.rotate_left(kept);
        }
        for (&page, place) in pages.iter().zip(places) {
            if *place != Place::Overflow {
                continue;
            }
            let word = &mut self.cold[page as usize / 64];
            let bit = 1 << (page % 64);
            if phase == Phase::Decode && *word & bit != 0 {
                *word &= !bit;
                tally.compulsory += 1;
            } else {
                tally.capacity += 1;
            }
            match self.free.pop() {
                Some(way) => {
                    let way = way as usize;
                    self.ways[way] = Way { page, slot: self.ways[way].slot, stamp: step };
                    self.way_of[page as usize] = way as u32;
                    self.order.admit(way as u32, page);
                    self.cold_residents |= *word & bit != 0;
                    *place = Place::Fetch(self.ways[way].slot);
                }
                None => tally.overflow += 1,
            }
        }
    }

    /// A decode step has demanded these pages: those that it hit are not cold any more. Rare, so not worth a look at every hit.
    fn warm(&mut self, pages: &[u32]) {
        for &page in pages.iter().filter(|&&page| self.way_of[page as usize] != NONE) {
            self.cold[page as usize / 64] &= !(1 << (page % 64));
        }
        let cold = &self.cold;
        let is_cold = |way: &Way| way.page != NONE && cold[way.page as usize / 64] & 1 << (way.page % 64) != 0;
        self.cold_residents = self.ways.iter().any(is_cold);
    }

    fn check_demand(&self, pages: &[u32]) -> Result<(), TableError> {
        if let Some(pair) = pages.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(TableError::NotAscending { page: pair[1] });
        }
        match pages.last() {
            Some(&page) if page as usize >= self.way_of.len() => {
                Err(TableError::OutOfRange { page, pages: self.way_of.len() })
            }
            _ => Ok(()),
        }
    }

    /// The first decode step after a prefill: prompt pages that are not resident now are cold.
    fn settle_prompt(&mut self, phase: Phase) {
        let Some(from) = self.prompt_from.filter(|_| phase == Phase::Decode) else { return };
        for page in from as usize..self.way_of.len() {
            if self.way_of[page] == NONE {
                self.cold[page / 64] |= 1 << (page % 64);
            }
        }
        self.prompt_from = None;
    }

    /// Ends a failed fetch: the page stops being resident and its way is free. The page is still reserved.
    pub fn drop_page(&mut self, page: u32) {
        match self.way_of.get(page as usize) {
            Some(&way) if way != NONE => self.vacate(way),
            _ => {}
        }
    }

    fn place(&mut self, way: u32, page: u32, step: u64) {
        let entry = &mut self.ways[way as usize];
        entry.page = page;
        entry.stamp = step;
        self.way_of[page as usize] = way;
    }

    /// Takes the page out of a way that the order has already forgotten.
    fn forget(&mut self, way: u32) {
        let page = std::mem::replace(&mut self.ways[way as usize].page, NONE);
        self.way_of[page as usize] = NONE;
    }

    /// Takes the page, if there is one, out of a way and makes the way free.
    fn vacate(&mut self, way: u32) {
        if self.ways[way as usize].page != NONE {
            self.order.remove(way);
            self.forget(way);
            let below = self.free.partition_point(|&free| free > way);
            self.free.insert(below, way);
        }
    }

    /// Bytes of heap that the table itself takes.
    pub fn table_bytes(&self) -> usize {
        self.way_of.capacity() * size_of::<u32>()
            + self.ways.capacity() * size_of::<Way>()
            + self.free.capacity() * size_of::<u32>()
            + self.cold.capacity() * size_of::<u64>()
            + self.order.table_bytes()
    }

    /// Resident pages as (logical page, device slot, stamp), in no particular order.
    pub fn residents(&self) -> impl Iterator<Item = (u32, u32, u64)> + '_ {
        self.ways.iter().filter(|way| way.page != NONE).map(|way| (way.page, way.slot, way.stamp))
    }

    /// Checks invariant 2 of the design: a way holds at most one page, a page is in at most one way, free ways are just those
    /// without a page.
    ///
    /// # Errors
    /// What does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        for (index, way) in self.ways.iter().enumerate() {
            let index = index as u32;
            if (way.page == NONE) != self.free.contains(&index) {
                return Err(format!("way {index} holds page {} but the free list disagrees", way.page));
            }
            if way.page != NONE && self.way_of.get(way.page as usize) != Some(&index) {
                return Err(format!("way {index} holds page {}, which does not point back", way.page));
            }
        }
        for (page, &way) in self.way_of.iter().enumerate() {
            if way != NONE && self.ways.get(way as usize).map(|way| way.page) != Some(page as u32) {
                return Err(format!("page {page} claims way {way}, which does not hold it"));
            }
        }
        if !self.free.is_sorted_by(|a, b| a > b) {
            return Err(format!("free ways are out of order: {:?}", self.free));
        }
        Ok(())
    }
}
