//! How heads behave.

use std::path::Path;

use anyhow::Result;
use wakekv::sim::metrics::wake::Prediction;

use super::{Findings, chart, percent};
use crate::evaluation::regime::MAP_WIDTH;
use crate::study::behaviour::Behaviour;
use crate::study::chart::{Chart, Map};
use crate::study::table::Table;

pub fn section(findings: &Findings<'_>, charts: &Path) -> Result<String> {
    let columns = ["task", "demand", "Jaccard", "κ", "unstable", "drift", "shifted", "by chance"];
    let mut table = Table::new(columns);
    let mut wakes = Table::new(["task", "wakes", "by turnover", "by drift", "by entropy"]);
    let mut total = Behaviour::default();
    for regime in findings.regimes {
        for (name, behaviour) in [("pages read", &regime.by_demand), ("64 tokens", &regime.by_attention)] {
            let heads = behaviour.heads.max(1) as f64;
            table.row([
                regime.task.to_string(),
                name.to_owned(),
                format!("{:.2}", behaviour.jaccard / heads),
                format!("{:.2}", behaviour.kappa / heads),
                percent(behaviour.unstable as f64 / heads),
                percent(behaviour.drifting as f64 / heads),
                percent(behaviour.shifted as f64 / heads),
                percent(behaviour.null / heads),
            ]);
        }
        let seen = &regime.by_attention;
        total += *seen;
        wakes.row([
            regime.task.to_string(),
            seen.by_entropy.wakes.to_string(),
            prediction(&seen.by_turnover),
            prediction(&seen.by_drift),
            prediction(&seen.by_entropy),
        ]);
    }
    let heads = total.heads.max(1) as f64;
    let mut text = format!(
        "## How heads behave\n\nPer KV head and run. *Pages read* is what the cache demanded; *64 tokens* is what WakeKV looks at: the \
         pages of the 64 tokens with the most attention, over the group. Jaccard and κ (overlap beyond chance) compare a step \
         with the one before. Unstable and drift are the paper's rules, shifted is ours; *by chance* is how many heads it flags \
         when their steps are shuffled; where a text grows by many pages, shuffling mixes contexts of unlike length, and that share is \
         high itself.\n\n{}\n\
         By the paper's rule {} of the heads drift in their attention, by ours {} shift, {} by chance. The paper reports 63 to 85 % of \
         drifting heads; its rule also flags heads that follow a local window or sample a fixed distribution, which is why ours is \
         beside it.\n\n\
         A head wakes when more than a fifth of its attention goes to old pages that it has not read in the 8 steps before, after at \
         least 8 steps with less than a twentieth. Whether an alarm (a signal 2 standard deviations above its last 32 steps) announces \
         a wake within 8 steps, precision / recall:\n\n{}\n\
         The paper's best precision is .08 to .20 at a recall of .41 to .70.\n\n",
        table.markdown(),
        percent(total.drifting as f64 / heads),
        percent(total.shifted as f64 / heads),
        percent(total.null / heads),
        wakes.markdown()
    );
    // The longest dialogue and the longest generation that there is.
    for name in ["turns", "story", "chain"] {
        let Some(regime) = findings.regimes.iter().find(|regime| regime.task.name() == name) else { continue };
        let stem = format!("turnover-{name}");
        let map = Map {
            title: format!("{name}: share of its demand that a head changes per step (white 0, dark 1)"),
            x: "decode step".into(),
            y: "head (layer × KV heads + KV head)".into(),
            column_width: MAP_WIDTH,
            rows: regime.turnover.clone(),
        };
        map.write_png(&charts.join(&stem))?;
        text += &chart(&format!("Turnover of demand by head and step, {name}"), &format!("{stem}.png"));
    }
    Ok(text)
}

fn prediction(prediction: &Prediction) -> String {
    let share = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.2}"));
    format!("{} / {}", share(prediction.precision()), share(prediction.recall()))
}
