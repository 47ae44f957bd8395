//! Recorded runs on disk: what is written is read again, in numpy as well, and what makes no sense is refused.
#![cfg(feature = "trace")]

use std::path::PathBuf;
use std::process::Command;

use half::f16;
use wakekv::sim::{Accounting, Policy, Rule, run};
use wakekv::table::{Phase, Pins};
use wakekv::trace::{Array, Lanes, Log, Mark, Meta, Recorder, Shape, Trace, TraceError};
use wakekv::{Cache, Cpu, Geometry, Selection};

/// A folder that is empty and goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("wakekv-trace-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Two steps, one layer, four query heads in two groups, three tokens each.
fn log() -> Log {
    let heads = [[0, 17, 40], [1, 16, -1], [33, 20, 41], [0, -1, -1]];
    let weights = [[0.5, 0.25, 0.125], [0.75, 0.25, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]];
    Log {
        meta: Meta {
            prompt_len: 42,
            n_layers: 1,
            n_heads: 4,
            n_kv_heads: 2,
            topk: 3,
            sink_tokens: 4,
            local_window: 64,
            needle_token_span: Some([16, 20]),
            generated_text: "zwölf „Füchse“\n".into(),
        },
        indices: heads.into_iter().chain(heads).flatten().collect(),
        weights: weights.into_iter().chain(weights).flatten().map(f16::from_f32).collect(),
        ctx_len: vec![42, 43],
        gen_token_ids: vec![1 << 40, 7],
        needle_score: Some(Array { shape: vec![2, 1, 4], values: (0..8).map(|x| x as f32 / 7.0).collect() }),
        copy_paste: Some(Array { shape: vec![2], values: vec![false, true] }),
    }
}

#[test]
fn a_log_is_read_as_it_was_written() {
    let folder = Folder::new("log");
    log().write(&folder.0).unwrap();
    assert_eq!(Log::read(&folder.0).unwrap(), log());
    let bare =
        Log { needle_score: None, copy_paste: None, meta: Meta { needle_token_span: None, ..log().meta }, ..log() };
    bare.write(&folder.0).unwrap();
    assert_eq!(Log::read(&folder.0).unwrap(), bare);
}

#[test]
fn a_log_loads_in_numpy_and_numpys_logs_load_here() {
    if !Command::new("python3").args(["-c", "import numpy"]).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: python3 with numpy is not there");
        return;
    }
    let folder = Folder::new("numpy");
    log().write(&folder.0).unwrap();
    let script = r#"
import json, sys, numpy as np
log = np.load(sys.argv[1] + "/log.npz")
meta = json.load(open(sys.argv[1] + "/meta.json", encoding="utf-8"))
assert sorted(log.files) == ["copy_paste", "ctx_len", "gen_token_ids", "needle_score", "topk_idx", "topk_val"], log.files
dtypes = [str(log[name].dtype) for name in sorted(log.files)]
assert dtypes == ["bool", "int32", "int64", "float32", "int32", "float16"], dtypes
assert log["topk_idx"].shape == log["topk_val"].shape == (2, 1, 4, 3)
assert log["topk_idx"][1, 0, 2].tolist() == [33, 20, 41] and log["topk_idx"][0, 0, 3].tolist() == [0, -1, -1]
assert log["topk_val"][0, 0, 0].tolist() == [0.5, 0.25, 0.125]
assert log["gen_token_ids"].tolist() == [2**40, 7] and log["ctx_len"].tolist() == [42, 43]
assert log["needle_score"].shape == (2, 1, 4) and log["copy_paste"].tolist() == [False, True]
assert meta["generated_text"] == "zw\u00f6lf \u201eF\u00fcchse\u201c\n" and meta["needle_token_span"] == [16, 20]
for save in (np.savez, np.savez_compressed):
    save(sys.argv[1] + "/log.npz", **{name: log[name] for name in log.files})
    print(save.__name__, flush=True)
    sys.stdin.readline()
