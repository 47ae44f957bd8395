//! Decode steps of a batch whose heads want other pages at a chosen rate.
//!
//! Every page has a topic, which is the channel that its keys point to, and a head's query points to some neighbouring topics. When it
//! moves on by a topic, the pages of one topic more are demanded, which have not been for long, and those of another are not any more. So
//! the cache selects, misses and evicts as it would for a model, and how much is known beforehand.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, CudaStream};
use half::f16;
use wakekv::{
    Cache, CapturedStep, Counts, Cuda, CudaBackend, DType, Digest, Error, Geometry, Reservoir, Selection, Sequence,
    Step,
};

use super::Outcome;
use super::memory::Stopwatch;

/// How large a scene is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub geometry: Geometry,
    pub sequences: usize,
    /// Pages of each prompt.
    pub prompt_pages: usize,
    /// Pages that may be filled by decoding.
    pub decoded_pages: usize,
    /// Topics that a head reads at a time.
    pub topics_read: usize,
    /// Pages of each topic.
    pub topic_pages: usize,
}

/// What the heads read and keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// Everything is read and is resident.
    ReadAll,
    /// The pages of some topics are read, and everything is resident.
    KeepAll,
    /// The pages of some topics are read, and little more is resident.
    KeepRead,
}

impl Size {
    /// The attention shape of Llama-3-8B with up to 8k tokens, of whose 512 pages 64 are demanded.
    pub fn llama(layers: usize, sequences: usize) -> Self {
        let geometry = Geometry::builder().layers(layers).query_heads(32).kv_heads(8).head_dim(128).page_tokens(16);
        let geometry = geometry.dtype(DType::F16).build().expect("a valid shape");
        Size { geometry, sequences, prompt_pages: 496, decoded_pages: 16, topics_read: 16, topic_pages: 4 }
    }

    /// The same in small, for a device that is emulated.
    pub fn tiny() -> Self {
        let geometry = Geometry::builder().layers(2).query_heads(4).kv_heads(2).head_dim(64).page_tokens(8);
        let geometry = geometry.dtype(DType::F16).build().expect("a valid shape");
        Size { geometry, sequences: 2, prompt_pages: 24, decoded_pages: 8, topics_read: 4, topic_pages: 2 }
    }

    /// Pages that each head reads, the open one aside.
    pub fn pages_read(&self) -> usize {
        self.topics_read * self.topic_pages
    }

    pub fn prompt_tokens(&self) -> usize {
        self.prompt_pages * self.geometry.page_tokens()
    }

    /// Bytes of keys and values that the attention of one layer reads, where every sequence has so many tokens.
    pub fn layer_bytes(&self, tokens: usize) -> usize {
        self.sequences * self.geometry.sequence_bytes(tokens) / self.geometry.layers()
    }

    fn topics(&self) -> usize {
        self.prompt_pages / self.topic_pages
    }

    fn lanes(&self) -> usize {
        self.sequences * self.geometry.kv_heads()
    }

    fn most_pages(&self) -> usize {
        self.prompt_pages + self.decoded_pages
    }

    fn settings(&self, residency: Residency) -> wakekv::CacheBuilder {
        let count = self.pages_read();
        let selection = match residency {
            Residency::ReadAll => Selection::All,
            _ => Selection::TopPages { count, sink_pages: 0, recent_pages: 0, digest: Digest::MinMax },
        };
        let ways = match residency {
            // The open page, and the one before it, which is not always read.
            Residency::KeepRead => count + 2,
            _ => self.most_pages() + 1,
        };
        let pool = self.sequences * ways * self.geometry.group_bytes();
        let reservoir = self.sequences * self.most_pages() * self.geometry.group_bytes();
        Cache::builder(self.geometry)
            .selection(selection)
            .pages_per_head(ways)
            .device_pool(pool as u64)
            .reservoir(Reservoir::memory(reservoir as u64))
    }
}

