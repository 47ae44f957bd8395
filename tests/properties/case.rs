//! The settings of one random history.
#![allow(dead_code, reason = "each device uses a part of it")]

use crate::common::faulty::Handle;
use crate::common::{Rng, Tensors};
use wakekv::residency::Rule;
use wakekv::table::Pins;
use wakekv::{Cache, CacheBuilder, Cpu, DType, Digest, Geometry, Reservoir, Selection};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    All,
    Explicit,
    TopPages,
    LargePages,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Memory,
    File,
    Faulty,
}

/// A device to run histories on.
pub trait Place {
    type Backend: Tensors;
    /// How far an output may be from float64, and from a cache on the CPU that never evicts: 0 means to the bit.
    const TOLERANCE: f64;
    const TWIN_TOLERANCE: f32;
    /// Whether pages that an undone step has used may have lost their ways.
    const FORGETS_UNDONE: bool;

    /// The cache, and the test's end of a store that can fail.
    fn build(&self, case: &Case) -> (Cache<Self::Backend>, Option<Handle>);
}

#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub geometry: Geometry,
    pub selection: Selection,
    pub pins: Pins,
    pub reselect_every: usize,
    pub stickiness: f32,
    pub replacement: Rule,
    pub budget: Option<usize>,
    /// Pages that the reservoir holds.
    pub groups: usize,
    /// Ways per head that the device pool holds, over all sequences.
    pub ways: Option<usize>,
    pub scrub: bool,
    pub operations: usize,
    pub threads: usize,
    pub staging: Option<usize>,
    kind: Kind,
}

impl Case {
    pub fn random(wanted: Wanted, seed: u64) -> Self {
        let rng = &mut Rng::new(seed.wrapping_mul(4) + wanted as u64);
        let large = wanted == Wanted::LargePages;
        let kv_heads = 1 + rng.below(2);
        let geometry = Geometry::builder()
            .layers(1 + rng.below(2))
            .kv_heads(kv_heads)
            .query_heads(kv_heads * rng.pick(&[1, 3, 4]))
            .head_dim(if large { 128 } else { rng.pick(&[32, 40, 64]) })
            .page_tokens(if large { 64 } else { rng.pick(&[8, 8, 16]) })
            .dtype(match wanted {
                Wanted::LargePages => DType::F32,
                _ => rng.pick(&[DType::F32, DType::F16, DType::BF16]),
            })
            .build()
            .unwrap();
        let (sink_pages, recent_pages) = (rng.below(3), rng.below(3));
        let selection = match wanted {
            Wanted::All | Wanted::LargePages => Selection::All,
            Wanted::Explicit => Selection::Explicit { sink_pages, recent_pages },
            Wanted::TopPages => {
                let digest = rng.pick(&[
                    Digest::MinMax,
                    Digest::CuboidMean,
                    Digest::KeySketch2,
                    Digest::RotatedSketch1,
                    Digest::RotatedSketch2,
                    Digest::RotatedSketch3,
                ]);
                Selection::TopPages { count: rng.below(6), sink_pages, recent_pages, digest }
            }
        };
        let pins = match selection {
            Selection::All => Pins::default(),
            _ => Pins { sinks: sink_pages as u32, recent: recent_pages as u32 },
        };
        let budget = rng.chance(85).then(|| pins.ways() + rng.pick(&[0, 0, 1, 2, 4, 9]));
        let segment = ((256 << 10) / geometry.page_bytes()).clamp(1, 64);
        Case {
            seed,
            geometry,
            selection,
            pins,
            reselect_every: 1 + rng.below(3),
            stickiness: rng.pick(&[0.0, 0.0, 0.5, 3.0]),
            replacement: if rng.chance(30) { rng.pick(&Rule::ALL) } else { Rule::Lru },
            budget,
            groups: rng.pick(&[12, 40, 100]),
            ways: rng.chance(50).then(|| budget.unwrap_or(20) + rng.below(20)),
            scrub: rng.chance(30),
            operations: if large { 25 } else { 60 },
            threads: 1 + rng.below(3),
            staging: rng.chance(60).then_some(2 * segment + rng.below(3)),
            kind: if rng.chance(15) { Kind::File } else { rng.pick(&[Kind::Memory, Kind::Faulty]) },
        }
    }

    /// The same with a geometry that there are CUDA kernels for, of one of these head dims unless pages are to be large.
    pub fn on_cuda(mut self, head_dims: &[usize]) -> Self {
        let rng = &mut Rng::new(self.seed ^ 0x6E0);
        let g = self.geometry;
        self.replacement = Rule::Lru; // CUDA refuses others
        self.geometry = Geometry::builder()
            .layers(g.layers())
            .kv_heads(g.kv_heads())
            .query_heads(g.query_heads())
            .head_dim(if g.head_dim() == 128 { 128 } else { rng.pick(head_dims) })
            .page_tokens(g.page_tokens())
            .dtype(rng.pick(&[DType::F16, DType::BF16]))
            .build()
            .unwrap();
        self
    }

    /// All settings but the reservoir.
    pub fn builder(&self) -> CacheBuilder {
        let builder = Cache::builder(self.geometry).selection(self.selection);
        let builder = builder.reselect_every(self.reselect_every).stickiness(self.stickiness);
        let builder = builder.replacement(self.replacement).scrub_on_free(self.scrub);
        let builder = match self.budget {
            Some(budget) => builder.pages_per_head(budget),
            None => builder,
        };
        match self.ways {
            Some(ways) => builder.device_pool((ways * self.geometry.group_bytes()) as u64),
            None => builder,
        }
    }

    /// Size of the reservoir.
    pub fn bytes(&self) -> usize {
        self.groups * self.geometry.group_bytes()
    }

    /// A store of its kind, and the test's end of it if it can fail.
    pub fn reservoir(&self) -> (Option<Handle>, Reservoir) {
        let name = format!("wakekv-{}-{}-{:?}", std::process::id(), self.seed, std::thread::current().id());
        match self.kind {
            Kind::Memory => (None, Reservoir::memory(self.bytes() as u64)),
            Kind::File => (None, Reservoir::file(std::env::temp_dir().join(name), self.bytes() as u64)),
            Kind::Faulty => {
                let (handle, reservoir) = Handle::new(self.bytes());
                (Some(handle), reservoir)
            }
        }
    }

    /// A cache that never evicts.
    pub fn build_twin(&self) -> Cache {
        let bytes = self.bytes() as u64;
        Cache::builder(self.geometry)
            .reservoir(Reservoir::memory(bytes))
            .device_pool(3 * bytes)
            .selection(self.selection)
            .reselect_every(self.reselect_every)
            .stickiness(self.stickiness)
            .build(Cpu::new().threads(1))
            .unwrap()
    }
}
