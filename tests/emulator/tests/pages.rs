//! Appending, digests and selection.

mod common;
#[path = "common/digests.rs"]
mod digests;
#[path = "common/heads.rs"]
mod heads;

use common::Gpu;
use common::layout::{
    CopyList, DIGEST_CUBOID, DIGEST_MIN_MAX, DIGEST_ROTATED, DIGEST_SKETCH, Digests, Entry, F16, F32, FAULT_BAD_DEMAND,
    Fault, PageCopy, SELECT_ALL, SELECT_LISTED, SELECT_TOP, Selection, Staging,
};
use common::numbers::{DType, normal};
use heads::{DemandBuffers, Heads, shape};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use wakekv_emulator::Order;

const KINDS: [u32; 6] =
    [DIGEST_MIN_MAX, DIGEST_CUBOID, DIGEST_SKETCH, DIGEST_ROTATED, DIGEST_ROTATED + 1, DIGEST_ROTATED + 2];

/// Appends two chunks to two sequences, and compares slots, digests and mirror lists.
fn append(gpu: &Gpu, stored: DType, tensor: DType, dim: usize, page_tokens: usize, kind: u32, resident: usize) {
    let (room, kv_heads) = (6, 3);
    let heads = Heads::new(gpu, shape(dim, page_tokens, kv_heads as u32, 1), 2, room, resident);
    let elements = 2 * page_tokens * dim;
    let staging = Staging { first: heads.slots.len() as u32, ring: room as u32 };
    let slots = heads.slots.len() + 2 * kv_heads * room;
    let pool = gpu.alloc::<u8>(slots * elements * 2);
    let stride = digests::bytes(kind, dim, page_tokens);
    let hosts = 2 * room * kv_heads;
    let digest_bytes = gpu.alloc::<u8>(hosts * stride);
    let digest_view = Digests { bytes: digest_bytes.ptr(), stride: stride as u64, kind, unused: 0 };
    let (copies, counts) = (gpu.alloc::<PageCopy>(hosts), gpu.zeros::<u32>(2));
    let mirrors = CopyList { copies: copies.ptr(), counts: counts.ptr(), first_room: 0, wave_room: 0 };
    let mut rng = SmallRng::seed_from_u64(dim as u64);
    let mut written: Vec<Vec<f32>> = vec![Vec::new(); 2 * kv_heads * 2]; // per sequence, head and block
    // A page that is open between two steps keeps its way, so without ways chunks end with a page.
    let (first, second) = if resident == 0 { (page_tokens * 2, page_tokens) } else { (page_tokens * 2 + 3, 1) };
    let chunks = [[(0, first), (0, second)], [(first, page_tokens * 3), (second, page_tokens)]];
    for chunk in chunks {
        let mut row = 0;
        let entries: Vec<Entry> = chunk
            .iter()
            .enumerate()
            .map(|(index, &(start, tokens))| {
                row += tokens;
                let (sequence, start, tokens) = (index as u32, start as u32, tokens as u32);
                Entry { sequence, start, tokens, row: row as u32 - tokens, decode: 0, reselect: 0 }
            })
            .collect();
        let mut tensors = [0, 1].map(|_| normal(&mut rng, tensor, row * kv_heads * dim));
        tensors[0][2 * dim + 1] = f32::NAN; // a key of the first sequence's head 2
        for (block, values) in tensors.iter().enumerate() {
            for (i, &value) in values.iter().enumerate() {
                let (token, head) = (i / dim / kv_heads, i / dim % kv_heads);
                let sequence = usize::from(token >= chunk[0].1);
                written[(sequence * kv_heads + head) * 2 + block].push(stored.round(value));
            }
        }
        let [k, v] = tensors.map(|values| gpu.upload(&tensor.encode(&values)));
        let entries = gpu.upload(&entries);
        gpu.launch(
            &format!("wakekv_append_{}", stored.name()),
            (room, kv_heads, 2),
            128,
            if digests::is_rotated(kind) { 4 * (17 * dim + page_tokens) } else { 8 * dim },
            &[
                &heads.tables,
                &heads.shape,
                &entries.ptr(),
                &k.ptr(),
                &v.ptr(),
                &tensor.0,
                &pool.ptr(),
                &digest_view,
                &staging,
                &mirrors,
                &0u32,
            ],
        );
        gpu.synchronize().unwrap();
    }

    let count = counts.read()[1] as usize;
    let mut listed: Vec<_> = copies.read_range(0, count).iter().map(|copy| (copy.host, copy.device)).collect();
    let mut expected = Vec::new();
    for (sequence, (first_chunk, second_chunk)) in chunks[0].into_iter().zip(chunks[1]).enumerate() {
        let tokens = first_chunk.1 + second_chunk.1;
        for head in 0..kv_heads {
            let lane = sequence * kv_heads + head;
            for page in 0..tokens.div_ceil(page_tokens) {
                // The first page that a chunk writes to is the staging ring's first.
                let first = if page < first_chunk.1 / page_tokens { 0 } else { second_chunk.0 / page_tokens };
                let slot = if page < resident {
                    heads.slots[lane * room + page]
                } else {
                    staging.first + (lane * room + page - first) as u32
                };
                let filled = page_tokens.min(tokens - page * page_tokens);
                let range = page * page_tokens * dim..(page * page_tokens + filled) * dim;
                let [keys, values] = [0, 1].map(|block| &written[lane * 2 + block][range.clone()]);
                let stored_page = stored.decode(&pool.read_range(slot as usize * elements * 2, elements * 2));
                // The second chunk writes over the first one's staging slots, whose pages would be mirrored by then.
                if page < resident || page * page_tokens >= second_chunk.0 {
                    same_floats(&stored_page[..filled * dim], keys);
                    same_floats(&stored_page[elements / 2..elements / 2 + filled * dim], values);
                }
                if filled < page_tokens {
                    assert!(stored_page[filled * dim].is_nan(), "nothing is written behind the last token");
                    continue;
                }
                let host = heads.host(sequence, head, page);
                expected.push((host, slot));
                let digest = digest_bytes.read_range(host as usize * stride, stride);
                digests::compare(&digest, &digests::build(kind, stored, keys, dim), stored, kind, dim, page_tokens);
            }
        }
    }
    listed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(listed, expected, "every sealed page is listed to be mirrored, once");
}

