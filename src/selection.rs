//! Which pages a head reads in a decode step.

use crate::geometry::Geometry;
use crate::table::Pins;

/// What a decode step demands of each head. Prefill always attends exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Selection {
    /// Every page: exact attention over the whole context.
    All,
    /// The pinned pages and the best `count` others, by digest.
    TopPages {
        /// Pages beside the pinned ones.
        count: usize,
        /// Pages at the start of the sequence that are always read (attention sinks).
        sink_pages: usize,
        /// Pages before the last one that are always read.
        recent_pages: usize,
        /// What pages are scored by.
        digest: Digest,
    },
    /// The pinned pages and those that the engine names in
    /// [`Step::attend_pages`](crate::Step::attend_pages): its own indexer, or a recorded trace.
    Explicit {
        /// Pages at the start of the sequence that are always read.
        sink_pages: usize,
        /// Pages before the last one that are always read.
        recent_pages: usize,
    },
}

impl Selection {
    /// The best `count` pages by [`Digest::RotatedSketch2`], with one sink page and one recent page.
    pub const fn top_pages(count: usize) -> Self {
        Selection::TopPages { count, sink_pages: 1, recent_pages: 1, digest: Digest::RotatedSketch2 }
    }

    /// The same selection with other pins. [`Selection::All`] reads everything anyway and has none.
    pub const fn pinned(self, sinks: usize, recent: usize) -> Self {
        match self {
            Selection::All => Selection::All,
            Selection::TopPages { count, digest, .. } => {
                Selection::TopPages { count, sink_pages: sinks, recent_pages: recent, digest }
            }
            Selection::Explicit { .. } => Selection::Explicit { sink_pages: sinks, recent_pages: recent },
        }
    }

    /// The same selection scored by another digest, where it scores at all.
    pub const fn scored_by(self, digest: Digest) -> Self {
        match self {
            Selection::TopPages { count, sink_pages, recent_pages, .. } => {
                Selection::TopPages { count, sink_pages, recent_pages, digest }
            }
            other => other,
        }
    }

    pub(crate) const fn digest(self) -> Option<Digest> {
        match self {
            Selection::TopPages { digest, .. } => Some(digest),
            _ => None,
        }
    }

    /// `None` when the counts do not fit a page number.
    pub(crate) fn pins(self) -> Option<Pins> {
        let (sinks, recent) = match self {
            Selection::All => (0, 0),
            Selection::TopPages { sink_pages, recent_pages, .. } | Selection::Explicit { sink_pages, recent_pages } => {
                (sink_pages, recent_pages)
            }
        };
        Some(Pins { sinks: u32::try_from(sinks).ok()?, recent: u32::try_from(recent).ok()? })
    }
}

/// What a page leaves on the device to be scored by, also when the page itself is only in the reservoir.
///
/// The score of a page is the maximum over the query rows that share its head. Digests take device memory for every page that
/// the reservoir can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Digest {
    /// Smallest and largest value of each key channel; the score Σ_d max(q_d·min_d, q_d·max_d) bounds every logit from above
    /// (Quest, arXiv 2406.10774). 1/16 of the KV bytes at 16-token pages.
    MinMax,
    /// As `MinMax`, but between the middle of each channel's range less and plus the keys' mean distance from it: no bound, but a better
    /// guess (ArkVale, NeurIPS 2024). As many bytes.
    CuboidMean,
    /// Every key at 2 bits per channel with a scale and a zero per page and channel, scored per token. 1/8 of the KV bytes at
    /// 16-token pages and 2-byte dtypes.
    KeySketch2,
    /// As [`RotatedSketch2`](Self::RotatedSketch2), at 1 bit. 5 % of the KV bytes at 16-token pages and 2-byte dtypes. Finds about
    /// what `CuboidMean` finds, in fewer bytes.
    RotatedSketch1,
    /// Every key less its page's mean, rotated by Hadamard's matrix, at 2 bits per channel with a scale per token, scored per token. 8 % of
    /// the KV bytes at 16-token pages and 2-byte dtypes.
    ///
    /// The default: a model does as well with its pages as with those of `KeySketch2`, in two thirds of the bytes and less than half of the
    /// time, which is about a sixth of what attending a page takes. The rotation makes all channels alike, so one scale per token
    /// serves them, as in RaBitQ (arXiv 2405.12497), and one rounded query serves every page.
    RotatedSketch2,
    /// The same at 3 bits. 11 % of the KV bytes, and a fifth of the time of attending: for the fewest pages.
    RotatedSketch3,
}

impl Digest {
    /// Bytes that one page's digest takes.
    pub const fn bytes(self, geometry: &Geometry) -> usize {
        let bounds = 2 * geometry.head_dim() * geometry.dtype().bytes();
        match self {
            Digest::MinMax | Digest::CuboidMean => bounds,
            Digest::KeySketch2 => bounds + geometry.page_tokens() * geometry.head_dim() / 4,
            Digest::RotatedSketch1 => rotated(1, geometry),
            Digest::RotatedSketch2 => rotated(2, geometry),
            Digest::RotatedSketch3 => rotated(3, geometry),
        }
    }
}

/// Codes in blocks of 16 tokens and whole words of 32 bytes, a byte per token and channel, two scales.
const fn rotated(bits: usize, geometry: &Geometry) -> usize {
    let (dim, tokens) = (geometry.head_dim(), geometry.page_tokens().next_multiple_of(16));
    let pairs = if bits >= 2 { dim.div_ceil(8) } else { 0 };
    let quads = if bits % 2 == 1 { dim.div_ceil(16) } else { 0 };
    tokens / 16 * (pairs + quads) * 32 + tokens + dim.next_multiple_of(16) + 8
}

/// Page lists for [`Step::attend_pages`](crate::Step::attend_pages), in compressed rows: list `i` is
/// `pages[offsets[i]..offsets[i + 1]]`.
///
/// There is one list per (batch entry, KV head), KV heads innermost. A list names each page at most once, in any order; pinned
/// pages and those that the step's tokens are written to are read whether named or not. Lists of prefill entries must be empty,
/// for prefill reads everything.
#[derive(Clone, Copy, Debug)]
pub struct PageLists<'a> {
    /// `entries × kv_heads + 1` ascending offsets into `pages`, the first 0, the last `pages.len()`.
    pub offsets: &'a [u32],
    /// Logical pages.
    pub pages: &'a [u32],
}

impl<'a> PageLists<'a> {
    /// The list of one (batch entry, KV head), given their combined index. Empty when the offsets do not reach that far.
    pub fn list(&self, index: usize) -> &'a [u32] {
        match (self.offsets.get(index), self.offsets.get(index + 1)) {
            (Some(&from), Some(&to)) => self.pages.get(from as usize..to as usize).unwrap_or(&[]),
            _ => &[],
        }
    }
}
