//! Slot pools: who owns which place of an arena, with a generation that makes stale handles harmless.
//!
//! A pool hands out indices only. The bytes behind them belong to a backend.

#![forbid(unsafe_code)]

/// A place in a pool, as its owner holds it. Only the generation that was handed out can give it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    index: u32,
    generation: u32,
}

impl Slot {
    /// The place in the arena that the pool manages.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// How often the place had changed hands when this slot was handed out. Odd, because even means free.
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

/// A fixed number of slots, each free or owned exactly once.
///
/// ```
/// use wakekv::pool::SlotPool;
/// let mut pool = SlotPool::new(2);
/// let slot = pool.take().unwrap();
/// assert!(pool.is_live(slot));
/// assert!(pool.give_back(slot));
/// assert!(!pool.give_back(slot), "the second time the handle is stale");
/// assert_eq!((pool.free(), pool.owned(), pool.total()), (2, 0, 2));
/// ```
#[derive(Clone, Debug)]
pub struct SlotPool {
    /// Odd while owned, even while free; grows by one at every change of hands.
    generations: Vec<u32>,
    /// Free indices. The last one is handed out next, so that recently used memory is used again.
    free: Vec<u32>,
}

impl SlotPool {
    /// A pool of `total` free slots. The lowest index is handed out first.
    pub fn new(total: u32) -> Self {
        SlotPool { generations: vec![0; total as usize], free: (0..total).rev().collect() }
    }

    /// Takes a free slot, or `None` when all are owned.
    pub fn take(&mut self) -> Option<Slot> {
        let index = self.free.pop()?;
        let generation = &mut self.generations[index as usize];
        *generation = generation.wrapping_add(1);
        Some(Slot { index, generation: *generation })
    }

    /// Frees a slot. Returns `false`, and changes nothing, when the handle is stale or of another pool's range.
    pub fn give_back(&mut self, slot: Slot) -> bool {
        if !self.is_live(slot) {
            return false;
        }
        self.generations[slot.index as usize] = slot.generation.wrapping_add(1);
        self.free.push(slot.index);
        true
    }

    /// Whether the handle's owner still owns the slot.
    pub fn is_live(&self, slot: Slot) -> bool {
        slot.generation % 2 == 1 && self.generations.get(slot.index as usize) == Some(&slot.generation)
    }

    /// Slots that nobody owns.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Slots that somebody owns.
    pub fn owned(&self) -> usize {
        self.total() - self.free()
    }

    /// All slots.
    pub fn total(&self) -> usize {
        self.generations.len()
    }

    /// Bytes of heap that the bookkeeping itself takes.
    pub fn table_bytes(&self) -> usize {
        (self.generations.capacity() + self.free.capacity()) * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slots_are_owned_exactly_once(total in 0u32..40, takes in prop::collection::vec(any::<Option<u8>>(), 0..300)) {
            let mut pool = SlotPool::new(total);
            let (mut owned, mut stale): (Vec<Slot>, Vec<Slot>) = Default::default();
            for action in takes {
                match action {
                    None => match pool.take() {
                        Some(slot) => {
                            prop_assert!(owned.iter().all(|other| other.index() != slot.index()));
                            owned.push(slot);
                        }
                        None => prop_assert_eq!(owned.len(), total as usize),
                    },
                    Some(pick) if !owned.is_empty() => {
                        let slot = owned.swap_remove(pick as usize % owned.len());
                        prop_assert!(pool.give_back(slot));
                        stale.push(slot);
                    }
                    Some(_) => {}
                }
                prop_assert!(stale.iter().all(|&slot| !pool.is_live(slot)));
                prop_assert!(owned.iter().all(|&slot| pool.is_live(slot)));
                prop_assert_eq!(pool.owned(), owned.len());
                prop_assert_eq!(pool.free() + pool.owned(), pool.total());
            }
            for slot in stale {
                prop_assert!(!pool.give_back(slot));
            }
        }
    }
}
