//! wakekv
#![deny(missing_docs)]

pub mod backend;
mod cache;
mod error;
mod geometry;
mod growth;
pub mod pool;
mod reservoir;
pub mod residency;
mod selection;
mod shim;
mod stats;
mod step;
pub mod table;

pub use backend::cpu::{Cpu, CpuBackend, CpuTensor, CpuTensorMut, Isa};
pub use cache::{Cache, CacheBuilder, Entry, Sequence};
pub use error::Error;
pub use geometry::{DType, Geometry, GeometryBuilder};
pub use reservoir::{Reservoir, Store};
pub use selection::{Digest, PageLists, Selection};
pub use stats::{Counts, Occupancy, PhaseCounts, Stats, StepReport};
pub use step::Step;
pub use table::Phase;
