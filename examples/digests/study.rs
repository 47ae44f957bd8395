//! Candidates judged by the pages that they find, over recorded queries and keys.

use std::fmt::Write as _;

use anyhow::Result;
use clap::Args;

use super::candidate::Candidate;
use super::judge::{BUDGETS, Truth, Verdict, judge, truth};
use super::recording::{Recording, ids};
use crate::llm::model::Model;
use crate::llm::process::progress;
use crate::tasks::{Frame, Task};

#[derive(Args)]
pub struct Pages {
    /// What is read: task:tokens
    #[arg(long, value_delimiter = ',', default_value = "copy:2048,needle:2048,turns:2048,copy:4096,copy:8000", value_parser = work)]
    recordings: Vec<(Task, usize)>,
    /// Tokens per page
    #[arg(long, default_value_t = 16)]
    page: usize,
    #[arg(long, default_value_t = 3)]
    seed: u64,
}

fn work(text: &str) -> Result<(Task, usize), String> {
    let (task, tokens) = text.split_once(':').ok_or("give task:tokens")?;
    Ok((task.parse()?, tokens.parse().map_err(|error| format!("{error}"))?))
}

pub fn run(settings: &Pages, candidates: &[Candidate], model: Model, frame: &Frame<'_>) -> Result<String> {
    let mut recordings = Vec::new();
    for &(task, tokens) in &settings.recordings {
        let ids = ids(&task.script(frame, tokens, settings.seed)?);
        let bar = progress(format!("{task}: reading"));
        bar.set_length(ids.len() as u64);
        let recording = Recording::new(&model, &ids, |done| bar.set_position(done as u64))?;
        bar.finish_and_clear();
        let truths = recording.heads.iter().map(|head| truth(&recording, head, settings.page));
        let truths = truths.collect::<Result<Vec<_>>>()?;
        recordings.push((task, recording, truths));
    }
    drop(model);

    let of = BUDGETS.map(|budget| format!("{budget:>6}")).concat();
    println!(
        "{:<48} {:<8} {:>5} {:>5} {:>6} {:>6} {:>18} {:>19}",
        "", "", "kept", "read", "", "", "pages found at", "attention found at"
    );
    println!("{:<48} {:<8} {:>5} {:>5} {:>6} {:>6} {of}  {of}", "digest", "score", "%", "%", "task", "tokens");
    let mut csv = "digest,score,kept,read,task,tokens,pages4,pages8,pages16,mass4,mass8,mass16\n".to_owned();
    for candidate in candidates {
        for (task, recording, truths) in &recordings {
            let verdict = verdict(candidate, recording, truths, settings.page)?;
            let kv = (4 * recording.head_dim * settings.page) as f64;
            let share = |bytes: f64| 100.0 * bytes / kv;
            let kept = share(candidate.digest.bytes(recording.head_dim, settings.page));
            let read = share(candidate.digest.bytes_read(recording.head_dim, settings.page));
            let (name, score, tokens) =
                (candidate.digest.to_string(), format!("{:?}", candidate.score), recording.tokens);
            let percent = |shares: [f64; 3]| shares.map(|share| format!("{:6.1}", 100.0 * share)).concat();
            let (pages, mass) = (verdict.recall(), verdict.mass());
            println!(
                "{name:<48} {score:<8} {kept:5.1} {read:5.1} {:>6} {tokens:6} {}  {}",
                task.name(),
                percent(pages),
                percent(mass)
            );
            let figures: Vec<String> = pages.into_iter().chain(mass).map(|share| format!("{share:.4}")).collect();
            writeln!(csv, "{name},{score},{kept:.2},{read:.2},{task},{tokens},{}", figures.join(","))?;
        }
    }
    Ok(csv)
}

fn verdict(candidate: &Candidate, recording: &Recording, truths: &[Truth], page: usize) -> Result<Verdict> {
    let mut verdict = Verdict::default();
    for (head, truth) in recording.heads.iter().zip(truths) {
        verdict.add(judge(recording, head, truth, candidate, page)?);
    }
    Ok(verdict)
}