fn same_floats(got: &[f32], want: &[f32]) {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!(same(got, want), "element {i} is {got}, not {want}");
    }
}

#[test]
fn appended_tokens_lie_in_their_pages_and_full_pages_leave_digests() {
    let Some(gpu) = Gpu::new() else { return };
    for (i, (dim, page_tokens)) in [(64, 8), (80, 16), (96, 32), (128, 16), (256, 64)].into_iter().enumerate() {
        for (j, stored) in DType::STORED.into_iter().enumerate() {
            for kind in KINDS {
                gpu.session.order(Order::ALL[(i + j) % 4]);
                append(&gpu, stored, DType::ALL[(i + j) % 3], dim, page_tokens, kind, 6);
            }
        }
    }
}

#[test]
fn pages_without_a_way_are_written_to_staging_slots() {
    let Some(gpu) = Gpu::new() else { return };
    append(&gpu, DType(F16), DType(F32), 64, 8, DIGEST_SKETCH, 0);
}

/// Selects by digests of random keys, on the device and by sorting.
fn select(gpu: &Gpu, stored: DType, dim: usize, group: usize, kind: u32, count: u32, seed: u64) -> Result<(), String> {
    let (page_tokens, pages, kv_heads, pins) = (8, 60, 2, (1, 2));
    let heads = Heads::new(gpu, shape(dim, page_tokens, kv_heads as u32, group as u32), 2, pages + 2, pages);
    let stride = digests::bytes(kind, dim, page_tokens);
    let digest_bytes = gpu.alloc::<u8>(2 * (pages + 2) * kv_heads * stride);
    let view = Digests { bytes: digest_bytes.ptr(), stride: stride as u64, kind, unused: 0 };
    let mut rng = SmallRng::seed_from_u64(seed);
    let starts = [pages * page_tokens + 3, 9];
    let mut built = vec![Vec::new(); 2 * kv_heads];
    for (lane, built) in built.iter_mut().enumerate() {
        let mut last = Vec::new();
        for page in 0..starts[lane / kv_heads] / page_tokens {
            // Every tenth page equals its predecessor, for equal scores; one has a NaN.
            let mut keys = if page % 10 == 9 { last } else { normal(&mut rng, stored, page_tokens * dim) };
            if page == 20 {
                keys[3] = f32::NAN;
            }
            let digest = digests::build(kind, stored, &keys, dim);
            digest_bytes.write(heads.host(lane / kv_heads, lane % kv_heads, page) as usize * stride, &digest);
            built.push(digest);
            last = keys;
        }
    }
    let entry = |index: usize, decode, reselect| {
        let (sequence, start) = (index as u32, starts[index] as u32);
        Entry { sequence, start, tokens: 1, row: index as u32, decode, reselect }
    };
    let entries = gpu.upload(&[entry(0, 1, 1), entry(1, 1, 1)]);
    let q = normal(&mut rng, DType(F32), 2 * kv_heads * group * dim);
    let (device_q, scale) = (gpu.upload(&q), 0.125f32);
    let selection = Selection { mode: SELECT_TOP, count, sinks: pins.0, recent: pins.1, stickiness: 0.0 };
    let demand = DemandBuffers::new(gpu, 2 * kv_heads, pages + 2);
    let rows = group.max(4) * dim * 4 * if digests::is_rotated(kind) { 2 } else { 1 };
    let shared = rows + 4 * (stride + 4 * dim);
    gpu.launch(
        &format!("wakekv_score_{}", stored.name()),
        (3, kv_heads, 2),
        128,
        shared,
        &[
            &heads.tables,
            &heads.shape,
            &entries.ptr(),
            &selection,
            &view,
            &device_q.ptr(),
            &F32,
            &scale,
            &demand.scores.ptr(),
            &demand.view.room,
        ],
    );
    let got = demand.select(gpu, &heads, &entries, selection, &[], &[])?;
    for (lane, digests) in built.iter().enumerate() {
        let last = (starts[lane / kv_heads] / page_tokens) as u32;
        let (first, end) = (pins.0.min(last), (last.saturating_sub(pins.1)).max(pins.0.min(last)));
        let rows = &q[lane * group * dim..(lane + 1) * group * dim];
        let rows: Vec<f32> = rows.iter().map(|x| x * scale).collect();
        let score = |page: u32| {
            let score = digests::score(kind, stored, &digests[page as usize], &rows, dim, page_tokens);
            if score.is_nan() { f32::INFINITY } else { score }
        };
        let mut order: Vec<_> = (first..end).map(|page| (score(page), page)).collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut best: Vec<u32> = order.iter().take(count as usize).map(|&(_, page)| page).collect();
        best.sort_unstable();
        let want: Vec<u32> = (0..first).chain(best.iter().copied()).chain(end..=last).collect();
        if got[lane] != want || heads.selected(lane) != best {
            return Err(format!("lane {lane}, count {count}: {:?}, not {want:?}", got[lane]));
        }
    }
    // Two tokens later the last selection is used again; what has become pinned is named once.
    let later = |index: usize| Entry { start: starts[index] as u32 + 2, ..entry(index, 1, 0) };
    let entries = gpu.upload(&[later(0), later(1)]);
    let reused = demand.select(gpu, &heads, &entries, selection, &[], &[])?;
    if reused != got {
        return Err(format!("the same selection again: {reused:?}, not {got:?}"));
    }
    Ok(())
}

