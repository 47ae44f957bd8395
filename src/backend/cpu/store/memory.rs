//! A reservoir in host memory.

use std::io;

use crate::error::Error;
use crate::reservoir::Store;

/// Exactly the bytes asked for, touched once.
pub(crate) struct MemoryStore(Vec<u8>);

impl MemoryStore {
    pub(crate) fn new(bytes: u64) -> Result<Self, Error> {
        let error = |bytes| Error::OutOfMemory { knob: "reservoir", bytes };
        let bytes = usize::try_from(bytes).map_err(|_| error(usize::MAX))?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).map_err(|_| error(bytes))?;
        // Writing the zeros is what makes the system back the memory now instead of in the middle of a step. In blocks, because `resize`
        // goes byte by byte where the crate is not optimised.
        let zeros = [0; 1 << 12];
        while memory.len() < bytes {
            memory.extend_from_slice(&zeros[..zeros.len().min(bytes - memory.len())]);
        }
        Ok(MemoryStore(memory))
    }

    fn range(&self, offset: u64, bytes: usize) -> io::Result<std::ops::Range<usize>> {
        let from = usize::try_from(offset).ok().filter(|&from| from + bytes <= self.0.len());
        from.map(|from| from..from + bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MemoryStore({} bytes)", self.0.len())
    }
}

impl Store for MemoryStore {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let range = self.range(offset, into.len())?;
        into.copy_from_slice(&self.0[range]);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        let range = self.range(offset, from.len())?;
        self.0[range].copy_from_slice(from);
        Ok(())
    }
}
