//! Text to ids and back, built from a model file's metadata.

use std::collections::HashMap;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, normalizers};

use super::gguf::Metadata;

/// A model's tokenizer.
pub struct Tokenizer {
    bpe: tokenizers::Tokenizer,
    /// What each id stands for. Bytes, as a character may be split over tokens.
    pieces: Vec<Piece>,
    ids: HashMap<String, u32>,
    bos: Option<u32>,
    adds_bos: bool,
    stops: Vec<u32>,
}

struct Piece {
    bytes: Vec<u8>,
    /// A mark of the format, such as the end of a turn; not part of the text.
    control: bool,
}

/// Types that GGUF gives to tokens.
const CONTROL: usize = 3;
const USER_DEFINED: usize = 4;

/// Marks that end a turn or a text, by the names they have in models at large: a file's metadata names only one or two.
const ENDS: [&str; 7] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>"];

impl Tokenizer {
    /// Builds the tokenizer that the metadata describes.
    pub fn from_metadata(metadata: Metadata<'_>) -> Result<Self> {
        let required = |key: &str| metadata.require(key, metadata.text(key));
        let model = required("tokenizer.ggml.model")?;
        ensure!(
            model == "gpt2",
            "the model file's tokenizer is `{model}`; only byte-level BPE (`gpt2`) is supported, not SentencePiece"
        );
        let texts = metadata.require("tokenizer.ggml.tokens", metadata.texts("tokenizer.ggml.tokens"))?;
        let types = metadata.integers("tokenizer.ggml.token_type").unwrap_or_else(|| vec![1; texts.len()]);
        ensure!(types.len() == texts.len(), "{} token types for {} tokens", types.len(), texts.len());
        let scheme = Scheme::named(metadata.text("tokenizer.ggml.pre").unwrap_or("default"))?;

        let ids: HashMap<String, u32> = texts.iter().zip(0..).map(|(text, id)| (text.to_string(), id)).collect();
        let mut bpe = tokenizers::Tokenizer::new(
            BPE::builder()
                .vocab_and_merges(
                    ids.clone().into_iter().collect::<tokenizers::models::bpe::Vocab>(),
                    merges(metadata)?,
                )
                .ignore_merges(scheme.ignores_merges)
                .build()
                .map_err(|error| anyhow!("the file's merges do not fit its tokens: {error}"))?,
        );
        bpe.with_pre_tokenizer(Some(scheme.split()?));
        if scheme.composes {
            bpe.with_normalizer(Some(NormalizerWrapper::NFC(normalizers::NFC)))
                .map_err(|error| anyhow!("cannot set up the normalizer: {error}"))?;
        }
        let marks = texts.iter().zip(&types).filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED));
        bpe.add_special_tokens(marks.map(|(text, _)| AddedToken::from(*text, true)))
            .map_err(|error| anyhow!("cannot add the special tokens: {error}"))?;

        let bytes_of = byte_alphabet();
        let pieces = texts.iter().zip(&types).map(|(text, &kind)| Piece {
            bytes: if matches!(kind, CONTROL | USER_DEFINED) {
                text.as_bytes().to_vec()
            } else {
                spell(text, &bytes_of)
            },
            control: kind == CONTROL,
        });
        let pieces: Vec<Piece> = pieces.collect();
        let id = |key: &str| metadata.integer(key).and_then(|id| u32::try_from(id).ok());
        let bos = id("tokenizer.ggml.bos_token_id").filter(|&bos| (bos as usize) < pieces.len());
        let adds_bos = metadata.boolean("tokenizer.ggml.add_bos_token").unwrap_or(scheme.adds_bos);
        let named = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"].into_iter().filter_map(id);
        let known = ENDS.iter().filter_map(|text| ids.get(*text).copied());
        let mut stops: Vec<u32> = named.chain(known.filter(|&id| types[id as usize] == CONTROL)).collect();
        stops.sort_unstable();
        stops.dedup();
        Ok(Self { bpe, pieces, ids, bos, adds_bos, stops })
    }

    /// The ids of a text, with the model's opening mark if it wants one. Marks that appear in the text become their ids.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding =
            self.bpe.encode_fast(text, false).map_err(|error| anyhow!("cannot tokenize the text: {error}"))?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(bos) = self.bos.filter(|bos| self.adds_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The text of some ids, marks left out. Bytes that are no UTF-8 become replacement characters.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut decoder = self.decoder();
        let mut text: String = ids.iter().map(|&id| decoder.push(id)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// Decodes ids as they come.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder { tokenizer: self, pending: Vec::new() }
    }

    /// The id of a token by its exact spelling.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// The spelling of a token, marks included.
    pub fn spelling(&self, id: u32) -> Option<String> {
        self.pieces.get(id as usize).map(|piece| String::from_utf8_lossy(&piece.bytes).into_owned())
    }

    /// The mark that opens a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Ids after which generation ends.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }
}

