//! The tasks of the evaluation: made from seeds, with the right answer in the right place, and scored for what they ask.

#[path = "../examples/llm/mod.rs"]
mod llm;
#[path = "../examples/tasks/mod.rs"]
mod tasks;

use std::io::Cursor;

use anyhow::Result;
use candle_core::quantized::gguf_file::{self, Value};
use wakekv::Digest::{KeySketch2, RotatedSketch2};
use wakekv::{Cache, Cpu, DType, Geometry, Selection};

use llm::attention::{Kind, Memory};
use llm::gguf::Gguf;
use llm::linear::Weights;
use llm::model::Model;
use llm::tokenizer::Tokenizer;
use tasks::context::Context;
use tasks::oracle::Oracle;
use tasks::run::{Decoding, Reads};
use tasks::{Frame, Measure, Rest, Script, Task};

/// A vocabulary of the 256 bytes and one pair of them, without a template: about a token per byte.
fn bytes() -> Result<Gguf<Cursor<Vec<u8>>>> {
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let shifted = (0..=255).filter(|byte| !printable(byte)).count() as u32;
    let spelled = (0..=255).filter(printable).chain(0x100..0x100 + shifted).filter_map(char::from_u32);
    let tokens = Value::Array(spelled.map(String::from).chain(["ab".to_owned()]).map(Value::String).collect());
    let metadata = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("gpt-2".into())),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.merges", Value::Array(vec![Value::String("a b".into())])),
    ];
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &[])?;
    Gguf::read(Cursor::new(file.into_inner()))
}

/// The script of a task, and what is read and asked as text.
fn script(task: Task, tokens: usize, seed: u64) -> Result<(Script, String, String)> {
    let file = bytes()?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let script = task.script(&Frame { metadata: file.metadata(), tokenizer: &tokenizer }, tokens, seed)?;
    let (context, question) = (tokenizer.decode(&script.context), tokenizer.decode(&script.question));
    Ok((script, context, question))
}

fn answers(script: &Script) -> Vec<String> {
    match &script.rest {
        Rest::Write { answers, .. } => answers.clone(),
        Rest::Follow(_) => Vec::new(),
    }
}

#[test]
fn a_seed_makes_a_script_and_another_seed_another() -> Result<()> {
    for task in Task::ALL {
        let one = script(task, 4000, 3)?.0;
        assert_eq!(one, script(task, 4000, 3)?.0, "{task}");
        assert_ne!(one.context, script(task, 4000, 4)?.0.context, "{task}");
        assert!((3500..4600).contains(&one.context.len()), "{task}: {} tokens", one.context.len());
        assert!(!one.question.is_empty(), "{task}: nothing is decoded before the model is judged");
        assert_eq!(task.name().parse(), Ok(task));
    }
    assert!(script(Task::Needle, 100, 0).is_err());
    Ok(())
}

#[test]
fn a_needle_is_read_once_and_lies_deeper_with_the_seed() -> Result<()> {
    let mut depths = Vec::new();
    for seed in 0..10 {
        for (task, needles) in [(Task::Needle, 1), (Task::Distractors, 8)] {
            let (script, context, question) = script(task, 6000, seed)?;
            let answers = answers(&script);
            assert_eq!(answers.len(), 1);
            assert_eq!(context.matches(&answers[0]).count(), 1, "{task}, seed {seed}");
            assert!(!question.contains(&answers[0]));
            assert_eq!(context.matches("One of the special magic numbers for").count(), needles);
            let place = context.find(&answers[0]).unwrap_or_default();
            // The question is about the key that the number was given to.
            let key = context[..place].rsplit(" for ").next().and_then(|rest| rest.split(" is").next()).unwrap();
            assert!(question.contains(&format!("magic number for {key} ")), "{key}: {question}");
            if needles == 1 {
                depths.push(place as f64 / context.len() as f64);
            }
        }
    }
    assert!(depths.is_sorted() && depths[0] < 0.2 && depths[9] > 0.8, "{depths:?}");
    Ok(())
}

#[test]
fn facts_are_told_first_and_asked_last() -> Result<()> {
    for seed in 0..5 {
        let (script, context, question) = script(Task::Turns, 4000, seed)?;
        let answers = answers(&script);
        assert_eq!(answers.len(), 3);
        for answer in &answers {
            let place = context.find(answer).expect("a fact that was told");
            assert!(place < 300 && !question.contains(answer), "{answer} at {place}");
        }
    }
    Ok(())
}

#[test]
fn chains_are_worked_without_mistakes() -> Result<()> {
    let (_, context, question) = script(Task::Chain, 6000, 1)?;
    let mut sums = 0;
    for line in context.lines().filter_map(|line| line.strip_prefix("Solution: ")) {
        let (steps, answer) = line.split_once(". The answer is ").expect("an answer");
        let mut have = None;
        for step in steps.split(", ") {
            let words: Vec<&str> = step.split(' ').collect();
            let number = |index: usize| words[index].parse::<i64>().unwrap();
            let signed = if words[1] == "-" { -number(2) } else { number(2) };
            assert!(have.is_none_or(|have| have == number(0)) && number(0) + signed == number(4), "{step}");
            have = Some(number(4));
            sums += 1;
        }
        assert_eq!(answer.trim_end_matches('.').parse().ok(), have);
    }
    assert!(sums > 50);
    assert!(question.contains("How many"));
    Ok(())
}

