//! The rule of one head, written down a second time without any cleverness: a list of pages with stamps, and a search through all
//! of them for every decision.
#![allow(dead_code, reason = "each test uses a part of it")]

use wakekv::table::{Opened, Phase, Pins, Place, TableError, Tally};

#[derive(Clone, Debug, Default)]
struct Page {
    way: Option<usize>,
    /// The last step that used it. Counts only while it is resident.
    stamp: u64,
    /// The step that opened it.
    opened: u64,
    /// Opened by a prefill step, and no decode step has come since.
    prompt: bool,
    /// A prompt page that was not resident when the first decode step came, and that no decode step has demanded.
    cold: bool,
}

#[derive(Clone, Debug, Default)]
pub struct NaiveTable {
    pages: Vec<Page>,
    /// The device slot of every way.
    slots: Vec<u32>,
}

impl NaiveTable {
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    pub fn ways(&self) -> usize {
        self.slots.len()
    }

    /// (logical page, device slot, stamp), by page.
    pub fn residents(&self) -> Vec<(u32, u32, u64)> {
        let resident = self.pages.iter().enumerate().filter(|(_, page)| page.way.is_some());
        resident.map(|(index, page)| (index as u32, self.slots[page.way.unwrap()], page.stamp)).collect()
    }

    pub fn grant(&mut self, slot: u32) {
        self.slots.push(slot);
    }

    pub fn revoke(&mut self) -> Option<u32> {
        let slot = self.slots.pop()?;
        self.pages.iter_mut().filter(|page| page.way == Some(self.slots.len())).for_each(|page| page.way = None);
        Some(slot)
    }

    pub fn open(&mut self, step: u64, phase: Phase, pins: Pins, keep: Option<u32>) -> Result<Opened, TableError> {
        let new = self.pages.len() as u32;
        let pinned = |page: u32| page < pins.sinks || page + pins.recent >= new;
        let (way, evicted) = match self.free_way() {
            Some(way) => (way, None),
            None => {
                let victim = self.victim(|page, _| !pinned(page) && keep != Some(page));
                let victim = victim.ok_or(TableError::NoWay { ways: self.slots.len() })?;
                (self.pages[victim as usize].way.unwrap(), Some(victim))
            }
        };
        self.end_prompt(phase);
        if let Some(victim) = evicted {
            self.drop_page(victim);
        }
        let prompt = phase == Phase::Prefill;
        self.pages.push(Page { way: Some(way), stamp: step, opened: step, prompt, cold: false });
        Ok(Opened { page: new, slot: self.slots[way], evicted })
    }

    pub fn close(&mut self) {
        self.pages.pop();
    }

    pub fn drop_page(&mut self, page: u32) {
        if let Some(page) = self.pages.get_mut(page as usize) {
            page.way = None;
        }
    }

    pub fn demand(&mut self, step: u64, phase: Phase, demand: &[u32]) -> Result<(Vec<Place>, Tally), TableError> {
        if let Some(index) = (1..demand.len()).find(|&index| demand[index - 1] >= demand[index]) {
            return Err(TableError::NotAscending { page: demand[index] });
        }
        if let Some(&page) = demand.iter().find(|&&page| page as usize >= self.pages.len()) {
            // A strictly ascending list names its largest page last, and that is the one that is reported.
            return Err(TableError::OutOfRange { page: page.max(*demand.last().unwrap()), pages: self.pages.len() });
        }
        self.end_prompt(phase);
        let mut tally = Tally::default();
        let was_resident: Vec<bool> = demand.iter().map(|&page| self.pages[page as usize].way.is_some()).collect();
        for (&page, _) in demand.iter().zip(&was_resident).filter(|(_, hit)| **hit) {
            self.pages[page as usize].stamp = step;
        }
        let mut places = Vec::new();
        for (&page, hit) in demand.iter().zip(was_resident) {
            let first = phase == Phase::Decode && std::mem::take(&mut self.pages[page as usize].cold);
            if hit {
                tally.hits += 1;
                places.push(Place::Hit(self.slots[self.pages[page as usize].way.unwrap()]));
                continue;
            }
            *if first { &mut tally.compulsory } else { &mut tally.capacity } += 1;
            let way = self.free_way().or_else(|| {
                let victim = self.victim(|page, state| demand.binary_search(&page).is_err() && state.opened != step)?;
                tally.evictions += 1;
                self.pages[victim as usize].way.take()
            });
            places.push(match way {
                Some(way) => {
                    let state = &mut self.pages[page as usize];
                    (state.way, state.stamp) = (Some(way), step);
                    Place::Fetch(self.slots[way])
                }
                None => {
                    tally.overflow += 1;
                    Place::Overflow
                }
            });
        }
        Ok((places, tally))
    }

    /// The first decode step ends the prompt.
    fn end_prompt(&mut self, phase: Phase) {
        if phase == Phase::Decode {
            for page in &mut self.pages {
                page.cold |= std::mem::take(&mut page.prompt) && page.way.is_none();
            }
        }
    }

    fn free_way(&self) -> Option<usize> {
        let mut taken = vec![false; self.slots.len()];
        self.pages.iter().filter_map(|page| page.way).for_each(|way| taken[way] = true);
        taken.iter().position(|taken| !taken)
    }

    /// The resident page with the smallest (stamp, logical page) that is eligible.
    fn victim(&self, eligible: impl Fn(u32, &Page) -> bool) -> Option<u32> {
        let resident = (0u32..).zip(&self.pages).filter(|(_, page)| page.way.is_some());
        resident
            .filter(|(index, page)| eligible(*index, page))
            .min_by_key(|(index, page)| (page.stamp, *index))
            .map(|(index, _)| index)
    }
}
