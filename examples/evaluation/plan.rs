//! Which runs there are.

use wakekv::Digest::{KeySketch2, MinMax};

use crate::tasks::Task;
use crate::tasks::run::Reads;

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub task: Task,
    /// Tokens of the context, about.
    pub context: usize,
    pub seed: u64,
    /// Whether a run without limit is compared as well.
    pub compared: bool,
}

/// How the evaluation is done.
#[derive(Clone, Debug)]
pub struct Plan {
    pub jobs: Vec<Job>,
    /// Ways of reading that scored tasks are run with.
    pub reads: Vec<Reads>,
    /// How the recorded run reads, and the pages that its heads may keep.
    pub recorded: (Reads, usize),
    /// Tokens that a recorded run decodes at least.
    pub least: usize,
    /// Pages per head in the replays.
    pub budgets: Vec<usize>,
    /// Tokens of context at which decoding speed is measured.
    pub pace: Vec<usize>,
}

/// The whole evaluation: the runs that take longest come first, so that all threads end at about the same time.
pub fn full() -> Plan {
    let mut jobs = Vec::new();
    let mut add = |task, contexts: &[usize], each: u64| {
        for (index, &context) in (0u64..).zip(contexts) {
            jobs.extend((0..each).map(|run| index * each + run).map(|seed| Job {
                task,
                context,
                seed,
                compared: seed == 0,
            }));
        }
    };
    add(Task::Story, &[5600, 4000, 3000, 2000, 1000], 1);
    for task in [Task::Needle, Task::Distractors, Task::Turns] {
        add(task, &[2048], 10);
    }
    add(Task::Copy, &[2048], 10);
    add(Task::Chain, &[1024], 5);
    add(Task::Prose, &[1024], 10);
    let mut reads = vec![Reads::Full];
    for pages in [16, 8, 4] {
        let digests = [Reads::Oracle(pages), Reads::Digest(KeySketch2, pages), Reads::Digest(MinMax, pages)];
        reads.extend(digests);
    }
    reads.push(Reads::Window(16));
    Plan {
        jobs,
        reads,
        recorded: (Reads::Digest(KeySketch2, 16), 32),
        least: 128,
        budgets: vec![16, 20, 24, 32, 48, 64, 96],
        pace: vec![4096],
    }
}

/// A few short runs that show that everything works and that every check holds.
pub fn short() -> Plan {
    let job = |task, seed| Job { task, context: 512, seed, compared: true };
    Plan {
        jobs: vec![
            job(Task::Needle, 0),
            job(Task::Needle, 1),
            job(Task::Copy, 0),
            job(Task::Chain, 0),
            job(Task::Chain, 1),
        ],
        reads: vec![Reads::Full, Reads::Oracle(8), Reads::Digest(KeySketch2, 8), Reads::Window(8)],
        recorded: (Reads::Digest(KeySketch2, 8), 12),
        least: 48,
        budgets: vec![8, 12, 16, 24],
        pace: Vec::new(),
    }
}
