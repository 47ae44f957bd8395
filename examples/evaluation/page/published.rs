//! The rule beside the paper's comparators.

use wakekv::sim::at_memory;

use super::{FEW, Findings, LRU, percent};
use crate::evaluation::regime::{PAPER_BUDGETS, PAPER_RUNS, Regime};
use crate::study::grid::{Cell, Contender, curve};
use crate::study::table::Table;

pub fn section(findings: &Findings<'_>) -> String {
    matched(findings) + &paper(findings) + &lost(findings)
}

/// The rule against a comparator at the memory that it took.
pub struct Matched {
    pub name: &'static str,
    /// Misses of the rule with LRU over those of the comparator, ascending, one for each task and budget.
    pub ratios: Vec<f64>,
    /// Points of the comparator beyond the ends of the rule's curve.
    pub outside: usize,
}

impl Matched {
    pub fn wins(&self) -> usize {
        self.ratios.iter().filter(|&&ratio| ratio < 1.0).count()
    }
}

/// Frozen with either split, and evict.
pub fn comparisons(findings: &Findings<'_>) -> [Matched; 3] {
    let compare = |name: &'static str, cells: &dyn Fn(&Regime) -> Vec<Cell>| {
        let mut matched = Matched { name, ratios: Vec::new(), outside: 0 };
        for regime in findings.regimes {
            let reactive: Vec<_> = curve(&regime.cells, LRU).iter().map(Cell::point).collect();
            for cell in cells(regime).iter().filter(|cell| cell.miss_rate() >= FEW) {
                match at_memory(&reactive, cell.resident) {
                    Some(rate) => matched.ratios.push(rate / cell.miss_rate()),
                    None => matched.outside += 1,
                }
            }
        }
        matched.ratios.sort_by(f64::total_cmp);
        matched
    };
    let by = |contender| move |regime: &Regime| curve(&regime.cells, contender);
    [
        compare("frozen, split from another run", &by(Contender::Frozen)),
        compare("frozen, split from its own run", &|regime| regime.own_split.clone()),
        compare("evict (the same budget)", &by(Contender::Evict)),
    ]
}

fn matched(findings: &Findings<'_>) -> String {
    let mut table =
        Table::new(["against", "wins", "outside of the curve", "misses of theirs, median", "at best", "at worst"]);
    for matched in comparisons(findings) {
        let ratios = &matched.ratios;
        let at = |index: usize| ratios.get(index).map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
        table.row([
            matched.name.to_owned(),
            format!("{} of {}", matched.wins(), ratios.len()),
            matched.outside.to_string(),
            at(ratios.len() / 2),
            at(0),
            at(ratios.len().saturating_sub(1)),
        ]);
    }
    format!(
        "### At matched memory\n\nThe curve of the rule with LRU, interpolated at the mean resident pages of each comparator, over all tasks and \
         budgets; below 1 the rule misses less. A comparator's point beyond the ends of the curve is counted as outside. Points where it \
         misses less than one page in a hundred are left out.\n\n{}\n",
        table.markdown()
    )
}

/// The paper's own accounting.
fn paper(findings: &Findings<'_>) -> String {
    let mut table = Table::new(
        ["task".to_owned(), "policy".to_owned()]
            .into_iter()
            .chain(PAPER_BUDGETS.map(|budget| format!("{budget} pages"))),
    );
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
         pages, over at most {PAPER_RUNS} runs of each task. Not to be compared with the tables above.\n\n{}\n",
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
        "### What eviction destroys\n\nShare of all attention, per head and step, that lies on pages which `evict` has destroyed, as far as they hold \
         one of the 64 most attended tokens. Under the rule it is 0: a page that is not there is fetched.\n\n{}\n",
        table.markdown()
    )
}
