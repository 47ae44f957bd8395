//! What the device's memory and its bus can do, measured with plain copies of one large block: the yardstick of everything else.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, PinnedHostSlice, sys};

use super::Outcome;

/// A block on the device and one in pinned memory, to copy between.
pub struct Blocks {
    stream: Arc<CudaStream>,
    device: [CudaSlice<u8>; 2],
    host: PinnedHostSlice<u8>,
}

/// Which block is copied where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    WithinDevice,
    HostToDevice,
    DeviceToHost,
}

impl Route {
    pub const ALL: [Route; 3] = [Route::WithinDevice, Route::HostToDevice, Route::DeviceToHost];

    /// Bytes that device memory or bus move for each byte of the block: within the device it is read and written.
    pub fn traffic(self) -> usize {
        if self == Route::WithinDevice { 2 } else { 1 }
    }
}

impl Blocks {
    pub fn new(stream: &Arc<CudaStream>, bytes: usize) -> Outcome<Self> {
        let device = [stream.alloc_zeros(bytes)?, stream.alloc_zeros(bytes)?];
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: bytes have no invalid values, and are written before they are read.
        let mut host = unsafe { stream.context().alloc_pinned_with_flags(bytes, flags) }?;
        host.as_mut_slice()?.fill(1);
        Ok(Blocks { stream: stream.clone(), device, host })
    }

    pub fn bytes(&self) -> usize {
        self.host.len()
    }

    /// Seconds of one copy, by the device's clock.
    pub fn time(&mut self, route: Route) -> Outcome<f64> {
        let [a, b] = &mut self.device;
        let watch = Stopwatch::new(&self.stream)?;
        watch.start(&self.stream)?;
        match route {
            Route::WithinDevice => self.stream.memcpy_dtod(a, b)?,
            Route::HostToDevice => self.stream.memcpy_htod(&self.host, a)?,
            Route::DeviceToHost => self.stream.memcpy_dtoh(a, &mut self.host)?,
        }
        watch.stop(&self.stream)
    }
}

/// Measures on a stream, by the device's clock.
pub struct Stopwatch {
    start: cudarc::driver::CudaEvent,
    end: cudarc::driver::CudaEvent,
}

impl Stopwatch {
    pub fn new(stream: &CudaStream) -> Outcome<Self> {
        let event = || stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Stopwatch { start: event()?, end: event()? })
    }

    pub fn start(&self, stream: &CudaStream) -> Outcome<()> {
        Ok(self.start.record(stream)?)
    }

    /// Marks the end, for [`seconds`](Self::seconds).
    pub fn mark(&self, stream: &CudaStream) -> Outcome<()> {
        Ok(self.end.record(stream)?)
    }

    /// From the start to the mark. Waits for it.
    pub fn seconds(&self) -> Outcome<f64> {
        Ok(1e-3 * f64::from(self.start.elapsed_ms(&self.end)?))
    }

    /// Marks the end and waits for it.
    pub fn stop(&self, stream: &CudaStream) -> Outcome<f64> {
        self.mark(stream)?;
        self.seconds()
    }
}

/// The middle of some times.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
