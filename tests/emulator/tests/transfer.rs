//! Copies between device slots and the reservoir, and the waits that they need.

mod common;

use std::time::Duration;

use common::layout::{CopyList, NONE, PageCopy, Place, Reservoir};
use common::{Buffer, Gpu, PENDING, Pinned};

/// Pages in the reservoir and in device slots, and a list of copies between them.
struct Transfer {
    page_bytes: usize,
    chunks: Vec<Pinned<u32>>,
    reservoir: Reservoir,
    pool: Buffer<u32>,
    places: Buffer<Place>,
    list: CopyList,
    copies: Vec<PageCopy>,
    _buffers: (Buffer<u64>, Buffer<PageCopy>, Buffer<u32>),
}

const CHUNK_PAGES: usize = 5;

impl Transfer {
    fn new(gpu: &Gpu, page_bytes: usize, wave: u32) -> Transfer {
        let words = page_bytes / 4;
        let mut chunks: Vec<_> = (0..3).map(|_| gpu.pin::<u32>(CHUNK_PAGES * words)).collect();
        for (chunk, memory) in chunks.iter_mut().enumerate() {
            let first = chunk * CHUNK_PAGES * words;
            memory.write(0, &(first..first + CHUNK_PAGES * words).map(|i| i as u32).collect::<Vec<_>>());
        }
        let addresses = gpu.upload(&chunks.iter().map(Pinned::ptr).collect::<Vec<_>>());
        let reservoir = Reservoir { chunks: addresses.ptr(), chunk_pages: CHUNK_PAGES as u64 };
        let copy = |(i, host)| PageCopy { host, device: 11 - i, place: if i == 3 { NONE } else { i } };
        let copies: Vec<_> = (0..).zip([14, 0, 7, 5, 4, 11]).map(copy).collect();
        // Waves from 2 on lie behind the first.
        let (first_room, wave_room) = (4, 8);
        let at = if wave < 2 { 0 } else { first_room + (wave as usize - 2) * wave_room };
        let listed = gpu.alloc::<PageCopy>(at + 8);
        listed.write(at, &copies);
        let counts = gpu.zeros::<u32>(wave as usize + 1);
        counts.write(wave as usize, &[copies.len() as u32]);
        let list = CopyList {
            copies: listed.ptr(),
            counts: counts.ptr(),
            first_room: first_room as u32,
            wave_room: wave_room as u32,
        };
        let places = gpu.upload(&[Place { slot: 9, wave: wave | PENDING }; 6]);
        let pool = gpu.alloc::<u32>(12 * words);
        Transfer { page_bytes, chunks, reservoir, pool, places, list, copies, _buffers: (addresses, listed, counts) }
    }

    fn gather(&self, gpu: &Gpu, stream: &cudarc::driver::CudaStream, wave: u32, blocks: usize) {
        let page_bytes = self.page_bytes as u64;
        let parameters: [&dyn common::gpu::Parameter; 6] =
            [&self.list, &wave, &self.reservoir, &self.pool.ptr(), &page_bytes, &self.places.ptr()];
        gpu.launch_on(stream, "wakekv_gather", (blocks, 1, 1), 64, 0, &parameters).unwrap();
    }

    fn mirror(&self, gpu: &Gpu, stream: &cudarc::driver::CudaStream, wave: u32) {
        let page_bytes = self.page_bytes as u64;
        let parameters: [&dyn common::gpu::Parameter; 5] =
            [&self.list, &wave, &self.reservoir, &self.pool.ptr(), &page_bytes];
        gpu.launch_on(stream, "wakekv_mirror", (2, 1, 1), 64, 0, &parameters).unwrap();
    }

    fn host_page(&self, host: u32) -> Vec<u32> {
        let words = self.page_bytes / 4;
        let chunk = self.chunks[host as usize / CHUNK_PAGES].read();
        chunk[host as usize % CHUNK_PAGES * words..][..words].to_vec()
    }

    fn device_page(&self, slot: u32) -> Vec<u32> {
        let words = self.page_bytes / 4;
        self.pool.read_range(slot as usize * words, words)
    }
}

#[test]
fn gathered_pages_arrive_in_their_slots() {
    let Some(gpu) = Gpu::new() else { return };
    for (page_bytes, wave, blocks) in [(2048, 1, 1), (8192, 3, 4), (5120, 2, 16), (6144, 2, 3), (65536, 1, 2)] {
        let transfer = Transfer::new(&gpu, page_bytes, wave);
        transfer.gather(&gpu, &gpu.copy, wave, blocks);
        gpu.synchronize().unwrap();
        for copy in &transfer.copies {
            assert_eq!(transfer.device_page(copy.device), transfer.host_page(copy.host));
        }
        let waves: Vec<u32> = transfer.places.read().iter().map(|place| place.wave).collect();
        let there = |place| if place == 3 { wave | PENDING } else { wave };
        assert_eq!(waves, (0..6).map(there).collect::<Vec<_>>(), "places are there once their page is");
        let untouched = transfer.device_page(0);
        assert!(untouched.iter().all(|&word| word == NONE), "no other slot is written");
    }
}

