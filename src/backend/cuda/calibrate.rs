//! Measures on the device at hand which of the two copy paths is faster for how many pages.

use cudarc::driver::{CudaEvent, result, sys};

use super::CudaBackend;
use super::copies::{Crossover, Direction, HostList, Pool};
use super::driver::{Called, Driver};
use super::layout::{CopyList, NONE, PageCopy};
use super::memory::DeviceMemory;
use super::reservoir::HostPages;
use crate::cache::Cache;
use crate::error::Error;

/// What [`Cache::calibrate`] has found.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Calibration {
    /// What is used from now on.
    pub crossover: Crossover,
    /// The measurements, by number of pages.
    pub measured: Vec<Measured>,
}

/// Times of copies of a number of pages, each the fastest of several, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Measured {
    /// Pages per copy.
    pub pages: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Host to device, by the gather kernel.
    pub gather_us: f32,
    /// Host to device, by DMA.
    pub dma_us: f32,
    /// Device to host, by the mirror kernel.
    pub mirror_us: f32,
    /// Device to host, by DMA.
    pub mirror_dma_us: f32,
}

const MOST_PAGES: usize = 4096;
const MOST_BYTES: usize = 64 << 20;
const ROUNDS: usize = 7;

impl Cache<CudaBackend> {
    /// Measures gather and DMA on this device, at the cache's page size and 1 to 4,096 pages, and has
    /// [`FetchPath::Auto`](crate::FetchPath::Auto) go by it from now on. Takes some tens of milliseconds, no step may be under way on the stream
    /// that is to be fast, and the pages of the cache are left alone.
    ///
    /// # Errors
    /// Memory for the measurement cannot be had, or the driver fails.
    pub fn calibrate(&mut self) -> Result<Calibration, Error> {
        self.undo_leaked_step();
        self.backend.calibrate()
    }
}

impl CudaBackend {
    fn calibrate(&mut self) -> Result<Calibration, Error> {
        self.check_whole()?;
        self.context.bind_to_thread().called("cuCtxSetCurrent")?;
        let bench = Bench::new(self)?;
        let mut measured = Vec::new();
        let counts = std::iter::successors(Some(1), |pages| Some(2 * pages)).take_while(|&pages| pages <= bench.most);
        for pages in counts {
            bench.list_pages(pages)?;
            measured.push(Measured {
                pages,
                page_bytes: bench.pool.page_bytes,
                gather_us: bench.fastest(self, Direction::Fetch, Path::Kernel, pages)?,
                dma_us: bench.fastest(self, Direction::Fetch, Path::Dma, pages)?,
                mirror_us: bench.fastest(self, Direction::Mirror, Path::Kernel, pages)?,
                mirror_dma_us: bench.fastest(self, Direction::Mirror, Path::Dma, pages)?,
            });
        }
        let crossover = Crossover {
            fetch_pages: from_where(&measured, |at| at.gather_us < at.dma_us),
            mirror_pages: from_where(&measured, |at| at.mirror_us < at.mirror_dma_us),
        };
        self.engine.crossover = crossover;
        tracing::info!(?crossover, page_bytes = bench.pool.page_bytes, "copy paths calibrated");
        Ok(Calibration { crossover, measured })
    }
}

#[derive(Clone, Copy)]
enum Path {
    Kernel,
    Dma,
}

/// Memory of its own to copy pages within, scattered as those of a step are.
struct Bench {
    host: HostPages,
    device: DeviceMemory,
    pool: Pool,
    most: usize,
    counts: DeviceMemory,
    copies: DeviceMemory,
    pages: Vec<PageCopy>,
    start: CudaEvent,
    end: CudaEvent,
}

