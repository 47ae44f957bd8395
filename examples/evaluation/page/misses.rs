//! Policies against each other: misses over memory.

use std::path::Path;

use anyhow::Result;
use wakekv::sim::{Rule, at_memory};

use super::{Findings, chart, percent};
use crate::evaluation::regime::Regime;
use crate::study::chart::{Chart, Lines, Series};
use crate::study::grid::{Cell, Contender, curve};
use crate::study::table::Table;
use crate::tasks::run::STICKINESS;

const LRU: Contender = Contender::Reactive(Rule::Lru);

pub fn section(findings: &Findings<'_>, charts: &Path) -> Result<String> {
    let mut text = "## Misses\n\nWhat the cache demanded, replayed under each policy: misses per demanded page in decode, compulsory ones \
                    included, all runs of a task together. `frozen` has its split from another run; it holds more than the budget, \
                    because its unstable heads hold everything, so its memory is beside it.\n\n"
        .to_owned();
    for regime in findings.regimes {
        text += &format!("### {}\n\n{}\n", regime.task, table(findings, regime).markdown());
        let stem = format!("misses-{}", regime.task);
        miss_chart(regime).write(&charts.join(&stem))?;
        text += &chart(&format!("Misses against memory, {}", regime.task), &stem);
    }
    text += &rules(findings);
    text += &sticky(findings);
    text += &churn(findings);
    text += &matched(findings);
    text += &paper(findings);
    text += &lost(findings);
    Ok(text)
}

fn table(findings: &Findings<'_>, regime: &Regime) -> Table {
    let budgets = &findings.plan.budgets;
    let mut head = vec!["policy".to_owned()];
    head.extend(budgets.iter().map(|budget| format!("{budget} pages")));
    let mut table = Table::new(head);
    for contender in Contender::all() {
        let cells = curve(&regime.cells, contender);
        let mut row = vec![contender.to_string()];
        row.extend(cells.iter().map(|cell| match contender {
            Contender::Frozen => format!("{:.4} at {:.1}", cell.miss_rate(), cell.resident),
            _ => format!("{:.4}", cell.miss_rate()),
        }));
        table.row(row);
    }
    let mut compulsory = vec!["of LRU's, compulsory".to_owned()];
    let lru = curve(&regime.cells, LRU);
    compulsory.extend(lru.iter().map(|cell| format!("{:.4}", cell.miss_rate() - cell.capacity_rate())));
    table.row(compulsory);
    table
}

fn miss_chart(regime: &Regime) -> Lines {
    let shown = [
        LRU,
        Contender::Reactive(Rule::Standing),
        Contender::Pooled,
        Contender::Evict,
        Contender::Frozen,
        Contender::Belady,
        Contender::PooledBelady,
    ];
    let series = shown.into_iter().map(|contender| Series {
        name: contender.to_string(),
        points: curve(&regime.cells, contender).iter().map(|cell| (cell.resident, cell.miss_rate())).collect(),
        bound: contender.is_bound(),
    });
    Lines {
        title: format!("{}: misses against memory", regime.task),
        x: "resident pages per head".into(),
        y: "misses per demanded page".into(),
        series: series.collect(),
    }
}

/// Whether it is a rule for who goes, at equal memory.
fn is_rule(contender: Contender) -> bool {
    matches!(contender, Contender::Reactive(_) | Contender::Moving(_) | Contender::Pooled)
}

