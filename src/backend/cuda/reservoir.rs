//! The reservoir: mapped pinned host memory in chunks, which the gather kernel reads and the mirror kernel writes.

use std::sync::Arc;
use std::thread::JoinHandle;

use cudarc::driver::CudaContext;
use parking_lot::{Condvar, Mutex};

use super::layout;
use super::memory::{DeviceMemory, PinnedMemory};
use crate::error::Error;

/// Chunks are pinned one by one: in one piece, more than a few GiB fail on some systems.
const CHUNK_BYTES: usize = 256 << 20;

/// Pages in pinned memory, and where the device finds them.
#[derive(Debug)]
pub(super) struct HostPages {
    shared: Arc<Shared>,
    pinning: Option<JoinHandle<()>>,
    page_bytes: usize,
    pages: usize,
    chunk_pages: usize,
    /// The device address of each chunk that is pinned.
    table: DeviceMemory,
    /// Chunks whose address is in the table.
    known: usize,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    chunks: Vec<PinnedMemory>,
    failure: Option<Error>,
    stop: bool,
}

impl HostPages {
    /// Pins `pages` pages, on the calling thread or on one of its own that goes on after the call.
    pub fn pin(
        context: &Arc<CudaContext>,
        page_bytes: usize,
        pages: usize,
        in_background: bool,
        numa_node: Option<usize>,
    ) -> Result<Self, Error> {
        let chunk_pages = (CHUNK_BYTES / page_bytes).max(1).min(pages);
        let chunks = pages.div_ceil(chunk_pages);
        let cpus = numa_node.map(cpus_of_node).transpose()?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let table = DeviceMemory::new(context, "reservoir", chunks * size_of::<u64>())?;
        let mut host = HostPages { shared, pinning: None, page_bytes, pages, chunk_pages, table, known: 0 };
        let work = {
            let (context, shared) = (context.clone(), host.shared.clone());
            move || pin_all(&context, &shared, page_bytes, pages, chunk_pages, cpus)
        };
        let thread = std::thread::Builder::new().name("wakekv-pin".into()).spawn(work);
        host.pinning = Some(thread.map_err(|cause| Error::Thread { name: "wakekv-pin", cause })?);
        if !in_background {
            host.wait_for(pages)?;
        }
        Ok(host)
    }

    /// Bytes that are pinned, and bytes that will be.
    pub fn progress(&self) -> (u64, u64) {
        let pinned = self.shared.state.lock().chunks.iter().map(|chunk| chunk.bytes() as u64).sum();
        (pinned, (self.pages * self.page_bytes) as u64)
    }

    /// Waits until the first `pages` pages are pinned.
    pub fn wait_for(&self, pages: usize) -> Result<(), Error> {
        let chunks = pages.min(self.pages).div_ceil(self.chunk_pages);
        let mut state = self.shared.state.lock();
        while state.chunks.len() < chunks {
            if let Some(failure) = &state.failure {
                let pinned = state.chunks.iter().map(|chunk| chunk.bytes() as u64).sum();
                let bytes = (self.pages * self.page_bytes) as u64;
                return Err(match failure {
                    Error::Pinning { cause, .. } => Error::Pinning { bytes, pinned, cause: cause.clone() },
                    other => Error::DeviceLost { cause: other.to_string() },
                });
            }
            self.shared.changed.wait(&mut state);
        }
        Ok(())
    }

    /// Tells the device of chunks that it does not know yet.
    pub fn publish(&mut self, upload: &mut impl FnMut(u64, &[u8]) -> Result<(), Error>) -> Result<(), Error> {
        let chunks = self.pages.div_ceil(self.chunk_pages);
        if self.known == chunks {
            return Ok(());
        }
        let state = self.shared.state.lock();
        let new: Vec<u64> = state.chunks[self.known..].iter().map(PinnedMemory::device).collect();
        drop(state);
        if !new.is_empty() {
            upload(self.table.at(self.known * size_of::<u64>()), bytemuck::cast_slice(&new))?;
            self.known += new.len();
        }
        Ok(())
    }

    /// What the kernels are given.
    pub fn view(&self) -> layout::Reservoir {
        layout::Reservoir { chunks: self.table.at(0), chunk_pages: self.chunk_pages as u64 }
    }

    /// Chunks in all.
    pub fn chunks(&self) -> usize {
        self.pages.div_ceil(self.chunk_pages)
    }

    /// Pages of a chunk: a run of copies must not go beyond one.
    pub fn chunk_pages(&self) -> usize {
        self.chunk_pages
    }

    /// The host address of a page that is pinned.
    pub fn host_address(&self, page: usize) -> *mut u8 {
        let state = self.shared.state.lock();
        state.chunks[page / self.chunk_pages].host(page % self.chunk_pages * self.page_bytes)
    }

    /// Overwrites pages with zeros. The device touches none of them now.
    pub fn scrub(&self, pages: std::ops::Range<usize>) {
        for page in pages {
            let address = self.host_address(page);
            // SAFETY: a whole page inside the pinned memory, which nobody else touches, by the caller's promise.
            unsafe { address.write_bytes(0, self.page_bytes) };
        }
    }

    /// Device bytes of the table.
    pub fn table_bytes(&self) -> usize {
        self.table.bytes()
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        if let Some(thread) = self.pinning.take() {
            // It does not panic; if it did, there is nothing left to do about it.
            let _ = thread.join();
        }
    }
}

/// Pins chunk after chunk until all are there, one fails, or nobody wants them any more.
fn pin_all(
    context: &Arc<CudaContext>,
    shared: &Shared,
    page_bytes: usize,
    pages: usize,
    chunk_pages: usize,
    cpus: Option<Vec<usize>>,
) {
    let mut left = pages;
    if let Some(cpus) = cpus {
        run_on(&cpus);
    }
    while left > 0 && !shared.state.lock().stop {
        let count = left.min(chunk_pages);
        let chunk = PinnedMemory::new(context, count * page_bytes);
        let mut state = shared.state.lock();
        match chunk {
            Ok(chunk) => state.chunks.push(chunk),
            Err(error) => state.failure = Some(error),
        }
        shared.changed.notify_all();
        if state.failure.is_some() {
            return;
        }
        left -= count;
    }
}

/// The processors of a NUMA node. Memory is pinned where the thread runs that asks for it.
#[cfg(target_os = "linux")]
fn cpus_of_node(node: usize) -> Result<Vec<usize>, Error> {
    let refuse = |rule: &str| Error::Setting { knob: "numa_node", value: node.to_string(), rule: rule.into() };
    let list = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist"));
    let list = list.map_err(|_| refuse("the system has no such NUMA node"))?;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse::<usize>().ok()?)
    };
    let ranges: Option<Vec<_>> = list.trim().split(',').filter(|part| !part.is_empty()).map(range).collect();
    let cpus: Vec<usize> = ranges.unwrap_or_default().into_iter().flatten().collect();
    if cpus.is_empty() { Err(refuse("the NUMA node has no processors to pin memory from")) } else { Ok(cpus) }
}

#[cfg(not(target_os = "linux"))]
fn cpus_of_node(node: usize) -> Result<Vec<usize>, Error> {
    Err(Error::Setting { knob: "numa_node", value: node.to_string(), rule: "is known on Linux only".into() })
}

#[cfg(target_os = "linux")]
fn run_on(cpus: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().filter(|&&cpu| cpu < rustix::thread::CpuSet::MAX_CPU).for_each(|&cpu| set.set(cpu));
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(%error, "the thread that pins memory cannot run on the NUMA node that was asked for");
    }
}

#[cfg(not(target_os = "linux"))]
fn run_on(_cpus: &[usize]) {}
