//! Decoding speed: dense attention against selected pages, by how often they are selected anew.

use std::time::Instant;

use anyhow::Result;
use wakekv::Cpu;
use wakekv::Digest::RotatedSketch2;

use crate::llm::attention::{Kind, Memory};
use crate::llm::cached::Cached;
use crate::llm::engine;
use crate::llm::model::{Logits, Model};
use crate::tasks::context::Context;
use crate::tasks::run::Reads;

/// One way to decode.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub context: usize,
    pub reads: Reads,
    /// Steps from one selection to the next.
    pub every: usize,
    /// Tokens per second, the median over rounds.
    pub speed: f64,
    /// Over that of dense attention, the median over rounds of the ratio within one.
    pub ratio: f64,
}

/// Rounds, in each of which every way decodes so many tokens.
const ROUNDS: usize = 5;
const TOKENS: usize = 16;

/// Pages that each head may keep where pages are selected.
pub const BUDGET: usize = 32;

/// Measures on one thread with a context of given ids. The first way is the dense one.
pub fn measure(model: &Model, ids: &[u32]) -> Result<Vec<Pace>> {
    let context = Context::read(model, ids, |_| ())?;
    let ways = [
        (Reads::Full, 1),
        (Reads::Digest(RotatedSketch2, 16), 1),
        (Reads::Digest(RotatedSketch2, 16), 4),
        (Reads::Digest(RotatedSketch2, 16), 16),
    ];
    let mut memories = Vec::new();
    for (reads, every) in ways {
        let mut builder = reads.cache(model.config(), context.tokens + ROUNDS * TOKENS)?.reselect_every(every);
        if reads != Reads::Full {
            builder = builder.pages_per_head(BUDGET);
        }
        let mut memory = Cached::new(builder.build(Cpu::new().threads(1))?);
        context.write(&mut memory)?;
        memories.push(memory);
    }
    let mut speeds = vec![Vec::new(); ways.len()];
    for round in 0..ROUNDS {
        for (memory, speeds) in memories.iter_mut().zip(&mut speeds) {
            speeds.push(decode(model, memory, &ids[round * TOKENS..(round + 1) * TOKENS])?);
        }
    }
    let dense = speeds[0].clone();
    let paces = ways.into_iter().zip(speeds).map(|((reads, every), speeds)| Pace {
        context: context.tokens,
        reads,
        every,
        ratio: median(speeds.iter().zip(&dense).map(|(own, dense)| own / dense)),
        speed: median(speeds.into_iter()),
    });
    Ok(paces.collect())
}

/// Tokens per second.
fn decode(model: &Model, memory: &mut dyn Memory, ids: &[u32]) -> Result<f64> {
    let started = Instant::now();
    for &id in ids {
        engine::pass(model, memory, Kind::Generated, &[id], Logits::Last)?;
    }
    Ok(ids.len() as f64 / started.elapsed().as_secs_f64())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
