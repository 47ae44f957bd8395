//! Least frequently used, with uses that fade.

use super::Replacement;

/// The page goes whose uses, each halved every 16 steps, sum up to the least; of equal ones the lower page. Sums outlive
/// evictions, so that a page that comes back is not a stranger.
///
/// The idea is that of LFU with aging (LRFU, Lee et al. 2001, with λ = 1/16 and a step as its unit of time); keeping sums of absent
/// pages is possible here because the number of pages is known. Victims are found by a search through all ways.
#[derive(Clone, Debug)]
pub struct Frequency {
    /// Per way its page, or [`NONE`].
    pages: Vec<u32>,
    /// Per logical page the sum of its uses, in units of a use at time 0.
    heat: Vec<f32>,
    /// What a use counts now. It grows, instead of all sums shrinking.
    weight: f32,
    candidates: Vec<(f32, u32, u32)>,
}

const NONE: u32 = u32::MAX;

/// Steps until a use counts half.
const HALF_LIFE: f32 = 16.0;

/// When a use counts this much, everything is divided by it.
const LARGE: f32 = 1e24;

impl Replacement for Frequency {
    fn new() -> Self {
        Frequency { pages: Vec::new(), heat: Vec::new(), weight: 1.0, candidates: Vec::new() }
    }

    fn reserve(&mut self, pages: usize, ways: usize) {
        self.pages.reserve_exact(ways.saturating_sub(self.pages.len()));
        self.heat.reserve_exact(pages.saturating_sub(self.heat.len()));
        self.candidates.reserve_exact(ways.saturating_sub(self.candidates.len()));
    }

    fn grow(&mut self) {
        self.pages.push(NONE);
        self.candidates.clear();
        self.candidates.reserve(self.pages.len());
    }

    fn shrink(&mut self) {
        self.pages.pop();
    }

    fn admit(&mut self, way: u32, page: u32) {
        self.pages[way as usize] = page;
        if self.heat.len() <= page as usize {
            self.heat.resize(page as usize + 1, 0.0);
        }
    }

    fn touch(&mut self, ways: impl Iterator<Item = u32>) {
        self.weight *= f32::exp2(1.0 / HALF_LIFE);
        if self.weight > LARGE {
            self.heat.iter_mut().for_each(|heat| *heat /= self.weight);
            self.weight = 1.0;
        }
        for way in ways {
            self.heat[self.pages[way as usize] as usize] += self.weight;
        }
    }

    fn rename(&mut self, from: u32, to: u32) {
        self.pages[to as usize] = std::mem::replace(&mut self.pages[from as usize], NONE);
    }

    fn remove(&mut self, way: u32) {
        self.pages[way as usize] = NONE;
    }

    fn evict(&mut self, wanted: usize, mut eligible: impl FnMut(u32) -> bool, mut take: impl FnMut(u32)) {
        let occupied = (0u32..).zip(&self.pages).filter(|&(_, &page)| page != NONE);
        let heat = &self.heat;
        self.candidates.clear();
        self.candidates
            .extend(occupied.filter(|&(way, _)| eligible(way)).map(|(way, &page)| (heat[page as usize], page, way)));
        let order = |a: &(f32, u32, u32), b: &(f32, u32, u32)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if wanted < self.candidates.len() {
            self.candidates.select_nth_unstable_by(wanted, order);
            self.candidates.truncate(wanted);
        }
        self.candidates.sort_unstable_by(order);
        for &(_, _, way) in &self.candidates {
            self.pages[way as usize] = NONE;
            take(way);
        }
    }

    fn table_bytes(&self) -> usize {
        (self.pages.capacity() + self.heat.capacity()) * 4 + self.candidates.capacity() * size_of::<(f32, u32, u32)>()
    }
}
