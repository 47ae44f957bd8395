//! wakekv
mod backend;
pub mod error;
pub mod geometry;
pub use error::Error;
pub use geometry::{DType, Geometry};
