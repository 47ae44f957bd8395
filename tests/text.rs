//! The examples' text handling, on made-up vocabularies: tokenizer, chat template, sampler, command line.

#[path = "../examples/llm/mod.rs"]
mod llm;

use std::io::Cursor;

use anyhow::Result;
use candle_core::quantized::gguf_file::{self, Value};
use clap::Parser;

use llm::gguf::Gguf;
use llm::options::{Keep, Options, Select};
use llm::sampler::{Sampler, argmax};
use llm::tokenizer::Tokenizer;

/// A vocabulary of the 256 bytes as GPT-2 spells them, a few words and two marks.
fn vocabulary(pre: &str, more: &[(&str, Value)]) -> Result<Gguf<Cursor<Vec<u8>>>> {
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let shifted = (0..=255).filter(|byte| !printable(byte)).count() as u32;
    let spelled = (0..=255).filter(printable).chain(0x100..0x100 + shifted);
    let mut tokens: Vec<String> = spelled.filter_map(char::from_u32).map(String::from).collect();
    tokens.extend(["he", "ll", "hell", "hello", "12", "123", "Ġhe"].map(String::from));
    let mut types = vec![1; tokens.len()];
    tokens.extend(["<|im_start|>", "<|im_end|>"].map(String::from));
    types.extend([3, 3]);
    let end = Value::U32(tokens.len() as u32 - 1);
    let texts = |texts: &[String]| Value::Array(texts.iter().cloned().map(Value::String).collect());
    let merges = ["h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ġ he"].map(String::from);
    let metadata = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String(pre.into())),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.merges", texts(&merges)),
        ("tokenizer.ggml.token_type", Value::Array(types.into_iter().map(Value::I32).collect())),
        ("tokenizer.ggml.eos_token_id", end),
    ];
    let metadata: Vec<(&str, &Value)> = metadata.iter().chain(more).map(|(key, value)| (*key, value)).collect();
    let mut file = Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &[])?;
    Gguf::read(Cursor::new(file.into_inner()))
}

fn pieces(pre: &str, text: &str) -> Result<Vec<String>> {
    let file = vocabulary(pre, &[])?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let ids = tokenizer.encode(text)?;
    assert_eq!(tokenizer.decode(&ids), text);
    Ok(ids.iter().map(|&id| tokenizer.decode(&[id])).collect())
}

#[test]
fn families_cut_numbers_differently() -> Result<()> {
    assert_eq!(pieces("gpt-2", "hello 1234")?, ["hello", " ", "123", "4"]);
    assert_eq!(pieces("smollm", "hello 1234")?, ["hello", " ", "1", "2", "3", "4"]);
    assert_eq!(pieces("qwen2", "hello 1234")?, ["hello", " ", "1", "2", "3", "4"]);
    assert_eq!(pieces("llama-bpe", "hello 1234")?, ["hello", " ", "123", "4"]);
    assert_eq!(pieces("smollm", "hello hex")?, ["hello", " he", "x"]);
    Ok(())
}

#[test]
fn marks_are_single_ids_and_no_text() -> Result<()> {
    let file = vocabulary("smollm", &[])?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let ids = tokenizer.encode("<|im_start|>hello<|im_end|>")?;
    assert_eq!((ids.len(), tokenizer.decode(&ids).as_str()), (3, "hello"));
    assert_eq!(tokenizer.stops(), [ids[2]]);
    assert_eq!(tokenizer.spelling(ids[0]).as_deref(), Some("<|im_start|>"));
    Ok(())
}

