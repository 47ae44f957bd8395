//! Elements as the kernels store them, and random ones.

use half::{bf16, f16};
use rand::Rng;
use rand::rngs::SmallRng;

use super::layout::{BF16, F16, F32};

/// What a tensor or a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DType(pub u32);

impl DType {
    pub const STORED: [DType; 2] = [DType(F16), DType(BF16)];
    pub const ALL: [DType; 3] = [DType(F32), DType(F16), DType(BF16)];

    pub fn name(self) -> &'static str {
        ["f32", "f16", "bf16"][self.0 as usize]
    }

    pub fn bytes(self) -> usize {
        if self.0 == F32 { 4 } else { 2 }
    }

    /// Rounded to the nearest element.
    pub fn round(self, value: f32) -> f32 {
        match self.0 {
            F32 => value,
            F16 => f16::from_f32(value).to_f32(),
            _ => bf16::from_f32(value).to_f32(),
        }
    }

    /// The bytes of values that are elements already.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self.0 {
            F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        }
    }

    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self.0 {
            F32 => bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
            F16 => bytes.chunks_exact(2).map(|x| f16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
            _ => bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
        }
    }
}

/// Roughly normal numbers, rounded to elements.
pub fn normal(rng: &mut SmallRng, dtype: DType, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| {
            let sum: f32 = (0..6).map(|_| rng.random::<f32>()).sum();
            dtype.round((sum - 3.0) * std::f32::consts::SQRT_2)
        })
        .collect()
}
