//! A KV cache that an inference engine links in place of its own. Every attention head keeps a bounded set of pages on the
//! device, ordered by recency of use; a *reservoir* in host memory or in a file keeps them all; and a page that is missing is
//! fetched before the attention step that asked for it ends. A wrong guess about a head costs one transfer and never a token
//! (WakeKV, arXiv 2610.02713).
//!
//! # A first step
//!
//! An engine changes the place where it used to call attention:
//!
//! ```
//! use wakekv::{Cache, Cpu, Geometry, Reservoir, Selection};
//!
//! let geometry = Geometry::builder().layers(2).query_heads(8).kv_heads(2).head_dim(64).build()?;
//! let mut cache = Cache::builder(geometry)
//!     .pages_per_head(8)                          // what each head may keep on the device
//!     .reservoir(Reservoir::memory(64 << 20))     // where every full page also lives
//!     .selection(Selection::top_pages(4))         // what a generated token reads
//!     .build(Cpu::new())?;
//!
//! let sequence = cache.insert();
//! for tokens in [100, 1, 1] {                     // a prompt, then two generated tokens
//!     let (k, v) = (vec![0.1f32; tokens * 2 * 64], vec![0.2f32; tokens * 2 * 64]);
//!     let q = vec![0.3f32; tokens * 8 * 64];
//!     let mut out = vec![0f32; tokens * 8 * 64];
//!     let mut step = cache.step(&[(sequence, tokens)])?;
//!     for layer in 0..2 {
//!         step.append(layer, &k, &v)?;            // [tokens, kv_heads, head_dim]
//!         step.attend(layer, &q, &mut out)?;      // [tokens, query_heads, head_dim]
//!     }
//!     let report = step.finish()?;                // dropped instead: as if it had never begun
//!     println!("{} hits, {} misses", report.counts.decode.hits, report.counts.decode.misses());
//! }
//! # Ok::<(), wakekv::Error>(())
//! ```
//!
//! # How it works
//!
//! A head's tokens live in **pages** of [`page_tokens`](Geometry::page_tokens) tokens, keys then values. The last page is
//! *open* and always on the device. When it is full it is *sealed*: it never changes again, and a copy of it, the *mirror*, goes to
//! the reservoir. From then on the page can leave the device for free, and come back for one copy.
//!
//! A head owns a number of **ways**, each of which holds one page. Per step and head, with the step number as the clock:
//!
//! 1. the *demand* is the pinned pages (sinks, recent window, last page) and those that the [`Selection`] picks;
//! 2. each demanded page that is resident is a *hit*;
//! 3. each other one is a *miss*: it takes a free way, or that of the page which was used longest ago and is not demanded;
//! 4. attention runs over the hits while the misses are fetched, then over the fetched pages, and the partial results merge exactly;
//! 5. if the demand exceeds the ways, what is over streams through staging slots and is not kept.
//!
//! The output depends on the demand alone. On the CPU it is the same to the bit for every budget and every number of threads, on
//! CUDA within the rounding of f32.
//!
//! # What it takes
//!
//! With `page` = 2 × page_tokens × head_dim × bytes of the dtype, for a sequence of `n` pages per head and a budget of `B` ways:
//!
//! | memory | where | bytes |
//! |---|---|---|
//! | ways | device | layers × kv_heads × min(B, n) × `page` |
//! | reservoir | host or file | layers × kv_heads × n × `page` |
//! | digests, with [`Selection::TopPages`] | device | [`Digest::bytes`] for every page that the reservoir can hold |
//! | staging slots | device | about 2 MiB, or [`Cpu::staging_pages`] × `page` |
//! | tables | host | below 1 % of the keys and values they manage, at 16-token pages and 128 channels |
//! | scratch | host | the queries and partial results of a step's largest layer, in f32; kept from step to step |
//!
//! On CUDA staging slots take up to 64 MiB or `Cuda::staging_pages` × `page`, and tables and scratch are device memory as well,
//! beside the pool: partial results take up to 64 MiB, rounded up to a power of two. `Cache::scratch_bytes` and
//! [`Cache::table_bytes`] tell.
//!
//! All of it but the tables and the scratch is set aside when the cache is built. [`Cache::step`] decides admission before anything
//! changes: a step that has begun does not run out of pages.
//!
//! # Selection
//!
//! | | reads per step | quality |
//! |---|---|---|
//! | [`Selection::All`] | everything; what exceeds the budget is streamed from the reservoir in each step | exact |
//! | [`Selection::TopPages`] | the pinned pages and the best `count` by [`Digest`] | depends on the digest and on `count` |
//! | [`Selection::Explicit`] | the pinned pages and those that the engine names | the engine's |
//!
//! Prefill always reads everything. [`CacheBuilder::reselect_every`] trades how often pages are selected for time,
//! [`CacheBuilder::stickiness`] how exactly for fewer misses. [`CacheBuilder::replacement`] says who goes when a page needs a way, which
//! changes what has to be fetched and no output.
//!
//! # Errors, and steps that do not finish
//!
//! Library code does not panic, print or exit. Bad input is refused with an [`Error`] that names the quantity, its limit and the knob,
//! and changes nothing. A step that fails or is dropped leaves every sequence with the tokens it had; only which pages are resident may
//! differ. A page that could not be fetched is still in the reservoir, and one that could not be mirrored is still on the device.
//!
//! # Dependencies
//!
//! `half` (f16 and bf16), `bytemuck` (casts between tensors and bytes), `parking_lot` (locks), `thiserror` (errors), `tracing` (spans
//! and events, which cost nothing unless somebody listens) and on Unix `rustix` (file allocation, huge pages). There are no default
//! features to turn off. The CPU backend is always there; it uses AVX-512, or AVX2 with FMA and F16C, where the processor has them,
//! and runs everywhere else as well.
//!
//! | feature | what it adds | dependencies |
//! |---|---|---|
//! | `trace` | recorded runs on disk | `npyz`, `zip`, `serde_json` |
//! | `cuda` | the CUDA backend; the driver is loaded at run time | `cudarc`, `libloading` |
//! | `cuda-12040` … `cuda-13000` | the same, for the driver interface of that version | |

#![deny(missing_docs)]

pub mod backend;
mod cache;
mod error;
mod geometry;
mod growth;
mod observe;
pub mod pool;
mod reservoir;
pub mod residency;
mod selection;
mod shim;
pub mod sim;
mod stats;
mod step;
pub mod table;
pub mod trace;

pub use backend::cpu::{Cpu, CpuBackend, CpuTensor, CpuTensorMut, Isa};
#[cfg(feature = "cuda")]
pub use backend::cuda::{
    Calibration, CapturedStep, CopyDirection, CopyPath, CopyTimer, Crossover, Cuda, CudaBackend, CudaTensor,
    CudaTensorMut, FetchPath, Measured,
};
pub use cache::{Cache, CacheBuilder, Entry, Sequence};
pub use error::Error;
pub use geometry::{DType, Geometry, GeometryBuilder};
pub use observe::{Observer, Part};
pub use reservoir::{Reservoir, Store};
pub use selection::{Digest, PageLists, Selection};
pub use stats::{Counts, Occupancy, PhaseCounts, Stats, StepReport};
pub use step::Step;
pub use table::Phase;
