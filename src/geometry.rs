//! Shapes, dtypes and byte arithmetic: the only place that computes sizes.
//!
//! ```text
//! page            K block [page_tokens, head_dim], then V block [page_tokens, head_dim], contiguous
//! reservoir group one logical page of every head of a sequence: [layers, kv_heads] pages, contiguous
//! ```

use half::{bf16, f16};

use crate::error::Error;

/// The element type that keys and values are stored in. Scores and sums are always accumulated in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// IEEE 754 half precision, 2 bytes.
    F16,
    /// bfloat16: the upper half of an f32, 2 bytes.
    BF16,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 => size_of::<f32>(),
            DType::F16 => size_of::<f16>(),
            DType::BF16 => size_of::<bf16>(),
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        })
    }
}

/// The shape of a model's KV cache. Every size in the crate is computed from it.
///
/// ```
/// use wakekv::{DType, Geometry};
/// let llama3_8b = Geometry::builder().layers(32).query_heads(32).kv_heads(8).head_dim(128).build()?;
/// assert_eq!(llama3_8b.page_bytes(), 8192);
/// assert_eq!(llama3_8b.heads(), 256);
/// # Ok::<(), wakekv::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    layers: usize,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    page_tokens: usize,
    dtype: DType,
}

/// Collects the numbers of a [`Geometry`] and checks them together.
#[derive(Clone, Copy, Debug)]
pub struct GeometryBuilder(Geometry);

impl GeometryBuilder {
    /// Transformer layers, at least 1. Default 1.
    pub fn layers(mut self, layers: usize) -> Self {
        self.0.layers = layers;
        self
    }

    /// Query heads per layer, a multiple of the KV heads. Default 1.
    pub fn query_heads(mut self, query_heads: usize) -> Self {
        self.0.query_heads = query_heads;
        self
    }

    /// KV heads per layer, at least 1. Equal to the query heads for MHA, fewer for GQA, one for MQA. Default 1.
    pub fn kv_heads(mut self, kv_heads: usize) -> Self {
        self.0.kv_heads = kv_heads;
        self
    }

    /// Channels per head: a multiple of 8 from 32 to 256. Default 64.
    pub fn head_dim(mut self, head_dim: usize) -> Self {
        self.0.head_dim = head_dim;
        self
    }

    /// Tokens per page: a power of two from 8 to 128. Default 16.
    pub fn page_tokens(mut self, page_tokens: usize) -> Self {
        self.0.page_tokens = page_tokens;
        self
    }

    /// Element type of the stored keys and values. Default f16.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.0.dtype = dtype;
        self
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// [`Error::Geometry`] names the quantity that is out of range, and the range.
    pub fn build(self) -> Result<Geometry, Error> {
        let g = self.0;
        let reject = |quantity, value, rule| Err(Error::Geometry { quantity, value, rule });
        if g.layers == 0 {
            return reject("layers", g.layers, "must be at least 1");
        }
        if g.kv_heads == 0 {
            return reject("kv_heads", g.kv_heads, "must be at least 1");
        }
        if g.query_heads == 0 || !g.query_heads.is_multiple_of(g.kv_heads) {
            return reject("query_heads", g.query_heads, "must be a positive multiple of kv_heads");
        }
        if !(32..=256).contains(&g.head_dim) || !g.head_dim.is_multiple_of(8) {
            return reject("head_dim", g.head_dim, "must be a multiple of 8 from 32 to 256");
        }
        if !(8..=128).contains(&g.page_tokens) || !g.page_tokens.is_power_of_two() {
            return reject("page_tokens", g.page_tokens, "must be a power of two from 8 to 128");
        }
        // One query row is the widest thing per token, and heads index u32 slots.
        let group = g.layers.checked_mul(g.kv_heads).and_then(|heads| heads.checked_mul(g.page_bytes()));
        let row = g.query_heads.checked_mul(g.head_dim * size_of::<f32>());
        let fits = |bytes: Option<usize>| bytes.is_some_and(|bytes| bytes < MAX_BYTES);
        let heads = g.layers.saturating_mul(g.kv_heads);
        if heads >= MAX_HEADS || !fits(group) {
            return reject("layers × kv_heads", heads, "must stay below 2^24 heads");
        }
        if !fits(row) {
            return reject("query_heads", g.query_heads, "must be so few that a token's queries can be addressed");
        }
        Ok(g)
    }
}

