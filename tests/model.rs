//! The examples' language model against other implementations of it, and the cache against having none.
//!
//! The tests on the real model need its file. They run if it has been fetched already, or if `WAKEKV_FETCH=1` allows
//! them to fetch it; otherwise they say that they were skipped. The others make tiny models of random numbers.

#[path = "../examples/llm/mod.rs"]
mod llm;

use std::io::Cursor;

use anyhow::Result;
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use candle_transformers::models::{quantized_llama, quantized_qwen2};
use clap::Parser;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use llm::attention::{Dense, Kind};
use llm::cached::Cached;
use llm::engine::{self, Request};
use llm::gguf::Gguf;
use llm::linear::Weights;
use llm::model::{Logits, Model};
use llm::options::Options;
use llm::sampler::{Sampler, argmax};
use llm::tokenizer::Tokenizer;

/// Prose of some 1,700 tokens.
const PROSE: &str = include_str!("data/harbour.txt");

// --- Tiny models, on every machine ---

#[test]
fn a_tiny_llama_agrees_with_candle() -> Result<()> {
    let file = tiny_model("llama", GgmlDType::F32)?;
    let mut peer = {
        let mut reader = Cursor::new(&file);
        quantized_llama::ModelWeights::from_gguf(Content::read(&mut reader)?, &mut reader, &Device::Cpu)?
    };
    agrees(&file, |tokens, position| peer.forward(tokens, position))
}

#[test]
fn a_tiny_qwen2_agrees_with_candle() -> Result<()> {
    let file = tiny_model("qwen2", GgmlDType::F32)?;
    let mut peer = {
        let mut reader = Cursor::new(&file);
        quantized_qwen2::ModelWeights::from_gguf(Content::read(&mut reader)?, &mut reader, &Device::Cpu)?
    };
    agrees(&file, |tokens, position| peer.forward(tokens, position))
}

fn agrees(file: &[u8], mut peer: impl FnMut(&Tensor, usize) -> candle_core::Result<Tensor>) -> Result<()> {
    let model = Model::load(&mut Gguf::read(Cursor::new(file))?, Weights::F32, |_, _| {})?;
    let mut memory = dense(&model, 64)?;
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 100).collect();
    let mut position = 0;
    for chunk in [&tokens[..17], &tokens[17..37], &tokens[37..38], &tokens[38..]] {
        let ours = pass(&model, &mut memory, chunk, Logits::Last)?;
        let theirs =
            peer(&Tensor::new(chunk, &Device::Cpu)?.unsqueeze(0)?, position)?.flatten_all()?.to_vec1::<f32>()?;
        position += chunk.len();
        let difference = largest_difference(&ours, &theirs);
        assert!(difference < 1e-4, "logits differ by {difference} after {position} tokens");
    }
    Ok(())
}

#[test]
fn all_logits_end_with_the_last_ones_in_any_chunking() -> Result<()> {
    let file = tiny_model("llama", GgmlDType::F32)?;
    let model = Model::load(&mut Gguf::read(Cursor::new(&file))?, Weights::F32, |_, _| {})?;
    let tokens: Vec<u32> = (0..24).collect();
    let all = pass(&model, &mut dense(&model, 24)?, &tokens, Logits::All)?;
    assert_eq!(all.len(), tokens.len() * model.vocabulary());
    let mut memory = dense(&model, 24)?;
    for (token, expected) in tokens.iter().zip(all.chunks_exact(model.vocabulary())) {
        let one = pass(&model, &mut memory, &[*token], Logits::Last)?;
        assert!(largest_difference(&one, expected) < 1e-4);
    }
    Ok(())
}

