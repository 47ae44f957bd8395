//! The paper's rules for unstable and drifting heads (WakeKV, arXiv 2610.02713).
//!
//! They are here to be compared with. On synthetic heads the drift rule flags heads that only follow a local window, heads that sample
//! a fixed distribution, and random ones; [`shifted`](super::shifted) does not.

use super::overlap::{mean, overlap_coefficient, rco};

/// Steps of one window of [`unstable`].
const WINDOW: usize = 16;

/// Whether the mean RCO over 16-step windows is below 0.5.
///
/// Within a window each later demand is compared with the first, as FlexiCache does (arXiv 2511.00868); `pool(step)` is the pages that
/// the head has at a step. The last window may be shorter. A run of one step is stable.
pub fn unstable(demands: &[impl AsRef<[u32]>], pool: impl Fn(usize) -> usize) -> bool {
    let windows = demands.chunks(WINDOW).enumerate().filter_map(|(index, window)| {
        let (first, rest) = window.split_first()?;
        let steps = (index * WINDOW + 1..).zip(rest);
        mean(steps.map(|(step, demand)| rco(first.as_ref(), demand.as_ref(), pool(step))))
    });
    mean(windows).is_some_and(|mean| mean < 0.5)
}

/// Steps whose overlap's median decides.
const MEMORY: usize = 8;

/// The steps at which the median overlap coefficient of the last 8 demands with the base falls below 0.5. The base is step 0's demand, and
/// at each event that step's; the median starts afresh then.
pub fn drift_events(demands: &[impl AsRef<[u32]>]) -> Vec<usize> {
    let mut events = Vec::new();
    let Some(mut base) = demands.first().map(AsRef::as_ref) else { return events };
    let mut last = std::collections::VecDeque::with_capacity(MEMORY);
    for (step, demand) in demands.iter().enumerate().skip(1) {
        if last.len() == MEMORY {
            last.pop_front();
        }
        last.push_back(overlap_coefficient(demand.as_ref(), base));
        if last.len() == MEMORY && median(last.iter().copied()) < 0.5 {
            events.push(step);
            base = demand.as_ref();
            last.clear();
        }
    }
    events
}

/// The mean of the two middle values of an even number.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    (at(values.len().saturating_sub(1) / 2) + at(values.len() / 2)) / 2.0
}
