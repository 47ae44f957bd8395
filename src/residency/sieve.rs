//! SIEVE: a queue, and a hand that spares what was used.

use super::Replacement;
use super::chains::Chains;

/// SIEVE (Zhang et al., NSDI 2024): pages queue up in the order of their admission. A hand walks from the oldest to the newest and round
/// again. A page that was used since the hand last came by is spared once, any other one goes.
///
/// Our reading: the step that admits a page does not count as a use, and pages that may not go are passed without losing their mark.
#[derive(Clone, Debug)]
pub struct Sieve {
    queue: Chains<1>,
    marks: Vec<Mark>,
    /// The way to look at next; the oldest when there is none.
    hand: Option<u32>,
    occupied: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mark {
    /// Admitted in the step at hand.
    Fresh,
    Unused,
    Used,
}

impl Sieve {
    fn unlink(&mut self, way: u32) {
        if self.hand == Some(way) {
            self.hand = self.queue.newer(way);
        }
        self.queue.unlink(way);
        self.occupied -= 1;
    }

    fn victim(&mut self, eligible: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        // The first round takes all marks away, so the second one finds whoever may go.
        for _ in 0..2 * self.occupied {
            let way = self.hand.or_else(|| self.queue.oldest(0))?;
            self.hand = self.queue.newer(way);
            if eligible(way) {
                match &mut self.marks[way as usize] {
                    used @ Mark::Used => *used = Mark::Unused,
                    _ => return Some(way),
                }
            }
        }
        None
    }
}

impl Replacement for Sieve {
    fn new() -> Self {
        Sieve { queue: Chains::new(), marks: Vec::new(), hand: None, occupied: 0 }
    }

    fn reserve(&mut self, _pages: usize, ways: usize) {
        self.queue.reserve(ways);
        self.marks.reserve_exact(ways.saturating_sub(self.marks.len()));
    }

    fn grow(&mut self) {
        self.queue.grow();
        self.marks.push(Mark::Unused);
    }

    fn shrink(&mut self) {
        self.queue.shrink();
        self.marks.pop();
    }

    fn admit(&mut self, way: u32, _page: u32) {
        self.queue.push_newest(0, way);
        self.marks[way as usize] = Mark::Fresh;
        self.occupied += 1;
    }

    fn touch(&mut self, ways: impl Iterator<Item = u32>) {
        for way in ways {
            let mark = &mut self.marks[way as usize];
            *mark = if *mark == Mark::Fresh { Mark::Unused } else { Mark::Used };
        }
    }

    fn rename(&mut self, from: u32, to: u32) {
        self.queue.rename(from, to);
        self.marks[to as usize] = self.marks[from as usize];
        if self.hand == Some(from) {
            self.hand = Some(to);
        }
    }

    fn remove(&mut self, way: u32) {
        self.unlink(way);
    }

    fn evict(&mut self, wanted: usize, mut eligible: impl FnMut(u32) -> bool, mut take: impl FnMut(u32)) {
        for _ in 0..wanted {
            let Some(way) = self.victim(&mut eligible) else { return };
            self.unlink(way);
            take(way);
        }
    }

    fn table_bytes(&self) -> usize {
        self.queue.bytes() + self.marks.capacity() * size_of::<Mark>()
    }
}
