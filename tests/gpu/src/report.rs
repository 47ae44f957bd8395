//! The table that is printed, line by line as it comes, and the same for machines.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::correct::Verdict;

#[derive(Default)]
pub struct Report {
    text: String,
    values: Map<String, Value>,
    checks: Vec<Value>,
    targets: Vec<Value>,
    /// Whether something was wrong. Targets that are missed are not.
    pub failed: bool,
}

impl Report {
    pub fn heading(&mut self, title: &str) {
        self.line(&format!("\n{title}"));
    }

    pub fn line(&mut self, line: &str) {
        println!("{line}");
        self.text += line;
        self.text.push('\n');
    }

    /// A figure that no line of its own is printed for.
    pub fn value(&mut self, name: &str, value: Value) {
        self.values.insert(name.into(), value);
    }

    pub fn verdict(&mut self, verdict: &Verdict) {
        let Verdict { name, kernels, result, took } = verdict;
        let words = match result {
            Ok(cases) => format!("ok, {cases} cases"),
            Err(failure) => format!("WRONG: {failure}"),
        };
        self.line(&format!("  {name:<44} {words} ({:.1} s; {kernels})", took.as_secs_f64()));
        self.checks.push(json!({
            "name": name, "kernels": kernels, "seconds": took.as_secs_f64(),
            "cases": result.as_ref().ok(), "failure": result.as_ref().err(),
        }));
    }

    /// A figure beside what it is to be at least, or at most.
    pub fn target(&mut self, name: &str, measured: f64, at_least: bool, target: f64) {
        let met = if at_least { measured >= target } else { measured <= target };
        let (relation, verdict) = (if at_least { "≥" } else { "≤" }, if met { "met" } else { "MISSED" });
        self.line(&format!("  {name:<44} {measured:.2} (target {relation} {target:.2}: {verdict})"));
        self.targets.push(json!({
            "name": name, "measured": measured, "target": target, "at_least": at_least, "met": met,
        }));
    }

    pub fn failure(&mut self, reason: &str) {
        self.line(&format!("  FAILED: {reason}"));
        self.values.insert("failure".into(), json!(reason));
        self.failed = true;
    }

    /// Writes gpu.txt and gpu.json.
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        let mut values = self.values.clone();
        values.insert("checks".into(), json!(self.checks));
        values.insert("targets".into(), json!(self.targets));
        fs::create_dir_all(folder)?;
        fs::write(folder.join("gpu.json"), serde_json::to_string_pretty(&values)?)?;
        Ok(fs::write(folder.join("gpu.txt"), &self.text)?)
    }
}