/// Each rule for who goes, against LRU and against the optimum.
fn rules(findings: &Findings<'_>) -> String {
    let mut head = vec!["rule".to_owned()];
    head.extend(findings.plan.budgets.iter().map(|budget| format!("{budget} pages")));
    head.push("worst task and budget".to_owned());
    let (mut to_belady, mut to_lru) = (Table::new(&head), Table::new(&head));
    let mut best: Option<(f64, Contender)> = None;
    for contender in Contender::all() {
        if !is_rule(contender) {
            continue;
        }
        let to = |other: Contender| {
            let ratio = |budget| ratio(findings.regimes, contender, other, budget);
            let mut row = vec![contender.to_string()];
            row.extend(findings.plan.budgets.iter().map(|&budget| {
                let (mean, _) = ratio(budget);
                mean.map_or("–".to_owned(), |mean| format!("{mean:.2}"))
            }));
            let worst = findings.plan.budgets.iter().filter_map(|&budget| ratio(budget).1).reduce(f64::max);
            row.push(worst.map_or("–".to_owned(), |worst| format!("{worst:.2}")));
            (row, worst)
        };
        let ((row, worst), (lru_row, _)) = (to(Contender::Belady), to(LRU));
        to_belady.row(row);
        to_lru.row(lru_row);
        if let Some(worst) = worst.filter(|worst| best.is_none_or(|(least, _)| *worst < least)) {
            best = Some((worst, contender));
        }
    }
    let best = best.map_or(String::new(), |(worst, contender)| {
        let verdict = if worst <= 1.3 { "is met" } else { "is missed" };
        format!(
            "The goal of at most 1.3 times the optimum of each head, over all tasks and budgets, {verdict}: the best in its worst case is \
             {contender} with {worst:.2}. "
        )
    });
    let gains = findings.regimes.iter().flat_map(|regime| {
        findings.plan.budgets.iter().filter_map(|&budget| {
            let misses = |contender| regime.cell(contender, budget).map(|cell| cell.counts.misses());
            let lru = regime.cell(LRU, budget).filter(|cell| cell.miss_rate() >= FEW)?.counts.misses();
            let least = Contender::all().into_iter().filter(|&contender| is_rule(contender));
            Some(1.0 - least.filter_map(misses).min()? as f64 / lru as f64)
        })
    });
    let gains: Vec<f64> = gains.collect();
    let reached = gains.iter().filter(|&&gain| gain >= 0.2).count();
    format!(
        "### Rules for who goes, at equal memory\n\nMisses over those of Belady's optimum for each head, pooled over tasks; tasks and \
         budgets where LRU misses less than one page in a hundred are left out.\n\n{}\nMisses over those of LRU:\n\n{}\n{best}The goal of 20 % fewer misses than LRU \
         is met by the best rule in {reached} of {} tasks × budgets; its gain there is {} in the mean.\n\n",
        to_belady.markdown(),
        to_lru.markdown(),
        gains.len(),
        percent(gains.iter().sum::<f64>() / gains.len().max(1) as f64),
    )
}

/// Misses per demanded page below which a ratio says nothing: almost everything is resident.
const FEW: f64 = 0.01;

/// The ratio of the misses of two policies at a budget, all tasks together, and the largest of a task.
fn ratio(regimes: &[Regime], of: Contender, to: Contender, budget: usize) -> (Option<f64>, Option<f64>) {
    let pairs = regimes.iter().filter_map(|regime| {
        let misses = |contender| regime.cell(contender, budget).map(|cell| cell.counts.misses());
        let enough = regime.cell(LRU, budget)?.miss_rate() >= FEW && misses(to)? > 0;
        enough.then_some((misses(of)? as f64, misses(to)? as f64))
    });
    let pairs: Vec<(f64, f64)> = pairs.collect();
    let (own, other) = pairs.iter().fold((0.0, 0.0), |(own, other), pair| (own + pair.0, other + pair.1));
    let worst = pairs.iter().map(|(own, other)| own / other).reduce(f64::max);
    ((other > 0.0).then(|| own / other), worst)
}

/// What stickiness of the selection changes.
fn sticky(findings: &Findings<'_>) -> String {
    let budgets = &findings.plan.budgets;
    let misses = |cells: &dyn Fn(&Regime) -> Vec<Cell>, budget: usize| -> u64 {
        let cells = findings.regimes.iter().flat_map(cells).filter(|cell| cell.budget == budget);
        cells.map(|cell| cell.counts.misses()).sum()
    };
    let mut head = vec!["who goes".to_owned()];
    head.extend(budgets.iter().map(|budget| format!("{budget} pages")));
    let mut table = Table::new(head);
    for (name, contender) in Regime::STICKY.map(|contender| (format!("sticky, {contender}"), contender)) {
        let mut row = vec![name];
        row.extend(budgets.iter().map(|&budget| {
            let own = misses(&|regime| curve(&regime.sticky, contender), budget);
            let lru = misses(&|regime| curve(&regime.cells, LRU), budget);
            format!("{:.2}", own as f64 / lru.max(1) as f64)
        }));
        table.row(row);
    }
    format!(
        "### Stickiness\n\nThe same runs recorded once more with a stickiness of {STICKINESS}: a page that the last token read is chosen \
         again unless another one's score is higher by that much. Misses over those of LRU without stickiness, all tasks together; what \
         it does to quality is in the table of quality, as *sticky*. It changes the demand and not who goes, so the optimum for the \
         unchanged demand is no bound for it.\n\n{}\n",
        table.markdown()
    )
}

