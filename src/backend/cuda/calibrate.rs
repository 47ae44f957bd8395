//! Measures on the device at hand which of the two copy paths is faster for how many pages.

use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::CudaBackend;
use super::copies::{CopyDirection, Crossover, HostList, Pool};
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
    /// [`FetchPath::Auto`](crate::FetchPath::Auto) go by it from now on. The device should
    /// have nothing else to do meanwhile. The pages of the cache are left alone.
    ///
    /// # Errors
    /// Memory for the measurement cannot be had, or the driver fails.
    pub fn calibrate(&mut self) -> Result<Calibration, Error> {
        let most = (MOST_BYTES / self.geometry().page_bytes()).clamp(1, MOST_PAGES);
        let mut timer = self.copy_timer(most)?;
        let counts = std::iter::successors(Some(1), |pages| Some(2 * pages)).take_while(|&pages| pages <= most);
        let measured = counts.map(|pages| timer.measure(pages)).collect::<Result<Vec<_>, _>>()?;
        drop(timer);
        let crossover = Crossover {
            fetch_pages: from_where(&measured, |at| at.gather_us < at.dma_us),
            mirror_pages: from_where(&measured, |at| at.mirror_us < at.mirror_dma_us),
        };
        self.backend.engine.crossover = crossover;
        tracing::info!(?crossover, page_bytes = self.geometry().page_bytes(), "copy paths calibrated");
        Ok(Calibration { crossover, measured })
    }

    /// Memory to time copies of up to `most_pages` pages in, with the kernels and settings of the cache, whose own pages are left alone.
    ///
    /// # Errors
    /// No pages, more than 2^32 − 1, or memory that cannot be had.
    pub fn copy_timer(&mut self, most_pages: usize) -> Result<CopyTimer<'_>, Error> {
        if most_pages == 0 || u32::try_from(most_pages).is_err() {
            let (value, rule) = (most_pages.to_string(), "must be from 1 to 2^32 − 1".into());
            return Err(Error::Setting { knob: "most_pages", value, rule });
        }
        self.undo_leaked_step();
        self.backend.check_whole()?;
        self.backend.context.bind_to_thread().called("cuCtxSetCurrent")?;
        CopyTimer::new(&mut self.backend, most_pages)
    }
}

/// How [`CopyTimer`] moves pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyPath {
    /// The gather or the mirror kernel.
    Kernel,
    /// The copy engines.
    Dma,
}

/// Times copies between memory of its own, whose pages are scattered as those of a step are.
#[derive(Debug)]
pub struct CopyTimer<'c> {
    backend: &'c mut CudaBackend,
    host: HostPages,
    /// What `pool` is the address of.
    _device: DeviceMemory,
    pool: Pool,
    counts: DeviceMemory,
    copies: DeviceMemory,
    pages: Vec<PageCopy>,
    start: CudaEvent,
    end: CudaEvent,
}

