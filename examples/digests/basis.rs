//! Directions to look at keys in: as they are, rotated, or along those of most variance.

/// An orthonormal basis of some or all of the channels' space, `[rank, head_dim]`.
#[derive(Clone)]
pub struct Basis {
    pub rank: usize,
    dim: usize,
    rows: Vec<f32>,
}

impl Basis {
    /// The channels themselves.
    pub fn identity(dim: usize) -> Basis {
        let rows = (0..dim * dim).map(|i| if i / dim == i % dim { 1.0 } else { 0.0 }).collect();
        Basis { rank: dim, dim, rows }
    }

    /// Hadamard's matrix: every channel spread evenly over the `width` ones of its band. `width` is a power of two.
    pub fn hadamard(dim: usize, width: usize) -> Basis {
        let element = |i: usize| {
            let (row, column) = (i / dim, i % dim);
            let sign = if ((row % width) & (column % width)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            if row / width == column / width { sign / (width as f32).sqrt() } else { 0.0 }
        };
        Basis { rank: dim, dim, rows: (0..dim * dim).map(element).collect() }
    }

    /// The `rank` directions in which the vectors `[count, dim]` vary most about their mean, most first.
    pub fn principal(vectors: &[f32], dim: usize, rank: usize) -> Basis {
        let rows = leading(covariance(vectors, dim), dim, rank);
        Basis { rank, dim, rows }
    }

    /// The `rank` channels in which the vectors vary most.
    pub fn channels(vectors: &[f32], dim: usize, rank: usize) -> Basis {
        let covariance = covariance(vectors, dim);
        let mut order: Vec<usize> = (0..dim).collect();
        order.sort_by(|&a, &b| covariance[b * dim + b].total_cmp(&covariance[a * dim + a]).then(a.cmp(&b)));
        let mut rows = vec![0.0; rank * dim];
        order.iter().take(rank).enumerate().for_each(|(row, &channel)| rows[row * dim + channel] = 1.0);
        Basis { rank, dim, rows }
    }

    /// `vectors` `[count, dim]` in this basis, `[count, rank]`.
    pub fn apply(&self, vectors: &[f32]) -> Vec<f32> {
        let dots = |v| self.rows.chunks_exact(self.dim).map(move |row| dot(row, v));
        vectors.chunks_exact(self.dim).flat_map(dots).collect()
    }
}

pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

fn covariance(vectors: &[f32], dim: usize) -> Vec<f64> {
    let count = (vectors.len() / dim) as f64;
    let mut mean = vec![0.0f64; dim];
    for vector in vectors.chunks_exact(dim) {
        mean.iter_mut().zip(vector).for_each(|(mean, &x)| *mean += f64::from(x) / count);
    }
    let mut covariance = vec![0.0; dim * dim];
    for vector in vectors.chunks_exact(dim) {
        let centred: Vec<f64> = vector.iter().zip(&mean).map(|(&x, mean)| f64::from(x) - mean).collect();
        for (row, &x) in covariance.chunks_exact_mut(dim).zip(&centred) {
            row.iter_mut().zip(&centred).for_each(|(sum, y)| *sum += x * y / count);
        }
    }
    covariance
}

/// Eigenvectors of the largest eigenvalues by Jacobi's rotations.
fn leading(mut matrix: Vec<f64>, dim: usize, rank: usize) -> Vec<f32> {
    let mut vectors = vec![0.0; dim * dim];
    (0..dim).for_each(|i| vectors[i * dim + i] = 1.0);
    for _ in 0..8 {
        for p in 0..dim {
            for q in p + 1..dim {
                let off = matrix[p * dim + q];
                if off.abs() < 1e-12 {
                    continue;
                }
                let theta = (matrix[q * dim + q] - matrix[p * dim + p]) / (2.0 * off);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let cos = 1.0 / (t * t + 1.0).sqrt();
                let sin = t * cos;
                for i in 0..dim {
                    rotate(&mut matrix, i * dim + p, i * dim + q, cos, sin);
                }
                for i in 0..dim {
                    rotate(&mut matrix, p * dim + i, q * dim + i, cos, sin);
                    rotate(&mut vectors, p * dim + i, q * dim + i, cos, sin);
                }
            }
        }
    }
    let mut order: Vec<usize> = (0..dim).collect();
    order.sort_by(|&a, &b| matrix[b * dim + b].total_cmp(&matrix[a * dim + a]).then(a.cmp(&b)));
    order.iter().take(rank).flat_map(|&row| vectors[row * dim..][..dim].iter().map(|&x| x as f32)).collect()
}

fn rotate(of: &mut [f64], p: usize, q: usize, cos: f64, sin: f64) {
    (of[p], of[q]) = (cos * of[p] - sin * of[q], sin * of[p] + cos * of[q]);
}
