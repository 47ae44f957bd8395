//! The structs and numbers of `kernels/*.cu` and `*.cuh`, field for field. Addresses are device addresses. The emulator's tests
//! of the kernels include this very file.

use bytemuck::{Pod, Zeroable};

macro_rules! layout {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
        pub struct $name { $(pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$ty>())*, "no padding");
        // SAFETY: every field can be zero.
        unsafe impl Zeroable for $name {}
        // SAFETY: plain numbers in C layout, for which every bit pattern is a value, and no padding between them.
        unsafe impl Pod for $name {}
    )*};
}

layout! {
    Shape { kv_heads: u32, group: u32, page_tokens: u32, heads: u32, first_head: u32, head_dim: u32 }
    Entry { sequence: u32, start: u32, tokens: u32, row: u32, decode: u32, reselect: u32 }
    Sequence { ways_at: u64, pages_at: u64, groups_at: u64, ways_room: u32, pages_room: u32 }
    /// All zeros is a head without pages and ways.
    Head {
        opened_step: u64,
        opened_from: u32,
        pages: u32,
        ways: u32,
        prompt_from: u32,
        selected: u32,
        selection_due: u32,
        list: u32,
        kept: u32,
        selected_step: u64,
    }
    Tables {
        sequences: u64,
        heads: u64,
        slot_of_way: u64,
        page_of_way: u64,
        stamp_of_way: u64,
        way_of_page: u64,
        selected: [u64; 2],
        groups: u64,
    }
    Place { slot: u32, wave: u32 }
    Demand { pages: u64, places: u64, counts: u64, room: u32, unused: u32 }
    PageCopy { host: u32, device: u32, place: u32 }
    CopyList { copies: u64, counts: u64, first_room: u32, wave_room: u32 }
    Reservoir { chunks: u64, chunk_pages: u64 }
    Staging { first: u32, ring: u32 }
    Fault { kind: u32, sequence: u32, head: u32, page: u32 }
    Pins { sinks: u32, recent: u32 }
    Tally { hits: u32, compulsory: u32, capacity: u32, overflow: u32, evictions: u32 }
    Digests { bytes: u64, stride: u64, kind: u32, unused: u32 }
    Selection { mode: u32, count: u32, sinks: u32, recent: u32, stickiness: f32 }
    Attention {
        q: u64,
        pool: u64,
        acc: u64,
        state: u64,
        copies_per_wave: u64,
        fault: u64,
        scale: f32,
        dtype: u32,
        splits: u32,
        wave: u32,
        first_token: u32,
        window: u32,
    }
    WayGrant { way: u64, head: u32, slot: u32, ways: u32, last: u32 }
    Move { ways_from: u64, ways_to: u64, pages_from: u64, pages_to: u64, ways_room_from: u32, ways_room_to: u32, pages_room_from: u32, pages_room_to: u32 }
}

/// A place of a page table without a way, with or without the flag that its page is cold.
pub const NO_WAY: u32 = 0x7fff_ffff;
pub const NONE: u32 = u32::MAX;

pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const BF16: u32 = 2;

pub const DIGEST_NONE: u32 = 0;
pub const DIGEST_MIN_MAX: u32 = 1;
pub const DIGEST_SKETCH: u32 = 2;
/// Of one bit; those of two and three bits come next.
pub const DIGEST_ROTATED: u32 = 3;
pub const DIGEST_CUBOID: u32 = 6;

pub const FAULT_NO_WAY: u32 = 1;
pub const FAULT_NOT_THERE: u32 = 2;
pub const FAULT_BAD_DEMAND: u32 = 3;
pub const FAULT_TOO_MANY: u32 = 4;

pub const SELECT_ALL: u32 = 0;
pub const SELECT_TOP: u32 = 1;
pub const SELECT_LISTED: u32 = 2;
