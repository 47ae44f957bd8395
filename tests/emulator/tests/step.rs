//! One layer's decode step, captured once and replayed for every token: append, select, residency, fetch beside attention, merge.
//! Heads have far fewer ways than pages, so most of what is read has been out to the reservoir and back.

mod common;

use std::time::Duration;

use common::Gpu;
use common::layout::{
    Attention, CopyList, DIGEST_SKETCH, Demand, Digests, Entry, F16, F32, Fault, Head, PageCopy, Pins, Place,
    Reservoir, SELECT_TOP, Selection, Sequence, Shape, Staging, Tables, Tally, WayGrant,
};
use common::numbers::{DType, normal};
use cudarc::driver::{result, sys};
use rand::SeedableRng;
use rand::rngs::SmallRng;

const SEQUENCES: usize = 2;
const KV_HEADS: usize = 2;
const GROUP: usize = 2;
const DIM: usize = 64;
const PAGE_TOKENS: usize = 8;
const WAYS: usize = 6;
const ROOM: usize = 16;
const LANES: usize = SEQUENCES * KV_HEADS;
const HOSTS: usize = SEQUENCES * ROOM * KV_HEADS;
const PAGE_BYTES: usize = 2 * PAGE_TOKENS * DIM * 2;
const DIGEST_BYTES: usize = PAGE_TOKENS * DIM / 4 + 2 * DIM * 2;
const SPLITS: usize = 2;

