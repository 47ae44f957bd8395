//! The copy engine: a stream of its own, on which pages move between reservoir and device while the compute stream goes on.
//!
//! There are two paths. The *gather* kernels read the list of copies from device memory: no host is in the loop, and a step can be
//! captured. *DMA* has the host read the list and ask the driver for one copy per contiguous run: the host waits for the device
//! in each layer, but the multiprocessors are left to attention. Which is faster when is
//! [`Crossover`]'s to say.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};

use super::driver::{Called, CopyAttributes, Driver};
use super::kernels::{Grid, Kernels};
use super::layout::{CopyList, PageCopy};
use super::memory::PinnedMemory;
use super::reservoir::HostPages;
use crate::error::Error;

/// How pages move between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchPath {
    /// Gather for what a step fetches; for the pages that a prompt seals, whichever is faster for so many of that size.
    #[default]
    Auto,
    /// Kernels over mapped pinned memory, driven by the device alone.
    Gather,
    /// The copy engines, driven by the host, which waits for the device in every layer. Such a step cannot be captured.
    Dma,
}

/// From how many pages on the gather kernels are faster than DMA, at one page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Crossover {
    /// Host to device. `usize::MAX`: never.
    pub fetch_pages: usize,
    /// Device to host. `usize::MAX`: never.
    pub mirror_pages: usize,
}

impl Crossover {
    /// What others have measured, on an A30 for the most part: it is a default until
    /// `Cache::calibrate` has measured the device at hand.
    pub(super) fn of_page(bytes: usize) -> Self {
        let pages = match bytes {
            0..=16_384 => 48,
            16_385..=32_768 => 128,
            _ => usize::MAX,
        };
        Crossover { fetch_pages: pages, mirror_pages: pages }
    }
}

/// Which way pages move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the reservoir to the device.
    Fetch,
    /// From the device to the reservoir.
    Mirror,
}

/// Device memory that pages are copied to and from, and the layout of pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    pub address: u64,
    pub page_bytes: usize,
}

#[derive(Debug)]
pub(super) struct CopyEngine {
    pub stream: Arc<CudaStream>,
    pub path: FetchPath,
    pub crossover: Crossover,
    /// Blocks of a gather or mirror kernel: enough to keep the bus busy, few enough to leave room for attention.
    pub blocks: usize,
    /// Lists that DMA has the host read.
    read_back: PinnedMemory,
    runs: Vec<Run>,
    driver: &'static Driver,
}

/// A list on the host, one wave of it.
#[derive(Debug, Default)]
pub(super) struct HostList {
    counts: Vec<u32>,
    copies: Vec<PageCopy>,
    first_room: usize,
    wave_room: usize,
}

/// Copies whose host pages and device slots both follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    host: u32,
    device: u32,
    pages: u32,
}

const GATHER_THREADS: usize = 256;

impl CopyEngine {
    pub fn new(
        context: &Arc<CudaContext>,
        priority: Option<i32>,
        path: FetchPath,
        blocks: usize,
        page_bytes: usize,
    ) -> Result<Self, Error> {
        let stream = match priority {
            Some(priority) => context.new_stream_with_priority(priority),
            None => context.new_stream(),
        };
        Ok(CopyEngine {
            stream: stream.called("cuStreamCreate")?,
            path,
            crossover: Crossover::of_page(page_bytes),
            blocks,
            read_back: PinnedMemory::new(context, 0)?,
            runs: Vec::new(),
            driver: Driver::get()?,
        })
    }

    /// Whether DMA serves `count` pages; the host would have to wait for the list.
    pub fn prefers_dma(&self, direction: CopyDirection, count: usize, may_wait: bool) -> bool {
        let crossover = match direction {
            CopyDirection::Fetch => self.crossover.fetch_pages,
            CopyDirection::Mirror => self.crossover.mirror_pages,
        };
        match self.path {
            FetchPath::Gather => false,
            FetchPath::Dma => true,
            FetchPath::Auto => may_wait && direction == CopyDirection::Mirror && count < crossover,
        }
    }

    /// Puts the gather kernel for a wave on the copy stream.
    ///
    /// # Safety
    /// The list, `places` and the pool are good until the kernel has ended, and what the list names is inside pool and reservoir.
    pub unsafe fn gather(
        &self,
        kernels: &Kernels,
        list: &CopyList,
        wave: u32,
        reservoir: &HostPages,
        pool: Pool,
        places: u64,
    ) -> Result<(), Error> {
        let page_bytes = pool.page_bytes as u64;
        // SAFETY: wakekv_gather's parameters; the rest is the caller's promise.
        unsafe {
            kernels.gather.launch(
                &self.stream,
                self.grid(),
                &[list, &wave, &reservoir.view(), &pool.address, &page_bytes, &places],
            )
        }
    }

