//! Attention against double precision: shapes, ragged lengths, waves, chunks, orders of warps.

#[path = "common/attention.rs"]
mod attention;
mod common;

use attention::Case;
use common::Gpu;
use common::layout::{F16, F32};
use common::numbers::DType;
use wakekv_emulator::Order;

/// A decode step of ragged sequences.
fn decode(dim: usize, page_tokens: usize, group: usize) -> Case {
    let p = page_tokens;
    Case {
        stored: DType(F16),
        tensor: DType(F32),
        dim,
        page_tokens,
        kv_heads: 2,
        group,
        entries: vec![(0, 1), (p - 2, 1), (p - 1, 1), (p, 1), (4 * p + 3, 1)],
        splits: 2,
        waves: 1,
        percent: 100,
        leave_pending: false,
    }
}

#[test]
fn every_shape_of_head_page_and_group() {
    let Some(gpu) = Gpu::new() else { return };
    let mut seed = 0;
    for (dim, page_tokens) in [(64, 8), (64, 64), (80, 16), (96, 32), (128, 8), (128, 16), (256, 16)] {
        for group in [1, 3, 4, 7, 8] {
            for stored in DType::STORED {
                seed += 1;
                gpu.session.order(Order::ALL[seed as usize % 4]);
                let entries = if dim == 64 { 5 } else { 3 };
                let mut case = decode(dim, page_tokens, group);
                case.entries = case.entries.split_off(5 - entries);
                Case { stored, ..case }.run(&gpu, seed).unwrap();
            }
        }
    }
}

#[test]
fn groups_beyond_eight_take_several_tiles() {
    let Some(gpu) = Gpu::new() else { return };
    for group in [9, 12, 16] {
        Case { kv_heads: 1, ..decode(64, 16, group) }.run(&gpu, group as u64).unwrap();
    }
}

#[test]
fn any_tensor_dtype_goes_with_any_storage() {
    let Some(gpu) = Gpu::new() else { return };
    for tensor in DType::ALL {
        for stored in DType::STORED {
            Case { stored, tensor, ..decode(64, 16, 4) }.run(&gpu, 7).unwrap();
        }
    }
}

#[test]
fn waves_join_to_the_same_result() {
    let Some(gpu) = Gpu::new() else { return };
    for (waves, splits) in [(2, 1), (2, 3), (3, 2), (6, 2)] {
        for order in Order::ALL {
            gpu.session.order(order);
            let case = Case { waves, splits, entries: vec![(150, 1), (40, 1)], ..decode(64, 8, 3) };
            case.run(&gpu, u64::from(waves)).unwrap();
        }
    }
}

#[test]
fn sparse_demands_read_what_they_name() {
    let Some(gpu) = Gpu::new() else { return };
    for percent in [0, 20, 60] {
        let case = Case { percent, waves: 2, splits: 4, entries: vec![(300, 1), (77, 1)], ..decode(128, 16, 4) };
        case.run(&gpu, u64::from(percent)).unwrap();
    }
}

#[test]
fn chunks_of_new_tokens_see_what_is_before_them() {
    let Some(gpu) = Gpu::new() else { return };
    for (i, (dim, group, entries)) in [
        (64, 1, vec![(0, 17), (5, 1), (16, 30)]),
        (64, 3, vec![(0, 128)]),
        (128, 4, vec![(21, 9), (0, 16)]),
        (80, 2, vec![(7, 11)]),
        (96, 7, vec![(3, 6)]),
        (256, 1, vec![(10, 12)]),
    ]
    .into_iter()
    .enumerate()
    {
        let stored = DType::STORED[i % 2];
        let case = Case { stored, waves: 2, entries, ..decode(dim, 16, group) };
        case.run(&gpu, dim as u64).unwrap();
    }
}

#[test]
fn a_page_that_is_not_there_is_a_fault_and_no_output() {
    let Some(gpu) = Gpu::new() else { return };
    let error = Case { leave_pending: true, ..decode(64, 16, 4) }.run(&gpu, 1).unwrap_err();
    assert!(error.starts_with("not there"), "{error}");
    assert!(error.contains("sequence: 4, head: 1, page: 4"), "{error}");
}

#[test]
fn planted_bugs_are_found() {
    for bug in
        ["attention_missing_barrier", "attention_wrong_lanes", "attention_page_off_by_one", "attention_reads_unwritten"]
    {
        let Some(gpu) = Gpu::seeded(bug) else { return };
        let found = Order::ALL.into_iter().find_map(|order| {
            gpu.session.order(order);
            decode(64, 16, 4).run(&gpu, 3).err()
        });
        println!("{bug}: {}", found.unwrap_or_else(|| panic!("{bug} has not been found")));
    }
}
