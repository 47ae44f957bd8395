//! One weight matrix, kept in the form that multiplies fastest.
//!
//! A decode step reads every weight once for one row, so bytes count: the matrix stays quantised. A prefill chunk has
//! enough rows to pay for turning it into f32 on the way, which is faster than a quantised product and loses nothing;
//! nothing of that f32 copy stays. candle has no vector code for some of the types (Q4_1, Q5_0, Q5_1) and would
//! multiply them an order of magnitude slower, so for decode those are quantised anew to Q8_0.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Tensor};

/// How weights are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Weights {
    /// Quantised where that is faster.
    #[default]
    Fast,
    /// Everything as f32, computed as f32: slower and larger, for comparisons with other implementations.
    F32,
}

/// From this many rows on, converting the matrix costs less than the quantised product.
const ROWS_WORTH_CONVERTING: usize = 12;

/// `y = x Wᵀ`, with W of shape `[outputs, inputs]`.
pub struct Linear {
    few_rows: QMatMul,
    /// What a prefill chunk converts to f32; absent where `few_rows` is f32 already.
    stored: Option<Arc<QTensor>>,
    inputs: usize,
    outputs: usize,
}

impl Linear {
    /// Takes a matrix as the file stores it.
    pub fn new(stored: Arc<QTensor>, weights: Weights) -> Result<Self> {
        let (outputs, inputs) = stored.shape().dims2().context("a weight matrix must have two dimensions")?;
        let quantises = inputs.is_multiple_of(GgmlDType::Q8_0.block_size());
        let (few_rows, stored) = match (weights, stored.dtype()) {
            (Weights::Fast, dtype) if is_fast(dtype) => (QMatMul::from_arc(stored.clone())?, Some(stored)),
            (Weights::Fast, _) if quantises => {
                let requantised = QTensor::quantize(&stored.dequantize(&Device::Cpu)?, GgmlDType::Q8_0)?;
                (QMatMul::from_qtensor(requantised)?, Some(stored))
            }
            _ => (QMatMul::Tensor(stored.dequantize(&Device::Cpu)?), None),
        };
        Ok(Self { few_rows, stored, inputs, outputs })
    }

    /// Columns of the result.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Multiplies rows of `inputs` numbers, giving rows of `outputs` numbers.
    pub fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        let rows = x.len() / self.inputs;
        ensure!(rows * self.inputs == x.len(), "{} numbers are no rows of {}", x.len(), self.inputs);
        let x = Tensor::from_slice(x, (rows, self.inputs), &Device::Cpu)?;
        let y = match &self.stored {
            Some(stored) if rows >= ROWS_WORTH_CONVERTING => x.matmul(&stored.dequantize(&Device::Cpu)?.t()?)?,
            _ => self.few_rows.forward(&x)?,
        };
        Ok(y.flatten_all()?.to_vec1()?)
    }
}

/// Types that candle multiplies with vector instructions.
fn is_fast(dtype: GgmlDType) -> bool {
    use GgmlDType::*;
    matches!(dtype, Q4_0 | Q8_0 | Q2K | Q3K | Q4K | Q5K | Q6K)
}
