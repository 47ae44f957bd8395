//! One layer's attention on the device, and the same in double precision.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::common::gpu::Parameter;
use super::common::layout::{Attention, Demand, Entry, FAULT_NOT_THERE, Fault, Place, Shape};
use super::common::numbers::{DType, normal};
use super::common::{Buffer, Gpu, PENDING};

/// What is attended.
#[derive(Clone, Debug)]
pub struct Case {
    pub stored: DType,
    pub tensor: DType,
    pub dim: usize,
    pub page_tokens: usize,
    pub kv_heads: usize,
    pub group: usize,
    /// Per entry the tokens before the step, and the new ones.
    pub entries: Vec<(usize, usize)>,
    pub splits: usize,
    /// Pages are spread over so many waves.
    pub waves: u32,
    /// Percentage of the pages that are demanded, beside those with new tokens.
    pub percent: u32,
    /// Leaves one page pending, as if its copy had not come in.
    pub leave_pending: bool,
}

/// The launch's data, on the host.
struct Data {
    q: Vec<f32>,
    /// Per lane the demanded pages and where they are.
    demands: Vec<Vec<(u32, Place)>>,
    /// Per slot K then V, of all tokens of the page.
    pages: Vec<Vec<f32>>,
    rows: usize,
}

/// Where results may differ from the true ones by: f32 sums of rounded inputs, and the rounding of the output.
fn tolerance(dtype: DType) -> f64 {
    [2e-5, 1e-3, 8e-3][dtype.0 as usize]
}

impl Case {
    fn total_tokens(&self) -> usize {
        self.entries.iter().map(|&(_, tokens)| tokens).sum()
    }

    fn query_heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn is_chunk(&self) -> bool {
        self.entries.iter().any(|&(_, tokens)| tokens > 1)
    }

    /// Random bytes in scattered slots. What no token has written stays NaN.
    fn data(&self, rng: &mut SmallRng) -> Data {
        let mut demands = Vec::new();
        let mut slots = 0;
        for &(start, tokens) in &self.entries {
            let (written, last) = (start / self.page_tokens, (start + tokens - 1) / self.page_tokens);
            for _ in 0..self.kv_heads {
                let mut list = Vec::new();
                for page in 0..=last {
                    if page >= written || rng.random_range(0..100) < self.percent {
                        list.push((page as u32, Place { slot: slots, wave: rng.random_range(0..self.waves) }));
                        slots += 1;
                    }
                }
                demands.push(list);
            }
        }
        let mut order: Vec<u32> = (0..slots).collect();
        order.shuffle(rng);
        for (_, place) in demands.iter_mut().flatten() {
            place.slot = order[place.slot as usize];
        }
        let elements = 2 * self.page_tokens * self.dim;
        let mut pages = vec![Vec::new(); slots as usize];
        for (lane, list) in demands.iter().enumerate() {
            let (start, tokens) = self.entries[lane / self.kv_heads];
            for &(page, place) in list {
                let filled = self.page_tokens.min(start + tokens - page as usize * self.page_tokens);
                let mut values = normal(rng, self.stored, elements);
                values[filled * self.dim..elements / 2].fill(f32::NAN);
                values[elements / 2 + filled * self.dim..].fill(f32::NAN);
                pages[place.slot as usize] = values;
            }
        }
        let rows = self.total_tokens() * self.query_heads();
        Data { q: normal(rng, self.tensor, rows * self.dim), demands, pages, rows }
    }

    /// Runs the case and compares. The error says where it differs, or what the device reports.
    pub fn run(&self, gpu: &Gpu, seed: u64) -> Result<(), String> {
        let data = self.data(&mut SmallRng::seed_from_u64(seed));
        let got = self.on_device(gpu, &data)?;
        let mut token = 0;
        for (entry, &(start, tokens)) in self.entries.iter().enumerate() {
            for t in 0..tokens {
                for head in 0..self.query_heads() {
                    let row = (token + t) * self.query_heads() + head;
                    let lane = entry * self.kv_heads + head / self.group;
                    let want = self.expected(&data, lane, row, start + t + 1);
                    for (d, want) in want.into_iter().enumerate() {
                        let got = f64::from(got[row * self.dim + d]);
                        let off = (got - want).abs() / (want.abs() + 0.05);
                        if off.is_nan() || off > tolerance(self.tensor) {
                            return Err(format!(
                                "{self:?}: entry {entry}, token {t}, head {head}, channel {d}: {got}, not {want}"
                            ));
                        }
                    }
                }
            }
            token += tokens;
        }
        Ok(())
    }

    /// Softmax over the demanded tokens below `visible`.
    fn expected(&self, data: &Data, lane: usize, row: usize, visible: usize) -> Vec<f64> {
        let q = &data.q[row * self.dim..(row + 1) * self.dim];
        let mut weights = Vec::new();
        for &(page, place) in &data.demands[lane] {
            for t in 0..self.page_tokens {
                if page as usize * self.page_tokens + t < visible {
                    let page = &data.pages[place.slot as usize];
                    let (k, v) = page.split_at(self.page_tokens * self.dim);
                    let range = t * self.dim..(t + 1) * self.dim;
                    let dot: f64 = q.iter().zip(&k[range.clone()]).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                    weights.push((dot / (self.dim as f64).sqrt(), &v[range]));
                }
            }
        }
        let top = weights.iter().fold(f64::NEG_INFINITY, |top, &(logit, _)| top.max(logit));
        let sum: f64 = weights.iter().map(|&(logit, _)| (logit - top).exp()).sum();
        (0..self.dim)
            .map(|d| weights.iter().map(|&(logit, v)| (logit - top).exp() * f64::from(v[d])).sum::<f64>() / sum)
            .collect()
    }