impl<'c> CopyTimer<'c> {
    fn new(backend: &'c mut CudaBackend, most: usize) -> Result<Self, Error> {
        let (context, page_bytes) = (&backend.context, backend.geometry.page_bytes());
        let stream = backend.engine.stream.clone();
        let stream = &stream;
        let memory = |bytes| DeviceMemory::new(context, "most_pages", bytes);
        let device = memory(most * page_bytes)?;
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).called("cuEventCreate");
        let mut host = HostPages::pin(context, page_bytes, most, false, None)?;
        host.publish(&mut |to, bytes| write(stream, to, bytes))?;
        // Neighbours in the reservoir are no neighbours in the pool.
        let stride = scattering_stride(most);
        let slot = |page: usize| (page as u64 * stride as u64 % most as u64) as u32;
        let pages: Vec<PageCopy> =
            (0..most).map(|page| PageCopy { host: page as u32, device: slot(page), place: NONE }).collect();
        let copies = memory(most * size_of::<PageCopy>())?;
        write(stream, copies.at(0), bytemuck::cast_slice(&pages))?;
        let pool = Pool { address: device.at(0), page_bytes };
        let counts = memory(16)?;
        Ok(CopyTimer { start: event()?, end: event()?, backend, host, _device: device, pool, counts, copies, pages })
    }

    /// The time that copies of `pages` pages take on the copy stream, the host's part included where there is one. Waits for it.
    ///
    /// # Errors
    /// More pages than the timer has memory for, or the driver fails.
    pub fn time(&mut self, direction: CopyDirection, path: CopyPath, pages: usize) -> Result<Duration, Error> {
        let Some(listed) = self.pages.get(..pages) else {
            let (value, rule) = (pages.to_string(), format!("must be at most {}", self.pages.len()));
            return Err(Error::Setting { knob: "pages", value, rule });
        };
        let CudaBackend { context, engine, kernels, .. } = &mut *self.backend;
        context.bind_to_thread().called("cuCtxSetCurrent")?;
        let host_list = HostList::of(listed);
        write(&engine.stream, self.counts.at(0), bytemuck::cast_slice(&[0, pages as u32, 0, 0]))?;
        let list = CopyList { copies: self.copies.at(0), counts: self.counts.at(0), first_room: 0, wave_room: 0 };
        self.start.record(&engine.stream).called("cuEventRecord")?;
        match (path, direction) {
            // SAFETY: the list names pages of the timer's own memory, all of which outlives the wait below.
            (CopyPath::Kernel, CopyDirection::Fetch) => unsafe {
                engine.gather(kernels, &list, 1, &self.host, self.pool, 0)
            },
            // SAFETY: as above.
            (CopyPath::Kernel, CopyDirection::Mirror) => unsafe {
                engine.mirror(kernels, &list, &self.host, self.pool)
            },
            // SAFETY: as above.
            (CopyPath::Dma, _) => unsafe { engine.copy(&host_list, 1, direction, &self.host, self.pool) },
        }?;
        self.end.record(&engine.stream).called("cuEventRecord")?;
        engine.stream.synchronize().called("cuStreamSynchronize")?;
        elapsed(&self.start, &self.end)
    }

    fn measure(&mut self, pages: usize) -> Result<Measured, Error> {
        let mut fastest = |direction, path| -> Result<f32, Error> {
            (0..ROUNDS).try_fold(f32::INFINITY, |fastest, _| {
                Ok(fastest.min(1e6 * self.time(direction, path, pages)?.as_secs_f32()))
            })
        };
        Ok(Measured {
            pages,
            gather_us: fastest(CopyDirection::Fetch, CopyPath::Kernel)?,
            dma_us: fastest(CopyDirection::Fetch, CopyPath::Dma)?,
            mirror_us: fastest(CopyDirection::Mirror, CopyPath::Kernel)?,
            mirror_dma_us: fastest(CopyDirection::Mirror, CopyPath::Dma)?,
            page_bytes: self.pool.page_bytes,
        })
    }
}

impl Drop for CopyTimer<'_> {
    fn drop(&mut self) {
        // After a failure copies may still be under way, and the memory must outlive them.
        let _ = self.backend.engine.stream.synchronize();
    }
}

/// A step through all of `most` slots that ends at each of them once.
fn scattering_stride(most: usize) -> usize {
    // Primes, whose product is beyond any number of pages.
    [1_031, 1_033, 1_039, 1_049].into_iter().find(|stride| !most.is_multiple_of(*stride)).unwrap_or(1)
}

/// Copies bytes to a device address, and waits. On the stream itself: a copy on another would be ordered by nothing.
fn write(stream: &CudaStream, to: u64, bytes: &[u8]) -> Result<(), Error> {
    // SAFETY: the range lies inside memory of the timer's own, and the bytes stay until the stream has been waited for.
    unsafe { result::memcpy_htod_async(to, bytes, stream.cu_stream()) }.called("cuMemcpyHtoDAsync")?;
    stream.synchronize().called("cuStreamSynchronize")
}

fn elapsed(start: &CudaEvent, end: &CudaEvent) -> Result<Duration, Error> {
    let missing = || Error::CudaUnavailable { reason: "the driver lacks cuEventElapsedTime".into() };
    let elapsed = Driver::get()?.elapsed.ok_or_else(missing)?;
    let mut milliseconds = 0.0;
    // SAFETY: two events that have been recorded and have passed, and a place to write to.
    unsafe { elapsed(&mut milliseconds, start.cu_event(), end.cu_event()) }.result().called("cuEventElapsedTime")?;
    Ok(Duration::from_secs_f32(1e-3 * milliseconds))
}

/// The smallest number of pages from which on the kernel is faster at all that were measured.
fn from_where(measured: &[Measured], faster: impl Fn(&Measured) -> bool) -> usize {
    let slower = measured.iter().rposition(|at| !faster(at));
    let first = slower.map_or(0, |last| last + 1);
    measured.get(first).map_or(usize::MAX, |at| at.pages)
}