"#;
    use std::io::{BufRead, BufReader, Write};
    let mut python = Command::new("python3")
        .args(["-c", script, folder.0.to_str().unwrap()])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, output) = (python.stdin.take().unwrap(), python.stdout.take().unwrap());
    let mut saved = Vec::new();
    for name in BufReader::new(output).lines() {
        assert_eq!(Log::read(&folder.0).unwrap(), log());
        saved.push(name.unwrap());
        input.write_all(b"\n").unwrap();
    }
    assert!(python.wait().unwrap().success());
    assert_eq!(saved, ["savez", "savez_compressed"]);
}

#[test]
fn demands_are_the_pages_of_the_logged_tokens() {
    let pins = Pins { sinks: 1, recent: 0 };
    let queries = log().trace(16, Lanes::Query, pins).unwrap();
    assert_eq!(
        queries.marks().iter().map(|mark| (mark.start, mark.tokens)).collect::<Vec<_>>(),
        [(0, 41), (41, 1), (42, 1)]
    );
    assert_eq!(queries.marks()[0].phase, Phase::Prefill);
    // Tokens 0, 17, 40; 1, 16; 33, 20, 41; 0: with the sink and the last page.
    let demands: Vec<&[u32]> = queries.heads().iter().map(|head| head.demand(1)).collect();
    assert_eq!(demands, [&[0, 1, 2][..], &[0, 1, 2], &[0, 1, 2], &[0, 2]]);
    assert_eq!(queries.head(2).masses(1), Some(&[0.0, 0.25, 0.75][..]));
    let groups = log().trace(16, Lanes::Kv, pins).unwrap();
    assert_eq!(groups.heads().len(), 2);
    assert_eq!(groups.head(0).masses(1), Some(&[0.625, 0.25, 0.0625][..]));
    let groups = log().trace(16, Lanes::Kv, Pins::default()).unwrap();
    let outcome = run(&groups, Policy::Reactive(Rule::Lru), 2, Accounting::Strict).unwrap();
    // Prefill leaves pages 1 and 2; nothing may go for page 0.
    assert_eq!((outcome.counts().hits, outcome.counts().misses()), (8, 4));
}

#[test]
fn logs_that_contradict_themselves_are_refused() {
    let folder = Folder::new("wrong");
    let refused = |log: Log| assert!(matches!(log.write(&folder.0), Err(TraceError::Format { .. })));
    refused(Log { weights: vec![], ..log() });
    refused(Log { meta: Meta { topk: 2, ..log().meta }, ..log() });
    refused(Log { meta: Meta { n_kv_heads: 3, ..log().meta }, ..log() });
    refused(Log { copy_paste: Some(Array { shape: vec![3], values: vec![true] }), ..log() });
    assert!(Log { ctx_len: vec![43, 43], ..log() }.trace(16, Lanes::Kv, Pins::default()).is_err());
    let far = Log { indices: vec![48; 24], ..log() };
    assert!(matches!(far.trace(16, Lanes::Kv, Pins::default()), Err(TraceError::Demand { pages: 3, .. })));

    assert!(matches!(Log::read(&folder.0), Err(TraceError::Io { .. })));
    log().write(&folder.0).unwrap();
    let meta = std::fs::read_to_string(folder.0.join("meta.json")).unwrap();
    std::fs::write(folder.0.join("meta.json"), meta.replace("\"n_layers\": 1", "\"n_layers\": 2")).unwrap();
    assert!(matches!(Log::read(&folder.0), Err(TraceError::Format { .. })));
    std::fs::write(folder.0.join("meta.json"), &meta).unwrap();
    let bytes = std::fs::read(folder.0.join("log.npz")).unwrap();
    std::fs::write(folder.0.join("log.npz"), &bytes[..bytes.len() / 2]).unwrap();
    assert!(matches!(Log::read(&folder.0), Err(TraceError::Format { .. })));
}

/// A cache of two layers with a prompt of 90 tokens and 40 generated ones.
fn recorded(recorder: Recorder) -> Trace {
    let geometry =
        Geometry::builder().layers(2).query_heads(2).kv_heads(2).head_dim(32).page_tokens(8).build().unwrap();
    let builder = Cache::builder(geometry).pages_per_head(5).selection(Selection::top_pages(3));
    let mut cache = builder.observer(recorder.clone()).build(Cpu::new().threads(1)).unwrap();
    let sequence = cache.insert();
    for step in 0..41 {
        let tokens = if step == 0 { 90 } else { 1 };
        let wave = |phase: f32| -> Vec<f32> {
            (0..geometry.kv_elements(tokens)).map(|i| (i as f32 * 0.37 + step as f32 * 1.9 + phase).sin()).collect()
        };
        let mut pass = cache.step(&[(sequence, tokens)]).unwrap();
        for layer in 0..2 {
            pass.append(layer, &wave(0.0), &wave(1.0)).unwrap();
            pass.attend(layer, &wave(2.0), &mut vec![0f32; geometry.query_elements(tokens)]).unwrap();
        }
        pass.finish().unwrap();
    }
    recorder.take(sequence).unwrap()
}

