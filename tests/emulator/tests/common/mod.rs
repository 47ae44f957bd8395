//! What the tests share: a device to launch kernels on, the layouts that kernels take, random numbers.

#![allow(dead_code, unused_imports, reason = "each test uses some of it")]

pub mod gpu;
#[path = "../../../../src/backend/cuda/layout.rs"]
pub mod layout;
pub mod numbers;

/// In the wave of a place whose bytes are still under way.
pub const PENDING: u32 = 1 << 31;

pub use gpu::{Buffer, Gpu, Pinned};