/// A cache with its prompts, and the tensors of an engine.
pub struct Scene {
    size: Size,
    cache: Cache<CudaBackend>,
    stream: Arc<CudaStream>,
    prompt: Vec<Chunk>,
    /// One token of each sequence.
    batch: Vec<(Sequence, usize)>,
    tensors: Tensors,
    /// How far each lane's query has moved, in topics.
    moved: Vec<f64>,
    captured: Option<CapturedStep>,
}

/// Tokens of the prompt, the same for all sequences and layers.
struct Chunk {
    tokens: usize,
    k: CudaSlice<f16>,
    v: CudaSlice<f16>,
}

/// One token per sequence, the same for all layers.
struct Tensors {
    layers: usize,
    kv: CudaSlice<f16>,
    q: CudaSlice<f16>,
    out: CudaSlice<f16>,
}

/// The time that a step took, until its output was there, and the host's share of it.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub step: Duration,
    pub host: Duration,
}

impl Scene {
    pub fn new(cuda: Cuda, size: Size, residency: Residency) -> Outcome<Self> {
        assert!(size.topics() <= size.geometry.head_dim() && 2 * size.topics_read <= size.topics());
        let mut cache = size.settings(residency).build(cuda)?;
        let stream = cache.stream().clone();
        let prompt = prompt(&stream, &size)?;
        let batch = fill(&mut cache, &size, &prompt)?;
        let (layers, kv, q) = (
            size.geometry.layers(),
            size.geometry.kv_elements(size.sequences),
            size.geometry.query_elements(size.sequences),
        );
        let (kv, q, out) = (stream.alloc_zeros(kv)?, stream.alloc_zeros(q)?, stream.alloc_zeros(q)?);
        let tensors = Tensors { layers, kv, q, out };
        // Heads move on at different steps.
        let moved = (0..size.lanes()).map(|lane| lane as f64 / size.lanes() as f64).collect();
        Ok(Scene { size, cache, stream, prompt, batch, tensors, moved, captured: None })
    }

    /// Records the step, which is replayed from now on.
    pub fn capture(&mut self) -> Outcome<()> {
        let Scene { cache, batch, tensors, .. } = self;
        let mut step = cache.step(batch)?;
        self.captured = Some(step.capture(|step| tensors.forward(step))?);
        Ok(())
    }

    /// One token of every sequence, for which each head replaces this share of the pages that it reads. Sequences that have no room for
    /// it start over, which is not measured.
    pub fn step(&mut self, share: f64) -> Outcome<Taken> {
        if self.start_over_if_full()? {
            self.run(share)?;
        }
        self.run(share)
    }

    fn run(&mut self, share: f64) -> Outcome<Taken> {
        self.turn(share)?;
        let Scene { cache, stream, batch, tensors, captured, .. } = self;
        let start = Instant::now();
        let mut step = cache.step(batch)?;
        match captured {
            // SAFETY: the tensors are the scene's, which does not move them.
            Some(captured) => unsafe { step.replay(captured) }?,
            None => tensors.forward(&mut step)?,
        }
        step.finish()?;
        let host = start.elapsed();
        stream.synchronize()?;
        Ok(Taken { step: start.elapsed(), host })
    }

    /// Seconds that the device takes for `attend` in the last layer, launches included; the host is ahead of it by then.
    pub fn attention(&mut self) -> Outcome<f64> {
        self.start_over_if_full()?;
        self.turn(0.0)?;
        let watch = Stopwatch::new(&self.stream)?;
        let Scene { cache, stream, batch, tensors, size, .. } = self;
        let mut step = cache.step(batch)?;
        for layer in 0..size.geometry.layers() {
            step.append(layer, &tensors.kv, &tensors.kv)?;
            watch.start(stream)?;
            step.attend(layer, &tensors.q, &mut tensors.out)?;
            watch.mark(stream)?;
        }
        step.finish()?;
        watch.seconds()
    }

    /// Pages demanded and missed since the cache was built.
    pub fn counts(&mut self) -> Outcome<Counts> {
        self.cache.synchronize()?;
        Ok(self.cache.stats().counts.decode)
    }

    /// Tokens of each sequence.
    pub fn tokens(&self) -> Outcome<usize> {
        Ok(self.cache.tokens(self.batch[0].0)?)
    }

