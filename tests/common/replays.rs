//! Captured steps beside a cache on the CPU that is told the same.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use wakekv::{Cache, CacheBuilder, CapturedStep, Cpu, Cuda, CudaBackend, Error, Geometry, Sequence, Step};

use crate::common::{Part, Which, World, run_step};

/// What an engine keeps at fixed addresses for its captured step, by layer.
pub struct Fixed {
    pub k: Vec<CudaSlice<f32>>,
    pub v: Vec<CudaSlice<f32>>,
    pub q: Vec<CudaSlice<f32>>,
    pub out: Vec<CudaSlice<f32>>,
}

impl Fixed {
    fn new(g: &Geometry, stream: &Arc<CudaStream>, sequences: usize) -> Self {
        let make = |elements| (0..g.layers()).map(|_| stream.alloc_zeros(elements).unwrap()).collect();
        let (kv, q) = (g.kv_elements(sequences), g.query_elements(sequences));
        Fixed { k: make(kv), v: make(kv), q: make(q), out: make(q) }
    }

    /// The inputs of every sequence's token at `position`, and poison where the outputs go.
    fn fill(&mut self, stream: &Arc<CudaStream>, worlds: &[World], position: usize) {
        for layer in 0..self.k.len() {
            let gather = |which| -> Vec<f32> {
                worlds.iter().flat_map(|world| world.tensor(which, layer, position..position + 1)).collect()
            };
            stream.memcpy_htod(&gather(Which::Key), &mut self.k[layer]).unwrap();
            stream.memcpy_htod(&gather(Which::Value), &mut self.v[layer]).unwrap();
            stream.memcpy_htod(&gather(Which::Query), &mut self.q[layer]).unwrap();
            stream.memcpy_htod(&vec![f32::NAN; self.out[layer].len()], &mut self.out[layer]).unwrap();
        }
    }

    pub fn forward(&mut self, step: &mut Step<'_, CudaBackend>) -> Result<(), Error> {
        for layer in 0..self.k.len() {
            step.append(layer, &self.k[layer], &self.v[layer])?;
            step.attend(layer, &self.q[layer], &mut self.out[layer])?;
        }
        Ok(())
    }
}

/// A cache on the device and one on the CPU, with the same sequences, of the same prompt.
pub struct Scene {
    pub cache: Cache<CudaBackend>,
    pub sequences: Vec<(Sequence, Sequence)>,
    pub position: usize,
    twin: Cache,
    worlds: Vec<World>,
    tensors: Fixed,
    tolerance: f32,
}

impl Scene {
    /// `budget` is that of the cache on the device.
    pub fn new(cuda: Cuda, builder: impl Fn() -> CacheBuilder, budget: usize, prompt: usize, tolerance: f32) -> Self {
        let mut cache = builder().pages_per_head(budget).build(cuda).unwrap();
        let mut twin = builder().build(Cpu::new().threads(1)).unwrap();
        let geometry = *cache.geometry();
        let worlds: Vec<World> = (0..2).map(|index| World { geometry, seed: 70 + index }).collect();
        let sequences: Vec<_> = worlds.iter().map(|_| (cache.insert(), twin.insert())).collect();
        for (world, &(sequence, twin_sequence)) in worlds.iter().zip(&sequences) {
            run_step(&mut cache, &[Part::new(world, sequence, 0, prompt)]).unwrap();
            run_step(&mut twin, &[Part::new(world, twin_sequence, 0, prompt)]).unwrap();
        }
        let tensors = Fixed::new(&geometry, &cache.stream().clone(), worlds.len());
        Scene { cache, twin, worlds, sequences, position: prompt, tensors, tolerance }
    }

    pub fn step(&mut self) -> (Step<'_, CudaBackend>, &mut Fixed) {
        let batch: Vec<_> = self.sequences.iter().map(|&(sequence, _)| (sequence, 1)).collect();
        self.tensors.fill(&self.cache.stream().clone(), &self.worlds, self.position);
        (self.cache.step(&batch).unwrap(), &mut self.tensors)
    }

    pub fn capture(&mut self) -> CapturedStep {
        let (mut step, tensors) = self.step();
        step.capture(|step| tensors.forward(step)).unwrap()
    }

    /// The outputs of the token that was run last are those of the CPU.
    pub fn compare(&mut self) {
        let parts: Vec<_> = self
            .worlds
            .iter()
            .zip(&self.sequences)
            .map(|(world, &(_, twin))| Part::new(world, twin, self.position, 1))
            .collect();
        let (expected, _) = run_step(&mut self.twin, &parts).unwrap();
        for (layer, expected) in expected.iter().enumerate() {
            let got = self.cache.stream().clone_dtoh(&self.tensors.out[layer]).unwrap();
            let worst = got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).fold(0.0, nan_max);
            assert!(worst < self.tolerance, "token {}, layer {layer}: off by {worst}", self.position);
        }
        self.position += 1;
    }

    pub fn replay(&mut self, captured: &CapturedStep) -> Result<(), Error> {
        self.fill();
        self.run(Some(captured))?;
        self.compare();
        Ok(())
    }

    /// Replays a step with the inputs of a later token, and gives it up: as if it had not been.
    pub fn give_up(&mut self, captured: &CapturedStep) -> Result<(), Error> {
        self.tensors.fill(&self.cache.stream().clone(), &self.worlds, self.position + 7);
        let batch: Vec<_> = self.sequences.iter().map(|&(sequence, _)| (sequence, 1)).collect();
        let mut step = self.cache.step(&batch)?;
        // SAFETY: the tensors are the scene's, which does not move them.
        unsafe { step.replay(captured) }
    }

    /// Puts the next token's inputs where the step finds them.
    pub fn fill(&mut self) {
        self.tensors.fill(&self.cache.stream().clone(), &self.worlds, self.position);
    }

    /// The next token's step from begin to finish and no more, replayed or by calls; `fill` comes before, `compare` after.
    pub fn run(&mut self, captured: Option<&CapturedStep>) -> Result<(), Error> {
        let batch: Vec<_> = self.sequences.iter().map(|&(sequence, _)| (sequence, 1)).collect();
        let mut step = self.cache.step(&batch)?;
        match captured {
            // SAFETY: the tensors are the scene's, which does not move them.
            Some(captured) => unsafe { step.replay(captured) }?,
            None => self.tensors.forward(&mut step)?,
        }
        step.finish()?;
        Ok(())
    }

    /// The next token by calls instead of a replay.
    pub fn call(&mut self) -> Result<(), Error> {
        self.fill();
        self.run(None)?;
        self.compare();
        Ok(())
    }
}

fn nan_max(a: f32, b: f32) -> f32 {
    if b.is_nan() { f32::INFINITY } else { a.max(b) }
}