#[test]
fn copies_that_the_host_has_made_are_marked() {
    let Some(gpu) = Gpu::new() else { return };
    let transfer = Transfer::new(&gpu, 2048, 1);
    gpu.launch("wakekv_arrive", (1, 1, 1), 32, 0, &[&transfer.list, &1u32, &transfer.places.ptr()]);
    gpu.synchronize().unwrap();
    let pending = transfer.places.read().iter().filter(|place| place.wave & PENDING != 0).count();
    assert_eq!(pending, 1);
}

/// Fills the pool, as a writer on the compute stream, and mirrors it on the copy stream. Without the event the mirror runs first.
fn mirror_after_writer(gpu: &Gpu, waits: bool) -> bool {
    let transfer = Transfer::new(gpu, 2048, 1);
    let held = gpu.session.hold(gpu.compute.cu_stream());
    // SAFETY: all of the pool.
    unsafe { cudarc::driver::result::memset_d8_async(transfer.pool.ptr(), 7, 12 * 2048, gpu.compute.cu_stream()) }
        .unwrap();
    let written = gpu.compute.record_event(None).unwrap();
    if waits {
        gpu.copy.wait(&written).unwrap();
    }
    transfer.mirror(gpu, &gpu.copy, 1);
    let mirrored = gpu.copy.record_event(None).unwrap();
    if !waits {
        mirrored.synchronize().unwrap();
    }
    std::thread::sleep(Duration::from_millis(5));
    drop(held);
    gpu.synchronize().unwrap();
    transfer.copies.iter().all(|copy| transfer.host_page(copy.host).iter().all(|&word| word == 0x0707_0707))
}

#[test]
fn a_mirror_that_does_not_wait_for_its_writer_is_found() {
    let Some(gpu) = Gpu::new() else { return };
    assert!(mirror_after_writer(&gpu, true));
    assert!(!mirror_after_writer(&gpu, false), "a planted bug: no event between writer and mirror");
}

/// Writes a slot anew while its mirror is held up. Without the event the reservoir gets the new bytes.
fn reuse_after_mirror(gpu: &Gpu, waits: bool) -> bool {
    let transfer = Transfer::new(gpu, 2048, 1);
    transfer.pool.fill(3);
    let held = gpu.session.hold(gpu.copy.cu_stream());
    transfer.mirror(gpu, &gpu.copy, 1);
    let mirrored = gpu.copy.record_event(None).unwrap();
    if waits {
        gpu.compute.wait(&mirrored).unwrap();
    }
    // SAFETY: all of the pool.
    unsafe { cudarc::driver::result::memset_d8_async(transfer.pool.ptr(), 9, 12 * 2048, gpu.compute.cu_stream()) }
        .unwrap();
    if !waits {
        gpu.compute.synchronize().unwrap();
    }
    drop(held);
    gpu.synchronize().unwrap();
    transfer.copies.iter().all(|copy| transfer.host_page(copy.host).iter().all(|&word| word == 0x0303_0303))
}

#[test]
fn a_slot_that_is_reused_before_its_mirror_is_done_is_found() {
    let Some(gpu) = Gpu::new() else { return };
    assert!(reuse_after_mirror(&gpu, true));
    assert!(!reuse_after_mirror(&gpu, false), "a planted bug: no event between mirror and the next writer");
}

/// Gathers on the copy stream and reads on the compute stream what has arrived.
fn read_after_gather(gpu: &Gpu, waits: bool) -> usize {
    let transfer = Transfer::new(gpu, 2048, 1);
    let seen = gpu.alloc::<Place>(6);
    let held = gpu.session.hold(gpu.copy.cu_stream());
    transfer.gather(gpu, &gpu.copy, 1, 2);
    let gathered = gpu.copy.record_event(None).unwrap();
    if waits {
        gpu.compute.wait(&gathered).unwrap();
    }
    let stream = gpu.compute.cu_stream();
    // SAFETY: both are six places.
    unsafe { cudarc::driver::result::memcpy_dtod_async(seen.ptr(), transfer.places.ptr(), 48, stream) }.unwrap();
    if !waits {
        gpu.compute.synchronize().unwrap();
    }
    drop(held);
    gpu.synchronize().unwrap();
    seen.read().iter().filter(|place| place.wave & PENDING == 0).count()
}

#[test]
fn a_step_that_does_not_wait_for_its_fetches_sees_them_pending() {
    let Some(gpu) = Gpu::new() else { return };
    assert_eq!(read_after_gather(&gpu, true), 5);
    assert_eq!(read_after_gather(&gpu, false), 0, "a planted bug: no event between fetch and second pass");
}

#[test]
fn a_launch_that_has_drifted_from_its_kernel_is_refused() {
    let Some(gpu) = Gpu::seeded("parameter_drift") else { return };
    let transfer = Transfer::new(&gpu, 2048, 1);
    let parameters: [&dyn common::gpu::Parameter; 5] =
        [&transfer.list, &1u32, &transfer.reservoir, &transfer.pool.ptr(), &2048u64];
    let refused = gpu.launch_on(&gpu.copy, "wakekv_mirror", (1, 1, 1), 64, 0, &parameters);
    assert!(matches!(refused, Err(common::gpu::Refused::Signature(_, _))), "{refused:?}");
}