    fn start_over_if_full(&mut self) -> Outcome<bool> {
        let full = self.size.most_pages() * self.size.geometry.page_tokens();
        if self.tokens()? < full {
            return Ok(false);
        }
        let Scene { cache, batch, .. } = self;
        batch.iter().try_for_each(|&(sequence, _)| cache.remove(sequence))?;
        self.batch = fill(&mut self.cache, &self.size, &self.prompt)?;
        if self.captured.is_some() {
            self.capture()?;
        }
        Ok(true)
    }

    /// Moves the queries on, and waits until they are on the device.
    fn turn(&mut self, share: f64) -> Outcome<()> {
        let Size { geometry, topics_read, .. } = self.size;
        let (dim, topics) = (geometry.head_dim(), self.size.topics());
        let mut q = vec![f16::ZERO; geometry.query_elements(self.size.sequences)];
        for (lane, moved) in self.moved.iter_mut().enumerate() {
            *moved += share * topics_read as f64;
            for row in q[lane * geometry.group() * dim..].chunks_exact_mut(dim).take(geometry.group()) {
                (0..topics_read).for_each(|topic| row[(*moved as usize + topic) % topics] = f16::ONE);
            }
        }
        self.stream.memcpy_htod(&q, &mut self.tensors.q)?;
        self.stream.synchronize()?;
        Ok(())
    }
}

impl Tensors {
    fn forward(&mut self, step: &mut Step<'_, CudaBackend>) -> Result<(), Error> {
        for layer in 0..self.layers {
            step.append(layer, &self.kv, &self.kv)?;
            step.attend(layer, &self.q, &mut self.out)?;
        }
        Ok(())
    }
}

/// The prompt in chunks, on the device.
fn prompt(stream: &Arc<CudaStream>, size: &Size) -> Outcome<Vec<Chunk>> {
    const PAGES: usize = 64;
    let chunk = |first: usize| {
        let pages = first..(first + PAGES).min(size.prompt_pages);
        let tokens = pages.len() * size.geometry.page_tokens();
        let (keys, values) = (keys(size, pages), noise(size.geometry.kv_elements(tokens), 1.0, !(first as u64)));
        Ok(Chunk { tokens, k: stream.clone_htod(&keys)?, v: stream.clone_htod(&values)? })
    };
    (0..size.prompt_pages).step_by(PAGES).map(chunk).collect()
}

/// Appends the prompt to new sequences, and returns them as a batch of one token each.
fn fill(cache: &mut Cache<CudaBackend>, size: &Size, prompt: &[Chunk]) -> Outcome<Vec<(Sequence, usize)>> {
    let mut batch = Vec::new();
    for _ in 0..size.sequences {
        let sequence = cache.insert_with_capacity(size.most_pages() * size.geometry.page_tokens());
        for Chunk { tokens, k, v } in prompt {
            let mut step = cache.step(&[(sequence, *tokens)])?;
            (0..size.geometry.layers()).try_for_each(|layer| step.append(layer, k, v))?;
            step.finish()?;
        }
        batch.push((sequence, 1));
    }
    cache.synchronize()?;
    Ok(batch)
}

/// Keys `[tokens, kv_heads, head_dim]` of some pages, each of which points to its topic.
fn keys(size: &Size, pages: std::ops::Range<usize>) -> Vec<f16> {
    let (geometry, first) = (&size.geometry, pages.start);
    let tokens = pages.len() * geometry.page_tokens();
    let mut keys = noise(geometry.kv_elements(tokens), 0.02, first as u64);
    for (row, key) in keys.chunks_exact_mut(geometry.head_dim()).enumerate() {
        let page = first + row / geometry.kv_heads() / geometry.page_tokens();
        key[page % size.topics()] = f16::ONE;
    }
    keys
}

/// Random numbers in [-amplitude, amplitude), by a linear congruential generator.
fn noise(len: usize, amplitude: f32, seed: u64) -> Vec<f16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f16::from_f32(amplitude * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0))
    };
    (0..len).map(|_| next()).collect()
}
