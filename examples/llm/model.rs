//! The forward pass of the Llama and Qwen2 families. Keys, values and attention belong to somebody else.

use std::io::{Read, Seek};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_core::quantized::QTensor;
use wakekv::{Geometry, GeometryBuilder};

use super::attention::Attention;
use super::gguf::{Gguf, Metadata};
use super::linear::{Linear, Weights};
use super::rope::{Layout, Rope};

/// The numbers that define a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub architecture: String,
    pub layers: usize,
    pub width: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Tokens that the model was trained to see at once.
    pub context: usize,
    pub norm_epsilon: f32,
}

impl Config {
    fn read(metadata: Metadata<'_>) -> Result<Self> {
        let architecture = metadata.require("general.architecture", metadata.text("general.architecture"))?;
        ensure!(
            matches!(architecture, "llama" | "qwen2"),
            "the model's architecture is `{architecture}`; supported are `llama` and `qwen2`"
        );
        let name = |key: &str| format!("{architecture}.{key}");
        let required = |key: &str| metadata.require(&name(key), metadata.integer(&name(key)));
        let query_heads = required("attention.head_count")?;
        let width = required("embedding_length")?;
        ensure!(query_heads > 0 && width > 0, "the model file names no heads or no channels");
        if metadata.integer(&name("expert_count")).unwrap_or(0) > 1 {
            bail!("mixtures of experts are not supported");
        }
        Ok(Self {
            architecture: architecture.to_owned(),
            layers: required("block_count")?,
            width,
            query_heads,
            kv_heads: metadata.integer(&name("attention.head_count_kv")).unwrap_or(query_heads),
            head_dim: metadata.integer(&name("attention.key_length")).unwrap_or(width / query_heads),
            context: required("context_length")?,
            norm_epsilon: metadata
                .require(
                    &name("attention.layer_norm_rms_epsilon"),
                    metadata.float(&name("attention.layer_norm_rms_epsilon")),
                )?
                .max(0.0) as f32,
        })
    }

    /// The shape of the model's cache; pages and dtype are still to be chosen.
    pub fn geometry(&self) -> GeometryBuilder {
        Geometry::builder()
            .layers(self.layers)
            .query_heads(self.query_heads)
            .kv_heads(self.kv_heads)
            .head_dim(self.head_dim)
    }
}

/// A model that is ready to run.
pub struct Model {
    config: Config,
    rope: Rope,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Linear,
}

struct Layer {
    attention_norm: Vec<f32>,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Linear,
    mlp_norm: Vec<f32>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// For which positions logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    Last,
    All,
}

impl Model {
    /// Reads all weights; `progress` is called with the layers read so far and their number.
    pub fn load<R: Read + Seek>(file: &mut Gguf<R>, weights: Weights, progress: impl Fn(usize, usize)) -> Result<Self> {
        let config = Config::read(file.metadata())?;
        let rope = read_rope(file, &config)?;
        let table = Arc::new(file.tensor("token_embd.weight")?);
        let head = file.optional_tensor("output.weight")?.map(Arc::new).unwrap_or_else(|| table.clone());
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            progress(index, config.layers);
            layers.push(Layer::load(file, index, &config, weights)?);
        }
        let norm = file.vector("output_norm.weight", config.width)?;
        let head = Linear::new(head, weights)?;
        progress(config.layers, config.layers);
        Ok(Self { embedding: Embedding::new(table, config.width)?, config, rope, layers, norm, head })
    }

    /// The numbers that define the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Ids that the model knows.
    pub fn vocabulary(&self) -> usize {
        self.head.outputs()
    }

    /// Runs `tokens`, the first of them at `position` of its sequence. Returns `[positions, vocabulary]` logits.
    pub fn forward(
        &self,
        tokens: &[u32],
        position: usize,
        wanted: Logits,
        attention: &mut dyn Attention,
    ) -> Result<Vec<f32>> {
        ensure!(!tokens.is_empty(), "a forward pass needs at least one token");
        let c = &self.config;
        let mut x = self.embedding.rows(tokens)?;
        let mut attended = vec![0.0; tokens.len() * c.query_heads * c.head_dim];
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.attention_norm, c.norm_epsilon);
            let (mut q, mut k) = (layer.q.forward(&normed)?, layer.k.forward(&normed)?);
            let v = layer.v.forward(&normed)?;
            self.rope.apply(&mut q, c.query_heads, c.head_dim, position);
            self.rope.apply(&mut k, c.kv_heads, c.head_dim, position);
            attention.attend(index, &q, &k, &v, &mut attended)?;
            add(&mut x, &layer.o.forward(&attended)?);
            let update = layer.mlp(&x, c.norm_epsilon)?;
            add(&mut x, &update);
        }
        let from = match wanted {
            Logits::Last => x.len() - c.width,
            Logits::All => 0,
        };
        self.head.forward(&rms_norm(&x[from..], &self.norm, c.norm_epsilon))
    }
}