#[test]
fn a_trace_is_loaded_as_it_was_saved() {
    let folder = Folder::new("trace");
    let trace = recorded(Recorder::new());
    assert!(trace.head(3).scores(40).is_none());
    assert!(trace.head(3).tally(40).is_some_and(|tally| tally.hits > 0));
    trace.save(&folder.0).unwrap();
    assert_eq!(Trace::load(&folder.0).unwrap(), trace);
    let scored = recorded(Recorder::with_scores());
    // The prompt scores nothing; then all pages between the first and the last two, once there are more than are chosen.
    assert!(scored.head(3).scores(0).is_none());
    assert!(scored.head(3).scores(40).is_some_and(|scores| scores.first == 1 && scores.scores.len() == 14));
    scored.save(&folder.0).unwrap();
    assert_eq!(Trace::load(&folder.0).unwrap(), scored);
    let weighted = log().trace(16, Lanes::Query, Pins::default()).unwrap();
    weighted.save(&folder.0).unwrap();
    assert_eq!(Trace::load(&folder.0).unwrap(), weighted);
    let shape = Shape { layers: 1, heads_per_layer: 2, page_tokens: 16, pins: Pins::default(), budget: Some(3) };
    let mut sparse = Trace::new(shape);
    sparse.save(&folder.0).unwrap();
    assert!(Trace::load(&folder.0).unwrap().marks().is_empty());
    sparse.push(Mark { step: 4, phase: Phase::Decode, start: 0, tokens: 20 }, &[vec![], vec![0, 1]]).unwrap();
    sparse.save(&folder.0).unwrap();
    assert_eq!(Trace::load(&folder.0).unwrap(), sparse);
}

#[test]
fn steps_that_no_sequence_can_have_are_refused() {
    let shape = Shape { layers: 1, heads_per_layer: 1, page_tokens: 16, pins: Pins::default(), budget: None };
    let mark = |tokens| Mark { step: 1, phase: Phase::Prefill, start: 0, tokens };
    for tokens in [usize::MAX, usize::MAX / 2, 1 << 32] {
        assert!(matches!(Trace::new(shape).push(mark(tokens), &[[0u32; 0]]), Err(TraceError::Length { .. })));
    }
    let none: [[u32; 0]; 1] = [[]];
    assert!(matches!(Trace::new(Shape { page_tokens: 0, ..shape }).push(mark(1), &none), Err(TraceError::PageTokens)));
    // As long as can be, with one page read: nothing is set aside for what is not there.
    let mut long = Trace::new(shape);
    long.push(Mark { phase: Phase::Decode, ..mark(1 << 20) }, &none).unwrap();
    assert_eq!(run(&long, Policy::Belady, 2, Accounting::Strict).unwrap().counts().demanded, 0);
}

#[test]
fn traces_that_were_tampered_with_are_refused() {
    let folder = Folder::new("tampered");
    recorded(Recorder::with_scores()).save(&folder.0).unwrap();
    let path = folder.0.join("trace.json");
    let shape = std::fs::read_to_string(&path).unwrap();
    // A model with fewer heads, and pages that hold more tokens than the demands can mean.
    for (from, to) in
        [("\"layers\": 2", "\"layers\": 1"), ("\"page_tokens\": 8", "\"page_tokens\": 64"), ("8", "0"), ("{", "[")]
    {
        assert!(shape.contains(from));
        std::fs::write(&path, shape.replacen(from, to, 1)).unwrap();
        assert!(Trace::load(&folder.0).is_err(), "{from} is {to}");
    }
    std::fs::write(&path, &shape).unwrap();
    Trace::load(&folder.0).unwrap();
}
