//! How heads behave: what they read in one step against another.
//!
//! Demands are ascending lists of logical pages, one per decode step.

pub mod drift;
pub mod overlap;
pub mod shifted;
pub mod wake;