    /// Puts the mirror kernel on the copy stream.
    ///
    /// # Safety
    /// As for [`gather`](Self::gather).
    pub unsafe fn mirror(
        &self,
        kernels: &Kernels,
        list: &CopyList,
        reservoir: &HostPages,
        pool: Pool,
    ) -> Result<(), Error> {
        let page_bytes = pool.page_bytes as u64;
        // SAFETY: wakekv_mirror's parameters; the rest is the caller's promise.
        unsafe {
            kernels.mirror.launch(
                &self.stream,
                self.grid(),
                &[list, &1_u32, &reservoir.view(), &pool.address, &page_bytes],
            )
        }
    }

    fn grid(&self) -> Grid {
        Grid { blocks: (self.blocks, 1, 1), threads: GATHER_THREADS, shared: 0 }
    }

    /// Has the host read a list of `waves` waves that may hold `capacity` copies. Waits for the copy stream, and with it for the
    /// kernel that has written the list.
    pub fn read(&mut self, list: &CopyList, waves: usize, capacity: usize) -> Result<HostList, Error> {
        let (counts, copies) = (waves * size_of::<u32>(), capacity * size_of::<PageCopy>());
        if self.read_back.bytes() < counts + copies {
            let context = self.stream.context().clone();
            self.read_back = PinnedMemory::new(&context, (counts + copies).next_power_of_two())?;
        }
        let stream = self.stream.cu_stream();
        // SAFETY: both ranges lie inside the pinned memory, which nobody reads before the stream has been waited for.
        unsafe {
            let into = std::slice::from_raw_parts_mut(self.read_back.host(0), counts);
            result::memcpy_dtoh_async(into, list.counts, stream).called("cuMemcpyDtoHAsync")?;
            let into = std::slice::from_raw_parts_mut(self.read_back.host(counts), copies);
            result::memcpy_dtoh_async(into, list.copies, stream).called("cuMemcpyDtoHAsync")?;
        }
        self.stream.synchronize().called("cuStreamSynchronize")?;
        // SAFETY: the copies into these ranges have been waited for.
        let (counts, copies) = unsafe { (self.read_back.read(0, counts), self.read_back.read(counts, copies)) };
        Ok(HostList {
            counts: bytemuck::cast_slice(counts).to_vec(),
            copies: bytemuck::cast_slice(copies).to_vec(),
            first_room: list.first_room as usize,
            wave_room: list.wave_room as usize,
        })
    }

