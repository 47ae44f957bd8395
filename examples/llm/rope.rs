//! Rotary position embedding.

use anyhow::{Result, bail, ensure};

use super::gguf::Metadata;

/// Which two channels of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// 2i with 2i + 1: the order of `llama` files.
    Interleaved,
    /// i with i + half: the order of `qwen2` files.
    Halves,
}

/// The rotation of one model.
pub struct Rope {
    layout: Layout,
    /// Radians per position, for each pair.
    speeds: Vec<f64>,
}

impl Rope {
    /// `channels` of each head turn, the slower the later; `factors` slow each pair further (Llama 3's long context).
    pub fn new(layout: Layout, channels: usize, base: f64, factors: Option<&[f32]>) -> Result<Self> {
        ensure!(channels >= 2 && channels.is_multiple_of(2), "rotary channels must be even, not {channels}");
        let pair = |i: usize| base.powf(-2.0 * i as f64 / channels as f64);
        let mut speeds: Vec<f64> = (0..channels / 2).map(pair).collect();
        for (speed, factor) in speeds.iter_mut().zip(factors.unwrap_or_default()) {
            *speed /= f64::from(*factor);
        }
        Ok(Self { layout, speeds })
    }

    /// Slows every pair by the factor of a linear scaling, if the file asks for one.
    pub fn scaled(mut self, metadata: Metadata<'_>, architecture: &str) -> Result<Self> {
        let factor = metadata.float(&format!("{architecture}.rope.scaling.factor")).unwrap_or(1.0);
        match metadata.text(&format!("{architecture}.rope.scaling.type")) {
            None | Some("none") => {}
            Some("linear") if factor > 0.0 => self.speeds.iter_mut().for_each(|speed| *speed /= factor),
            Some(other) => bail!("rotary scaling `{other}` (factor {factor}) is not supported: only `linear` is"),
        }
        Ok(self)
    }

    /// Turns the heads of `rows` (`[tokens, heads, head_dim]`), the first token being at `position`.
    pub fn apply(&self, rows: &mut [f32], heads: usize, head_dim: usize, position: usize) {
        for (token, row) in rows.chunks_exact_mut(heads * head_dim).enumerate() {
            let at = (position + token) as f64;
            let turns: Vec<(f32, f32)> = self.speeds.iter().map(|speed| sin_cos(at * speed)).collect();
            for head in row.chunks_exact_mut(head_dim) {
                self.turn(head, &turns);
            }
        }
    }

    fn turn(&self, head: &mut [f32], turns: &[(f32, f32)]) {
        let half = turns.len();
        for (i, &(sin, cos)) in turns.iter().enumerate() {
            let (a, b) = match self.layout {
                Layout::Interleaved => (2 * i, 2 * i + 1),
                Layout::Halves => (i, i + half),
            };
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }
}

/// In double precision, as an angle of some thousand radians in f32 is off by more than attention tolerates.
fn sin_cos(angle: f64) -> (f32, f32) {
    let (sin, cos) = angle.sin_cos();
    (sin as f32, cos as f32)
}
