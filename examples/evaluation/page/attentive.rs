//! Policies that look at queries and keys.

use super::{Findings, percent};
use crate::study::table::Table;

pub fn section(findings: &Findings<'_>) -> String {
    if findings.attentive.is_empty() {
        return String::new();
    }
    let columns =
        ["task", "budget", "policy", "resident", "miss rate", "the rule's there", "lost mass", "output error"];
    let mut table = Table::new(columns);
    let (mut wins, mut compared) = (0, 0);
    for judged in &findings.attentive {
        let rate = |rate: f64| format!("{rate:.4}");
        if let Some(matched) = judged.matched.filter(|_| judged.policy != "reactive lru") {
            compared += 1;
            wins += usize::from(matched < judged.miss_rate);
        }
        table.row([
            judged.task.to_string(),
            judged.budget.to_string(),
            judged.policy.to_owned(),
            format!("{:.1}", judged.resident),
            rate(judged.miss_rate),
            judged.matched.map_or("outside".to_owned(), rate),
            percent(judged.lost_mass),
            percent(judged.output_error),
        ]);
    }
    format!(
        "### Policies that look at queries and keys\n\nOne run per task. Demand is the pages of the 64 most attended tokens of each query head, \
         over the group. Lost mass and output error are against true attention over everything: the rule reads what is demanded and no \
         more, so its own loss is that of the 64 tokens' pages. Token-level policies get 16 tokens for each page, and a page hits only if all \
         its demanded tokens are left. What has to be learned (the split of heads, the shares of layers) is learned on another run. *The \
         rule's there* is the miss rate of the rule with LRU at the same resident pages.\n\n{}\nAt matched memory the rule misses less in \
         {wins} of {compared}.\n\n",
        table.markdown()
    )
}
