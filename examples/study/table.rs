//! Rows of text: for a terminal, for Markdown, as CSV.

use std::path::Path;

use anyhow::{Context, Result};

/// A table whose first row is its head.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new(head: impl IntoIterator<Item = impl ToString>) -> Self {
        Table { rows: vec![head.into_iter().map(|cell| cell.to_string()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl ToString>) {
        self.rows.push(cells.into_iter().map(|cell| cell.to_string()).collect());
    }

    /// Columns of equal width, the first to the left and the others to the right.
    pub fn terminal(&self) -> String {
        let widths = self.widths();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        };
        self.rows.iter().map(line).collect()
    }

    /// A Markdown table.
    pub fn markdown(&self) -> String {
        let line = |row: &Vec<String>| format!("| {} |\n", row.join(" | "));
        let mut rows = self.rows.iter().map(line);
        let head = rows.next().unwrap_or_default();
        let rule = "|---".repeat(self.rows.first().map_or(0, Vec::len)) + "|\n";
        head + &rule + &rows.collect::<String>()
    }

    /// Writes the table as comma-separated values. Cells with commas or quotes are quoted.
    pub fn write_csv(&self, path: &Path) -> Result<()> {
        let cell = |cell: &String| match cell.contains([',', '"', '\n']) {
            true => format!("\"{}\"", cell.replace('"', "\"\"")),
            false => cell.clone(),
        };
        let line = |row: &Vec<String>| row.iter().map(cell).collect::<Vec<_>>().join(",") + "\n";
        let text: String = self.rows.iter().map(line).collect();
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        (0..columns).map(width).collect()
    }
}
