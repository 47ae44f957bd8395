//! Which page a head gives up when it needs a way: the seam for replacement policies.
//!
//! A policy orders the ways of one head. It knows pages only as names, and no memory: [`HeadTable`](crate::table::HeadTable)
//! tells it what was used, and asks it whom to evict. Whatever it decides, an evicted page is still reserved.
//!
//! | policy | who goes | state beside the order |
//! |---|---|---|
//! | [`Lru`] | the page used longest ago: the published rule, and the default | none |
//! | [`Frequency`] | the page with the smallest sum of uses, each halved every 16 steps | 4 bytes per logical page |
//! | [`Standing`] | the page that was chosen least of late, and was least close to being chosen | 4 bytes per logical page |
//! | [`S3Fifo`] | pages that were used only once go first, in a small queue of their own | names of as many evicted pages as there are ways |
//! | [`Sieve`] | a hand walks from old to new and spares what was used since it last came by | none |
//! | [`Arc`] | recency or frequency, whichever has of late been missed less | names of as many evicted pages as there are ways, twice |
//!
//! [`Rule`] names one of them, for [`CacheBuilder::replacement`](crate::CacheBuilder::replacement) and for replays. What each is
//! worth on recorded runs is in `docs/results.md`.

#![forbid(unsafe_code)]

mod arc;
mod balance;
mod chains;
mod fading;
mod frequency;
mod ghosts;
mod lru;
mod rule;
mod s3fifo;
mod sieve;
mod standing;

pub use arc::Arc;
pub use balance::{BalanceSettings, Balancer, Load, Move};
pub use frequency::Frequency;
pub use lru::Lru;
pub use rule::{Rule, Ruled};
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use standing::Standing;

/// What a selection found pages of a head to be worth, by digest: logits, raised by the stickiness where there is one, and infinite
/// where they are NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores<'a> {
    /// The first page that was scored.
    pub first: u32,
    /// One for each page from there on.
    pub scores: &'a [f32],
}

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
/// * No call but `reserve`, `grow` and the `admit` of a new logical page allocates, and these do not where room has been made.
pub trait Replacement {
    /// The policy of a head that owns no ways yet.
    fn new() -> Self;

    /// Makes room for this many logical pages and ways in all.
    fn reserve(&mut self, pages: usize, ways: usize);

    /// One more way, unoccupied.
    fn grow(&mut self);

    /// One way fewer.
    fn shrink(&mut self);

    /// The way got this page, which is used in this step. A [`touch`](Self::touch) that names it follows in the same step, unless the
    /// step asks for nothing.
    fn admit(&mut self, way: u32, page: u32);

    /// The ways' pages are used in this step, in this order.
    fn touch(&mut self, ways: impl Iterator<Item = u32>);

    /// A selection has scored pages of the head, and the step is going to demand `pages`, ascending; those of them that were scored are
    /// the ones it chose. Comes before the step's admissions and its `touch`, if it comes. What is scored exists. Policies that
    /// look at use alone do nothing.
    fn rate(&mut self, scores: Scores<'_>, pages: &[u32]) {
        let _ = (scores, pages);
    }

    /// The same of a prompt, which uses everything: a policy that counts uses need not count these. What is in one chunk of a prompt
    /// and what in the next must then make no difference to it.
    fn touch_prompt(&mut self, ways: impl Iterator<Item = u32>) {
        self.touch(ways);
    }

    /// The occupied way `from` is called `to` from now on, which was unoccupied. Its place in the order does not change.
    fn rename(&mut self, from: u32, to: u32);

    /// The way's page is gone without having been evicted.
    fn remove(&mut self, way: u32);

    /// Picks up to `wanted` occupied ways that are `eligible`, hands each to `take` in the order in which they have to go, and
    /// forgets them.
    fn evict(&mut self, wanted: usize, eligible: impl FnMut(u32) -> bool, take: impl FnMut(u32));

    /// Heap bytes of the policy's own state.
    fn table_bytes(&self) -> usize;
}
