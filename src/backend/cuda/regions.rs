//! Where in an array of device memory each sequence has its part: regions of power-of-two sizes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::driver::Called;
use super::memory::DeviceMemory;
use crate::error::Error;

/// Arrays with the same regions, one element of each per place.
#[derive(Debug)]
pub(super) struct Arrays {
    context: Arc<CudaContext>,
    memories: Vec<DeviceMemory>,
    /// Bytes of an element, by array.
    sizes: &'static [usize],
    /// Elements of a unit.
    unit: usize,
    regions: Regions,
}

/// The arrays grow with the sequences, whose number and length these settings limit.
pub(super) const KNOB: &str = "pages_per_head and reservoir";

impl Arrays {
    pub fn new(context: &Arc<CudaContext>, sizes: &'static [usize], unit: usize) -> Result<Self, Error> {
        let memories = sizes.iter().map(|_| DeviceMemory::new(context, KNOB, 0)).collect::<Result<_, _>>()?;
        Ok(Arrays { context: context.clone(), memories, sizes, unit, regions: Regions::new() })
    }

    /// Makes the arrays so large that regions of these sizes, in units, can be taken next. `true` if they have moved for it; then the
    /// stream has been waited for. What fails has changed nothing.
    pub fn reserve(&mut self, sizes: impl Iterator<Item = usize>, stream: &CudaStream) -> Result<bool, Error> {
        let needed = self.regions.capacity_for(sizes);
        if needed <= self.regions.capacity {
            return Ok(false);
        }
        let capacity = needed.next_power_of_two();
        let kept = self.regions.capacity as usize * self.unit;
        let elements = capacity as usize * self.unit;
        let arrays = std::iter::zip(&self.memories, self.sizes);
        self.memories = arrays
            .map(|(memory, size)| enlarge(&self.context, stream, memory, kept * size, elements * size))
            .collect::<Result<_, _>>()?;
        self.regions.capacity = capacity;
        Ok(true)
    }

    /// The first element of a region of at least `units`, if [`reserve`](Self::reserve) has made room for it.
    pub fn take(&mut self, units: usize) -> Option<u64> {
        self.regions.take(units).map(|first| first * self.unit as u64)
    }

    /// A region, by its first element, is free again.
    pub fn give_back(&mut self, first: u64, units: usize) {
        self.regions.give_back(first / self.unit as u64, units);
    }

    /// The device address of an element.
    pub fn at(&self, array: usize, element: u64) -> u64 {
        self.memories[array].at(element as usize * self.sizes[array])
    }

    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    pub fn memory(&self, array: usize) -> &DeviceMemory {
        &self.memories[array]
    }

    pub fn bytes(&self) -> usize {
        self.memories.iter().map(DeviceMemory::bytes).sum()
    }
}

/// A larger array with the first `kept` bytes of an old one. Waits for the copy, because the old one is about to be dropped.
pub(super) fn enlarge(
    context: &Arc<CudaContext>,
    stream: &CudaStream,
    old: &DeviceMemory,
    kept: usize,
    bytes: usize,
) -> Result<DeviceMemory, Error> {
    let new = DeviceMemory::new(context, KNOB, bytes)?;
    if kept > 0 {
        // SAFETY: both ranges lie inside their memory, and both stay until the stream has been waited for.
        unsafe { result::memcpy_dtod_async(new.at(0), old.at(0), kept, stream.cu_stream()) }
            .called("cuMemcpyDtoDAsync")?;
    }
    stream.synchronize().called("cuStreamSynchronize")?;
    Ok(new)
}

/// Hands out regions of an array. Sizes are powers of two times a unit, so that a region that is given back fits the next
/// sequence of that size; a larger one is halved where none fits.
#[derive(Debug)]
struct Regions {
    /// Free regions of 2^i units, by their first unit.
    free: [Vec<u64>; 32],
    /// The first unit behind all regions that have ever been handed out.
    end: u64,
    capacity: u64,
}

/// Units of a region of at least `units`.
pub(super) fn region_units(units: usize) -> usize {
    units.next_power_of_two().max(LEAST_UNITS)
}

/// Smaller regions would be outgrown at once.
const LEAST_UNITS: usize = 8;

impl Regions {
    fn new() -> Self {
        Regions { free: std::array::from_fn(|_| Vec::new()), end: 0, capacity: 0 }
    }

    /// Units that the array must have for regions of these sizes to be taken next, in any order.
    fn capacity_for(&self, sizes: impl Iterator<Item = usize>) -> u64 {
        self.end + sizes.map(|units| region_units(units) as u64).sum::<u64>()
    }

    /// A region of [`region_units`] units, if there is room for it.
    fn take(&mut self, units: usize) -> Option<u64> {
        let units = region_units(units);
        let size = units.trailing_zeros() as usize;
        let Some(found) = (size..self.free.len()).find(|&size| !self.free[size].is_empty()) else {
            let first = self.end;
            self.end = (first + units as u64 <= self.capacity).then_some(first + units as u64)?;
            return Some(first);
        };
        let first = self.free[found].pop()?;
        for half in size..found {
            self.free[half].push(first + (1 << half));
        }
        Some(first)
    }

    /// A region is free again.
    fn give_back(&mut self, first: u64, units: usize) {
        self.free[region_units(units).trailing_zeros() as usize].push(first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_never_overlap_and_are_used_again() {
        let mut regions = Regions::new();
        regions.capacity = 1000;
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut state = 12345_u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..10_000 {
            if next(2) == 0 && !live.is_empty() {
                let (first, units) = live.swap_remove(next(live.len() as u64) as usize);
                regions.give_back(first, units as usize);
            } else {
                let units = 1 + next(100);
                if let Some(first) = regions.take(units as usize) {
                    let end = first + region_units(units as usize) as u64;
                    assert!(end <= 1000);
                    let apart = |&(other, size): &(u64, u64)| {
                        end <= other || other + region_units(size as usize) as u64 <= first
                    };
                    assert!(live.iter().all(apart), "{first}..{end} overlaps");
                    live.push((first, units));
                }
            }
        }
        for (first, units) in live.drain(..) {
            regions.give_back(first, units as usize);
        }
        let end = regions.end;
        assert!(regions.take(8).is_some());
        assert_eq!(regions.end, end, "what was given back is used first");
    }

    #[test]
    fn capacity_that_was_promised_suffices() {
        let mut regions = Regions::new();
        let sizes = [3, 9, 64, 65];
        regions.capacity = regions.capacity_for(sizes.into_iter());
        assert!(sizes.into_iter().rev().all(|units| regions.take(units).is_some()));
        assert!(regions.take(1).is_none());
    }
}