#[test]
fn fast_weights_stay_within_the_noise_of_eight_bits() -> Result<()> {
    for stored in [GgmlDType::F32, GgmlDType::F16, GgmlDType::Q8_0, GgmlDType::Q5_0] {
        let file = tiny_model("qwen2", stored)?;
        let logits = |weights| -> Result<Vec<f32>> {
            let model = Model::load(&mut Gguf::read(Cursor::new(&file))?, weights, |_, _| {})?;
            let mut memory = dense(&model, 32)?;
            // One chunk of many rows, one of few: they multiply in different ways.
            let mut logits = pass(&model, &mut memory, &[1; 20], Logits::Last)?;
            logits.extend(pass(&model, &mut memory, &[2; 3], Logits::Last)?);
            Ok(logits)
        };
        let (exact, fast) = (logits(Weights::F32)?, logits(Weights::Fast)?);
        let scale = exact.iter().fold(0f32, |max, x| max.max(x.abs()));
        let difference = largest_difference(&exact, &fast) / scale;
        assert!(difference < 0.05, "{stored:?}: logits differ by {difference} of their scale");
    }
    Ok(())
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() -> Result<()> {
    let refused = |file: &[u8]| {
        let loaded = Gguf::read(Cursor::new(file)).and_then(|mut file| Model::load(&mut file, Weights::F32, |_, _| {}));
        loaded.err().map(|error| format!("{error:#}")).unwrap_or_default()
    };
    assert!(refused(&tiny_model("gemma", GgmlDType::F32)?).contains("`gemma`"));
    assert!(refused(b"not a model at all").contains("magic"));
    let whole = tiny_model("llama", GgmlDType::F32)?;
    assert!(refused(&whole[..whole.len() / 2]).contains("cannot read the tensor"));
    assert!(refused(&whole[..40]).contains("gguf"));
    Ok(())
}

/// A model file of random weights: 2 layers, 4 query heads, 2 KV heads of 32 channels, 100 ids.
fn tiny_model(architecture: &str, dtype: GgmlDType) -> Result<Vec<u8>> {
    const WIDTH: usize = 128;
    let mut random = StdRng::seed_from_u64(7);
    let mut numbers = |len: usize, centre: f32, spread: f32| -> Vec<f32> {
        (0..len).map(|_| centre + spread * (random.random::<f32>() - 0.5)).collect()
    };
    let mut tensors = Vec::new();
    let mut matrix = |name: String, rows: usize, columns: usize| -> Result<()> {
        let values = Tensor::from_vec(numbers(rows * columns, 0.0, 0.4), (rows, columns), &Device::Cpu)?;
        tensors.push((name, QTensor::quantize(&values, dtype)?));
        Ok(())
    };
    matrix("token_embd.weight".into(), 100, WIDTH)?;
    for layer in 0..2 {
        for (part, rows, columns) in [
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH / 2, WIDTH),
            ("attn_v", WIDTH / 2, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", 256, WIDTH),
            ("ffn_up", 256, WIDTH),
            ("ffn_down", WIDTH, 256),
        ] {
            matrix(format!("blk.{layer}.{part}.weight"), rows, columns)?;
        }
    }
    let mut vector = |name: String, len: usize, centre: f32| -> Result<()> {
        let values = Tensor::from_vec(numbers(len, centre, 0.5), len, &Device::Cpu)?;
        tensors.push((name, QTensor::quantize(&values, GgmlDType::F32)?));
        Ok(())
    };
    vector("output_norm.weight".into(), WIDTH, 1.0)?;
    for layer in 0..2 {
        vector(format!("blk.{layer}.attn_norm.weight"), WIDTH, 1.0)?;
        vector(format!("blk.{layer}.ffn_norm.weight"), WIDTH, 1.0)?;
        if architecture == "qwen2" {
            vector(format!("blk.{layer}.attn_q.bias"), WIDTH, 0.0)?;
            vector(format!("blk.{layer}.attn_k.bias"), WIDTH / 2, 0.0)?;
            vector(format!("blk.{layer}.attn_v.bias"), WIDTH / 2, 0.0)?;
        }
    }
    let own = |key: &str, value| (format!("{architecture}.{key}"), value);
    let metadata = [
        ("general.architecture".to_owned(), Value::String(architecture.to_owned())),
        own("block_count", Value::U32(2)),
        own("context_length", Value::U32(256)),
        own("embedding_length", Value::U32(WIDTH as u32)),
        own("attention.head_count", Value::U32(4)),
        own("attention.head_count_kv", Value::U32(2)),
        own("attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        own("rope.dimension_count", Value::U32(32)),
        own("rope.freq_base", Value::F32(10_000.0)),
    ];
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(file.into_inner())
}

/// A pass over prompt tokens.
fn pass(model: &Model, memory: &mut Dense, tokens: &[u32], wanted: Logits) -> Result<Vec<f32>> {
    engine::pass(model, memory, Kind::Prompt, tokens, wanted)
}

fn dense(model: &Model, tokens: usize) -> Result<Dense> {
    let c = model.config();
    Dense::new(c.layers, c.kv_heads, c.head_dim, tokens)
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |max, (a, b)| max.max((a - b).abs()))
}

// --- The real model, where its file can be had ---

/// The default model's file, or nothing, having said that the test is skipped.
fn real_model(test: &str) -> Result<Option<Gguf<std::io::BufReader<std::fs::File>>>> {
    let path = match std::env::var("WAKEKV_FETCH") {
        Ok(fetch) if fetch == "1" => Some(llm::download::fetch(|what| eprintln!("{what}"))?),
        _ => llm::download::cached()?,
    };
    match path {
        Some(path) => Gguf::open(&path).map(Some),
        None => {
            eprintln!("SKIPPED {test}: the model has not been fetched; set WAKEKV_FETCH=1 to fetch it");
            Ok(None)
        }
    }
}

#[test]
fn the_tokenizer_gives_back_what_it_was_given() -> Result<()> {
    let Some(file) = real_model("the_tokenizer_gives_back_what_it_was_given")? else { return Ok(()) };
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let varied =
        "Ünïcödé, 日本語 and 🦀🧑‍🚀!\n\n\tfn main() {\r\n    let x = 1_000;\n}   trailing  spaces   \nIt's 12345.67 €";
    for text in [PROSE, varied, "", " ", "a", "\u{0}\u{7f}", "e\u{301} vs é"] {
        let ids = tokenizer.encode(text)?;
        assert_eq!(tokenizer.decode(&ids), text);
        // However the text is cut into tokens, no half of a character is ever shown.
        let mut decoder = tokenizer.decoder();
        let mut shown: String = ids.iter().map(|&id| decoder.push(id)).collect();
        assert!(!shown.contains(char::REPLACEMENT_CHARACTER));
        shown.push_str(&decoder.finish());
        assert_eq!(shown, text);
    }
    let spelled: Vec<Option<u32>> = ["2", "0", "2", "4"].map(|digit| tokenizer.id(digit)).into();
    assert_eq!(tokenizer.encode("2024")?.into_iter().map(Some).collect::<Vec<_>>(), spelled);
    assert_eq!(tokenizer.encode("<|im_start|>user<|im_end|>")?, [1, tokenizer.encode("user")?[0], 2]);
    assert_eq!(tokenizer.stops(), [0, 2]);
    assert!(tokenizer.encode(PROSE)?.len() >= 1_500);
    Ok(())
}

#[test]
fn the_chat_template_frames_a_message() -> Result<()> {
    let Some(file) = real_model("the_chat_template_frames_a_message")? else { return Ok(()) };
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let prompt = llm::chat::render(file.metadata(), &tokenizer, "Hi.\nWho are you?")?;
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi.\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    );
    Ok(())
}

