//! Pooling of scores over neighbours.

/// Each value becomes the greatest within `kernel / 2` places of it, as `max_pool1d` with stride 1 and padding `kernel / 2` does.
pub(super) fn max_pool(values: &[f32], kernel: usize) -> Vec<f32> {
    let reach = kernel / 2;
    (0..values.len())
        .map(|at| {
            let around = values.get(at.saturating_sub(reach)..(at + reach + 1).min(values.len()));
            around.unwrap_or_default().iter().copied().fold(f32::NEG_INFINITY, f32::max)
        })
        .collect()
}