    fn on_device(&self, gpu: &Gpu, data: &Data) -> Result<Vec<f32>, String> {
        let lanes = data.demands.len();
        let room = data.demands.iter().map(Vec::len).max().unwrap_or(0);
        let (pages, places) = (gpu.alloc::<u32>(lanes * room), gpu.alloc::<Place>(lanes * room));
        let counts: Vec<u32> = data.demands.iter().map(|list| list.len() as u32).collect();
        let counts = gpu.upload(&counts);
        for (lane, list) in data.demands.iter().enumerate() {
            let (numbers, mut where_): (Vec<u32>, Vec<Place>) = list.iter().copied().unzip();
            if self.leave_pending && lane == lanes - 1 {
                where_.last_mut().expect("there is a page").wave = 1 | PENDING;
            }
            pages.write(lane * room, &numbers);
            places.write(lane * room, &where_);
        }
        let pool = gpu.alloc::<u8>(data.pages.len() * 2 * self.page_tokens * self.dim * 2);
        for (slot, values) in data.pages.iter().enumerate() {
            pool.write(slot * values.len() * 2, &self.stored.encode(values));
        }
        let mut row = 0;
        let entries = self.entries.iter().enumerate().map(|(index, &(start, tokens))| {
            row += tokens;
            let (start, tokens) = (start as u32, tokens as u32);
            Entry { sequence: index as u32, start, tokens, row: row as u32 - tokens, decode: 1, reselect: 1 }
        });
        let entries = gpu.upload(&entries.collect::<Vec<_>>());
        let shape = Shape {
            kv_heads: self.kv_heads as u32,
            group: self.group as u32,
            page_tokens: self.page_tokens as u32,
            heads: self.kv_heads as u32,
            first_head: 0,
            head_dim: self.dim as u32,
        };
        let demand =
            Demand { pages: pages.ptr(), places: places.ptr(), counts: counts.ptr(), room: room as u32, unused: 0 };
        let copies = self.copies_per_wave(gpu, data);
        let q = gpu.upload(&self.tensor.encode(&data.q));
        // Chunks in windows, the last of which is not full.
        let most = self.entries.iter().map(|&(_, tokens)| tokens).max().unwrap_or(0);
        let window = most.min(40);
        let partial_rows = lanes * window * self.group;
        let parts = partial_rows * 2 * self.splits;
        let (acc, state) = (gpu.alloc::<f32>(parts * self.dim), gpu.alloc::<u64>(parts));
        let fault = gpu.zeros::<Fault>(1);
        let mut attention = Attention {
            q: q.ptr(),
            pool: pool.ptr(),
            acc: acc.ptr(),
            state: state.ptr(),
            copies_per_wave: copies.ptr(),
            fault: fault.ptr(),
            scale: std::f32::consts::LOG2_E / (self.dim as f32).sqrt(),
            dtype: self.tensor.0,
            splits: self.splits as u32,
            wave: 0,
            first_token: 0,
            window: window as u32,
        };
        let (name, rows) = self.kernel();
        let tiles = (window * self.group).div_ceil(rows);
        let grid = (self.splits, self.kv_heads * tiles, self.entries.len());
        let out = gpu.alloc::<u8>(data.rows * self.dim * self.tensor.bytes());
        let threads = self.dim.next_multiple_of(32);
        let entries = entries.ptr();
        for first_token in (0..most).step_by(window) {
            attention.first_token = first_token as u32;
            for wave in 0..self.waves.max(2) {
                attention.wave = wave;
                let shared = 4 * rows * (self.dim + 2) * 4;
                gpu.launch(&name, grid, 128, shared, &[&shape, &entries, &demand, &attention]);
            }
            let parameters: [&dyn Parameter; 5] = [&shape, &entries, &attention, &out.ptr(), &self.tensor.0];
            gpu.launch("wakekv_merge", (partial_rows, 1, 1), threads, 0, &parameters);
        }
        gpu.synchronize()?;
        self.check_fault(&fault)?;
        Ok(self.tensor.decode(&out.read()))
    }

    /// The kernel for the case, and the query rows of its tiles.
    fn kernel(&self) -> (String, usize) {
        let (stored, dim) = (self.stored.name(), self.dim);
        if self.is_chunk() {
            return (format!("wakekv_attend_chunk_{stored}_d{dim}"), 8);
        }
        let rows = self.group.next_power_of_two().min(8);
        (format!("wakekv_attend_{stored}_d{dim}_r{rows}"), rows)
    }

    fn copies_per_wave(&self, gpu: &Gpu, data: &Data) -> Buffer<u32> {
        let mut counts = vec![0; self.waves.max(3) as usize];
        for (_, place) in data.demands.iter().flatten() {
            counts[place.wave as usize] += 1;
        }
        counts[0] = 0;
        counts[1] += u32::from(self.leave_pending);
        gpu.upload(&counts)
    }

    fn check_fault(&self, fault: &Buffer<Fault>) -> Result<(), String> {
        let fault = fault.read()[0];
        match fault.kind {
            0 => Ok(()),
            FAULT_NOT_THERE => Err(format!("not there: {fault:?}")),
            _ => Err(format!("{fault:?}")),
        }
    }
}
