//! S3-FIFO: three queues.

use super::Replacement;
use super::chains::Chains;
use super::ghosts::Ghosts;

/// S3-FIFO (Yang et al., SOSP 2023): new pages go through a small queue, a tenth of the ways. Those that were used again before they reach
/// its end move on to the main queue, the others go, and leave their names behind. A page that comes back while its name is known goes
/// to the main queue at once. At the end of the main queue a page goes round again for each use, three at most.
///
/// Our reading: the step that admits a page does not count as a use, one later use is enough to move on, and pages that may not go are
/// passed by.
#[derive(Clone, Debug)]
pub struct S3Fifo {
    queues: Chains<2>,
    ways: Vec<Way>,
    occupied: [usize; 2],
    ghosts: Ghosts,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    page: u32,
    queue: usize,
    uses: u8,
    fresh: bool,
}

const SMALL: usize = 0;
const MAIN: usize = 1;
const MOST_USES: u8 = 3;

impl S3Fifo {
    fn push(&mut self, queue: usize, way: u32) {
        self.queues.push_newest(queue, way);
        self.ways[way as usize].queue = queue;
        self.occupied[queue] += 1;
    }

    fn unlink(&mut self, way: u32) {
        self.queues.unlink(way);
        self.occupied[self.ways[way as usize].queue] -= 1;
    }

    /// Moves used pages on to the main queue until one is found that was not.
    fn small_victim(&mut self, eligible: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        let mut next = self.queues.oldest(SMALL);
        while let Some(way) = next {
            next = self.queues.newer(way);
            if !eligible(way) {
                continue;
            }
            if self.ways[way as usize].uses == 0 {
                return Some(way);
            }
            self.unlink(way);
            self.ways[way as usize].uses = 0;
            self.push(MAIN, way);
        }
        None
    }

    fn main_victim(&mut self, eligible: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        // Each round takes one use from everybody who may go.
        for _ in 0..=MOST_USES {
            let mut next = self.queues.oldest(MAIN);
            for _ in 0..self.occupied[MAIN] {
                let Some(way) = next else { break };
                next = self.queues.newer(way);
                if !eligible(way) {
                    continue;
                }
                if self.ways[way as usize].uses == 0 {
                    return Some(way);
                }
                self.ways[way as usize].uses -= 1;
                self.queues.unlink(way);
                self.queues.push_newest(MAIN, way);
            }
        }
        None
    }
}

impl Replacement for S3Fifo {
    fn new() -> Self {
        S3Fifo { queues: Chains::new(), ways: Vec::new(), occupied: [0; 2], ghosts: Ghosts::default() }
    }

    fn reserve(&mut self, _pages: usize, ways: usize) {
        self.queues.reserve(ways);
        self.ways.reserve_exact(ways.saturating_sub(self.ways.len()));
        self.ghosts.reserve(ways + 1);
    }

    fn grow(&mut self) {
        self.queues.grow();
        self.ways.push(Way { page: 0, queue: SMALL, uses: 0, fresh: false });
        self.ghosts.reserve(self.ways.len() + 1);
    }

    fn shrink(&mut self) {
        self.queues.shrink();
        self.ways.pop();
    }

    fn admit(&mut self, way: u32, page: u32) {
        let queue = if self.ghosts.take(page) { MAIN } else { SMALL };
        self.ways[way as usize] = Way { page, queue, uses: 0, fresh: true };
        self.push(queue, way);
    }

    fn touch(&mut self, ways: impl Iterator<Item = u32>) {
        for way in ways {
            let way = &mut self.ways[way as usize];
            way.uses = (way.uses + u8::from(!way.fresh)).min(MOST_USES);
            way.fresh = false;
        }
    }

    fn rename(&mut self, from: u32, to: u32) {
        self.queues.rename(from, to);
        self.ways[to as usize] = self.ways[from as usize];
    }

    fn remove(&mut self, way: u32) {
        self.unlink(way);
    }

    fn evict(&mut self, wanted: usize, mut eligible: impl FnMut(u32) -> bool, mut take: impl FnMut(u32)) {
        for _ in 0..wanted {
            let small = self.occupied[SMALL] >= (self.ways.len() / 10).max(1);
            let first = if small { self.small_victim(&mut eligible) } else { None };
            let victim = first.or_else(|| self.main_victim(&mut eligible)).or_else(|| {
                // A small queue below its size gives only when nothing else does, and then it may have moved everybody on.
                self.small_victim(&mut eligible).or_else(|| self.main_victim(&mut eligible))
            });
            let Some(way) = victim else { return };
            let Way { page, queue, .. } = self.ways[way as usize];
            self.unlink(way);
            if queue == SMALL {
                self.ghosts.push(page, self.ways.len());
            }
            take(way);
        }
    }

    fn table_bytes(&self) -> usize {
        self.queues.bytes() + self.ghosts.bytes() + self.ways.capacity() * size_of::<Way>()
    }
}
