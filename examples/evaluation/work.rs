//! One run: the context is read once, every way of reading is scored on it, and one of them is recorded.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use wakekv::Counts;

use super::plan::{Job, Plan};
use crate::llm::model::Model;
use crate::llm::tokenizer::Tokenizer;
use crate::tasks::Frame;
use crate::tasks::context::Context;
use crate::tasks::record::record;
use crate::tasks::run::{Decoding, RELAXED, Reads, STICKINESS, Score};

/// What a run left, beside its trace and its log on disk.
#[derive(Clone, Debug)]
pub struct Done {
    pub job: Job,
    pub folder: PathBuf,
    /// Tokens of the context, and those decoded in the recorded run.
    pub context: usize,
    pub decoded: usize,
    /// One per way of reading, in the plan's order, where the task has a score.
    pub scores: Vec<Score>,
    /// What the live cache counted in decode, as [`numbers`] orders it.
    pub live: [u64; 6],
    /// Whether a run without a limit on memory wrote the same ids, where one was made.
    pub same: Option<bool>,
}

/// The folder in a run's folder that holds what was demanded with [`Reads::Sticky`].
pub const STICKY: &str = "sticky";

/// What is compared of counters.
pub fn numbers(counts: &Counts) -> [u64; 6] {
    [counts.demanded, counts.hits, counts.compulsory, counts.capacity, counts.overflow, counts.evictions]
}

/// What runs are made with.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    pub model: &'a Model,
    pub name: &'a str,
    pub frame: Frame<'a>,
    pub plan: &'a Plan,
    /// Where the runs' folders are.
    pub work: &'a Path,
    /// Whether runs that are there already are kept.
    pub resume: bool,
}

impl Bench<'_> {
    /// A run that is there already and may be kept, because it was made in the very way.
    pub fn kept(&self, job: Job) -> Result<Option<Done>> {
        let folder = self.folder(job);
        let text = std::fs::read_to_string(folder.join("done.json")).ok().filter(|_| self.resume);
        let Some(text) = text else { return Ok(None) };
        let value: Value = serde_json::from_str(&text).context("done.json")?;
        if value["way"] != self.way(job) {
            return Ok(None);
        }
        Done::from_json(job, folder, &value).map(Some)
    }

    /// How a run is made: what its scores are scores of, and everything else that a change of the program may change.
    fn way(&self, job: Job) -> String {
        let Plan { reads, recorded, least, .. } = self.plan;
        format!("{} {job:?} {reads:?} {recorded:?} {least} {STICKINESS} {RELAXED}", self.name)
    }

    fn folder(&self, job: Job) -> PathBuf {
        self.work.join(format!("{}-{}-{}", job.task, job.context, job.seed))
    }

    /// Makes a run. `on` is told what it is at.
    pub fn run(&self, job: Job, on: impl Fn(&str)) -> Result<Done> {
        let folder = self.folder(job);
        if let Some(done) = self.kept(job)? {
            return Ok(done);
        }
        self.make(job, &folder, on)
            .with_context(|| format!("{} of {} tokens, seed {}", job.task, job.context, job.seed))
    }

    fn make(&self, job: Job, folder: &Path, on: impl Fn(&str)) -> Result<Done> {
        let script = job.task.script(&self.frame, job.context, job.seed)?;
        on("reading");
        let context = Context::read(self.model, &script.context, |_| ())?;

        let tokenizer: &Tokenizer = self.frame.tokenizer;
        let judging = Decoding { model: self.model, tokenizer, seed: job.seed, least: 0 };
        let recording = Decoding { least: self.plan.least, ..judging };
        on("recording");
        let recorded = record(recording, &context, &script, self.plan.recorded, || ())?;
        recorded.trace.save(folder)?;
        recorded.log(&recording)?.write(folder)?;
        if job.tensors {
            recorded.tensors.save(folder.join("tensors.npz"))?;
        }

        let (reads, budget) = self.plan.recorded;
        if let Reads::Digest(digest, pages) = reads {
            on("recording with stickiness");
            let sticky = record(recording, &context, &script, (Reads::Sticky(digest, pages), budget), || ())?;
            sticky.trace.save(folder.join(STICKY))?;
        }
        let same = job.compared.then(|| {
            on("comparing");
            let mut memory = reads.memory(self.model.config(), &context, recording.room(&script))?;
            let free = recording.run(&script, memory.as_mut(), || ())?;
            anyhow::Ok(free.ids == recorded.answer.ids)
        });
        let mut scores = Vec::new();
        if let Some(measure) = job.task.measure() {
            for &other in &self.plan.reads {
                on(other.name());
                let answer = if other == reads {
                    recorded.answer.clone()
                } else {
                    let mut memory = other.memory(self.model.config(), &context, judging.room(&script))?;
                    judging.run(&script, memory.as_mut(), || ())?
                };
                scores.push(answer.score(measure));
            }
        }
        let done = Done {
            job,
            folder: folder.to_owned(),
            context: context.tokens,
            decoded: recorded.trace.marks().len() - 1,
            scores,
            live: numbers(&recorded.live),
            same: same.transpose()?,
        };
        let mut value = done.to_json();
        value["way"] = self.way(job).into();
        let text = format!("{value:#}\n");
        std::fs::write(folder.join("done.json"), text).context("cannot write done.json")?;
        Ok(done)
    }
}

impl Done {
    fn to_json(&self) -> Value {
        json!({
            "context": self.context,
            "decoded": self.decoded,
            "scores": self.scores.iter().map(|score| [score.sum, score.count]).collect::<Vec<_>>(),
            "live": self.live,
            "same": self.same,
        })
    }

    fn from_json(job: Job, folder: PathBuf, value: &Value) -> Result<Self> {
        let number = |key: &str| value[key].as_u64().with_context(|| format!("done.json has no {key}"));
        let list = |key: &str| value[key].as_array().with_context(|| format!("done.json has no {key}"));
        let score = |pair: &Value| Some(Score { sum: pair[0].as_f64()?, count: pair[1].as_f64()? });
        let live: Option<Vec<u64>> = list("live")?.iter().map(Value::as_u64).collect();
        Ok(Done {
            job,
            folder,
            context: number("context")? as usize,
            decoded: number("decoded")? as usize,
            scores: list("scores")?
                .iter()
                .map(score)
                .collect::<Option<_>>()
                .context("done.json: a score is no pair")?,
            live: live.and_then(|live| live.try_into().ok()).context("done.json: live is not six numbers")?,
            same: value["same"].as_bool(),
        })
    }
}
