//! What can go wrong, each with the quantity, the limit and the knob that changes it.

use std::io;

use crate::DType;

/// Why a call was refused or failed. After any error every sequence is as it was before the call, unless the variant
/// says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number of the [`Geometry`](crate::Geometry) is out of range.
    #[error("geometry: {quantity} is {value}, but {rule}")]
    Geometry {
        /// The builder's method.
        quantity: &'static str,
        /// What it was given.
        value: usize,
        /// What it has to be.
        rule: &'static str,
    },
}
