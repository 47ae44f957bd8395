//! The digests of every page that the reservoir holds, at the page's host slot.

use super::arena::Arena;
use super::kernels::{DigestKernels, Isa, PageShape, Shelf};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::selection::Digest;

/// One digest per host slot: a page keeps it for as long as it is reserved, also when no head has it resident.
#[derive(Debug)]
pub(super) struct Digests {
    arena: Arena,
    kernels: DigestKernels,
}

impl Digests {
    pub(super) fn new(
        digest: Digest,
        isa: Isa,
        geometry: &Geometry,
        shape: PageShape,
        hosts: usize,
    ) -> Result<Self, Error> {
        let kernels = DigestKernels::new(digest, isa, shape).ok_or(Error::Isa { isa })?;
        debug_assert_eq!(kernels.bytes(), digest.bytes(geometry));
        Ok(Digests { arena: Arena::new("reservoir (digests)", hosts, kernels.bytes())?, kernels })
    }

    /// Summarises a page.
    ///
    /// # Safety
    /// `page` is a full page of the shape, nobody writes it, and nobody else uses this host slot's digest meanwhile.
    pub(super) unsafe fn build(&self, host: u32, page: *const u8) {
        // SAFETY: the digest's slot is exclusive and the page readable, by the caller's promise.
        unsafe {
            let digest = std::slice::from_raw_parts_mut(self.arena.slot(host), self.arena.slot_bytes());
            self.kernels.build(page, digest);
        }
    }

    /// Scores pages: the maximum over the rows of `queries`.
    ///
    /// # Safety
    /// Every host slot holds a digest, and nobody writes these meanwhile.
    pub(super) unsafe fn score(&self, queries: &[f32], hosts: &[u32], scores: &mut [f32]) {
        let shelf = Shelf { base: self.arena.slot(0).cast_const(), stride: self.arena.slot_bytes(), slots: hosts };
        // SAFETY: slots lie inside the arena and hold digests of this kind, by the caller's promise.
        unsafe { self.kernels.score(queries, shelf, scores) };
    }

    /// Forgets a digest.
    pub(super) fn scrub(&self, host: u32) {
        // SAFETY: the host slot is being freed; nothing scores or builds between steps.
        unsafe { self.arena.slot(host).write_bytes(0, self.arena.slot_bytes()) };
    }
}