/// The same weights as f32 on both sides: what is left is the order of summation.
#[test]
fn f32_logits_agree_with_candle_over_a_long_prompt_and_its_continuation() -> Result<()> {
    let Some(mut file) = real_model("f32_logits_agree_with_candle_over_a_long_prompt_and_its_continuation")? else {
        return Ok(());
    };
    let prompt = Tokenizer::from_metadata(file.metadata())?.encode(PROSE)?;
    const CONTINUED: usize = 24;
    let (ids, ours) = {
        let model = Model::load(&mut file, Weights::F32, |_, _| {})?;
        let mut memory = cached(&model, prompt.len() + CONTINUED, "--budget 0 --dtype f32")?;
        let mut logits = Vec::new();
        for chunk in prompt.chunks(512) {
            logits = engine::pass(&model, &mut memory, Kind::Prompt, chunk, Logits::Last)?;
        }
        let (mut ids, mut all) = (Vec::new(), Vec::new());
        while ids.len() < CONTINUED {
            let id = argmax(&logits).map_or(0, |id| id as u32);
            ids.push(id);
            all.push(std::mem::replace(
                &mut logits,
                engine::pass(&model, &mut memory, Kind::Generated, &[id], Logits::Last)?,
            ));
        }
        (ids, all)
    };
    let mut peer = {
        let mut rewritten = Cursor::new(as_f32(&mut file)?);
        quantized_llama::ModelWeights::from_gguf(Content::read(&mut rewritten)?, &mut rewritten, &Device::Cpu)?
    };
    let mut theirs = peer.forward(&row(&prompt)?, 0)?;
    let mut worst = Distance::default();
    for (i, (&id, ours)) in ids.iter().zip(&ours).enumerate() {
        let logits = theirs.flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(argmax(&logits), Some(id as usize), "greedy ids part at {i}");
        worst = worst.max(Distance::between(ours, &logits));
        theirs = peer.forward(&row(&[id])?, prompt.len() + i)?;
    }
    eprintln!(
        "f32 weights, {} + {CONTINUED} tokens, greedy ids equal, worst of all positions: {worst:?}",
        prompt.len()
    );
    assert!(worst.largest < 0.005 && worst.divergence < 1e-6, "{worst:?}");
    Ok(())
}