fn read_rope<R: Read + Seek>(file: &mut Gguf<R>, config: &Config) -> Result<Rope> {
    let name = |key: &str| format!("{}.rope.{key}", config.architecture);
    let channels = file.metadata().integer(&name("dimension_count")).unwrap_or(config.head_dim);
    ensure!(channels <= config.head_dim, "{channels} rotary channels exceed the head's {}", config.head_dim);
    let base = file.metadata().float(&name("freq_base")).unwrap_or(10_000.0);
    let layout = if config.architecture == "qwen2" { Layout::Halves } else { Layout::Interleaved };
    let factors = file.optional_vector("rope_freqs.weight", channels / 2)?;
    Rope::new(layout, channels, base, factors.as_deref())?.scaled(file.metadata(), &config.architecture)
}

impl Layer {
    fn load<R: Read + Seek>(file: &mut Gguf<R>, index: usize, config: &Config, weights: Weights) -> Result<Self> {
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        let (query_width, kv_width) = (config.query_heads * config.head_dim, config.kv_heads * config.head_dim);
        let mut projection = |part: &str, outputs| -> Result<Projection> {
            let linear = Linear::new(Arc::new(file.tensor(&name(part))?), weights)?;
            ensure!(linear.outputs() == outputs, "`{}` gives {} channels, not {outputs}", name(part), linear.outputs());
            let bias = file.optional_vector(&format!("blk.{index}.{part}.bias"), outputs)?;
            Ok(Projection { linear, bias })
        };
        let (q, k, v) =
            (projection("attn_q", query_width)?, projection("attn_k", kv_width)?, projection("attn_v", kv_width)?);
        let mut linear = |part: &str| Linear::new(Arc::new(file.tensor(&name(part))?), weights);
        let (o, gate, up, down) = (linear("attn_output")?, linear("ffn_gate")?, linear("ffn_up")?, linear("ffn_down")?);
        Ok(Self {
            attention_norm: file.vector(&name("attn_norm"), config.width)?,
            q,
            k,
            v,
            o,
            mlp_norm: file.vector(&name("ffn_norm"), config.width)?,
            gate,
            up,
            down,
        })
    }

    fn mlp(&self, x: &[f32], epsilon: f32) -> Result<Vec<f32>> {
        let normed = rms_norm(x, &self.mlp_norm, epsilon);
        let mut gate = self.gate.forward(&normed)?;
        let up = self.up.forward(&normed)?;
        gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = silu(*gate) * up);
        self.down.forward(&gate)
    }
}

/// A matrix with the bias that Qwen2 adds to queries, keys and values.
struct Projection {
    linear: Linear,
    bias: Option<Vec<f32>>,
}

impl Projection {
    fn forward(&self, x: &[f32]) -> Result<Vec<f32>> {
        let mut y = self.linear.forward(x)?;
        if let Some(bias) = &self.bias {
            y.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
        }
        Ok(y)
    }
}

/// The embedding table stays as the file stores it: only the rows of the step's tokens become f32.
struct Embedding {
    table: Arc<QTensor>,
    width: usize,
}

impl Embedding {
    fn new(table: Arc<QTensor>, width: usize) -> Result<Self> {
        let (_, columns) = table.shape().dims2().context("the embedding table must have two dimensions")?;
        ensure!(columns == width, "embeddings have {columns} channels, not {width}");
        Ok(Self { table, width })
    }

    fn rows(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let known = self.table.shape().elem_count() / self.width;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= known) {
            bail!("token {token} is outside the model's {known} embeddings");
        }
        let ids = candle_core::Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
        Ok(self.table.embedding(&ids)?.flatten_all()?.to_vec1()?)
    }
}

fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let mean_square = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / row.len() as f64;
        let scale = (mean_square as f32 + epsilon).sqrt().recip();
        y.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
    }
    y
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}
