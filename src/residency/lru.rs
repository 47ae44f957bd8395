//! Least recently used: the published rule (WakeKV, arXiv 2610.02713) and the default.

use super::Replacement;
use crate::growth::make_room;

/// A circular list through all occupied ways, oldest first. Node 0 is the list's end and way `w` is node `w + 1`, so that
/// linking needs no branches.
#[derive(Clone, Debug)]
pub struct Lru {
    links: Vec<Link>,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

const END: u32 = 0;

impl Lru {
    fn unlink(&mut self, node: u32) {
        let Link { older, newer } = self.links[node as usize];
        self.links[older as usize].newer = newer;
        self.links[newer as usize].older = older;
    }

    fn link_newest(&mut self, node: u32) {
        let newest = self.links[END as usize].older;
        self.links[node as usize] = Link { older: newest, newer: END };
        self.links[newest as usize].newer = node;
        self.links[END as usize].older = node;
    }
}

impl Replacement for Lru {
    fn new() -> Self {
        Lru { links: vec![Link { older: END, newer: END }] }
    }

    fn reserve(&mut self, _pages: usize, ways: usize) {
        self.links.reserve_exact((ways + 1).saturating_sub(self.links.len()));
    }

    fn grow(&mut self) {
        let node = self.links.len() as u32;
        make_room(&mut self.links, 1);
        self.links.push(Link { older: node, newer: node });
    }

    fn shrink(&mut self) {
        self.links.pop();
    }

    fn admit(&mut self, way: u32, _page: u32) {
        self.link_newest(way + 1);
    }

    /// The end of the list stays in a register from way to way: through memory it would be a chain of dependent loads.
    fn touch(&mut self, ways: impl Iterator<Item = u32>) {
        let mut newest = self.links[END as usize].older;
        for way in ways {
            let node = way + 1;
            if node == newest {
                continue;
            }
            self.unlink(node);
            self.links[newest as usize].newer = node;
            self.links[node as usize].older = newest;
            newest = node;
        }
        self.links[newest as usize].newer = END;
        self.links[END as usize].older = newest;
    }

    fn rename(&mut self, from: u32, to: u32) {
        let Link { older, newer } = self.links[from as usize + 1];
        self.links[to as usize + 1] = Link { older, newer };
        self.links[older as usize].newer = to + 1;
        self.links[newer as usize].older = to + 1;
    }

    fn remove(&mut self, way: u32) {
        self.unlink(way + 1);
    }

    fn evict(&mut self, wanted: usize, mut eligible: impl FnMut(u32) -> bool, mut take: impl FnMut(u32)) {
        let mut left = wanted;
        let mut node = self.links[END as usize].newer;
        while left > 0 && node != END {
            let newer = self.links[node as usize].newer;
            if eligible(node - 1) {
                self.unlink(node);
                take(node - 1);
                left -= 1;
            }
            node = newer;
        }
    }

    fn table_bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }
}
