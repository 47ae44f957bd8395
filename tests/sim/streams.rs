//! Traces to replay.

use crate::common::Rng;
use wakekv::table::{Phase, Pins};
use wakekv::trace::{Mark, Shape, Trace};

pub fn shape(heads: usize, pins: Pins) -> Shape {
    Shape { layers: 1, heads_per_layer: heads, page_tokens: 16, pins, budget: None }
}

/// A prompt whose last page, the one with the highest number, is half full, then up to 8 decode steps on it: `steps[step][head]`.
pub fn short(prompt_pages: usize, steps: &[Vec<Vec<u32>>]) -> Trace {
    let mut trace = Trace::new(shape(steps[0].len(), Pins::default()));
    let all: Vec<u32> = (0..prompt_pages as u32).collect();
    let tokens = 16 * prompt_pages - 8;
    trace.push(Mark { step: 1, phase: Phase::Prefill, start: 0, tokens }, &vec![all; steps[0].len()]).unwrap();
    assert!(steps.len() <= 8);
    for (index, demands) in steps.iter().enumerate() {
        let mark = Mark { step: index as u64 + 2, phase: Phase::Decode, start: tokens + index, tokens: 1 };
        trace.push(mark, demands).unwrap();
    }
    trace
}

/// A conversation: prompts in chunks, generated tokens one or a few at a time. Demands hold what is pinned and pages that come and go.
pub fn random(seed: u64, heads: usize, pins: Pins, steps: usize) -> Trace {
    let mut rng = Rng::new(seed);
    let mut trace = Trace::new(shape(heads, pins));
    let mut tokens = 0;
    let mut favourites: Vec<Vec<u32>> = vec![Vec::new(); heads];
    for step in 0..steps {
        let prefill = step == 0 || rng.chance(4);
        let new = if prefill {
            1 + rng.below(120)
        } else if rng.chance(5) {
            1 + rng.below(20)
        } else {
            1
        };
        let phase = if prefill { Phase::Prefill } else { Phase::Decode };
        let mark = Mark { step: 2 * step as u64 + 1, phase, start: tokens, tokens: new };
        let first_written = tokens as u32 / 16;
        tokens += new;
        let pages = tokens.div_ceil(16) as u32;
        let demands: Vec<Vec<u32>> = favourites
            .iter_mut()
            .map(|favourites| {
                if prefill {
                    return (0..pages).collect();
                }
                favourites.retain(|_| !rng.chance(20));
                while favourites.len() < 6 {
                    favourites.push(rng.below(pages as usize) as u32);
                }
                let pinned = (0..pages).filter(|&page| page >= first_written || pins.contain(page, pages - 1));
                let mut demand: Vec<u32> = favourites.iter().copied().chain(pinned).collect();
                demand.sort_unstable();
                demand.dedup();
                demand
            })
            .collect();
        trace.push(mark, &demands).unwrap();
    }
    trace
}
