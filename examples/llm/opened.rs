//! A model file with everything that a run of it needs.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::Result;

use super::download;
use super::gguf::Gguf;
use super::linear::Weights;
use super::model::Model;
use super::tokenizer::Tokenizer;

pub struct Opened {
    /// The file's name without its extension.
    pub name: String,
    pub file: Gguf<BufReader<File>>,
    pub tokenizer: Tokenizer,
    pub model: Model,
}

impl Opened {
    /// The model at `path`, else the default one, which is fetched once. Its weights are held as runs fastest.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => download::fetch(|what| eprintln!("{what}"))?,
        };
        let mut file = Gguf::open(&path)?;
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let model = Model::load(&mut file, Weights::Fast, |_, _| {})?;
        let name = path.file_stem().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        Ok(Opened { name, file, tokenizer, model })
    }
}
