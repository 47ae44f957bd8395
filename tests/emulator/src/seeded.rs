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
    Bug {
        name: "parameter_drift",
        kernel: "residency.cu",
        file: "page.cuh",
        right: "  u64 chunk_pages;\n};",
        wrong: "  u32 chunk_pages;\n};",
    },
];