/// Replays the step for `tokens` tokens and compares each output. With a
/// `slow_bus` fetches come in long after the first pass; `waits` is whether the second one waits for them.
fn decode(gpu: &Gpu, tokens: usize, slow_bus: bool, waits: bool) -> Result<(usize, usize), String> {
    let (lanes, stored) = (LANES, DType(F16));
    let sequence = |index: usize| Sequence {
        ways_at: (index * KV_HEADS * WAYS) as u64,
        pages_at: (index * KV_HEADS * ROOM) as u64,
        groups_at: (index * ROOM) as u64,
        ways_room: WAYS as u32,
        pages_room: ROOM as u32,
    };
    let sequences = gpu.upload(&(0..SEQUENCES).map(sequence).collect::<Vec<_>>());
    let heads = gpu.zeros::<Head>(lanes);
    let ways = [0; 2].map(|_| gpu.alloc::<u32>(lanes * WAYS));
    let stamps = gpu.alloc::<u64>(lanes * WAYS);
    let pages = [0; 2].map(|_| gpu.alloc::<u32>(lanes * ROOM));
    let groups = gpu.upload(&(0..(SEQUENCES * ROOM) as u32).collect::<Vec<_>>());
    let tables = Tables {
        sequences: sequences.ptr(),
        heads: heads.ptr(),
        slot_of_way: ways[0].ptr(),
        page_of_way: ways[1].ptr(),
        stamp_of_way: stamps.ptr(),
        way_of_page: pages[0].ptr(),
        selected: [pages[1].ptr(); 2],
        groups: groups.ptr(),
    };
    let grants = (0..lanes * WAYS).map(|way| WayGrant {
        way: way as u64,
        head: (way / WAYS) as u32,
        slot: (lanes * WAYS - 1 - way) as u32,
        ways: (way % WAYS + 1) as u32,
        last: u32::from(way % WAYS == WAYS - 1),
    });
    let grants = gpu.upload(&grants.collect::<Vec<_>>());
    gpu.launch("wakekv_grant", (1, 1, 1), 32, 0, &[&tables, &grants.ptr(), &((lanes * WAYS) as u32)]);
    gpu.synchronize()?;

    // What the host writes between steps.
    let entries = gpu.alloc::<Entry>(SEQUENCES);
    let step_number = gpu.alloc::<u64>(1);
    let [k, v] = [0; 2].map(|_| gpu.alloc::<f32>(SEQUENCES * KV_HEADS * DIM));
    let rows = SEQUENCES * KV_HEADS * GROUP;
    let (q, out) = (gpu.alloc::<f32>(rows * DIM), gpu.alloc::<f32>(rows * DIM));

    let pool = gpu.alloc::<u8>(lanes * (WAYS + 1) * PAGE_BYTES);
    let digest_bytes = gpu.alloc::<u8>(HOSTS * DIGEST_BYTES);
    let host = gpu.pin::<u8>(HOSTS * PAGE_BYTES);
    let chunks = gpu.upload(&[host.ptr()]);
    let (demanded, places, counts) =
        (gpu.alloc::<u32>(lanes * ROOM), gpu.alloc::<Place>(lanes * ROOM), gpu.alloc::<u32>(lanes));
    let scores = gpu.alloc::<f32>(lanes * ROOM);
    let fetches = (gpu.alloc::<PageCopy>(lanes * (WAYS + 2)), gpu.zeros::<u32>(4));
    let mirrors = (gpu.alloc::<PageCopy>(lanes), gpu.zeros::<u32>(4));
    let (tallies, fault) = (gpu.zeros::<Tally>(lanes), gpu.zeros::<Fault>(1));
    let (acc, state) = (gpu.alloc::<f32>(rows * 2 * SPLITS * DIM), gpu.alloc::<u64>(rows * 2 * SPLITS));

    let shape = Shape {
        kv_heads: KV_HEADS as u32,
        group: GROUP as u32,
        page_tokens: PAGE_TOKENS as u32,
        heads: KV_HEADS as u32,
        first_head: 0,
        head_dim: DIM as u32,
    };
    let pins = Pins { sinks: 1, recent: 1 };
    let selection = Selection { mode: SELECT_TOP, count: 2, sinks: 1, recent: 1, stickiness: 0.0 };
    let digests = Digests { bytes: digest_bytes.ptr(), stride: DIGEST_BYTES as u64, kind: DIGEST_SKETCH, unused: 0 };
    let staging = Staging { first: (lanes * WAYS) as u32, ring: 1 };
    let list = |(copies, counts): &(common::Buffer<PageCopy>, common::Buffer<u32>), first_room| CopyList {
        copies: copies.ptr(),
        counts: counts.ptr(),
        first_room,
        wave_room: lanes as u32,
    };
    let (fetch_list, mirror_list) = (list(&fetches, (lanes * WAYS) as u32), list(&mirrors, lanes as u32));
    let reservoir = Reservoir { chunks: chunks.ptr(), chunk_pages: HOSTS as u64 };
    let demand =
        Demand { pages: demanded.ptr(), places: places.ptr(), counts: counts.ptr(), room: ROOM as u32, unused: 0 };
    let scale = 1.0 / (DIM as f32).sqrt();
    let attention = |wave| Attention {
        q: q.ptr(),
        pool: pool.ptr(),
        acc: acc.ptr(),
        state: state.ptr(),
        copies_per_wave: fetches.1.ptr(),
        fault: fault.ptr(),
        scale: scale * std::f32::consts::LOG2_E,
        dtype: F32,
        splits: SPLITS as u32,
        wave,
        first_token: 0,
        window: 1,
    };
    let (entry_list, step, page_bytes) = (entries.ptr(), step_number.ptr(), PAGE_BYTES as u64);
    let lane_grid = (KV_HEADS, SEQUENCES, 1);

    let (compute, copy) = (gpu.compute.clone(), gpu.copy.clone());
    compute.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    for counters in [&fetches.1, &mirrors.1] {
        // SAFETY: four counters.
        unsafe { result::memset_d8_async(counters.ptr(), 0, 16, compute.cu_stream()) }.unwrap();
    }
    gpu.launch(
        "wakekv_open",
        lane_grid,
        32,
        8,
        &[&tables, &shape, &entry_list, &step, &pins, &tallies.ptr(), &fault.ptr()],
    );
    gpu.launch(
        "wakekv_append_f16",
        (1, KV_HEADS, SEQUENCES),
        128,
        8 * DIM,
        &[&tables, &shape, &entry_list, &k.ptr(), &v.ptr(), &F32, &pool.ptr(), &digests, &staging, &mirror_list, &0u32],
    );
    gpu.launch(
        "wakekv_score_f16",
        (2, KV_HEADS, SEQUENCES),
        128,
        4 * 4 * DIM + 4 * (DIGEST_BYTES + 4 * DIM),
        &[&tables, &shape, &entry_list, &selection, &digests, &q.ptr(), &F32, &scale, &scores.ptr(), &demand.room],
    );
    gpu.launch(
        "wakekv_select",
        lane_grid,
        32,
        1064,
        &[&tables, &shape, &entry_list, &step, &selection, &scores.ptr(), &0u64, &0u64, &demand, &fault.ptr()],
    );
    gpu.launch(
        "wakekv_demand",
        lane_grid,
        32,
        8 * 8 + 4 * (12 + 4),
        &[&tables, &shape, &entry_list, &step, &demand, &fetch_list, &staging, &4u32, &tallies.ptr(), &fault.ptr()],
    );
    let decided = compute.record_event(None).unwrap();
    copy.wait(&decided).unwrap();
    if slow_bus {
        // Where nobody waits for it, the bus must be slower than the first pass, also on a busy machine.
        let take = if waits { take_long as unsafe extern "C" fn(_) } else { take_very_long };
        // SAFETY: the function takes no notice of its argument.
        unsafe { result::stream::launch_host_function(copy.cu_stream(), take, std::ptr::null_mut()) }.unwrap();
    }
    gpu.launch_on(
        &copy,
        "wakekv_gather",
        (2, 1, 1),
        64,
        0,
        &[&fetch_list, &1u32, &reservoir, &pool.ptr(), &page_bytes, &places.ptr()],
    )
    .unwrap();
    let fetched = copy.record_event(None).unwrap();
    gpu.launch_on(
        &copy,
        "wakekv_mirror",
        (2, 1, 1),
        64,
        0,
        &[&mirror_list, &1u32, &reservoir, &pool.ptr(), &page_bytes],
    )
    .unwrap();
    let mirrored = copy.record_event(None).unwrap();
    let attend = |wave| {
        let (shared, grid) = (16 * GROUP * (DIM + 2), (SPLITS, KV_HEADS, SEQUENCES));
        gpu.launch("wakekv_attend_f16_d64_r2", grid, 128, shared, &[&shape, &entry_list, &demand, &attention(wave)]);
    };
    attend(0);
    if waits {
        compute.wait(&fetched).unwrap();
    }
    attend(1);
    gpu.launch("wakekv_merge", (rows, 1, 1), DIM, 0, &[&shape, &entry_list, &attention(1), &out.ptr(), &F32]);
    compute.wait(&mirrored).unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = compute.end_capture(flags).unwrap().expect("something was captured");

    let mut rng = SmallRng::seed_from_u64(11);
    let mut history = vec![[Vec::new(), Vec::new()]; lanes];
    let (mut hits, mut misses) = (0, 0);
    for token in 0..tokens {
        let entry = |index: usize| Entry {
            sequence: index as u32,
            start: token as u32,
            tokens: 1,
            row: index as u32,
            decode: 1,
            reselect: 1,
        };
        entries.write(0, &[entry(0), entry(1)]);
        step_number.write(0, &[token as u64 + 1]);
        for (block, tensor) in [&k, &v].into_iter().enumerate() {
            let values = normal(&mut rng, stored, lanes * DIM);
            tensor.write(0, &values);
            for (lane, row) in values.chunks_exact(DIM).enumerate() {
                history[lane][block].extend_from_slice(row);
            }
        }
        let queries = normal(&mut rng, DType(F32), rows * DIM);
        q.write(0, &queries);
        graph.launch().unwrap();
        gpu.synchronize()?;
        let fault = fault.read()[0];
        if fault != Fault::default() {
            return Err(format!("token {token}: {fault:?}"));
        }
        for tally in tallies.read() {
            hits += tally.hits as usize;
            misses += (tally.compulsory + tally.capacity) as usize;
        }
        let (results, lists, lengths) = (out.read(), demanded.read(), counts.read());
        for row in 0..rows {
            let lane = row / GROUP;
            let list = &lists[lane * ROOM..lane * ROOM + lengths[lane] as usize];
            let want = attend_exactly(&queries[row * DIM..(row + 1) * DIM], &history[lane], list);
            for (got, want) in results[row * DIM..].iter().zip(want) {
                let off = (f64::from(*got) - want).abs() / (want.abs() + 0.05);
                if off.is_nan() || off > 1e-4 {
                    return Err(format!("token {token}, row {row}: {got}, not {want}"));
                }
            }
        }
    }
    Ok((hits, misses))
}

