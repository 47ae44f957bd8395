//! The stores that come with the CPU backend.

mod file;
mod memory;

pub(super) use file::FileStore;
pub(super) use memory::MemoryStore;

use crate::error::Error;
use crate::reservoir::{Reservoir, Store};

/// Sets the reservoir aside.
pub(super) fn open(reservoir: Reservoir) -> Result<Box<dyn Store>, Error> {
    Ok(match reservoir {
        Reservoir::Memory { bytes } => Box::new(MemoryStore::new(bytes)?),
        Reservoir::File { path, bytes } => Box::new(FileStore::create(&path, bytes)?),
        Reservoir::Custom(store) => store,
    })
}
