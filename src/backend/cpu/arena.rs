//! Memory in slots of equal size, which several threads fill and read at once.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

use crate::error::Error;

/// `slots × slot_bytes` bytes, zeroed, touched once, aligned for huge pages.
///
/// The arena knows nothing of who may touch a slot when. That is the business of its users: a slot belongs to one head
/// (pool), and copies and kernels take turns by tickets (`copy`).
#[derive(Debug)]
pub(crate) struct Arena {
    memory: NonNull<u8>,
    layout: Layout,
    slot_bytes: usize,
    slots: usize,
}

// SAFETY: the arena is plain bytes behind a pointer. All access goes through `slot`, whose callers promise to exclude races.
unsafe impl Send for Arena {}
// SAFETY: as above; the methods themselves only compute addresses.
unsafe impl Sync for Arena {}

/// Transparent huge pages on x86-64 and most of aarch64.
const HUGE_PAGE: usize = 2 << 20;

impl Arena {
    /// Sets the memory aside. `knob` names the setting for the error.
    pub(crate) fn new(knob: &'static str, slots: usize, slot_bytes: usize) -> Result<Self, Error> {
        let error = |bytes| Error::OutOfMemory { knob, bytes };
        let bytes = slots.checked_mul(slot_bytes).ok_or(error(usize::MAX))?.max(1);
        let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 64 };
        let layout = Layout::from_size_align(bytes, align).map_err(|_| error(bytes))?;
        // SAFETY: the layout's size is not zero.
        let memory = NonNull::new(unsafe { alloc(layout) }).ok_or(error(bytes))?;
        let arena = Arena { memory, layout, slot_bytes, slots };
        // In this order: the advice counts for memory that has not been touched yet, and `alloc_zeroed` may touch it.
        arena.advise_huge_pages();
        // Makes the system back every page now, rather than in the middle of a step.
        // SAFETY: the range is our own allocation, and nobody else knows it yet.
        unsafe { arena.memory.as_ptr().write_bytes(0, bytes) };
        Ok(arena)
    }

    /// Pages lie scattered over the arena, so small pages would cost a TLB miss for nearly each of them.
    fn advise_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.layout.align() == HUGE_PAGE {
            // SAFETY: the range is our own allocation, and the advice does not change its contents. A refusal costs speed only.
            let _ = unsafe {
                rustix::mm::madvise(self.memory.as_ptr().cast(), self.layout.size(), rustix::mm::Advice::LinuxHugepage)
            };
        }
    }

    /// Bytes of one slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The address of a slot. Reading or writing through it is subject to the protocol of the arena's users.
    pub(crate) fn slot(&self, index: u32) -> *mut u8 {
        debug_assert!((index as usize) < self.slots, "slot {index} of {}", self.slots);
        self.memory.as_ptr().wrapping_add(index as usize * self.slot_bytes)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}
