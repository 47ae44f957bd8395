//! Adaptive replacement: recency against frequency.

use super::Replacement;
use super::chains::Chains;
use super::ghosts::Ghosts;

/// After ARC (Megiddo and Modha, FAST 2003): one list of pages that were used in one step, one of those that were used in several, and the
/// names of what was evicted from each. A miss on such a name says that its list is too short, and moves the target of its length.
///
/// Our reading: a step evicts for all its misses before it learns which names they bear, so the target moves one step later than in ARC.
#[derive(Clone, Debug)]
pub struct Arc {
    lists: Chains<2>,
    ways: Vec<Way>,
    occupied: [usize; 2],
    ghosts: [Ghosts; 2],
    /// How long the list of pages used once may be.
    target: usize,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    page: u32,
    list: usize,
    fresh: bool,
}

const ONCE: usize = 0;
const OFTEN: usize = 1;

impl Arc {
    fn push(&mut self, list: usize, way: u32) {
        self.lists.push_newest(list, way);
        self.ways[way as usize].list = list;
        self.occupied[list] += 1;
    }

    fn unlink(&mut self, way: u32) {
        self.lists.unlink(way);
        self.occupied[self.ways[way as usize].list] -= 1;
    }

    fn victim(&self, list: usize, eligible: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        std::iter::successors(self.lists.oldest(list), |&way| self.lists.newer(way)).find(|&way| eligible(way))
    }

    /// The evicted page's name joins its list's. Names and pages used once are as many as the ways at most, and names as well.
    fn remember(&mut self, list: usize, page: u32) {
        let ways = self.ways.len();
        self.ghosts[list].push(page, ways);
        while self.ghosts[ONCE].len() > 0 && self.occupied[ONCE] + self.ghosts[ONCE].len() > ways {
            self.ghosts[ONCE].forget_oldest();
        }
        while self.ghosts[OFTEN].len() > 0 && self.ghosts[ONCE].len() + self.ghosts[OFTEN].len() > ways {
            self.ghosts[OFTEN].forget_oldest();
        }
    }
}

impl Replacement for Arc {
    fn new() -> Self {
        Arc { lists: Chains::new(), ways: Vec::new(), occupied: [0; 2], ghosts: Default::default(), target: 0 }
    }

    fn reserve(&mut self, _pages: usize, ways: usize) {
        self.lists.reserve(ways);
        self.ways.reserve_exact(ways.saturating_sub(self.ways.len()));
        self.ghosts.iter_mut().for_each(|ghosts| ghosts.reserve(ways + 1));
    }

    fn grow(&mut self) {
        self.lists.grow();
        self.ways.push(Way { page: 0, list: ONCE, fresh: false });
        let ways = self.ways.len();
        self.ghosts.iter_mut().for_each(|ghosts| ghosts.reserve(ways + 1));
    }

    fn shrink(&mut self) {
        self.lists.shrink();
        self.ways.pop();
        self.target = self.target.min(self.ways.len());
    }

    fn admit(&mut self, way: u32, page: u32) {
        let [once, often] = [self.ghosts[ONCE].len(), self.ghosts[OFTEN].len()];
        let list = if self.ghosts[ONCE].take(page) {
            self.target = (self.target + (often / once.max(1)).max(1)).min(self.ways.len());
            OFTEN
        } else if self.ghosts[OFTEN].take(page) {
            self.target = self.target.saturating_sub((once / often.max(1)).max(1));
            OFTEN
        } else {
            ONCE
        };
        self.ways[way as usize] = Way { page, list, fresh: true };
        self.push(list, way);
    }

    fn touch(&mut self, ways: impl Iterator<Item = u32>) {
        for way in ways {
            if std::mem::take(&mut self.ways[way as usize].fresh) {
                continue;
            }
            self.unlink(way);
            self.push(OFTEN, way);
        }
    }

    fn rename(&mut self, from: u32, to: u32) {
        self.lists.rename(from, to);
        self.ways[to as usize] = self.ways[from as usize];
    }

    fn remove(&mut self, way: u32) {
        self.unlink(way);
    }

    fn evict(&mut self, wanted: usize, mut eligible: impl FnMut(u32) -> bool, mut take: impl FnMut(u32)) {
        for _ in 0..wanted {
            let first = if self.occupied[ONCE] > self.target { ONCE } else { OFTEN };
            let victim = self.victim(first, &mut eligible).or_else(|| self.victim(1 - first, &mut eligible));
            let Some(way) = victim else { return };
            let Way { page, list, .. } = self.ways[way as usize];
            self.unlink(way);
            self.remember(list, page);
            take(way);
        }
    }

    fn table_bytes(&self) -> usize {
        let ghosts: usize = self.ghosts.iter().map(Ghosts::bytes).sum();
        self.lists.bytes() + ghosts + self.ways.capacity() * size_of::<Way>()
    }
}