const MAX_HEADS: usize = 1 << 24;
const MAX_BYTES: usize = isize::MAX as usize;

impl Geometry {
    /// Starts a description with one layer, one head of 64 channels, pages of 16 tokens and f16 storage.
    pub fn builder() -> GeometryBuilder {
        GeometryBuilder(Geometry {
            layers: 1,
            query_heads: 1,
            kv_heads: 1,
            head_dim: 64,
            page_tokens: 16,
            dtype: DType::F16,
        })
    }

    /// Transformer layers.
    pub const fn layers(&self) -> usize {
        self.layers
    }

    /// Query heads per layer.
    pub const fn query_heads(&self) -> usize {
        self.query_heads
    }

    /// KV heads per layer.
    pub const fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Channels per head.
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Tokens per page.
    pub const fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Element type of the stored keys and values.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Query heads that share one KV head.
    pub const fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Heads of one sequence: layers × KV heads. Residency is decided for each of them.
    pub const fn heads(&self) -> usize {
        self.layers * self.kv_heads
    }

    /// The index of a head among [`heads`](Self::heads): layers outermost.
    pub const fn head(&self, layer: usize, kv_head: usize) -> usize {
        layer * self.kv_heads + kv_head
    }

    /// Bytes of the K block, and of the V block, of one page.
    pub const fn block_bytes(&self) -> usize {
        self.page_tokens * self.head_dim * self.dtype.bytes()
    }

    /// Bytes of one page: its K block and its V block.
    pub const fn page_bytes(&self) -> usize {
        2 * self.block_bytes()
    }

    /// Bytes of one logical page over all heads, which is the unit that the reservoir hands out.
    pub const fn group_bytes(&self) -> usize {
        self.heads() * self.page_bytes()
    }

    /// Bytes of keys and values that `tokens` tokens of one sequence occupy, in whole pages.
    pub const fn sequence_bytes(&self, tokens: usize) -> usize {
        self.pages(tokens).saturating_mul(self.group_bytes())
    }

    /// Pages that `tokens` tokens occupy, the open one included.
    pub const fn pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Pages that `tokens` tokens have filled, which are therefore sealed.
    pub const fn sealed_pages(&self, tokens: usize) -> usize {
        tokens / self.page_tokens
    }

    /// Elements of a key or value tensor `[tokens, kv_heads, head_dim]`.
    pub const fn kv_elements(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.kv_heads * self.head_dim)
    }

    /// Elements of a query or output tensor `[tokens, query_heads, head_dim]`.
    pub const fn query_elements(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.query_heads * self.head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_the_shape() {
        let g = Geometry::builder().layers(30).query_heads(9).kv_heads(3).head_dim(64).build().unwrap();
        assert_eq!((g.group(), g.heads(), g.head(2, 1)), (3, 90, 7));
        assert_eq!(g.page_bytes(), 2 * 16 * 64 * 2);
        assert_eq!(g.group_bytes(), 90 * 4096);
        assert_eq!((g.pages(0), g.pages(1), g.pages(16), g.pages(17)), (0, 1, 1, 2));
        assert_eq!((g.sealed_pages(15), g.sealed_pages(16), g.sealed_pages(33)), (0, 1, 2));
        assert_eq!(g.sequence_bytes(17), 2 * 90 * 4096);
    }

    #[test]
    fn every_quantity_out_of_range_is_named() {
        let b = Geometry::builder;
        let wrong: [(&str, GeometryBuilder); 12] = [
            ("layers", b().layers(0)),
            ("kv_heads", b().kv_heads(0)),
            ("query_heads", b().query_heads(0)),
            ("query_heads", b().query_heads(9).kv_heads(2)),
            ("head_dim", b().head_dim(24)),
            ("head_dim", b().head_dim(68)),
            ("head_dim", b().head_dim(264)),
            ("page_tokens", b().page_tokens(4)),
            ("page_tokens", b().page_tokens(24)),
            ("layers × kv_heads", b().layers(usize::MAX)),
            ("layers × kv_heads", b().layers(1 << 24)),
            ("query_heads is", b().query_heads(usize::MAX)),
        ];
        for (quantity, builder) in wrong {
            let error = builder.build().unwrap_err().to_string();
            assert!(error.contains(quantity), "{error}");
        }
        assert!(b().layers(1 << 40).kv_heads(1 << 40).query_heads(1 << 40).build().is_err());
    }
}
