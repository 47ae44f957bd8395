//! Attention through the cache is exact, whatever the budget.

mod common;

use common::{Part, World, error_against_dense, run_step};
use wakekv::{Cache, Cpu, DType, Geometry, Reservoir};

fn geometry(dtype: DType) -> Geometry {
    Geometry::builder().layers(2).query_heads(6).kv_heads(2).head_dim(64).page_tokens(8).dtype(dtype).build().unwrap()
}

/// All layers' outputs of a prompt in two chunks and then some generated tokens.
fn outputs(world: &World, cache: &mut Cache, steps: &[usize]) -> Vec<Vec<Vec<f32>>> {
    let sequence = cache.insert();
    let mut start = 0;
    let mut all = Vec::new();
    for &tokens in steps {
        let (out, report) = run_step(cache, &[Part::new(world, sequence, start, tokens)]).unwrap();
        let counts = report.counts.total();
        assert_eq!(counts.demanded, counts.hits + counts.misses());
        cache.check().unwrap();
        start += tokens;
        all.push(out);
    }
    all
}

#[test]
fn every_budget_gives_the_bits_of_no_budget_and_they_are_right() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let world = World { geometry: geometry(dtype), seed: 1 };
        let steps = [37, 200, 1, 1, 1, 1, 1, 1, 30, 1, 1, 1, 1, 1, 1, 1];
        let build = |budget: Option<usize>, threads| {
            let builder = Cache::builder(world.geometry).reservoir(Reservoir::memory(8 << 20));
            let builder = match budget {
                Some(budget) => builder.pages_per_head(budget),
                None => builder,
            };
            builder.build(Cpu::new().threads(threads)).unwrap()
        };
        let reference = outputs(&world, &mut build(None, 1), &steps);
        let mut start = 0;
        for (step, &tokens) in steps.iter().enumerate() {
            let mut cache = build(None, 1);
            let part = Part::new(&world, cache.insert(), start, tokens);
            for (layer, out) in reference[step].iter().enumerate() {
                let error = error_against_dense(&part, layer, out, &|_| true);
                assert!(error < 2e-6, "{dtype}, step {step}, layer {layer}: off by {error}");
            }
            start += tokens;
        }
        for budget in [2, 3, 5, 16, 1000] {
            for threads in [1, 3] {
                let got = outputs(&world, &mut build(Some(budget), threads), &steps);
                assert_eq!(got, reference, "{dtype}, budget {budget}, {threads} threads");
            }
        }
    }
}

/// Ragged lengths over every head dim, group and page size that models use, with each dtype in turn. The prompt is long enough for
/// pages to be evicted; what is checked is the tokens behind it.
#[test]
fn every_shape_agrees_with_float64() {
    let (mut seed, dtypes) = (0, [DType::F32, DType::F16, DType::BF16]);
    for head_dim in [64, 80, 96, 128, 256] {
        for group in [1, 3, 4, 7, 8] {
            for page_tokens in [8, 16, 32, 64] {
                seed += 1;
                let builder = Geometry::builder().query_heads(2 * group).kv_heads(2).head_dim(head_dim);
                let dtype = dtypes[seed as usize % 3];
                let geometry = builder.page_tokens(page_tokens).dtype(dtype).build().unwrap();
                let world = World { geometry, seed };
                let reservoir = Reservoir::memory(32 * geometry.group_bytes() as u64);
                let builder = Cache::builder(geometry).pages_per_head(3).reservoir(reservoir);
                let mut cache = builder.build(Cpu::new().threads(2)).unwrap();
                let sequence = cache.insert();
                let mut start = 0;
                for tokens in [30 + common::mix(seed) as usize % 100, 1, 5] {
                    let part = Part::new(&world, sequence, start, tokens);
                    let (outputs, _) = run_step(&mut cache, &[part]).unwrap();
                    if tokens <= 5 {
                        let error = error_against_dense(&part, 0, &outputs[0], &|_| true);
                        assert!(error < 4e-6, "seed {seed}, {geometry:?}, {tokens} tokens at {start}: off by {error}");
                    }
                    start += tokens;
                }
            }
        }
    }
}
