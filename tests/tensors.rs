//! Recorded tensors: what is kept, the attention that they make against float64, and the log against a naive one.

mod common;

use common::{Rng, Which, World};
use half::f16;
use wakekv::Geometry;
use wakekv::trace::{Tensors, TraceError};

const PROMPT: usize = 37;
const TOKENS: usize = 61;
const OBSERVED: usize = 8;
const SCALE: f32 = 0.2;

fn seed() -> u64 {
    let seed = std::env::var("WAKEKV_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    eprintln!("WAKEKV_SEED={seed}");
    seed
}

fn world() -> World {
    let geometry = Geometry::builder().layers(2).query_heads(6).kv_heads(2).head_dim(40).build().unwrap();
    World { geometry, seed: seed() }
}

/// The world's tensors, in chunks of random lengths.
fn recorded(world: &World) -> Tensors {
    let mut rng = Rng::new(world.seed);
    let mut tensors = Tensors::new(&world.geometry, SCALE, PROMPT, OBSERVED);
    for layer in 0..world.geometry.layers() {
        let mut start = 0;
        while start < TOKENS {
            let end = (start + 1 + rng.below(12)).min(TOKENS);
            let part = |which| world.tensor(which, layer, start..end);
            tensors.append(layer, &part(Which::Key), &part(Which::Value)).unwrap();
            tensors.queries(layer, start, &part(Which::Query)).unwrap();
            start = end;
        }
    }
    tensors
}

#[test]
fn every_row_is_found_where_it_belongs() {
    let world = world();
    let tensors = recorded(&world);
    assert_eq!((tensors.tokens(), tensors.queried(), tensors.steps()), (TOKENS, 29..TOKENS, 36..TOKENS));
    let row = |which, layer, token, head| -> Vec<f16> {
        (0..40).map(|channel| f16::from_f32(world.at(which, layer, token, head, channel))).collect()
    };
    for (layer, token) in (0..2).flat_map(|layer| (0..TOKENS).map(move |token| (layer, token))) {
        for head in 0..2 {
            assert_eq!(tensors.key(layer, head, token), row(Which::Key, layer, token, head));
            assert_eq!(tensors.value(layer, head, token), row(Which::Value, layer, token, head));
        }
        for head in 0..6 {
            let expected = (token >= PROMPT - OBSERVED).then(|| row(Which::Query, layer, token, head));
            assert_eq!(tensors.query(layer, head, token), expected.as_deref());
        }
    }
    assert!(tensors.key(0, 0, TOKENS).is_empty() && tensors.key(0, 2, 0).is_empty() && tensors.key(2, 0, 0).is_empty());
    assert!(tensors.query(0, 6, PROMPT).is_none() && tensors.query(usize::MAX, 0, usize::MAX).is_none());
}

/// Attention weights in float64, over the numbers as they are kept.
fn naive(world: &World, layer: usize, query_head: usize, token: usize) -> Vec<f64> {
    let at = |which, token, head, channel| f16::from_f32(world.at(which, layer, token, head, channel)).to_f64();
    let logit = |other: usize| -> f64 {
        let products =
            (0..40).map(|c| at(Which::Query, token, query_head, c) * at(Which::Key, other, query_head / 3, c));
        products.sum::<f64>() * f64::from(SCALE)
    };
    let exponentials: Vec<f64> = (0..=token).map(|other| logit(other).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|x| x / sum).collect()
}

#[test]
fn attention_is_that_of_float64() {
    let world = world();
    let tensors = recorded(&world);
    let mut weights = vec![9.0; 3];
    for token in tensors.queried() {
        for (layer, head) in (0..2).flat_map(|layer| (0..6).map(move |head| (layer, head))) {
            tensors.attention(layer, head, token, &mut weights).unwrap();
            let expected = naive(&world, layer, head, token);
            assert_eq!(weights.len(), expected.len());
            for (weight, expected) in weights.iter().zip(expected) {
                assert!((f64::from(*weight) - expected).abs() <= 2e-6 * expected + 1e-9, "{weight} {expected}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let world = world();
    let mut tensors = recorded(&world);
    let before = tensors.clone();
    let (kv, q) = (vec![0.0; 2 * 40], vec![0.0; 6 * 40]);
    let mut weights = Vec::new();
    let refused = [
        tensors.append(2, &kv, &kv),
        tensors.append(0, &kv[1..], &kv[1..]),
        tensors.append(0, &kv, &[]),
        tensors.append(0, &[f32::NAN; 80], &kv),
        tensors.append(0, &kv, &[7e4; 80]),
        tensors.queries(2, TOKENS, &q),
        tensors.queries(0, TOKENS + 1, &q),
        tensors.queries(0, TOKENS - 1, &q),
        tensors.queries(0, TOKENS, &q[1..]),
        tensors.attention(0, 0, PROMPT - OBSERVED - 1, &mut weights),
        tensors.attention(0, 6, PROMPT, &mut weights),
        tensors.attention(0, 0, TOKENS, &mut weights),
    ];
    let kinds: Vec<&str> = refused
        .iter()
        .map(|result| match result {
            Err(TraceError::Layer { layer: 2, layers: 2 }) => "layer",
            Err(TraceError::Rows { .. }) => "rows",
            Err(TraceError::Half { .. }) => "half",
            Err(TraceError::Queries { layer: 0, expected: TOKENS, .. }) => "queries",
            Err(TraceError::Unknown { layer: 0, .. }) => "unknown",
            other => panic!("{other:?}"),
        })
        .collect();
    let expected =
        "layer rows rows half half layer queries queries rows unknown unknown unknown".split(' ').collect::<Vec<_>>();
    assert_eq!(kinds, expected);
    assert_eq!(tensors, before);
    // A query whose keys have not come yet.
    tensors.queries(0, TOKENS, &q).unwrap();
    assert!(matches!(tensors.attention(0, 0, TOKENS, &mut weights), Err(TraceError::Unknown { .. })));
    assert_eq!(tensors.queried(), before.queried());
}

#[cfg(feature = "trace")]
mod saved {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            Scratch(std::env::temp_dir().join(format!("wakekv-tensors-{name}-{}.npz", std::process::id())))
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn tensors_are_read_as_they_were_written() {
        let file = Scratch::new("round");
        let mut tensors = recorded(&world());
        tensors.save(&file.0).unwrap();
        assert_eq!(Tensors::load(&file.0).unwrap(), tensors);
        let complete = tensors.clone();
        // What only one layer has is left out.
        tensors.append(0, &[0.0; 80], &[0.0; 80]).unwrap();
        tensors.queries(0, TOKENS, &[0.0; 240]).unwrap();
        tensors.save(&file.0).unwrap();
        assert_eq!(Tensors::load(&file.0).unwrap(), complete);
        let empty = Tensors::new(&world().geometry, SCALE, PROMPT, OBSERVED);
        empty.save(&file.0).unwrap();
        assert_eq!(Tensors::load(&file.0).unwrap(), empty);
        std::fs::write(&file.0, b"no archive").unwrap();
        assert!(matches!(Tensors::load(&file.0), Err(TraceError::Format { .. })));
    }

    #[test]
    fn tensors_load_in_numpy_and_numpys_attention_is_the_same() {
        if !Command::new("python3").args(["-c", "import numpy"]).output().is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: python3 with numpy is not there");
            return;
        }
        let file = Scratch::new("numpy");
        let tensors = recorded(&world());
        tensors.save(&file.0).unwrap();
        let script = r#"
import sys, numpy as np
t = np.load(sys.argv[1])
assert t["keys"].dtype == t["values"].dtype == t["queries"].dtype == np.float16
assert t["keys"].shape == t["values"].shape == (2, 2, 61, 40) and t["queries"].shape == (2, 6, 32, 40)
prompt, first = t["tokens"].tolist()
assert (prompt, first) == (37, 29)
token, layer, head = 50, 1, 4
logits = t["scale"][0].astype(float) * t["keys"][layer, head // 3, :token + 1].astype(float) @ t["queries"][layer, head, token - first].astype(float)
weights = np.exp(logits - logits.max())
print(*(weights / weights.sum()))
"#;
        let output = Command::new("python3").args(["-c", script, file.0.to_str().unwrap()]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let numpys: Vec<f64> =
            String::from_utf8(output.stdout).unwrap().split_whitespace().map(|x| x.parse().unwrap()).collect();
        let mut weights = Vec::new();
        tensors.attention(1, 4, 50, &mut weights).unwrap();
        assert_eq!(weights.len(), numpys.len());
        assert!(weights.iter().zip(numpys).all(|(a, b)| (f64::from(*a) - b).abs() <= 2e-6 * b));
    }

    #[test]
    fn the_log_holds_the_greatest_weights_of_every_head_and_step() {
        let world = world();
        let tensors = recorded(&world);
        for topk in [5, 64] {
            let log = tensors.log(topk).unwrap();
            assert_eq!((log.steps(), log.meta.prompt_len, log.meta.n_heads, log.meta.topk), (25, PROMPT, 6, topk));
            assert_eq!(log.ctx_len, (37..=61).collect::<Vec<i32>>());
            for step in 0..log.steps() {
                for (layer, head) in (0..2).flat_map(|layer| (0..6).map(move |head| (layer, head))) {
                    let mut expected: Vec<(usize, f64)> =
                        naive(&world, layer, head, PROMPT - 1 + step).into_iter().enumerate().collect();
                    expected.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
                    expected.truncate(topk);
                    let got: Vec<(u32, f32)> = log.attended(step, layer, head).collect();
                    assert_eq!(got.len(), expected.len());
                    for ((token, weight), (expected_token, expected)) in got.into_iter().zip(expected) {
                        assert_eq!(token as usize, expected_token);
                        assert!((f64::from(weight) - expected).abs() <= 1e-3 * expected + 3e-8, "{weight} {expected}");
                    }
                }
            }
        }
        let file = Scratch::new("log");
        let folder = file.0.with_extension("d");
        let log = tensors.log(64).unwrap();
        log.write(&folder).unwrap();
        assert_eq!(wakekv::trace::Log::read(&folder).unwrap(), log);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
