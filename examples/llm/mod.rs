//! A small language model to run the cache with: everything that the examples and the model tests share.
//!
//! ```text
//! download   the default model, fetched once
//! gguf       metadata and tensors of a model file
//! linear     one weight matrix, in the form that multiplies fastest
//! rope       rotary position embedding, both layouts
//! model      the forward pass of the Llama and Qwen2 families, up to attention
//! attention  the seam: what a forward pass asks of whoever keeps keys and values, and a dense reference
//! cached     the same memory through the cache
//! tokenizer  text to ids and back
//! chat       a prompt in the model's own template
//! sampler    logits to the next id
//! engine     prefill, decode, stop
//! opened     a model file with its tokenizer and weights
//! options    the command line of `generate`
//! report     what a run did, as a table and as JSON
//! process    threads, errors, exit codes and progress of the programs
//! ```

// Each example and test uses its own part of this module.
#![allow(dead_code)]

pub mod attention;
pub mod cached;
pub mod chat;
pub mod download;
pub mod engine;
pub mod gguf;
pub mod linear;
pub mod model;
pub mod opened;
pub mod options;
pub mod process;
pub mod report;
pub mod rope;
pub mod sampler;
pub mod tokenizer;