/// Holds back the bytes of an unfinished character.
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u8>,
}

impl Decoder<'_> {
    /// The text that this id completes.
    pub fn push(&mut self, id: u32) -> String {
        if let Some(piece) = self.tokenizer.pieces.get(id as usize).filter(|piece| !piece.control) {
            self.pending.extend_from_slice(&piece.bytes);
        }
        take_characters(&mut self.pending)
    }

    /// What is left: a replacement character if the text ended inside one.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Moves whole characters out of `bytes`, replacing what can never become one.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let invalid = chunk.invalid();
        let unfinished = taken + invalid.len() == bytes.len() && may_continue(invalid);
        if !invalid.is_empty() && !unfinished {
            text.push(char::REPLACEMENT_CHARACTER);
            taken += invalid.len();
        }
    }
    bytes.drain(..taken);
    text
}

/// Whether more bytes could make a character of these.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

fn merges(metadata: Metadata<'_>) -> Result<Vec<(String, String)>> {
    let merges = metadata.require("tokenizer.ggml.merges", metadata.texts("tokenizer.ggml.merges"))?;
    let pair = |merge: &str| {
        let (left, right) = merge.split_once(' ').with_context(|| format!("`{merge}` is no merge of two tokens"))?;
        Ok((left.to_owned(), right.to_owned()))
    };
    merges.into_iter().map(pair).collect()
}

/// How text is cut into words before BPE: the families differ in it, and the file names only the family.
struct Scheme {
    splits: Splits,
    composes: bool,
    ignores_merges: bool,
    adds_bos: bool,
}

enum Splits {
    Gpt2,
    DigitsThenGpt2,
    Pattern(String),
}

impl Scheme {
    fn named(pre: &str) -> Result<Self> {
        let plain = Self { splits: Splits::Gpt2, composes: false, ignores_merges: false, adds_bos: false };
        Ok(match pre {
            "default" | "gpt-2" | "gpt2" => plain,
            "smollm" | "starcoder" | "refact" | "codeshell" => Self { splits: Splits::DigitsThenGpt2, ..plain },
            "qwen2" | "deepseek-r1-qwen" => Self { splits: Splits::Pattern(words(1)), composes: true, ..plain },
            "llama-bpe" | "llama3" | "llama-v3" => {
                Self { splits: Splits::Pattern(words(3)), ignores_merges: true, adds_bos: true, ..plain }
            }
            other => bail!(
                "the model file's pre-tokenizer is `{other}`; supported are `smollm`, `qwen2`, `llama-bpe` and `gpt-2`"
            ),
        })
    }

    fn split(&self) -> Result<PreTokenizerWrapper> {
        let byte_level = |splits| PreTokenizerWrapper::from(ByteLevel::new(false, false, splits));
        let sequence = |first: PreTokenizerWrapper, second| Sequence::new(vec![first, second]).into();
        Ok(match &self.splits {
            Splits::Gpt2 => byte_level(true),
            Splits::DigitsThenGpt2 => sequence(Digits::new(true).into(), byte_level(true)),
            Splits::Pattern(pattern) => {
                let pattern = SplitPattern::Regex(pattern.clone());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                    .map_err(|error| anyhow!("cannot compile the pre-tokenizer's pattern: {error}"))?;
                sequence(split.into(), byte_level(false))
            }
        })
    }
}

/// The pattern that GPT-4's tokenizer brought into use, with numbers cut after `digits` digits.
fn words(digits: usize) -> String {
    let number = if digits == 1 { r"\p{N}".to_owned() } else { format!(r"\p{{N}}{{1,{digits}}}") };
    let contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)";
    let rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    format!(r"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}|{rest}")
}

/// GPT-2 spells each byte as a printable character: this is the way back.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut shifted = 0x100u32..;
    let spelled = (0..=u8::MAX).filter_map(|byte| {
        let code = if printable(byte) { u32::from(byte) } else { shifted.next()? };
        Some((char::from_u32(code)?, byte))
    });
    spelled.collect()
}

fn spell(text: &str, bytes_of: &HashMap<char, u8>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match bytes_of.get(&c) {
            Some(&byte) => bytes.push(byte),
            // Not byte-level after all: a token that the file mislabels as normal stands for itself.
            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}