    /// Puts one wave's copies on the copy stream, one per contiguous run, or all at once where the driver can do that.
    ///
    /// # Safety
    /// As for [`gather`](Self::gather).
    pub unsafe fn copy(
        &mut self,
        list: &HostList,
        wave: usize,
        direction: CopyDirection,
        reservoir: &HostPages,
        pool: Pool,
    ) -> Result<(), Error> {
        find_runs(list.wave(wave), reservoir.chunk_pages(), &mut self.runs);
        let sides = |run: &Run| {
            let host = reservoir.host_address(run.host as usize) as u64;
            let device = pool.address + u64::from(run.device) * pool.page_bytes as u64;
            (host, device, run.pages as usize * pool.page_bytes)
        };
        let stream = self.stream.cu_stream();
        if let Some(copy_batch) = self.driver.copy_batch.filter(|_| self.runs.len() > 1) {
            let (mut to, mut from, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
            for (host, device, size) in self.runs.iter().map(sides) {
                let (target, source) = if direction == CopyDirection::Fetch { (device, host) } else { (host, device) };
                to.push(target);
                from.push(source);
                bytes.push(size);
            }
            let mut attributes = CopyAttributes::of(direction);
            let (mut first, mut failed) = (0, 0);
            // SAFETY: as many destinations, sources and sizes as it says, one set of attributes for all from the first on; ranges inside
            // pool and reservoir, by the caller's promise.
            let status = unsafe {
                let lists = (to.as_mut_ptr(), from.as_mut_ptr(), bytes.as_mut_ptr());
                copy_batch(lists.0, lists.1, lists.2, to.len(), &mut attributes, &mut first, 1, &mut failed, stream)
            };
            return status.result().called("cuMemcpyBatchAsync");
        }
        for (host, device, bytes) in self.runs.iter().map(sides) {
            // SAFETY: whole pages inside pool and reservoir, which nobody else writes until the stream has passed the copy.
            unsafe {
                match direction {
                    CopyDirection::Fetch => {
                        let from = std::slice::from_raw_parts(host as *const u8, bytes);
                        result::memcpy_htod_async(device, from, stream).called("cuMemcpyHtoDAsync")?;
                    }
                    CopyDirection::Mirror => {
                        let into = std::slice::from_raw_parts_mut(host as *mut u8, bytes);
                        result::memcpy_dtoh_async(into, device, stream).called("cuMemcpyDtoHAsync")?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Marks the places of a wave as there, behind its copies.
    ///
    /// # Safety
    /// As for [`gather`](Self::gather).
    pub unsafe fn arrive(
        &self,
        kernels: &Kernels,
        list: &CopyList,
        wave: usize,
        count: usize,
        places: u64,
    ) -> Result<(), Error> {
        if count == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: (count.div_ceil(GATHER_THREADS), 1, 1), threads: GATHER_THREADS, shared: 0 };
        let wave = wave as u32;
        // SAFETY: wakekv_arrive's parameters; the rest is the caller's promise.
        unsafe { kernels.arrive.launch(&self.stream, grid, &[list, &wave, &places]) }
    }
}

impl HostList {
    /// A list of one wave.
    pub fn of(copies: &[PageCopy]) -> Self {
        HostList { counts: vec![0, copies.len() as u32], copies: copies.to_vec(), first_room: 0, wave_room: 0 }
    }

    pub fn wave(&self, wave: usize) -> &[PageCopy] {
        let first = if wave < 2 { 0 } else { self.first_room + (wave - 2) * self.wave_room };
        let count = self.counts.get(wave).map_or(0, |&count| count as usize);
        self.copies.get(first..first + count).unwrap_or(&[])
    }
}

impl CopyAttributes {
    /// What is copied to the device is sealed and lies still, so it may be read at any time. What is copied from it is being written by
    /// kernels before the copy, so it must be read in stream order.
    fn of(direction: CopyDirection) -> Self {
        const STREAM: u32 = 1;
        const ANY: u32 = 3;
        let source_access_order = if direction == CopyDirection::Fetch { ANY } else { STREAM };
        CopyAttributes { source_access_order, source: [0; 2], destination: [0; 2], flags: 0 }
    }
}

/// Joins copies where both sides adjoin, within a chunk of the reservoir.
fn find_runs(copies: &[PageCopy], chunk_pages: usize, runs: &mut Vec<Run>) {
    runs.clear();
    let mut sorted: Vec<(u32, u32)> = copies.iter().map(|copy| (copy.host, copy.device)).collect();
    sorted.sort_unstable();
    for (host, device) in sorted {
        match runs.last_mut() {
            Some(run)
                if run.host + run.pages == host
                    && run.device + run.pages == device
                    && !(host as usize).is_multiple_of(chunk_pages) =>
            {
                run.pages += 1;
            }
            _ => runs.push(Run { host, device, pages: 1 }),
        }
    }
}

/// Events that order the two streams. Each is recorded again and again; a wait is for the last record before it.
#[derive(Debug)]
pub(super) struct Events {
    /// The compute stream has decided what to copy.
    pub decided: CudaEvent,
    /// The copy stream has fetched a wave.
    pub fetched: CudaEvent,
    /// The compute stream has read a wave's staging slots.
    pub attended: CudaEvent,
    /// The copy stream has done all it was given.
    pub copied: CudaEvent,
}

impl Events {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)).called("cuEventCreate");
        Ok(Events { decided: event()?, fetched: event()?, attended: event()?, copied: event()? })
    }
}

/// Lets the second stream wait for what the first one has been given so far.
pub(super) fn order(first: &CudaStream, event: &CudaEvent, second: &CudaStream) -> Result<(), Error> {
    event.record(first).called("cuEventRecord")?;
    second.wait(event).called("cuStreamWaitEvent")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(host: u32, device: u32) -> PageCopy {
        PageCopy { host, device, place: 0 }
    }

    #[test]
    fn runs_join_only_where_both_sides_adjoin_within_a_chunk() {
        let copies = [copy(7, 3), copy(5, 1), copy(6, 2), copy(8, 9), copy(9, 10), copy(20, 11), copy(10, 11)];
        let mut runs = Vec::new();
        find_runs(&copies, 8, &mut runs);
        let run = |host, device, pages| Run { host, device, pages };
        assert_eq!(runs, [run(5, 1, 3), run(8, 9, 3), run(20, 11, 1)]);
        find_runs(&copies, 100, &mut runs);
        assert_eq!(runs, [run(5, 1, 3), run(8, 9, 3), run(20, 11, 1)]);
    }

    #[test]
    fn runs_cover_every_copy_once() {
        let mut state = 99_u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let chunk = 1 + next(9) as usize;
            let shift = next(5) as u32;
            let mut copies: Vec<PageCopy> =
                (0..40).filter(|_| next(3) > 0).map(|host| copy(host, host + shift + u32::from(host > 20))).collect();
            let half = copies.len() / 2;
            copies.rotate_left(half);
            let mut runs = Vec::new();
            find_runs(&copies, chunk, &mut runs);
            let mut covered: Vec<(u32, u32)> = Vec::new();
            for run in runs {
                assert_eq!(
                    run.host as usize / chunk,
                    (run.host + run.pages - 1) as usize / chunk,
                    "{run:?} crosses a chunk of {chunk}"
                );
                covered.extend((0..run.pages).map(|page| (run.host + page, run.device + page)));
            }
            let mut expected: Vec<(u32, u32)> = copies.iter().map(|copy| (copy.host, copy.device)).collect();
            expected.sort_unstable();
            assert_eq!(covered, expected);
        }
    }
}