impl Bench {
    fn new(backend: &CudaBackend) -> Result<Self, Error> {
        let (context, page_bytes) = (&backend.context, backend.geometry.page_bytes());
        let most = (MOST_BYTES / page_bytes).clamp(1, MOST_PAGES);
        let memory = |bytes| DeviceMemory::new(context, "calibrate", bytes);
        let device = memory(most * page_bytes)?;
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).called("cuEventCreate");
        let mut host = HostPages::pin(context, page_bytes, most, false, None)?;
        host.publish(&mut |to, bytes| write(to, bytes))?;
        // Neighbours in the reservoir are no neighbours in the pool. 1,031 is a prime, so every slot has its turn.
        let slot = |page: usize| (page * 1_031 % most) as u32;
        let pages: Vec<PageCopy> =
            (0..most).map(|page| PageCopy { host: page as u32, device: slot(page), place: NONE }).collect();
        let copies = memory(most * size_of::<PageCopy>())?;
        write(copies.at(0), bytemuck::cast_slice(&pages))?;
        let pool = Pool { address: device.at(0), page_bytes };
        Ok(Bench { host, pool, device, most, counts: memory(16)?, copies, pages, start: event()?, end: event()? })
    }

    /// Cuts the list to its first `pages` entries.
    fn list_pages(&self, pages: usize) -> Result<(), Error> {
        write(self.counts.at(0), bytemuck::cast_slice(&[0, pages as u32, 0, 0]))
    }

    /// Microseconds that the copies take on the copy stream, the host's part included where there is one.
    fn fastest(&self, backend: &mut CudaBackend, direction: Direction, path: Path, pages: usize) -> Result<f32, Error> {
        let list = CopyList { copies: self.copies.at(0), counts: self.counts.at(0), first_room: 0, wave_room: 0 };
        let host_list = HostList::of(&self.pages[..pages]);
        let mut fastest = f32::INFINITY;
        for _ in 0..ROUNDS {
            let CudaBackend { engine, kernels, .. } = &mut *backend;
            self.start.record(&engine.stream).called("cuEventRecord")?;
            // SAFETY: the list names pages of the bench's own memory, all of which outlives the wait below.
            match (path, direction) {
                (Path::Kernel, Direction::Fetch) => unsafe {
                    engine.gather(kernels, &list, 1, &self.host, self.pool, 0)
                },
                // SAFETY: as above.
                (Path::Kernel, Direction::Mirror) => unsafe { engine.mirror(kernels, &list, &self.host, self.pool) },
                // SAFETY: as above.
                (Path::Dma, _) => unsafe { engine.copy(&host_list, 1, direction, &self.host, self.pool) },
            }?;
            self.end.record(&engine.stream).called("cuEventRecord")?;
            engine.stream.synchronize().called("cuStreamSynchronize")?;
            fastest = fastest.min(elapsed_us(&self.start, &self.end)?);
        }
        debug_assert!(self.device.bytes() >= pages * self.pool.page_bytes);
        Ok(fastest)
    }
}

/// Copies bytes to a device address, and waits.
fn write(to: u64, bytes: &[u8]) -> Result<(), Error> {
    // SAFETY: the range lies inside memory of the bench's own.
    unsafe { result::memcpy_htod_sync(to, bytes) }.called("cuMemcpyHtoD")
}

fn elapsed_us(start: &CudaEvent, end: &CudaEvent) -> Result<f32, Error> {
    let missing = || Error::CudaUnavailable { reason: "the driver lacks cuEventElapsedTime".into() };
    let elapsed = Driver::get()?.elapsed.ok_or_else(missing)?;
    let mut milliseconds = 0.0;
    // SAFETY: two events that have been recorded and have passed, and a place to write to.
    unsafe { elapsed(&mut milliseconds, start.cu_event(), end.cu_event()) }.result().called("cuEventElapsedTime")?;
    Ok(1e3 * milliseconds)
}

/// The smallest number of pages from which on the kernel is faster at all that were measured.
fn from_where(measured: &[Measured], faster: impl Fn(&Measured) -> bool) -> usize {
    let slower = measured.iter().rposition(|at| !faster(at));
    let first = slower.map_or(0, |last| last + 1);
    measured.get(first).map_or(usize::MAX, |at| at.pages)
}
