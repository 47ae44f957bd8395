//! Bugs that are planted into copies of the kernels, to see that the tests find them.

/// A change to one place of a kernel's source that makes it wrong.
#[derive(Debug)]
pub struct Bug {
    /// What the library with the wrong kernels is called.
    pub name: &'static str,
    /// The kernel file that is built.
    pub kernel: &'static str,
    /// The file with the place, the kernel file itself or a header.
    pub file: &'static str,
    /// What is there once.
    pub right: &'static str,
    /// What is put in its place.
    pub wrong: &'static str,
}

/// The bug that AddressSanitizer has to find, and nothing else can: it is built for it alone, and the others are not.
pub const OUT_OF_BOUNDS: &str = "grant_out_of_bounds";
/// The bug of a plain build that ThreadSanitizer has to find as well.
pub const MISSING_BARRIER: &str = "attention_missing_barrier";

/// All of them.
pub const BUGS: &[Bug] = &[
    Bug {
        name: "victim_off_by_one",
        kernel: "residency.cu",
        file: "residency.cu",
        right: "const u64 key = keys[rank];",
        wrong: "const u64 key = keys[rank + 1 < eligible ? rank + 1 : rank];",
    },
    Bug {
        name: "victim_by_page_alone",
        kernel: "residency.cu",
        file: "residency.cu",
        right: "keys[atomicAdd(counter, 1)] = page == NONE ? key_of(0, way) : key_of(stamp, page);",
        wrong: "keys[atomicAdd(counter, 1)] = page == NONE ? key_of(0, way) : key_of(1, page);",
    },
    // A way that holds a page of this very demand is given away.
    Bug {
        name: "slot_reused_too_early",
        kernel: "residency.cu",
        file: "residency.cu",
        right: "if (page != NONE && stamp == step) continue;",
        wrong: "",
    },
    Bug {
        name: "residency_missing_barrier",
        kernel: "residency.cu",
        file: "residency.cu",
        right: "keys[low] = b, keys[high] = a;\n      }\n      __syncthreads();",
        wrong: "keys[low] = b, keys[high] = a;\n      }",
    },
    Bug {
        name: "residency_wrong_lane_mask",
        kernel: "residency.cu",
        file: "device.cuh",
        right: "__popc(votes & ((1u << lane) - 1))",
        wrong: "__popc(votes & ((2u << lane) - 1))",
    },
    // Warps' states are read before all of them are written.
    Bug {
        name: MISSING_BARRIER,
        kernel: "attention.cu",
        file: "attention.cu",
        right: "  __syncthreads();\n  const u32 slot = a.wave == 0",
        wrong: "  const u32 slot = a.wave == 0",
    },
    Bug {
        name: "attention_wrong_lanes",
        kernel: "attention.cu",
        file: "attention.cu",
        right: "for (int offset = LANES / 2; offset > 0; offset /= 2) logit",
        wrong: "for (int offset = LANES; offset > 1; offset /= 2) logit",
    },
    Bug {
        name: "attention_page_off_by_one",
        kernel: "attention.cu",
        file: "attention.cu",
        right: "load_place(&demand.places[list + i]);",
        wrong: "load_place(&demand.places[list + (i + 1 < to ? i + 1 : i)]);",
    },
    Bug {
        name: "attention_reads_unwritten",
        kernel: "attention.cu",
        file: "attention.cu",
        right: "const bool wanted = reads && token < filled;",
        wrong: "const bool wanted = reads;",
    },
    Bug {
        name: "select_wrong_lane_mask",
        kernel: "select.cu",
        file: "device.cuh",
        right: "__popc(votes & ((1u << lane) - 1))",
        wrong: "__popc(votes & ((1u << (lane & 15)) - 1))",
    },
    // The bytes behind an allocation that its alignment leaves unused.
    Bug {
        name: OUT_OF_BOUNDS,
        kernel: "residency.cu",
        file: "residency.cu",
        right: "tables.stamp_of_way[grant.way] = 0;",
        wrong: "tables.stamp_of_way[grant.way + 1] = 0;",
    },
    Bug {
        name: "parameter_drift",
        kernel: "transfer.cu",
        file: "transfer.cu",
        right: "const u8* pool, u64 page_bytes) {",
        wrong: "const u8* pool, u32 page_bytes) {",
    },
];
