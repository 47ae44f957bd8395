//! What goes to the device with each step, and what comes back a step or two later: a ring of pinned buffers.
//!
//! The host runs ahead of the device. So a buffer that a copy reads from is not written again until the event behind the copy has passed,
//! which is three steps later and as a rule long since.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::driver::Called;
use super::layout;
use super::memory::PinnedMemory;
use crate::backend::{StepCounts, StepPlan};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::table::Phase;

/// Steps that may be under way.
const FRAMES: usize = 3;

/// So that a step which is a little larger than the one before seldom pins anew.
const LEAST_BYTES: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct Frames {
    frames: Vec<Frame>,
    /// The frame of the step at hand.
    current: usize,
}

#[derive(Debug)]
struct Frame {
    uploads: PinnedMemory,
    /// Bytes of `uploads` that copies under way may read.
    used: usize,
    results: PinnedMemory,
    /// Behind the last use of both.
    done: CudaEvent,
    /// What the results are about, until they have been looked at.
    awaited: Option<Awaited>,
}

/// A step whose results are on their way.
#[derive(Debug)]
struct Awaited {
    /// Phase of each entry, and the pages that it has sealed.
    entries: Vec<(Phase, u64)>,
}

/// A fault that a kernel has raised.
pub(super) type Raised = layout::Fault;

impl Frames {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
        let frame = || {
            Ok(Frame {
                uploads: PinnedMemory::new(context, 0)?,
                used: 0,
                results: PinnedMemory::new(context, 0)?,
                done: context.new_event(None).called("cuEventCreate")?,
                awaited: None,
            })
        };
        let frames = (0..FRAMES).map(|_| frame()).collect::<Result<_, Error>>()?;
        Ok(Frames { frames, current: 0 })
    }

    /// Turns to the next frame, which must hold so many bytes to and from the device. Its last results have been collected.
    pub fn turn(&mut self, context: &Arc<CudaContext>, uploads: usize, results: usize) -> Result<(), Error> {
        let next = (self.current + 1) % FRAMES;
        let frame = &mut self.frames[next];
        frame.done.synchronize().called("cuEventSynchronize")?;
        frame.used = 0;
        if frame.uploads.bytes() < uploads {
            frame.uploads = PinnedMemory::new(context, uploads.next_power_of_two().max(LEAST_BYTES))?;
        }
        if frame.results.bytes() < results {
            frame.results = PinnedMemory::new(context, results.next_power_of_two().max(LEAST_BYTES))?;
        }
        self.current = next;
        Ok(())
    }

    /// Copies bytes to a device address, in the order of the stream. Waits only where the frame is full.
    pub fn upload(&mut self, stream: &CudaStream, to: u64, bytes: &[u8]) -> Result<(), Error> {
        let frame = &mut self.frames[self.current];
        if bytes.len() > frame.uploads.bytes() {
            // The frame was made for what the step uploads.
            return Err(Error::StepFailed);
        }
        if frame.used + bytes.len() > frame.uploads.bytes() {
            stream.synchronize().called("cuStreamSynchronize")?;
            frame.used = 0;
        }
        let at = frame.used;
        // SAFETY: nothing reads the bytes behind `used`: the frame's copies of earlier steps have been waited for.
        unsafe { frame.uploads.write(at, bytes) };
        // SAFETY: the frame's memory was just written, and is not written again until the copy has been waited for. The destination is the
        // caller's, who owns so many bytes there.
        unsafe { result::memcpy_htod_async(to, frame.uploads.read(at, bytes.len()), stream.cu_stream()) }
            .called("cuMemcpyHtoDAsync")?;
        // Keeps every upload aligned.
        frame.used = (at + bytes.len()).next_multiple_of(16);
        Ok(())
    }

    /// Asks for the results of the step at hand.
    pub fn ask(&mut self, stream: &CudaStream, plan: &StepPlan, from: u64, bytes: usize) -> Result<(), Error> {
        let frame = &mut self.frames[self.current];
        // SAFETY: the range lies inside the pinned memory, which nobody reads before the event has passed.
        let into = unsafe { std::slice::from_raw_parts_mut(frame.results.host(0), bytes) };
        // SAFETY: as above, and the source is the scratch memory's results.
        unsafe { result::memcpy_dtoh_async(into, from, stream.cu_stream()) }.called("cuMemcpyDtoHAsync")?;
        frame.done.record(stream).called("cuEventRecord")?;
        let entries = plan.entries.iter().map(|entry| (entry.phase, entry.groups.len() as u64)).collect();
        frame.awaited = Some(Awaited { entries });
        Ok(())
    }

    /// The step at hand is given up: whatever it has uploaded is read before the frame is used again.
    pub fn give_up(&mut self, stream: &CudaStream) -> Result<(), Error> {
        self.frames[self.current].done.record(stream).called("cuEventRecord")
    }

    /// Adds the results of the oldest `steps` steps to `counts`, or of all; those that have come in, or if `wait` says so those that have
    /// not as well. The first fault among them is returned.
    pub fn collect(
        &mut self,
        geometry: &Geometry,
        counts: &mut StepCounts,
        wait: bool,
        steps: Option<usize>,
    ) -> Result<Option<Raised>, Error> {
        // The oldest first, which is the one that is used next.
        for turn in 1..=steps.unwrap_or(FRAMES) {
            let frame = &mut self.frames[(self.current + turn) % FRAMES];
            let Some(awaited) = &frame.awaited else { continue };
            match wait {
                true => frame.done.synchronize().called("cuEventSynchronize")?,
                false if !frame.done.try_is_complete().called("cuEventQuery")? => return Ok(None),
                false => {}
            }
            let fault = add(&frame.results, awaited, geometry, counts);
            frame.awaited = None;
            if fault.kind != 0 {
                return Ok(Some(fault));
            }
        }
        Ok(None)
    }
}

/// Adds a step's tallies to the counters, and returns its fault.
fn add(results: &PinnedMemory, awaited: &Awaited, geometry: &Geometry, counts: &mut StepCounts) -> Raised {
    let lanes = awaited.entries.len() * geometry.kv_heads();
    // SAFETY: the copy from the device into this range has been waited for.
    let bytes = unsafe { results.read(0, result_bytes(geometry, awaited.entries.len())) };
    let (fault, tallies) = bytes.split_at(size_of::<layout::Fault>());
    let tallies: &[layout::Tally] = bytemuck::cast_slice(tallies);
    for (index, tally) in tallies.iter().enumerate() {
        let (layer, lane) = (index / lanes, index % lanes);
        let (phase, sealed) = awaited.entries[lane / geometry.kv_heads()];
        let head = &mut counts.heads[geometry.head(layer, lane % geometry.kv_heads())];
        let of_phase = head.of_mut(phase);
        let misses = u64::from(tally.compulsory) + u64::from(tally.capacity);
        of_phase.demanded += u64::from(tally.hits) + misses;
        of_phase.hits += u64::from(tally.hits);
        of_phase.compulsory += u64::from(tally.compulsory);
        of_phase.capacity += u64::from(tally.capacity);
        of_phase.overflow += u64::from(tally.overflow);
        of_phase.evictions += u64::from(tally.evictions);
        of_phase.fetched_bytes += misses * geometry.page_bytes() as u64;
        of_phase.mirrored_bytes += sealed * geometry.page_bytes() as u64;
    }
    bytemuck::pod_read_unaligned(fault)
}

/// Bytes of a step's results: the fault, then a tally per layer and lane.
pub(super) fn result_bytes(geometry: &Geometry, entries: usize) -> usize {
    size_of::<layout::Fault>() + geometry.heads() * entries * size_of::<layout::Tally>()
}
