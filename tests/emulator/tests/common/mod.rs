//! What the tests share: a device to launch kernels on, the layouts that kernels take, random numbers.

#![allow(dead_code, unused_imports, reason = "each test uses some of it")]

pub mod gpu;
pub mod layout;
pub mod numbers;

pub use gpu::{Buffer, Gpu, Pinned};
