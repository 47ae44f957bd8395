//! What the device has after a step, beside what the Rust tables say.

use wakekv::table::{HeadTable, Place, Tally};

use super::super::common::PENDING;
use super::super::common::layout::{self, Entry, Fault, NONE, PageCopy};
use super::{FIRST_GROUP, WAVES, Wanted, World};

impl World<'_> {
    pub(super) fn compare(&self, entries: &[Entry], wanted: &[Wanted]) -> Result<(), String> {
        let fault = self.device.fault.read()[0];
        same("fault", &fault, &Fault::default())?;
        let (places, tallies) = (self.device.places.read(), self.device.tallies.read());
        let mut fetches: Vec<Vec<PageCopy>> = vec![Vec::new(); WAVES];
        for (lane, wanted) in wanted.iter().enumerate() {
            let at = lane * self.shape.most_pages as usize;
            let mut overflow = 0;
            for (index, (place, &page)) in wanted.places.iter().zip(&wanted.demand).enumerate() {
                let expected = self.placed(lane as u32, *place, &mut overflow);
                same(&format!("place of page {page} in lane {lane}"), &places[at + index], &expected)?;
                if expected.wave != 0 {
                    let head = lane as u32 % self.shape.kv_heads;
                    let host = (page + FIRST_GROUP) * self.shape.kv_heads + head;
                    let copy = PageCopy { host, device: expected.slot, place: (at + index) as u32 };
                    fetches[(expected.wave & !PENDING) as usize].push(copy);
                }
            }
            let t = wanted.tally;
            let Tally { hits, compulsory, capacity, overflow, evictions } = t;
            let expected = layout::Tally { hits, compulsory, capacity, overflow, evictions };
            same(&format!("tally of lane {lane}"), &tallies[lane], &expected)?;
        }
        self.compare_fetches(fetches)?;
        self.compare_tables(entries)
    }

    /// Where the kernel puts what the Rust table leaves to the backend: overflow goes through the ring, in order.
    fn placed(&self, lane: u32, place: Place, overflow: &mut u32) -> layout::Place {
        match place {
            Place::Hit(slot) => layout::Place { slot, wave: 0 },
            Place::Fetch(slot) => layout::Place { slot, wave: 1 | PENDING },
            Place::Overflow => {
                let ring = self.shape.ring;
                let nth = *overflow;
                *overflow += 1;
                layout::Place { slot: (1 << 20) + lane * ring + nth % ring, wave: (2 + nth / ring) | PENDING }
            }
        }
    }

    /// Lanes enter their copies in any order.
    fn compare_fetches(&self, expected: Vec<Vec<PageCopy>>) -> Result<(), String> {
        let counts = self.device.copy_counts.read();
        let (lanes, ring) = (self.sequences.len() * self.shape.kv_heads as usize, self.shape.ring as usize);
        for (wave, mut expected) in expected.into_iter().enumerate().skip(1) {
            same(&format!("copies of wave {wave}"), &counts[wave], &(expected.len() as u32))?;
            let first = if wave == 1 { 0 } else { lanes * self.shape.budget as usize + (wave - 2) * lanes * ring };
            let mut listed = self.device.copies.read_range(first, expected.len());
            listed.sort_by_key(|copy| copy.place);
            expected.sort_by_key(|copy| copy.place);
            same(&format!("list of wave {wave}"), &listed, &expected)?;
        }
        Ok(())
    }

    pub(super) fn compare_tables(&self, entries: &[Entry]) -> Result<(), String> {
        let budget = self.shape.budget as usize;
        let (pages_of_ways, slots) = (self.device.page_of_way.read(), self.device.slot_of_way.read());
        let (stamps, heads) = (self.device.stamp_of_way.read(), self.device.heads.read());
        for entry in entries {
            for (head, table) in self.sequences[entry.sequence as usize].heads.iter().enumerate() {
                let lane = entry.sequence as usize * self.shape.kv_heads as usize + head;
                same("pages", &(heads[lane].pages as usize), &table.pages())?;
                same("ways", &(heads[lane].ways as usize), &table.ways())?;
                let ways = lane * budget..lane * budget + table.ways();
                let mut residents: Vec<_> = ways
                    .filter(|&way| pages_of_ways[way] != NONE)
                    .map(|way| (pages_of_ways[way], slots[way], stamps[way]))
                    .collect();
                let mut expected: Vec<_> = table.residents().collect();
                residents.sort_unstable();
                expected.sort_unstable();
                same(&format!("residents of lane {lane}"), &residents, &expected)?;
                self.compare_page_table(lane, &pages_of_ways, table)?;
            }
        }
        Ok(())
    }

    fn compare_page_table(&self, lane: usize, pages_of_ways: &[u32], table: &HeadTable) -> Result<(), String> {
        let budget = self.shape.budget as usize;
        let entries = self.device.way_of_page.read_range(lane * self.shape.most_pages as usize, table.pages());
        for (page, entry) in entries.iter().enumerate() {
            let way = (entry & !PENDING) as usize;
            let resident = way < table.ways() && pages_of_ways[lane * budget + way] == page as u32;
            same(
                &format!("residency of page {page} in lane {lane}"),
                &resident,
                &table.slot_of(page as u32).is_some(),
            )?;
        }
        Ok(())
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, device: &T, rust: &T) -> Result<(), String> {
    if device == rust { Ok(()) } else { Err(format!("{what}: the device has {device:?}, the rule says {rust:?}")) }
}
