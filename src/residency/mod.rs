//! Which page a head gives up when it needs a way: the seam for replacement policies.
//!
//! A policy orders the ways of one head. It knows neither pages nor memory: [`HeadTable`](crate::table::HeadTable) tells
//! it what was used, and asks it whom to evict.

#![forbid(unsafe_code)]

mod lru;

pub use lru::Lru;

/// An eviction order over the ways of one head. Ways are small dense indices.
///
/// # What the table guarantees
/// * Ways are added and dropped at the end: [`grow`](Self::grow) adds index n, [`shrink`](Self::shrink) drops n − 1.
/// * A way is [`admit`](Self::admit)ted when it gets a page, and from then on it is *occupied* until it is handed to `take`
///   by [`evict`](Self::evict) or to [`remove`](Self::remove). `touch` and `remove` name occupied ways only, `shrink` drops an
///   unoccupied one.
/// * Within one step the pages that are used come in ascending order of logical page, whether they were resident or have just
///   been admitted. An order by recency is therefore an order by (stamp, logical page).
///
/// # What the policy guarantees
/// * It decides from these calls alone, so that every backend makes the same decisions.
/// * `evict` never names a way twice, nor one that is not eligible, and names fewer than `wanted` only when no other way is
///   eligible.
/// * No call but `grow` allocates.
pub trait Replacement {
    /// The policy of a head that owns no ways yet.
    fn new() -> Self;

    /// One more way, unoccupied.
    fn grow(&mut self);

    /// One way fewer.
    fn shrink(&mut self);

    /// The way got a page that is used in this step.
    fn admit(&mut self, way: u32);

    /// The ways' pages are used in this step, in this order.
    fn touch(&mut self, ways: impl Iterator<Item = u32>);

    /// The way's page is gone without having been evicted.
    fn remove(&mut self, way: u32);

    /// Picks up to `wanted` occupied ways that are `eligible`, hands each to `take` in the order in which they have to go, and
    /// forgets them.
    fn evict(&mut self, wanted: usize, eligible: impl FnMut(u32) -> bool, take: impl FnMut(u32));

    /// Heap bytes of the policy's own state.
    fn table_bytes(&self) -> usize;
}
