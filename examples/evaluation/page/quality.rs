//! What selecting pages costs in quality.

use std::path::Path;

use anyhow::Result;

use super::{Findings, chart, percent};
use crate::evaluation::regime::Regime;
use crate::study::chart::{Chart, Lines, Series};
use crate::study::table::Table;
use crate::tasks::run::{RELAXED, Reads, STICKINESS};
use crate::tasks::{Measure, Task};

pub fn section(findings: &Findings<'_>, charts: &Path) -> Result<String> {
    let scored: Vec<(&Regime, Measure)> =
        findings.regimes.iter().filter_map(|regime| Some((regime, regime.task.measure()?))).collect();
    let mut head = vec!["reads".to_owned(), "pages".to_owned()];
    head.extend(scored.iter().map(|(regime, _)| regime.task.to_string()));
    let mut table = Table::new(head);
    for (index, reads) in findings.plan.reads.iter().enumerate() {
        let pages = reads.pages().map_or("all".to_owned(), |pages| pages.to_string());
        let mut row = vec![reads.name().to_owned(), pages];
        row.extend(scored.iter().map(|(regime, measure)| {
            let value = regime.scores.get(index).copied().unwrap_or_default().value(*measure);
            if *measure == Measure::Perplexity { format!("{value:.2}") } else { percent(value) }
        }));
        table.row(row);
    }
    let decisions = scored.iter().map(|(regime, _)| {
        let count = regime.scores.first().map_or(0.0, |score| score.count);
        format!("{} {count:.0}", regime.task)
    });
    let mut text = format!(
        "## Quality by what is read\n\nA head reads so many pages per token, the first and the last two among them. The oracle \
         takes the pages with the largest true logits, the window only the first and the last ones; *sticky* prefers what the last \
         token read by {STICKINESS}, *relaxed* selects anew every {RELAXED} tokens only, both with the library's default digest. Reversible \
         residency does not change what is read, so these rows hold for every budget. Two policies destroy: *evict* keeps twice the \
         pages that it reads, which are the oracle's choice of what is left, so what it loses against the oracle it loses by eviction; *SnapKV* \
         keeps as many tokens of the context as the pages hold, and all that comes after it, and reads all of them; its votes are those of the context's last tokens, before anybody has asked. \
         Decisions per cell: {}.\n\n{}\n",
        decisions.collect::<Vec<_>>().join(", "),
        table.markdown()
    );
    text += &goals(findings);
    for (regime, measure) in scored.iter().filter(|(_, measure)| *measure != Measure::Perplexity) {
        let stem = format!("quality-{}", regime.task);
        quality_chart(findings, regime, *measure).write(&charts.join(&stem))?;
        text += &chart(&format!("Quality of {} by pages read", regime.task), &format!("{stem}.svg"));
    }
    Ok(text)
}

fn quality_chart(findings: &Findings<'_>, regime: &Regime, measure: Measure) -> Lines {
    let value = |index: usize| regime.scores.get(index).copied().unwrap_or_default().value(measure);
    let reads = || findings.plan.reads.iter().enumerate();
    let full = reads().find(|(_, reads)| **reads == Reads::Full).map(|(index, _)| value(index));
    let mut series: Vec<Series> = Vec::new();
    let (mut least, mut most) = (usize::MAX, 0);
    for (index, reads) in reads() {
        let Some(pages) = reads.pages() else { continue };
        (least, most) = (least.min(pages), most.max(pages));
        let point = (pages as f64, value(index));
        match series.iter_mut().find(|series| series.name == reads.name()) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name: reads.name().to_owned(), points: vec![point], bound: false }),
        }
    }
    if let Some(full) = full {
        let points = vec![(least as f64, full), (most as f64, full)];
        series.push(Series { name: "full".into(), points, bound: true });
    }
    Lines {
        title: format!("{}: {}", regime.task, measure.name()),
        x: "pages that a head reads per token".into(),
        y: "share".into(),
        series,
    }
}

/// A reading against the full cache, and against the oracle of as many pages.
pub struct Score {
    /// Of the score of the full cache.
    pub needle: f64,
    pub distractors: f64,
    pub turns: f64,
    /// Points of copy accuracy below the full cache and below the oracle.
    pub behind_full: f64,
    pub behind_oracle: Option<f64>,
}

/// How a reading does. `None` where its tasks were not run.
pub fn beside_full(findings: &Findings<'_>, reads: Reads) -> Option<Score> {
    let score = |task: Task, reads: Reads| {
        let regime = findings.regimes.iter().find(|regime| regime.task == task)?;
        let index = findings.plan.reads.iter().position(|&other| other == reads)?;
        Some(regime.scores.get(index)?.value(task.measure()?))
    };
    let of_full = |task| Some(score(task, reads)? / score(task, Reads::Full)?.max(f64::MIN_POSITIVE));
    let behind = |other| Some(100.0 * (score(Task::Copy, other)? - score(Task::Copy, reads)?));
    Some(Score {
        needle: of_full(Task::Needle)?,
        distractors: of_full(Task::Distractors)?,
        turns: of_full(Task::Turns)?,
        behind_full: behind(Reads::Full)?,
        behind_oracle: reads.pages().and_then(|pages| behind(Reads::Oracle(pages))),
    })
}

/// The goals that were set for page selection, and how far each digest is from them.
fn goals(findings: &Findings<'_>) -> String {
    let mut text = String::new();
    for pages in [8, 4] {
        for &reads in findings.plan.reads.iter().filter(|reads| matches!(reads, Reads::Digest(_, p) if *p == pages)) {
            let Some(Score { needle, turns, behind_oracle: Some(behind), .. }) = beside_full(findings, reads) else {
                continue;
            };
            let met = needle >= 0.95 && turns >= 0.95 && behind <= 3.0;
            text += &format!(
                "* {} at {pages} pages: needle {}, turns {} of the full cache, copy {:+.1} points against the oracle. The goal (95 %, 95 %, \
                 −3) is {}.\n",
                reads.name(),
                percent(needle),
                percent(turns),
                -behind,
                if met { "met" } else { "missed" }
            );
        }
    }
    text + "\n"
}
