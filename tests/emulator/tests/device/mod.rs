//! The library on the emulated device.

#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "../../../common/cuda.rs"]
mod tensors;

use wakekv::Cuda;
use wakekv_emulator::{Session, emulator};

/// The emulated device, lent to one test.
pub struct Device {
    pub session: Session,
}

impl Device {
    /// `None` where there is no emulator; the test then has nothing to do.
    pub fn new() -> Option<Self> {
        Some(Device { session: emulator()?.session() })
    }

    /// Settings for the device, with the kernels that the emulator has.
    pub fn cuda(&self) -> Cuda {
        Cuda::new(0).kernel_image(self.session.image()).copy_blocks(2)
    }
}
