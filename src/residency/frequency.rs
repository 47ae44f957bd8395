//! Least frequently used, with uses that fade.

use super::Replacement;
use super::fading::Fading;

/// The page goes whose uses, each halved every 16 steps, sum up to the least; of equal ones the lower page. Sums outlive
/// evictions.
///
/// The idea is that of LFU with aging (LRFU, Lee et al. 2001, with λ = 1/16 and a step as its unit of time). Victims are found by a
/// search through all ways.
#[derive(Clone, Debug)]
pub struct Frequency(Fading);

/// Steps until a use counts half.
const HALF_LIFE: f32 = 16.0;

impl Replacement for Frequency {
    fn new() -> Self {
        Frequency(Fading::new(HALF_LIFE))
    }

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
}
