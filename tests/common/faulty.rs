//! A reservoir that a test can look into, and make fail.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use wakekv::{Reservoir, Store};

/// What the store does to the call of that number, counted from 0 since [`Handle::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Fail(usize),
    Panic(usize),
    /// From this call on, all of them.
    FailFrom(usize),
}

#[derive(Debug, Default)]
pub struct Inner {
    pub bytes: Vec<u8>,
    pub reads: usize,
    pub writes: usize,
    /// What has happened that the cache has promised never to do.
    pub broken: Vec<String>,
    written: HashSet<u64>,
    calls: usize,
    fault: Option<Fault>,
}

/// The test's end of the store.
#[derive(Clone, Debug)]
pub struct Handle(Arc<Mutex<Inner>>);

impl Handle {
    pub fn new(bytes: usize) -> (Handle, Reservoir) {
        let handle = Handle(Arc::new(Mutex::new(Inner { bytes: vec![0; bytes], ..Inner::default() })));
        let store = FaultyStore { size: bytes as u64, inner: handle.clone() };
        (handle, Reservoir::custom(store))
    }

    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn arm(&self, fault: Fault) {
        let mut inner = self.lock();
        (inner.calls, inner.fault) = (0, Some(fault));
    }

    /// Calls since it was armed.
    pub fn disarm(&self) -> usize {
        let mut inner = self.lock();
        inner.fault = None;
        std::mem::take(&mut inner.calls)
    }
}

#[derive(Debug)]
struct FaultyStore {
    size: u64,
    inner: Handle,
}

impl FaultyStore {
    fn begin(&self, offset: u64, bytes: usize) -> io::Result<MutexGuard<'_, Inner>> {
        let mut inner = self.inner.lock();
        if !offset.is_multiple_of(bytes as u64) || offset + bytes as u64 > self.size {
            inner.broken.push(format!("{bytes} bytes at {offset} of {}", self.size));
        }
        let call = inner.calls;
        inner.calls += 1;
        match inner.fault {
            Some(Fault::Panic(at)) if at == call => panic!("on purpose, at call {call}"),
            Some(Fault::Fail(at)) if at == call => Err(io::Error::other("injected")),
            Some(Fault::FailFrom(at)) if call >= at => Err(io::Error::other("injected")),
            _ => Ok(inner),
        }
    }
}

impl Store for FaultyStore {
    fn bytes(&self) -> u64 {
        self.size
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        // What a failed read leaves behind must not be used.
        into.fill(0xFF);
        let mut inner = self.begin(offset, into.len())?;
        inner.reads += 1;
        if !inner.written.contains(&offset) {
            inner.broken.push(format!("offset {offset} was read but never written"));
        }
        into.copy_from_slice(&inner.bytes[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        let mut inner = self.begin(offset, from.len())?;
        inner.writes += 1;
        // Scrubbing takes a page away.
        if from.iter().all(|&byte| byte == 0) {
            inner.written.remove(&offset);
        } else {
            inner.written.insert(offset);
        }
        inner.bytes[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }
}
