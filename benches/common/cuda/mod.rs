//! What is measured on a CUDA device, for the benches and for the runner of `tests/gpu`.
#![allow(dead_code, reason = "each user needs a part of it")]

pub mod copies;
pub mod memory;
pub mod scene;

/// What a measurement can meet: the cache's errors, and the driver's.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
