//! Linked lists through the ways, oldest first, for policies that keep more than one order.

/// `N` circular lists. Node `n < N` is the end of list `n`, and way `w` is node `N + w`; a way is in one list at most.
#[derive(Clone, Debug)]
pub(super) struct Chains<const N: usize> {
    links: Vec<Link>,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

impl<const N: usize> Chains<N> {
    pub(super) fn new() -> Self {
        Chains { links: (0..N as u32).map(|end| Link { older: end, newer: end }).collect() }
    }

    pub(super) fn reserve(&mut self, ways: usize) {
        self.links.reserve_exact((ways + N).saturating_sub(self.links.len()));
    }

    pub(super) fn grow(&mut self) {
        let node = self.links.len() as u32;
        self.links.push(Link { older: node, newer: node });
    }

    pub(super) fn shrink(&mut self) {
        self.links.pop();
    }

    pub(super) fn push_newest(&mut self, list: usize, way: u32) {
        let node = way + N as u32;
        let newest = self.links[list].older;
        self.links[node as usize] = Link { older: newest, newer: list as u32 };
        self.links[newest as usize].newer = node;
        self.links[list].older = node;
    }

    pub(super) fn unlink(&mut self, way: u32) {
        let Link { older, newer } = self.links[way as usize + N];
        self.links[older as usize].newer = newer;
        self.links[newer as usize].older = older;
    }

    pub(super) fn rename(&mut self, from: u32, to: u32) {
        let link = self.links[from as usize + N];
        self.links[to as usize + N] = link;
        self.links[link.older as usize].newer = to + N as u32;
        self.links[link.newer as usize].older = to + N as u32;
    }

    /// The way that has been in a list for the longest time.
    pub(super) fn oldest(&self, list: usize) -> Option<u32> {
        self.way(self.links[list].newer)
    }

    /// The way behind another one in its list.
    pub(super) fn newer(&self, way: u32) -> Option<u32> {
        self.way(self.links[way as usize + N].newer)
    }

    fn way(&self, node: u32) -> Option<u32> {
        node.checked_sub(N as u32)
    }

    pub(super) fn bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>()
    }
}
