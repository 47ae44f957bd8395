//! Sticky scores: what the last finished step chose is worth more, and what an undone step chose is not, nor is it reused.

mod common;
#[path = "common/heads.rs"]
mod heads;

use common::layout::{Entry, SELECT_TOP, Selection};
use common::{Buffer, Gpu};
use heads::{DemandBuffers, Heads, shape};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use wakekv_emulator::Order;

const PAGE_TOKENS: u32 = 8;
const ROOM: usize = 40;
const SEQUENCES: usize = 2;
const KV_HEADS: usize = 2;
const LANES: usize = SEQUENCES * KV_HEADS;

/// What a head has chosen, without lists that take turns.
#[derive(Clone, Default)]
struct Chosen {
    last: Vec<u32>,
    /// The same of the last finished step that has chosen.
    kept: Vec<u32>,
    /// The step that chose last was undone: the next one chooses whether it is told to or not.
    due: bool,
}

impl Chosen {
    fn choose(&mut self, scores: &[f32], candidates: std::ops::Range<u32>, selection: Selection) {
        let raised = |page: u32| {
            let score = scores[page as usize];
            let is_raised = selection.stickiness > 0.0 && self.kept.contains(&page);
            (if is_raised { score + selection.stickiness } else { score }, page)
        };
        let mut order: Vec<_> = candidates.map(raised).collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        self.last = order.iter().take(selection.count as usize).map(|&(_, page)| page).collect();
        self.last.sort_unstable();
    }
}

/// Steps that choose and steps that do not, finished and undone. Returns how many choices stickiness has changed.
fn run(gpu: &Gpu, seed: u64) -> usize {
    let rng = &mut SmallRng::seed_from_u64(seed);
    let selection = Selection {
        mode: SELECT_TOP,
        count: [0, 1, 4, 9][rng.random_range(0..4)],
        sinks: rng.random_range(0..3),
        recent: rng.random_range(0..3),
        stickiness: [0.0, 0.5, 1.5, 3.0][rng.random_range(0..4)],
    };
    let heads = Heads::new(gpu, shape(64, PAGE_TOKENS as usize, KV_HEADS as u32, 1), SEQUENCES, ROOM, ROOM);
    let demand = DemandBuffers::new(gpu, LANES, ROOM);
    let ways = gpu.upload(&[ROOM as u32; LANES]);
    let (mut chosen, mut changed) = (vec![Chosen::default(); LANES], 0);
    let mut start = rng.random_range(20..80);
    for step in 1..40u64 {
        let tokens = rng.random_range(1..10);
        let reselect = step == 1 || rng.random_ratio(2, 3);
        let entries = (0..SEQUENCES as u32).map(|sequence| Entry {
            sequence,
            start,
            tokens,
            row: 0,
            decode: 1,
            reselect: u32::from(reselect),
        });
        let entries = gpu.upload(&entries.collect::<Vec<_>>());
        heads.step_number.write(0, &[step]);
        // Few values, for equal scores.
        let mut score = || match rng.random_range(0..20) {
            0 => f32::INFINITY,
            1 => f32::NEG_INFINITY,
            2 => -0.0,
            _ => rng.random_range(-6..6) as f32 / 2.0,
        };
        let scores: Vec<f32> = (0..LANES * ROOM).map(|_| score()).collect();
        demand.scores.write(0, &scores);
        let got = demand.select(gpu, &heads, &entries, selection, &[], &[]).unwrap();

        let last = (start + tokens).div_ceil(PAGE_TOKENS) - 1;
        let first = selection.sinks.min(last);
        let end = last.saturating_sub(selection.recent).min(start / PAGE_TOKENS).max(first);
        let finished = rng.random_ratio(2, 3);
        for (lane, chosen) in chosen.iter_mut().enumerate() {
            let chooses = reselect || chosen.due;
            if chooses {
                let scores = &scores[lane * ROOM..(lane + 1) * ROOM];
                let mut free = Chosen::default();
                free.choose(scores, first..end, selection);
                chosen.choose(scores, first..end, selection);
                changed += usize::from(free.last != chosen.last);
            }
            let read = chosen.last.iter().copied().filter(|page| (first..end).contains(page));
            let want: Vec<u32> = (0..first).chain(read).chain(end..=last).collect();
            assert_eq!(got[lane], want, "seed {seed}, step {step}, lane {lane}, {selection:?}");
            assert_eq!(heads.selected(lane), chosen.last, "seed {seed}, step {step}, lane {lane}");
            if finished && chooses {
                chosen.kept.clone_from(&chosen.last);
            }
            chosen.due = chooses && !finished;
        }
        if finished {
            start = (start + tokens).min(ROOM as u32 * PAGE_TOKENS - 10);
        } else {
            undo(gpu, &heads, &entries, &ways);
        }
    }
    changed
}

fn undo(gpu: &Gpu, heads: &Heads, entries: &Buffer<Entry>, ways: &Buffer<u32>) {
    let parameters: [&dyn common::gpu::Parameter; 5] =
        [&heads.tables, &heads.shape, &entries.ptr(), &heads.step_number.ptr(), &ways.ptr()];
    gpu.launch("wakekv_undo", (KV_HEADS, SEQUENCES, 1), 32, 0, &parameters);
    gpu.synchronize().unwrap();
}

#[test]
fn what_finished_steps_chose_is_worth_more() {
    let Some(gpu) = Gpu::new() else { return };
    let changed: usize = (0..40)
        .map(|seed| {
            gpu.session.order(Order::ALL[seed as usize % 4]);
            run(&gpu, seed)
        })
        .sum();
    assert!(changed > 500, "scores were too far apart for stickiness to matter: {changed}");
}
