//! How much two demands have in common.

/// |A ∩ B| of two ascending lists.
pub fn intersection(a: &[u32], b: &[u32]) -> usize {
    let (mut i, mut j, mut common) = (0, 0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        common += usize::from(x == y);
        i += usize::from(x <= y);
        j += usize::from(y <= x);
    }
    common
}

/// |A ∩ B| / |A ∪ B|; two empty sets are equal.
pub fn jaccard(a: &[u32], b: &[u32]) -> f64 {
    let common = intersection(a, b);
    let union = a.len() + b.len() - common;
    if union == 0 { 1.0 } else { common as f64 / union as f64 }
}

/// Mean Jaccard index of each demand and the next; 1 for fewer than two.
pub fn adjacent_jaccard(demands: &[impl AsRef<[u32]>]) -> f64 {
    mean(demands.windows(2).map(|pair| jaccard(pair[0].as_ref(), pair[1].as_ref()))).unwrap_or(1.0)
}

/// Share of a demand that is new or gone: 1 − 2|A ∩ B| / (|A| + |B|); 0 for two empty sets.
pub fn churn(a: &[u32], b: &[u32]) -> f64 {
    let sizes = a.len() + b.len();
    if sizes == 0 { 0.0 } else { 1.0 - 2.0 * intersection(a, b) as f64 / sizes as f64 }
}

/// Mean churn of each demand and the next; 0 for fewer than two.
pub fn mean_churn(demands: &[impl AsRef<[u32]>]) -> f64 {
    mean(demands.windows(2).map(|pair| churn(pair[0].as_ref(), pair[1].as_ref()))).unwrap_or(0.0)
}

/// |A ∩ B| / min(|A|, |B|), the overlap coefficient; two empty sets 1, one empty 0.
pub fn overlap_coefficient(a: &[u32], b: &[u32]) -> f64 {
    match a.len().min(b.len()) {
        0 => f64::from(a.is_empty() && b.is_empty()),
        least => intersection(a, b) as f64 / least as f64,
    }
}

/// Overlap beyond chance of two sets of pages out of `pool`:
/// κ = (|A∩B| − |A||B|/N) / (min(|A|, |B|) − |A||B|/N).
///
/// Independent random sets have 0 in the mean (the intersection is hypergeometric), nested ones 1. It may be negative and must not be
/// clamped before averages are taken. At equal sizes it is Cohen's kappa. Both empty 1, one empty 0; where chance leaves no room (a set
/// is the pool) 1.
pub fn kappa(a: &[u32], b: &[u32], pool: usize) -> f64 {
    if a.is_empty() || b.is_empty() {
        return f64::from(a.is_empty() && b.is_empty());
    }
    let chance = a.len() as f64 * b.len() as f64 / pool.max(1) as f64;
    let room = a.len().min(b.len()) as f64 - chance;
    if room <= 0.0 { 1.0 } else { (intersection(a, b) as f64 - chance) / room }
}

/// The paper's chance-corrected overlap RCO = max(0, (|A∩B|/K − K/N) / (1 − K/N)) with K = min(|A|, |B|) (WakeKV, arXiv 2610.02713). It
/// corrects too little for sets of unequal sizes. Both empty 1, one empty 0; a set that is the pool 1.
pub fn rco(a: &[u32], b: &[u32], pool: usize) -> f64 {
    let least = a.len().min(b.len());
    if least == 0 {
        return f64::from(a.is_empty() && b.is_empty());
    }
    let chance = least as f64 / pool.max(1) as f64;
    if chance >= 1.0 {
        return 1.0;
    }
    ((intersection(a, b) as f64 / least as f64 - chance) / (1.0 - chance)).max(0.0)
}

pub(super) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}