#[test]
fn the_best_pages_by_digest_are_selected() {
    let Some(gpu) = Gpu::new() else { return };
    for (i, (dim, group)) in [(64, 1), (80, 3), (96, 4), (128, 7), (256, 12)].into_iter().enumerate() {
        for (j, stored) in DType::STORED.into_iter().enumerate() {
            for kind in KINDS {
                for count in [0, 1, 7, 30, 100] {
                    gpu.session.order(Order::ALL[(i + j) % 4]);
                    select(&gpu, stored, dim, group, kind, count, i as u64).unwrap();
                }
            }
        }
    }
}

#[test]
fn everything_and_listed_pages_are_demanded_in_order() {
    let Some(gpu) = Gpu::new() else { return };
    let heads = Heads::new(&gpu, shape(64, 8, 2, 1), 2, 40, 40);
    let demand = DemandBuffers::new(&gpu, 4, 40);
    let entry = |sequence, start, tokens, decode| Entry { sequence, start, tokens, row: 0, decode, reselect: 1 };
    let entries = gpu.upload(&[entry(0, 100, 1, 1), entry(1, 0, 77, 0)]);
    let selection = |mode| Selection { mode, count: 0, sinks: 2, recent: 1, stickiness: 0.0 };
    let all = demand.select(&gpu, &heads, &entries, selection(SELECT_ALL), &[], &[]).unwrap();
    assert_eq!(all, [13, 13, 10, 10].map(|pages| (0..pages).collect::<Vec<u32>>()));
    let (offsets, lists) = ([0, 4, 4, 4, 4], [9, 1, 12, 4]);
    let listed = demand.select(&gpu, &heads, &entries, selection(SELECT_LISTED), &offsets, &lists).unwrap();
    assert_eq!(listed[0], [0, 1, 4, 9, 11, 12]);
    assert_eq!(listed[1], [0, 1, 11, 12]);
    assert_eq!(listed[2], (0..10).collect::<Vec<u32>>(), "prefill reads everything");
    assert_eq!(demand.fault.read()[0], Fault::default());
    demand.select(&gpu, &heads, &entries, selection(SELECT_LISTED), &[0, 0, 1, 1, 1], &[13]).unwrap();
    assert_eq!(demand.fault.read()[0], Fault { kind: FAULT_BAD_DEMAND, sequence: 0, head: 1, page: 13 });
}

#[test]
fn planted_bugs_are_found() {
    let Some(gpu) = Gpu::seeded("select_wrong_lane_mask") else { return };
    assert!(select(&gpu, DType(F16), 64, 1, DIGEST_MIN_MAX, 7, 1).is_err());
}
