//! The structs of `kernels/page.cuh` and `kernels/residency.cu`, field for field, and of the other kernels. Addresses are device addresses.

/// Bytes that may be copied to and from the device: every bit pattern is a value, and there is no padding.
pub trait Plain: Copy + 'static {
    const ZERO: Self;
}

macro_rules! plain {
    ($($number:ty),*) => {$(impl Plain for $number { const ZERO: Self = 0 as $number; })*};
}
plain!(u8, u16, u32, u64, i32, f32);

macro_rules! layout {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
        pub struct $name { $(pub $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$ty>())*, "no padding");
        impl Plain for $name {
            const ZERO: Self = $name { $($field: <$ty as Plain>::ZERO),* };
        }
    )*};
}

layout! {
    Shape { kv_heads: u32, group: u32, page_tokens: u32, heads: u32, first_head: u32, head_dim: u32 }
    Entry { sequence: u32, start: u32, tokens: u32, row: u32, decode: u32, reselect: u32 }
    Sequence { ways_at: u64, pages_at: u64, groups_at: u64, ways_room: u32, pages_room: u32 }
    Head { opened_step: u64, opened_from: u32, pages: u32, ways: u32, prompt_from: u32, selected: u32, selection_due: u32 }
    Tables {
        sequences: u64,
        heads: u64,
        slot_of_way: u64,
        page_of_way: u64,
        stamp_of_way: u64,
        way_of_page: u64,
        selected: u64,
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
    Selection { mode: u32, count: u32, sinks: u32, recent: u32 }
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
}

pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const BF16: u32 = 2;

pub const DIGEST_MIN_MAX: u32 = 1;
pub const DIGEST_SKETCH: u32 = 2;
/// Of one bit; those of two and three bits come next.
pub const DIGEST_ROTATED: u32 = 3;
pub const DIGEST_CUBOID: u32 = 6;

pub const SELECT_ALL: u32 = 0;
pub const SELECT_TOP: u32 = 1;
pub const SELECT_LISTED: u32 = 2;

pub const NONE: u32 = u32::MAX;
pub const PENDING: u32 = 1 << 31;
pub const FAULT_NO_WAY: u32 = 1;
pub const FAULT_NOT_THERE: u32 = 2;
pub const FAULT_BAD_DEMAND: u32 = 3;
pub const FAULT_TOO_MANY: u32 = 4;