#[test]
fn what_is_copied_was_read_and_what_is_foreseen_goes_on() -> Result<()> {
    let file = bytes()?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    for seed in 0..10 {
        let (script, context, question) = script(Task::Copy, 4000, seed)?;
        let Rest::Follow(ids) = &script.rest else { panic!("nothing is given") };
        let given = question.rsplit("\n\n").next().unwrap();
        assert!(context.contains(&format!("{given}{}", tokenizer.decode(ids))), "seed {seed}: {given}");
        assert_eq!(ids.len(), 64);
    }
    let (script, ..) = script(Task::Prose, 4000, 0)?;
    assert!(matches!(&script.rest, Rest::Follow(ids) if ids.len() == 64));
    assert_eq!(script.context.len() + script.question.len(), 4000);
    Ok(())
}

/// Heads of pages whose keys point each in a direction of its own and whose values are their numbers: what a query reads of page p that
/// looks in its direction is p, if it reads the page at all.
struct Numbered {
    memory: Oracle,
}

const PAGE: usize = 8;

impl Numbered {
    /// 12 pages, the first and the last two of which are always read, and one more.
    fn new(make: impl Fn(Cache) -> Oracle) -> Result<Self> {
        let geometry = Geometry::builder().head_dim(32).page_tokens(PAGE).dtype(DType::F32).build()?;
        let selection = Selection::Explicit { sink_pages: 1, recent_pages: 1 };
        let cache = Cache::builder(geometry).selection(selection).build(Cpu::new().threads(1))?;
        let mut numbered = Numbered { memory: make(cache) };
        let tokens = 12 * PAGE - 4;
        let (mut k, mut v) = (vec![0.0; tokens * 32], vec![0.0; tokens * 32]);
        for token in 0..tokens {
            k[token * 32 + token / PAGE] = 30.0;
            v[token * 32..][..32].fill((token / PAGE) as f32);
        }
        numbered
            .memory
            .step(Kind::Prompt, tokens, &mut |attention| attention.append(0, &k, &v).map(|()| Vec::new()))?;
        Ok(numbered)
    }

    /// What a token reads that looks for a page.
    fn look_for(&mut self, page: usize) -> Result<f32> {
        let (nothing, mut q) = ([0.0; 32], [0.0; 32]);
        q[page] = 10.0;
        let read = self.memory.step(Kind::Generated, 1, &mut |attention| {
            let mut out = vec![f32::NAN; 32];
            attention.attend(0, &q, &nothing, &nothing, &mut out)?;
            Ok(out)
        })?;
        Ok(read[0])
    }
}

#[test]
fn a_page_that_is_evicted_is_read_for_the_last_time() -> Result<()> {
    let found = |make: &dyn Fn(Cache) -> Oracle, pages: &[usize]| -> Result<Vec<bool>> {
        let mut numbered = Numbered::new(make)?;
        pages.iter().map(|&page| Ok((numbered.look_for(page)? - page as f32).abs() < 1e-3)).collect()
    };
    let looks = [5, 6, 6, 5, 9, 5, 0, 11];
    assert_eq!(found(&|cache| Oracle::new(cache, 1), &looks)?, [true; 8]);
    assert_eq!(found(&|cache| Oracle::evicting(cache, 1, 20), &looks)?, [true; 8]);
    // Four ways, three of them pinned. 9 is resident when the prompt ends, and goes unread for 5; 5 goes for 6.
    let evicting = |cache| Oracle::evicting(cache, 1, 4);
    assert_eq!(found(&evicting, &looks)?, [true, true, true, false, false, false, true, true]);
    // With two ways more, 9 is still there, and 5 as well.
    assert_eq!(found(&|cache| Oracle::evicting(cache, 1, 6), &looks)?, [true; 8]);
    Ok(())
}

/// The model finds the number with all pages and with the best ones, and cannot find it in a window that does not hold it.
#[test]
fn a_needle_is_found_by_those_who_can_see_it() -> Result<()> {
    let path = match std::env::var("WAKEKV_FETCH") {
        Ok(fetch) if fetch == "1" => Some(llm::download::fetch(|what| eprintln!("{what}"))?),
        _ => llm::download::cached()?,
    };
    let Some(path) = path else {
        eprintln!("SKIPPED a needle is found: the model has not been fetched; set WAKEKV_FETCH=1 to fetch it");
        return Ok(());
    };
    let mut file = Gguf::open(&path)?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let model = Model::load(&mut file, Weights::Fast, |_, _| {})?;
    let frame = Frame { metadata: file.metadata(), tokenizer: &tokenizer };
    let script = Task::Needle.script(&frame, 512, 2)?;
    let context = Context::read(&model, &script.context, |_| ())?;
    let decoding = Decoding { model: &model, tokenizer: &tokenizer, seed: 0, least: 0 };
    let found = |reads: Reads| -> Result<f64> {
        let mut memory = reads.memory(model.config(), &context, decoding.room(&script))?;
        Ok(decoding.run(&script, memory.as_mut(), || ())?.score(Measure::Found).value(Measure::Found))
    };
    // SnapKV, whose votes are cast before anybody asks, finds it where everything stays.
    for (reads, expected) in [
        (Reads::Full, 1.0),
        (Reads::Oracle(8), 1.0),
        (Reads::Digest(KeySketch2, 8), 1.0),
        (Reads::Sticky(RotatedSketch2, 8), 1.0),
        (Reads::Evict(40), 1.0),
        (Reads::SnapKv(40), 1.0),
        (Reads::SnapKv(8), 0.0),
        (Reads::Window(8), 0.0),
    ] {
        assert_eq!(found(reads)?, expected, "{} of {:?} pages", reads.name(), reads.pages());
    }
    Ok(())
}
