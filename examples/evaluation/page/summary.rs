//! The page in a few lines, and beside the paper.

use wakekv::sim::Rule;

use super::quality::{self, Score};
use super::{Findings, LRU, percent, published, rules};
use crate::study::behaviour::Behaviour;
use crate::study::grid::Contender;
use crate::study::table::Table;
use crate::tasks::run::{Reads, STICKINESS};

pub fn section(findings: &Findings<'_>) -> String {
    let lines = quality(findings).into_iter().chain(destroyed(findings)).chain(misses(findings)).chain(speed(findings));
    let lines: String = lines.map(|line| format!("* {line}\n")).collect();
    format!("## In short\n\n{lines}\n{}", beside_the_paper(findings))
}

/// What reading the best pages by digest costs.
fn quality(findings: &Findings<'_>) -> Vec<String> {
    let digests = findings.plan.reads.iter().filter(|reads| matches!(reads, Reads::Digest(..) | Reads::Sticky(..)));
    let told = digests.filter(|reads| reads.pages() == Some(8)).filter_map(|&reads| {
        let Score { needle, distractors, turns, behind_full, .. } = quality::beside_full(findings, reads)?;
        Some(format!(
            "Reading 8 pages by *{}*: needle {}, among distractors {}, turns {} of what the full cache scores; copy {} than with it.",
            reads.name(),
            percent(needle),
            percent(distractors),
            percent(turns),
            points(behind_full)
        ))
    });
    told.collect()
}

/// What policies that destroy cost, where they may keep most.
fn destroyed(findings: &Findings<'_>) -> Vec<String> {
    let told = [("evict", Reads::Evict(16), "32 pages kept"), ("SnapKV", Reads::SnapKv(32), "32 pages' tokens kept")];
    let told = told.into_iter().filter_map(|(name, reads, kept)| {
        let Score { needle, turns, behind_full, .. } = quality::beside_full(findings, reads)?;
        Some(format!(
            "Destroying instead, *{name}*, {kept}: needle {}, turns {} of the full cache; copy {} than with it.",
            percent(needle),
            percent(turns),
            points(behind_full)
        ))
    });
    told.collect()
}

/// Misses at the recorded budget, and what brings them down.
fn misses(findings: &Findings<'_>) -> Vec<String> {
    let (_, budget) = findings.plan.recorded;
    let ratio = |sticky: bool, contender| {
        rules::to_lru(findings, |regime| if sticky { &regime.sticky } else { &regime.cells }, contender, budget).0
    };
    let standing = Contender::Reactive(Rule::Standing);
    let ratios = [(false, standing), (true, LRU), (true, standing), (true, Contender::Pooled)]
        .map(|(sticky, contender)| ratio(sticky, contender));
    let rates = findings.regimes.iter().filter_map(|regime| Some(regime.cell(LRU, budget)?.miss_rate()));
    let (least, most) = rates.fold((1.0, 0.0), |(least, most): (f64, f64), rate| (least.min(rate), most.max(rate)));
    let [Some(standing), Some(sticky), Some(both), Some(pooled)] = ratios else { return Vec::new() };
    vec![format!(
        "With {budget} pages per head the rule misses {} to {} of what it demands, by task. At the same memory `Rule::Standing` has {standing:.2} \
         of its misses, a stickiness of {STICKINESS} {sticky:.2}, both {both:.2}, and both with one pool for all heads {pooled:.2}: all tasks \
         together, those left out where the rule misses less than one page in a hundred.",
        percent(least),
        percent(most)
    )]
}

fn speed(findings: &Findings<'_>) -> Vec<String> {
    let told = findings.paces.iter().filter(|pace| pace.reads != Reads::Full && pace.every == 1).map(|strict| {
        let relaxed = findings.paces.iter().filter(|pace| pace.context == strict.context && pace.reads == strict.reads);
        let relaxed = relaxed.max_by_key(|pace| pace.every).unwrap_or(strict);
        format!(
            "At {} tokens of context on one thread, reading {} pages selected at every token gives {:.2} times the tokens per second of dense \
             attention, selected every {} tokens {:.2} times.",
            strict.context,
            strict.reads.pages().unwrap_or(0),
            strict.ratio,
            relaxed.every,
            relaxed.ratio
        )
    });
    told.collect()
}

fn beside_the_paper(findings: &Findings<'_>) -> String {
    let mut table = Table::new(["the paper (arXiv 2610.02713)", "here", "what is different here"]);
    let mut heads = Behaviour::default();
    findings.regimes.iter().for_each(|regime| heads += regime.by_attention);
    let share = |count: f64| percent(count / heads.heads.max(1) as f64);
    table.row([
        "63 to 85 % of heads drift".to_owned(),
        format!(
            "{} by its rule; by ours {} shift, {} by chance",
            share(heads.drifting as f64),
            share(heads.shifted as f64),
            share(heads.null)
        ),
        "KV heads rather than query heads; its rule also flags heads that follow a local window or sample a fixed distribution".to_owned(),
    ]);
    let [frozen, _, evict] = published::comparisons(findings);
    for (theirs, matched, why) in [
        (
            "misses less than frozen in 17 of 17, at best a seventh",
            frozen,
            "first touches count, for everybody; frozen's split comes from another run",
        ),
        (
            "misses less than evict in 19 of 20",
            evict,
            "a hard cap; what the prompt leaves behind is there for evict once",
        ),
    ] {
        let best = matched.ratios.first().map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
        let (wins, compared, outside) = (matched.wins(), matched.ratios.len(), matched.outside);
        let here = format!("{wins} of {compared}, at best {best} of its misses; {outside} outside of the curve");
        table.row([theirs.to_owned(), here, why.to_owned()]);
    }
    table.row([
        "alarms for waking: precision .08 to .20 at a recall of .41 to .70".to_owned(),
        format!("{} wakes in {} heads × runs; the tables are below", heads.by_entropy.wakes, heads.heads),
        "another model and shorter runs, with few wakes to announce".to_owned(),
    ]);
    for strict in findings.paces.iter().filter(|pace| pace.reads != Reads::Full && pace.every == 1) {
        let quality = quality::beside_full(findings, strict.reads).map_or(String::new(), |score| {
            format!(
                "; needle {}, turns {} of the full cache, copy {} than with it",
                percent(score.needle),
                percent(score.turns),
                points(score.behind_full)
            )
        });
        table.row([
            "strict mode: +34 % tokens/s with 97.4 % of the quality".to_owned(),
            format!("{:+.0} % at {} tokens{quality}", 100.0 * (strict.ratio - 1.0), strict.context),
            "a CPU, one thread, and a model in which attention is a small part of a token".to_owned(),
        ]);
    }
    format!("### Beside the paper\n\n{}\n", table.markdown())
}

/// How far a score is below another one.
fn points(behind: f64) -> String {
    if behind >= 0.0 { format!("{behind:.1} points worse") } else { format!("{:.1} points better", -behind) }
}