/// A bus that takes its time.
unsafe extern "C" fn take_long(_: *mut std::ffi::c_void) {
    std::thread::sleep(Duration::from_millis(30));
}

unsafe extern "C" fn take_very_long(_: *mut std::ffi::c_void) {
    std::thread::sleep(Duration::from_millis(150));
}

/// Softmax over the tokens of the pages.
fn attend_exactly(q: &[f32], [k, v]: &[Vec<f32>; 2], pages: &[u32]) -> Vec<f64> {
    let tokens = k.len() / DIM;
    let read =
        pages.iter().flat_map(|&page| page as usize * PAGE_TOKENS..((page as usize + 1) * PAGE_TOKENS).min(tokens));
    let weighted: Vec<(f64, &[f32])> = read
        .map(|token| {
            let row = token * DIM..(token + 1) * DIM;
            let dot: f64 = q.iter().zip(&k[row.clone()]).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            ((dot / (DIM as f64).sqrt()).exp(), &v[row])
        })
        .collect();
    let sum: f64 = weighted.iter().map(|(weight, _)| weight).sum();
    (0..DIM).map(|d| weighted.iter().map(|(weight, v)| weight * f64::from(v[d])).sum::<f64>() / sum).collect()
}

#[test]
fn a_captured_step_reads_what_the_head_has_seen_wherever_it_is() {
    let Some(gpu) = Gpu::new() else { return };
    let (hits, misses) = decode(&gpu, ROOM * PAGE_TOKENS - 2, false, true).unwrap();
    assert!(misses > 100 && hits > 1000, "{hits} hits, {misses} misses");
}

#[test]
fn a_captured_step_is_the_same_when_its_streams_dawdle() {
    let Some(gpu) = Gpu::new() else { return };
    gpu.session.delay(Duration::from_micros(300));
    let (_, misses) = decode(&gpu, 70, true, true).unwrap();
    assert!(misses > 0);
}

#[test]
fn a_captured_step_without_the_wait_for_its_fetches_is_found() {
    let Some(gpu) = Gpu::new() else { return };
    let error = decode(&gpu, 70, true, false).unwrap_err();
    assert!(error.contains("Fault { kind: 2"), "{error}");
}