/// The point of it all: a head that may keep 4 pages says what a head says that keeps all 117.
#[test]
fn no_budget_changes_what_is_said() -> Result<()> {
    let Some(story) = Story::load("no_budget_changes_what_is_said")? else { return Ok(()) };
    let (expected, memory) = story.go_on(200, "--budget 0")?;
    assert_eq!((expected.len(), memory.decode().counts.misses()), (200, 0));
    for budget in [4, 16, 64] {
        let (ids, memory) = story.go_on(200, &format!("--budget {budget}"))?;
        assert_eq!(ids, expected, "budget {budget}");
        let counts = memory.decode().counts;
        assert!(counts.misses() > 0 && counts.hits + counts.misses() == counts.demanded, "{counts:?}");
        eprintln!("{} + 200 tokens, budget {budget}: same ids, {counts:?}", story.prompt.len());
    }
    eprintln!("{}", story.tokenizer.decode(&expected));
    Ok(())
}

/// The same where a head reads the best few pages only: they are the best wherever they lie.
#[test]
fn no_budget_changes_what_is_said_with_a_selection_of_pages() -> Result<()> {
    let Some(story) = Story::load("no_budget_changes_what_is_said_with_a_selection_of_pages")? else { return Ok(()) };
    let (expected, memory) = story.go_on(40, "--budget 0 --selection top:8")?;
    assert_eq!(memory.decode().counts.misses(), 0);
    let (ids, memory) = story.go_on(40, "--budget 12 --selection top:8")?;
    assert_eq!(ids, expected);
    assert!(memory.decode().counts.misses() > 0);
    eprintln!("{} + 40 tokens, 8 pages of each head: same ids, {:?}", story.prompt.len(), memory.decode().counts);
    Ok(())
}

/// The real model and a text for it to continue.
struct Story {
    model: Model,
    tokenizer: Tokenizer,
    prompt: Vec<u32>,
}

impl Story {
    fn load(test: &str) -> Result<Option<Self>> {
        let Some(mut file) = real_model(test)? else { return Ok(None) };
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let prompt = tokenizer.encode(PROSE)?;
        Ok(Some(Self { model: Model::load(&mut file, Weights::Fast, |_, _| {})?, tokenizer, prompt }))
    }

    /// The likeliest continuation through a cache that `flags` describe.
    fn go_on(&self, tokens: usize, flags: &str) -> Result<(Vec<u32>, Cached)> {
        let mut memory = cached(&self.model, self.prompt.len() + tokens, flags)?;
        // The model would rather end its text early; here it may not.
        let request = Request { prompt: &self.prompt, tokens, chunk: 512, stops: &[] };
        let generated = engine::generate(&self.model, &mut memory, &mut Sampler::new(0.0, 0), request, |_| Ok(()))?;
        Ok((generated.ids, memory))
    }
}

