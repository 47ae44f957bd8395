//! Hadamard's rotation: every channel spread evenly over the channels of its block.

/// Multiplies the channels by Hadamard's matrix in blocks of the largest power of two that divides their number. Lengths
/// grow by the root of the block.
#[inline(always)]
pub(super) fn rotate(channels: &mut [f32]) {
    let block = block(channels.len());
    let mut half = 1;
    while half < block {
        for pair in channels.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                (*low, *high) = (*low + *high, *low - *high);
            }
        }
        half *= 2;
    }
}

/// The largest power of two that divides the number of channels.
pub(super) fn block(channels: usize) -> usize {
    1 << channels.trailing_zeros()
}
