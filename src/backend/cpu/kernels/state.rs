//! Partial softmax results: merging two of the same rows, and the final division.

use super::State;

impl State<'_> {
    /// Forgets everything that was attended.
    pub fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Adds what `from` has attended. Both are states of the same rows, over disjoint sets of tokens.
    ///
    /// Exact where either is empty. NaN passes through.
    pub fn merge(&mut self, from: &State<'_>) {
        debug_assert!(self.max.len() == from.max.len() && self.acc.len() == from.acc.len());
        let dim = self.acc.len() / self.max.len().max(1);
        let rows = self.acc.chunks_exact_mut(dim.max(1)).zip(from.acc.chunks_exact(dim.max(1)));
        for (row, (into, from_acc)) in rows.enumerate() {
            let (a, b) = (self.max[row], from.max[row]);
            if b == f32::NEG_INFINITY {
                continue;
            }
            let max = if b > a { b } else { a };
            let (keep, take) = ((a - max).exp(), (b - max).exp());
            self.max[row] = max;
            self.sum[row] = self.sum[row] * keep + from.sum[row] * take;
            for (into, from) in into.iter_mut().zip(from_acc) {
                *into = *into * keep + from * take;
            }
        }
    }

    /// Writes the attention output `[rows, head_dim]`. A row that has seen no token gives 0.
    pub fn finish(&self, out: &mut [f32]) {
        debug_assert_eq!(self.acc.len(), out.len());
        let dim = (self.acc.len() / self.max.len().max(1)).max(1);
        for (row, (out, acc)) in out.chunks_exact_mut(dim).zip(self.acc.chunks_exact(dim)).enumerate() {
            if self.max[row] == f32::NEG_INFINITY {
                out.fill(0.0);
                continue;
            }
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = acc / self.sum[row];
            }
        }
    }
}