/// An empty sequence in a cache that the command line's flags describe.
fn cached(model: &Model, tokens: usize, flags: &str) -> Result<Cached> {
    let options = Options::try_parse_from(std::iter::once("generate").chain(flags.split_whitespace()))?;
    Ok(Cached::new(options.cache(model.config(), tokens)?))
}

/// candle multiplies the quantised weights with activations rounded to 8 bits, so this is only as close as that.
#[test]
fn logits_agree_with_candles_quantised_model_within_its_noise() -> Result<()> {
    let Some(mut file) = real_model("logits_agree_with_candles_quantised_model_within_its_noise")? else {
        return Ok(());
    };
    let tokens = Tokenizer::from_metadata(file.metadata())?.encode(&PROSE[..250])?;
    let mut peer = {
        let mut stored = std::io::BufReader::new(std::fs::File::open(llm::download::fetch(|_| {})?)?);
        quantized_llama::ModelWeights::from_gguf(Content::read(&mut stored)?, &mut stored, &Device::Cpu)?
    };
    let (prompt, rest) = tokens.split_at(tokens.len() - 16);
    peer.forward(&row(prompt)?, 0)?;
    let theirs = rest
        .iter()
        .enumerate()
        .map(|(i, &token)| Ok(peer.forward(&row(&[token])?, prompt.len() + i)?.flatten_all()?.to_vec1::<f32>()?));
    let theirs = theirs.collect::<Result<Vec<_>>>()?;
    for weights in [Weights::F32, Weights::Fast] {
        let model = Model::load(&mut file, weights, |_, _| {})?;
        let mut memory = dense(&model, tokens.len())?;
        pass(&model, &mut memory, prompt, Logits::Last)?;
        let mut worst = Distance::default();
        let mut mean = 0.0;
        for (token, theirs) in rest.iter().zip(&theirs) {
            let ours = pass(&model, &mut memory, &[*token], Logits::Last)?;
            let distance = Distance::between(&ours, theirs);
            worst = worst.max(distance);
            mean += distance.divergence / rest.len() as f64;
        }
        eprintln!(
            "{weights:?} against candle's quantised path, {} tokens: worst {worst:?}, mean KL {mean:.5}",
            tokens.len()
        );
        assert!(mean < 0.03 && worst.divergence < 0.1, "{weights:?}: {worst:?}, mean KL {mean}");
    }
    Ok(())
}

/// The file again with every tensor as f32, which candle then multiplies as f32.
fn as_f32<R: std::io::Read + std::io::Seek>(file: &mut Gguf<R>) -> Result<Vec<u8>> {
    let mut tensors = Vec::new();
    for name in file.tensor_names() {
        let plain = file.tensor(&name)?.dequantize(&Device::Cpu)?;
        tensors.push((name, QTensor::quantize(&plain, GgmlDType::F32)?));
    }
    let metadata = file.metadata().entries().filter(|(key, _)| !key.starts_with("tokenizer."));
    let metadata: Vec<(&str, &Value)> = metadata.collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut rewritten = Cursor::new(Vec::new());
    gguf_file::write(&mut rewritten, &metadata, &tensors)?;
    Ok(rewritten.into_inner())
}

fn row(tokens: &[u32]) -> Result<Tensor> {
    Ok(Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?)
}

/// How far two sets of logits are apart.
#[derive(Clone, Copy, Debug, Default)]
struct Distance {
    largest: f32,
    /// Kullback-Leibler, in nats.
    divergence: f64,
}

impl Distance {
    fn between(a: &[f32], b: &[f32]) -> Self {
        let (p, q) = (log_softmax(a), log_softmax(b));
        let divergence = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
        Self { largest: largest_difference(a, b), divergence }
    }

    fn max(self, other: Self) -> Self {
        Self { largest: self.largest.max(other.largest), divergence: self.divergence.max(other.divergence) }
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, &x| max.max(x.into()));
    let total: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - max - total.ln()).collect()
}
