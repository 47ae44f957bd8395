//! What pages are worth, fading with every step: what [`Frequency`](super::Frequency) and [`Standing`](super::Standing) have in common.

use crate::growth::make_room;

/// Per logical page a sum of what it was given, each part halved after so many steps. Sums outlive evictions, so that a page that comes
/// back is not a stranger; that is possible here because the number of pages is known.
#[derive(Clone, Debug)]
pub(super) struct Fading {
    /// Per way its page, or [`NONE`].
    pages: Vec<u32>,
    /// Per logical page its sum, in units of what counts 1 at time 0.
    heat: Vec<f32>,
    /// What 1 counts now. It grows, instead of all sums shrinking.
    weight: f32,
    /// ... by this factor from step to step.
    growth: f32,
    candidates: Vec<(f32, u32, u32)>,
}

const NONE: u32 = u32::MAX;

/// When 1 counts this much, everything is divided by it.
const LARGE: f32 = 1e24;

impl Fading {
    /// What is given counts half after `half_life` steps.
    pub fn new(half_life: f32) -> Self {
        let growth = f32::exp2(half_life.recip());
        Fading { pages: Vec::new(), heat: Vec::new(), weight: 1.0, growth, candidates: Vec::new() }
    }

    pub fn reserve(&mut self, pages: usize, ways: usize) {
        self.pages.reserve_exact(ways.saturating_sub(self.pages.len()));
        self.heat.reserve_exact(pages.saturating_sub(self.heat.len()));
        self.candidates.reserve_exact(ways.saturating_sub(self.candidates.len()));
    }

    pub fn grow(&mut self) {
        self.pages.push(NONE);
        self.candidates.clear();
        self.candidates.reserve(self.pages.len());
    }

    pub fn shrink(&mut self) {
        self.pages.pop();
    }

    pub fn admit(&mut self, way: u32, page: u32) {
        self.pages[way as usize] = page;
        let missing = (page as usize + 1).saturating_sub(self.heat.len());
        if missing > 0 {
            make_room(&mut self.heat, missing);
            self.heat.resize(page as usize + 1, 0.0);
        }
    }

    /// The next step has begun: everything before it counts less.
    pub fn fade(&mut self) {
        self.weight *= self.growth;
        if self.weight > LARGE {
            self.heat.iter_mut().for_each(|heat| *heat /= self.weight);
            self.weight = 1.0;
        }
    }

    /// Each of these ways' pages is given 1.
    pub fn warm(&mut self, ways: impl Iterator<Item = u32>) {
        for way in ways {
            self.heat[self.pages[way as usize] as usize] += self.weight;
        }
    }

    /// The pages from `first` on are given these shares of 1, in the step that [`fade`](Self::fade) is about to begin.
    pub fn add(&mut self, first: u32, shares: impl Iterator<Item = f32>) {
        let weight = self.weight * self.growth;
        for (heat, share) in self.heat.iter_mut().skip(first as usize).zip(shares) {
            *heat += weight * share;
        }
    }

    /// What a page has, in units of what counts 1 at time 0.
    pub fn of(&self, page: u32) -> f32 {
        self.heat.get(page as usize).copied().unwrap_or(0.0)
    }

    pub fn rename(&mut self, from: u32, to: u32) {
        self.pages[to as usize] = std::mem::replace(&mut self.pages[from as usize], NONE);
    }

    pub fn remove(&mut self, way: u32) {
        self.pages[way as usize] = NONE;
    }

    /// The pages with the least go; of equal ones the lower page. Found by a search through all ways.
    pub fn evict(&mut self, wanted: usize, mut eligible: impl FnMut(u32) -> bool, mut take: impl FnMut(u32)) {
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

    pub fn table_bytes(&self) -> usize {
        (self.pages.capacity() + self.heat.capacity()) * 4 + self.candidates.capacity() * size_of::<(f32, u32, u32)>()
    }
}

/// The methods of [`Replacement`](super::Replacement) that a policy around a [`Fading`] leaves to it.
macro_rules! by_fading {
    () => {
        fn reserve(&mut self, pages: usize, ways: usize) {
            self.0.reserve(pages, ways);
        }

        fn grow(&mut self) {
            self.0.grow();
        }

        fn shrink(&mut self) {
            self.0.shrink();
        }

        fn admit(&mut self, way: u32, page: u32) {
            self.0.admit(way, page);
        }

        fn touch(&mut self, ways: impl Iterator<Item = u32>) {
            self.0.fade();
            self.0.warm(ways);
        }

        /// Not counted: pages that a later chunk of the prompt opens would have less than those of an earlier one, and go first.
        fn touch_prompt(&mut self, _ways: impl Iterator<Item = u32>) {}

        fn rename(&mut self, from: u32, to: u32) {
            self.0.rename(from, to);
        }

        fn remove(&mut self, way: u32) {
            self.0.remove(way);
        }

        fn evict(&mut self, wanted: usize, eligible: impl FnMut(u32) -> bool, take: impl FnMut(u32)) {
            self.0.evict(wanted, eligible, take);
        }

        fn table_bytes(&self) -> usize {
            self.0.table_bytes()
        }
    };
}
pub(super) use by_fading;
