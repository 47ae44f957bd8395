//! Names of pages that were evicted of late.

use std::collections::VecDeque;

/// A queue of page names. Looked through from end to end, which for a head's few dozen ways is faster than an index.
#[derive(Clone, Debug, Default)]
pub(super) struct Ghosts(VecDeque<u32>);

impl Ghosts {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Room for so many names, which is one more than are ever kept.
    pub(super) fn reserve(&mut self, names: usize) {
        self.0.reserve_exact(names.saturating_sub(self.0.len()));
    }

    /// Adds a name, then forgets the oldest until `most` are left.
    pub(super) fn push(&mut self, page: u32, most: usize) {
        if self.0.len() >= most {
            self.0.drain(..self.0.len() + 1 - most.max(1));
        }
        if most > 0 {
            self.0.push_back(page);
        }
    }

    pub(super) fn forget_oldest(&mut self) {
        self.0.pop_front();
    }

    /// Whether the page was here. It is not any more.
    pub(super) fn take(&mut self, page: u32) -> bool {
        match self.0.iter().position(|&ghost| ghost == page) {
            Some(index) => self.0.remove(index).is_some(),
            None => false,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<u32>()
    }
}
