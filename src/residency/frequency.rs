//! Least frequently used, with uses that fade.

use super::Replacement;
use super::fading::{Fading, by_fading};

/// The page goes whose uses, each halved every 16 steps, sum up to the least; of equal ones the lower page. Sums outlive
/// evictions.
///
/// The idea is that of LFU with aging (LRFU, Lee et al. 2001, with λ = 1/16 and a step as its unit of time). Victims are found by a
/// search through all ways.
#[derive(Clone, Debug)]
pub struct Frequency(Fading);

/// Steps until a use counts half.
const HALF_LIFE: f32 = 16.0;

impl Replacement for Frequency {
    fn new() -> Self {
        Frequency(Fading::new(HALF_LIFE))
    }

    by_fading!();
}
