//! Whether a head has shifted: it reads other pages than before, and each of them steadily.
//!
//! The windows U = \[t − 16, t) and V = \[t, t + 16) are compared, for t every 4 steps. Only pages from 1 up to (context − 64) /
//! 16 of U's start count (in tokens; at pages of 16), as one pool: the sink and what follows the local window are left out. A
//! window is *quiet* when it demands fewer than 2 such pages per step in the mean. One quiet and the other not makes t a
//! candidate. Else c is the smaller of the windows' mean κ within themselves; below 0.3 the head is incoherent and cannot shift;
//! t is a candidate if the mean κ across the windows is below half of c. Two consecutive candidates are an event, after which 16
//! steps are left out.

use super::overlap::{kappa, mean};

/// Steps of a window.
pub const WINDOW: usize = 16;

/// Steps from one place to the next.
pub const STRIDE: usize = 4;

/// Tokens before the end of the context that count as local.
const LOCAL_TOKENS: usize = 64;

/// The steps t at which the head shifted. `context(step)` is the sequence's tokens at a step.
pub fn shifted(demands: &[impl AsRef<[u32]>], page_tokens: usize, context: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut events = Vec::new();
    let (mut before, mut rest_until) = (None, 0);
    let mut t = WINDOW;
    while t + WINDOW <= demands.len() {
        let pool = context(t - WINDOW).saturating_sub(LOCAL_TOKENS) / page_tokens.max(1);
        let window = |from: usize| -> Vec<&[u32]> {
            demands.iter().skip(from).take(WINDOW).map(|demand| within(demand.as_ref(), pool)).collect()
        };
        let candidate = t >= rest_until && is_candidate(&window(t - WINDOW), &window(t), pool.saturating_sub(1));
        if candidate && before == Some(t - STRIDE) {
            events.push(t);
            rest_until = t + WINDOW;
            before = None;
        } else {
            before = candidate.then_some(t);
        }
        t += STRIDE;
    }
    events
}

/// The demanded pages from 1 to below `end`.
fn within(demand: &[u32], end: usize) -> &[u32] {
    let from = demand.partition_point(|&page| page < 1);
    let to = demand.partition_point(|&page| (page as usize) < end).max(from);
    demand.get(from..to).unwrap_or(&[])
}

fn is_candidate(u: &[&[u32]], v: &[&[u32]], pool: usize) -> bool {
    let quiet = |window: &[&[u32]]| mean(window.iter().map(|demand| demand.len() as f64)).is_none_or(|mean| mean < 2.0);
    match (quiet(u), quiet(v)) {
        (true, true) => return false,
        (false, false) => {}
        _ => return true,
    }
    let coherence = within_mean(u, pool).min(within_mean(v, pool));
    if coherence < 0.3 {
        return false;
    }
    let across = u.iter().flat_map(|a| v.iter().map(|b| kappa(a, b, pool)));
    mean(across).is_some_and(|across| across < 0.5 * coherence)
}

/// Mean κ of all pairs of a window's steps.
fn within_mean(window: &[&[u32]], pool: usize) -> f64 {
    let pairs = window.iter().enumerate().flat_map(|(i, a)| window.iter().skip(i + 1).map(move |b| (a, b)));
    mean(pairs.map(|(a, b)| kappa(a, b, pool))).unwrap_or(0.0)
}

/// How often the rule would see a shift in a head whose demands come in random order: the share of `rounds` shuffles with an event.
/// What it finds in the real order beyond this share is not chance.
pub fn null_rate(
    demands: &[impl AsRef<[u32]>],
    page_tokens: usize,
    context: impl Fn(usize) -> usize,
    rounds: usize,
    seed: u64,
) -> f64 {
    let mut order: Vec<&[u32]> = demands.iter().map(AsRef::as_ref).collect();
    let mut state = seed;
    let mut flagged = 0;
    for _ in 0..rounds {
        for last in (1..order.len()).rev() {
            order.swap(last, (next(&mut state) % (last as u64 + 1)) as usize);
        }
        flagged += usize::from(!shifted(&order, page_tokens, &context).is_empty());
    }
    flagged as f64 / rounds.max(1) as f64
}

/// SplitMix64 (Steele et al. 2014).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut x = *state;
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