#[test]
fn the_opening_mark_comes_once_where_the_file_asks_for_it() -> Result<()> {
    let opening = ("tokenizer.ggml.bos_token_id", Value::U32(263));
    let asks = ("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let file = vocabulary("smollm", &[opening.clone(), asks])?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    assert_eq!(tokenizer.encode("a")?.len(), 2);
    assert_eq!(tokenizer.encode("<|im_start|>a")?.len(), 2);
    let file = vocabulary("smollm", &[opening])?;
    assert_eq!(Tokenizer::from_metadata(file.metadata())?.encode("a")?.len(), 1);
    Ok(())
}

#[test]
fn characters_appear_whole_or_replaced() -> Result<()> {
    let file = vocabulary("smollm", &[])?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let ids = tokenizer.encode("é🦀")?;
    assert_eq!(ids.len(), 6);
    let mut decoder = tokenizer.decoder();
    let shown: Vec<String> = ids.iter().map(|&id| decoder.push(id)).collect();
    assert_eq!(shown, ["", "é", "", "", "", "🦀"]);
    assert_eq!(decoder.finish(), "");
    // Cut inside a character, followed by something else, or by nothing.
    let a = tokenizer.encode("a")?[0];
    assert_eq!(tokenizer.decode(&[ids[2], ids[3], a]), "\u{fffd}a");
    assert_eq!(tokenizer.decode(&[ids[1], a, ids[0]]), "\u{fffd}a\u{fffd}");
    Ok(())
}

#[test]
fn unsupported_tokenizers_are_named() -> Result<()> {
    let refusal = |pre: &str, more: &[(&str, Value)]| -> Result<String> {
        let file = vocabulary(pre, more)?;
        Ok(Tokenizer::from_metadata(file.metadata()).err().map(|error| format!("{error:#}")).unwrap_or_default())
    };
    assert!(refusal("tekken", &[])?.contains("`tekken`"));
    let sentencepiece = [("tokenizer.ggml.model", Value::String("llama".into()))];
    assert!(refusal("smollm", &sentencepiece)?.contains("SentencePiece"));
    let wrong = [("tokenizer.ggml.merges", Value::Array(vec![Value::String("z zz".into())]))];
    assert!(refusal("smollm", &wrong)?.contains("merges"));
    let wrong = [("tokenizer.ggml.tokens", Value::U32(3))];
    assert!(refusal("smollm", &wrong)?.contains("tokenizer.ggml.tokens"));
    Ok(())
}

#[test]
fn templates_see_what_hugging_face_gives_them() -> Result<()> {
    let template = "{{ bos_token }}{% for m in messages %}\n  {% if m['role'] == 'user' %}\n<{{ m.content.strip() | trim }}>\n  \
                    {% endif %}\n{% endfor %}{% if add_generation_prompt %}{{ 'A:' + eos_token }}{% endif %}";
    let file = vocabulary("smollm", &[("tokenizer.chat_template", Value::String(template.into()))])?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    assert_eq!(llm::chat::render(file.metadata(), &tokenizer, " hi ")?, "<hi>\nA:<|im_end|>");

    let refusing = Value::String("{{ raise_exception('roles must alternate') }}".into());
    let file = vocabulary("smollm", &[("tokenizer.chat_template", refusing)])?;
    let error = llm::chat::render(file.metadata(), &tokenizer, "hi").unwrap_err();
    assert!(format!("{error:#}").contains("roles must alternate"));

    let file = vocabulary("smollm", &[])?;
    let error = llm::chat::render(file.metadata(), &tokenizer, "hi").unwrap_err();
    assert!(format!("{error:#}").contains("--chat"));
    Ok(())
}

#[test]
fn sampling_is_greedy_at_zero_and_follows_the_odds_above() -> Result<()> {
    let logits = [0.0, 2f32.ln(), f32::MIN, 2f32.ln()];
    assert_eq!(argmax(&logits), Some(1));
    assert_eq!(Sampler::new(0.0, 1).pick(&logits)?, 1);
    let draws = |seed| -> Result<Vec<u32>> {
        let mut sampler = Sampler::new(1.0, seed);
        (0..2000).map(|_| sampler.pick(&logits)).collect()
    };
    assert_eq!(draws(5)?, draws(5)?);
    assert_ne!(draws(5)?, draws(6)?);
    let share = |id: u32| draws(5).map(|draws| draws.iter().filter(|&&draw| draw == id).count());
    assert!((330..470).contains(&share(0)?) && (720..880).contains(&share(1)?) && share(2)? == 0);
    assert!(Sampler::new(0.0, 1).pick(&[0.0, f32::NAN]).is_err());
    Ok(())
}

#[test]
fn the_command_line_is_checked_before_anything_is_loaded() {
    let parse = |line: &str| Options::try_parse_from(std::iter::once("generate").chain(line.split_whitespace()));
    let options = parse("--selection top:8 --reservoir file:/tmp/x --temperature 0.5 --budget 0").unwrap();
    assert_eq!(options.selection, Select::Top(8));
    assert_eq!(options.reservoir, Keep::File("/tmp/x".into()));
    assert_eq!(parse("").unwrap().prompt().unwrap().0, llm::options::DEFAULT_QUESTION);
    for (line, named) in [
        ("--selection most", "neither all nor top:N"),
        ("--selection top:0", "number of pages"),
        ("--reservoir disk", "neither memory nor file:PATH"),
        ("--reservoir file:", "takes a path"),
        ("--page-tokens 24", "power of two from 8 to 128"),
        ("--page-tokens x", "whole number"),
        ("--dtype f64", "f32, f16, bf16"),
        ("--threads 0", "--threads"),
        ("--chunk 0", "--chunk"),
        ("--temperature -1", "0 or more"),
        ("--temperature nan", "0 or more"),
        ("--weights q4", "fast nor f32"),
        ("--tokens many", "--tokens"),
        ("--prompt a --prompt-file b", "cannot be used with"),
        ("--colour", "--colour"),
    ] {
        let error = parse(line).expect_err(line);
        assert!(error.to_string().contains(named), "{line}: {error}");
        assert_eq!(error.exit_code(), 2);
    }
    assert!(parse("--prompt-file /nonexistent").unwrap().prompt().is_err());
}
