//! Policies against each other: misses over memory.

use std::path::Path;

use anyhow::Result;
use wakekv::sim::Rule;

use super::{Findings, LRU, chart};
use crate::evaluation::regime::Regime;
use crate::study::chart::{Chart, Lines, Series};
use crate::study::grid::{Contender, curve};
use crate::study::table::Table;

pub fn section(findings: &Findings<'_>, charts: &Path) -> Result<String> {
    let mut text = "## Misses\n\nWhat the cache demanded, replayed under each policy: misses per demanded page in decode, compulsory ones \
                    included, all runs of a task together. `frozen` has its split from another run; it holds more than the budget, \
                    because its unstable heads hold everything, so its memory is beside it.\n\n"
        .to_owned();
    for regime in findings.regimes {
        text += &format!("### {}\n\n{}\n", regime.task, table(findings, regime).markdown());
        let stem = format!("misses-{}", regime.task);
        miss_chart(regime).write(&charts.join(&stem))?;
        text += &chart(&format!("Misses against memory, {}", regime.task), &format!("{stem}.svg"));
    }
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
