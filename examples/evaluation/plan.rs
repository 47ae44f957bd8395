//! Which runs there are.

use wakekv::Digest::{MinMax, RotatedSketch2, RotatedSketch3};

use crate::tasks::Task;
use crate::tasks::run::Reads;

/// Tokens of a page, by the library's default, which logs do not tell.
pub const PAGE_TOKENS: usize = 16;

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub task: Task,
    /// Tokens of the context, about.
    pub context: usize,
    pub seed: u64,
    /// Whether a run without limit is compared as well.
    pub compared: bool,
    /// Whether queries, keys and values are kept, for policies that look at them.
    pub tensors: bool,
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
    /// Tasks of which one run is judged under policies that look at queries and keys, and the pages per head there.
    pub attentive: Vec<Task>,
    pub attentive_budgets: Vec<usize>,
    /// Tokens of context at which decoding speed is measured.
    pub pace: Vec<usize>,
}

/// The whole evaluation.
pub fn full() -> Plan {
    let mut jobs = Vec::new();
    let stories = [1000, 2000, 3000, 4000, 5600];
    let others = [
        (Task::Needle, 2048, 10),
        (Task::Distractors, 2048, 10),
        (Task::Turns, 2048, 10),
        (Task::Copy, 2048, 10),
        (Task::Chain, 1024, 5),
        (Task::Prose, 1024, 10),
    ];
    // Seed by seed, so that an evaluation that is stopped has something of everything.
    for seed in 0..10 {
        let others = others.into_iter().filter(|&(.., runs)| seed < runs).map(|(task, context, _)| (task, context));
        let story = stories.get(seed as usize).map(|&context| (Task::Story, context));
        let job = |(task, context)| Job { task, context, seed, compared: seed == 0, tensors: seed < 2 };
        jobs.extend(others.chain(story).map(job));
    }
    let mut reads = vec![Reads::Full];
    reads.extend([16, 8, 4].map(|pages| Reads::Digest(RotatedSketch2, pages)));
    reads.extend([8, 4].map(|pages| Reads::Digest(RotatedSketch3, pages)));
    reads.extend([16, 8].map(|pages| Reads::Digest(MinMax, pages)));
    // Where a digest has something left to lose.
    reads.extend([8, 4].map(Reads::Oracle));
    reads.extend([16, 8].map(|pages| Reads::Sticky(RotatedSketch2, pages)));
    reads.push(Reads::Relaxed(RotatedSketch2, 16));
    reads.extend([16, 8].map(Reads::Evict));
    reads.extend([32, 16].map(Reads::SnapKv));
    reads.push(Reads::Window(16));
    Plan {
        jobs,
        reads,
        recorded: (Reads::Digest(RotatedSketch2, 16), 32),
        least: 128,
        budgets: vec![16, 20, 24, 32, 48, 64, 96],
        attentive: vec![Task::Needle, Task::Copy, Task::Chain],
        attentive_budgets: vec![16, 32],
        pace: vec![4096, 7800],
    }
}

/// A few short runs that show that everything works and that every check holds.
pub fn short() -> Plan {
    let job = |task, seed| Job { task, context: 512, seed, compared: true, tensors: true };
    Plan {
        jobs: vec![
            job(Task::Needle, 0),
            job(Task::Needle, 1),
            job(Task::Copy, 0),
            job(Task::Chain, 0),
            job(Task::Chain, 1),
        ],
        reads: vec![
            Reads::Full,
            Reads::Oracle(8),
            Reads::Digest(RotatedSketch2, 8),
            Reads::Sticky(RotatedSketch2, 8),
            Reads::Evict(8),
            Reads::SnapKv(8),
            Reads::Window(8),
        ],
        recorded: (Reads::Digest(RotatedSketch2, 8), 12),
        least: 48,
        budgets: vec![8, 12, 16, 24],
        attentive: vec![Task::Needle],
        attentive_budgets: vec![8],
        pace: Vec::new(),
    }
}