/// How much the resident sets move.
fn churn(findings: &Findings<'_>) -> String {
    let (_, budget) = findings.plan.recorded;
    let shown = [
        LRU,
        Contender::Reactive(Rule::Standing),
        Contender::Pooled,
        Contender::Evict,
        Contender::Frozen,
        Contender::Belady,
    ];
    let mut head = vec!["task".to_owned()];
    head.extend(shown.iter().map(Contender::to_string));
    let mut table = Table::new(head);
    for regime in findings.regimes {
        let mut row = vec![regime.task.to_string()];
        row.extend(
            shown
                .iter()
                .map(|&contender| regime.cell(contender, budget).map_or("–".to_owned(), |cell| percent(cell.churn))),
        );
        table.row(row);
    }
    format!(
        "### Churn\n\nShare of the resident pages that a step replaces, at {budget} pages per head. `evict` moves less because what it \
         misses cannot come back.\n\n{}\n",
        table.markdown()
    )
}

/// The rule against the paper's comparators at the memory that they took.
fn matched(findings: &Findings<'_>) -> String {
    let mut table =
        Table::new(["against", "wins", "outside of the curve", "misses of theirs, median", "at best", "at worst"]);
    let by = |contender| move |regime: &Regime| curve(&regime.cells, contender);
    let own_split = |regime: &Regime| regime.own_split.clone();
    let comparators: [(&str, Vec<Vec<Cell>>); 3] = [
        ("frozen, split from another run", findings.regimes.iter().map(by(Contender::Frozen)).collect()),
        ("frozen, split from its own run", findings.regimes.iter().map(own_split).collect()),
        ("evict (the same budget)", findings.regimes.iter().map(by(Contender::Evict)).collect()),
    ];
    for (name, curves) in comparators {
        let (mut ratios, mut outside) = (Vec::new(), 0);
        for (regime, cells) in findings.regimes.iter().zip(&curves) {
            let reactive: Vec<_> = curve(&regime.cells, LRU).iter().map(Cell::point).collect();
            for cell in cells.iter().filter(|cell| cell.miss_rate() >= FEW) {
                match at_memory(&reactive, cell.resident) {
                    Some(rate) => ratios.push(rate / cell.miss_rate()),
                    None => outside += 1,
                }
            }
        }
        ratios.sort_by(f64::total_cmp);
        let at = |index: usize| ratios.get(index).map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
        let wins = ratios.iter().filter(|&&ratio| ratio < 1.0).count();
        table.row([
            name.to_owned(),
            format!("{wins} of {}", ratios.len()),
            outside.to_string(),
            at(ratios.len() / 2),
            at(0),
            at(ratios.len().saturating_sub(1)),
        ]);
    }
    format!(
        "### At matched memory\n\nThe curve of the rule with LRU, interpolated at the mean resident pages of each comparator, over all tasks and \
         budgets; below 1 the rule misses less. A comparator's point beyond the ends of the curve is counted as outside. Points where it \
         misses less than one page in a hundred are left out.\n\n{}\nThe paper wins 17 of 17 against frozen and 19 of 20 against evict, at best with a \
         seventh of the misses.\n\n",
        table.markdown()
    )
}

/// The paper's own accounting.
fn paper(findings: &Findings<'_>) -> String {
    let mut table = Table::new(["task", "policy", "8 pages", "16", "32", "64"]);
    for regime in findings.regimes {
        for contender in Contender::PUBLISHED {
            let mut row = vec![regime.task.to_string(), contender.to_string()];
            let cells = curve(&regime.paper, contender);
            row.extend(cells.iter().map(|cell| format!("{:.4} at {:.1}", cell.miss_rate(), cell.resident)));
            table.row(row);
        }
    }
    format!(
        "### By the paper's accounting\n\nEvery query head by itself, demand being the pages of its 64 most attended tokens; first demands free for \
         all but frozen, whose split is learned on the run itself; a head may exceed its budget within a step. Miss rate and mean resident \
         pages, over the first three runs of each task. Not to be compared with the tables above.\n\n{}\n",
        table.markdown()
    )
}

/// What destroying costs.
fn lost(findings: &Findings<'_>) -> String {
    let mut head = vec!["task".to_owned()];
    head.extend(findings.plan.budgets.iter().map(|budget| format!("{budget} pages")));
    let mut table = Table::new(head);
    for regime in findings.regimes {
        let mut row = vec![regime.task.to_string()];
        row.extend(regime.lost.iter().map(|&(_, mass)| percent(mass)));
        table.row(row);
    }
    format!(
        "### What eviction destroys\n\nAttention mass per head and step that lies on pages which `evict` has destroyed, of what the 64 most attended \
         tokens get. Under the rule it is 0: a page that is not there is fetched.\n\n{}\n",
        table.markdown()
    )
}
