//! The cache on the emulated device: what it computes is exact, and what it counts is the rule's.

#[path = "../../common/mod.rs"]
mod common;
mod device;

use common::{Part, World, error_against_dense, run_step};
use device::Device;
use wakekv::{Cache, CudaBackend, DType, Geometry, Reservoir};

fn geometry(dtype: DType) -> Geometry {
    Geometry::builder().layers(2).query_heads(6).kv_heads(2).head_dim(64).page_tokens(8).dtype(dtype).build().unwrap()
}

/// All layers' outputs of a prompt in chunks and some generated tokens, each compared with float64.
fn run(world: &World, cache: &mut Cache<CudaBackend>, steps: &[usize]) {
    let sequence = cache.insert();
    let mut start = 0;
    for (step, &tokens) in steps.iter().enumerate() {
        let part = Part::new(world, sequence, start, tokens);
        let (outputs, _) = run_step(cache, &[part]).unwrap();
        cache.check().unwrap();
        for (layer, out) in outputs.iter().enumerate() {
            let error = error_against_dense(&part, layer, out, &|_| true);
            assert!(error < 2e-5, "step {step}, layer {layer}: off by {error}");
        }
        start += tokens;
    }
    cache.synchronize().unwrap();
    let counts = cache.stats().counts.total();
    assert_eq!(counts.demanded, counts.hits + counts.misses());
}

#[test]
fn every_budget_is_exact() {
    let Some(device) = Device::new() else { return };
    for dtype in [DType::F16, DType::BF16] {
        let world = World { geometry: geometry(dtype), seed: 1 };
        for budget in [None, Some(2), Some(3), Some(5), Some(16)] {
            let builder = Cache::builder(world.geometry).reservoir(Reservoir::memory(2 << 20));
            let builder = match budget {
                Some(budget) => builder.pages_per_head(budget),
                None => builder,
            };
            let mut cache = builder.build(device.cuda()).unwrap();
            run(&world, &mut cache, &[37, 60, 1, 1, 1, 1, 1, 1, 30, 1, 1, 1, 1, 1, 1, 1]);
        }
    }
}
