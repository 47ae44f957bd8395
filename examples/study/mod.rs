//! What recorded runs come to under other policies, as numbers, tables and charts.
//!
//! ```text
//! grid       policies × budgets over the traces of a regime
//! behaviour  how heads behave, by the paper's rules and by ours
//! table      rows of text: for a terminal, for Markdown, as CSV
//! chart      lines and maps, as SVG and PNG
//! ```

// Each example uses its own part of this module.
#![allow(dead_code)]

pub mod behaviour;
pub mod chart;
pub mod grid;
pub mod table;
