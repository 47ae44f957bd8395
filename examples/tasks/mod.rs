//! Work for a language model, generated from seeds: what it reads, what it is asked, how it is judged.
//!
//! ```text
//! words     seeded names, numbers and prose
//! needle    a number hidden in filler, alone or among others
//! turns     a dialogue that ends with questions about its beginning
//! chain     arithmetic, step by step
//! prose     stories to go on with, to copy and to foresee
//! context   keys and values of what is read, computed once and written into every cache that is compared
//! oracle    attention over the pages that a head's true logits choose
//! run       a task's decoded part on one memory
//! record    the same on a cache whose demands are recorded
//! ```

// Each example and test uses its own part of this module.
#![allow(dead_code)]

pub mod chain;
pub mod context;
pub mod needle;
pub mod oracle;
pub mod prose;
pub mod record;
pub mod run;
pub mod turns;
pub mod words;

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, ensure};

use crate::llm::chat;
use crate::llm::gguf::Metadata;
use crate::llm::tokenizer::Tokenizer;

/// A kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Task {
    /// One number hidden in filler (RULER's single needle, arXiv 2404.06654).
    Needle,
    /// One of eight numbers hidden in filler (RULER's multi-key needle).
    Distractors,
    /// Three unlike facts, told first and asked for last.
    Turns,
    /// A chain of sums, after worked ones.
    Chain,
    /// A story to be continued.
    Story,
    /// A text to be copied, the copy being given token by token.
    Copy,
    /// A text to be foreseen token by token.
    Prose,
}

impl Task {
    /// All of them.
    pub const ALL: [Task; 7] =
        [Task::Needle, Task::Distractors, Task::Turns, Task::Chain, Task::Story, Task::Copy, Task::Prose];

    /// What it is called on command lines and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Task::Needle => "needle",
            Task::Distractors => "distractors",
            Task::Turns => "turns",
            Task::Chain => "chain",
            Task::Story => "story",
            Task::Copy => "copy",
            Task::Prose => "prose",
        }
    }

    /// What its score is, where it has one that a small model can earn.
    pub fn measure(self) -> Option<Measure> {
        match self {
            Task::Needle | Task::Distractors | Task::Turns => Some(Measure::Found),
            Task::Copy => Some(Measure::Agreement),
            Task::Prose => Some(Measure::Perplexity),
            Task::Chain | Task::Story => None,
        }
    }

    /// The work of a seed, whose context has about `tokens` tokens.
    pub fn script(self, frame: &Frame<'_>, tokens: usize, seed: u64) -> Result<Script> {
        ensure!(tokens >= 256, "a context of {tokens} tokens is too short for a task: give it at least 256");
        let mut script = match self {
            Task::Needle => needle::script(frame, tokens, seed, 1),
            Task::Distractors => needle::script(frame, tokens, seed, 8),
            Task::Turns => turns::script(frame, tokens, seed),
            Task::Chain => chain::script(frame, tokens, seed),
            Task::Story => prose::story(frame, tokens, seed),
            Task::Copy => prose::copy(frame, tokens, seed),
            Task::Prose => prose::foresee(frame, tokens, seed),
        }?;
        // Something has to be decoded before anything can be judged.
        if script.question.is_empty() {
            script.question.extend(script.context.pop());
        }
        Ok(script)
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Task {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Task::ALL.map(Task::name).join(", ");
        Task::ALL.into_iter().find(|task| task.name() == text).ok_or_else(|| format!("none of {known}"))
    }
}

/// What a score says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Share of the wanted answers that the text holds.
    Found,
    /// Share of the given tokens that the model thought likeliest.
    Agreement,
    /// exp of the mean surprise of the given tokens: lower is better.
    Perplexity,
}

impl Measure {
    /// In a few words.
    pub fn name(self) -> &'static str {
        match self {
            Measure::Found => "answers found in the text",
            Measure::Agreement => "given tokens that the model thought likeliest",
            Measure::Perplexity => "perplexity of the given tokens",
        }
    }
}

/// One piece of work.
#[derive(Clone, Debug, PartialEq)]
pub struct Script {
    /// Read as a prompt, which attends exactly whatever the policy.
    pub context: Vec<u32>,
    /// Fed token by token under the policy that is judged: were the question prefilled, its exact attention would hide the policy's
    /// effect from the first token of the answer.
    pub question: Vec<u32>,
    /// What comes then.
    pub rest: Rest,
}

/// What is decoded after the question.
#[derive(Clone, Debug, PartialEq)]
pub enum Rest {
    /// The model writes at most so many tokens at a temperature.
    Write {
        /// At most so many.
        tokens: usize,
        /// 0 takes the likeliest.
        temperature: f64,
        /// What the text should hold, whatever the case of its letters.
        answers: Vec<String>,
    },
    /// The model is given these one by one, and is judged by what it expected.
    Follow(Vec<u32>),
}

/// How a model is spoken to.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    pub metadata: Metadata<'a>,
    pub tokenizer: &'a Tokenizer,
}

impl Frame<'_> {
    /// A dialogue in the model's own template, cut where `CUT` stands in it: what is read, and what is asked. `begun` is how the answer
    /// begins. A model without a template reads the messages as plain text.
    pub fn dialogue(&self, messages: &[(&str, &str)], begun: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        let framed = chat::render_dialogue(self.metadata, self.tokenizer, messages).unwrap_or_else(|_| {
            let contents: Vec<&str> = messages.iter().map(|&(_, content)| content).collect();
            contents.join("\n\n") + "\n\n"
        });
        let (context, question) = framed.split_once(CUT).unwrap_or((&framed, ""));
        Ok((self.tokenizer.encode(context)?, self.further(&format!("{question}{begun}"))?))
    }

    /// The ids of a text that others go before.
    pub fn further(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode(text)?;
        if ids.first().is_some_and(|&first| Some(first) == self.tokenizer.bos()) && !self.begins_with_bos(text) {
            ids.remove(0);
        }
        Ok(ids)
    }

    fn begins_with_bos(&self, text: &str) -> bool {
        let bos = self.tokenizer.bos().and_then(|bos| self.tokenizer.spelling(bos));
        bos.is_some_and(|bos| text.starts_with(&bos))
    }

    /// Sentences up to some `tokens` tokens.
    pub fn fill(&self, tokens: usize, mut sentence: impl FnMut() -> String) -> Result<Vec<String>> {
        let (mut sentences, mut length) = (Vec::new(), 0);
        while length < tokens {
            let next = sentence();
            length += self.further(&format!(" {next}"))?.len();
            sentences.push(next);
        }
        Ok(sentences)
    }
}

/// Where a prompt ends and its question begins.
pub const CUT: char = '\u{1}';
