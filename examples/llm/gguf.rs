//! Metadata and tensors of a GGUF file, with errors that name the file and the key.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::Device;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value};

/// An opened model file: its metadata is read, its tensors are read when asked for.
pub struct Gguf<R> {
    content: Content,
    reader: R,
}

impl Gguf<BufReader<File>> {
    /// Opens a file and reads its metadata.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open the model {}", path.display()))?;
        Self::read(BufReader::new(file)).with_context(|| format!("{} is not a readable GGUF file", path.display()))
    }
}

impl<R: Read + Seek> Gguf<R> {
    /// Reads the metadata of any seekable source.
    pub fn read(mut reader: R) -> Result<Self> {
        let content = Content::read(&mut reader)?;
        Ok(Self { content, reader })
    }

    /// A tensor in the type that the file stores.
    pub fn tensor(&mut self, name: &str) -> Result<QTensor> {
        self.content
            .tensor(&mut self.reader, name, &Device::Cpu)
            .with_context(|| format!("cannot read the tensor `{name}`"))
    }

    /// A tensor that some models of a family lack.
    pub fn optional_tensor(&mut self, name: &str) -> Result<Option<QTensor>> {
        if self.content.tensor_infos.contains_key(name) { self.tensor(name).map(Some) } else { Ok(None) }
    }

    /// A small tensor as plain numbers.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        vector(self.tensor(name)?, name, len)
    }

    /// A small tensor as plain numbers, if the file has it.
    pub fn optional_vector(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>> {
        self.optional_tensor(name)?.map(|tensor| vector(tensor, name, len)).transpose()
    }

    /// The names of all tensors, in order of the alphabet.
    pub fn tensor_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.content.tensor_infos.keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// The file's metadata.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata(&self.content)
    }
}

fn vector(tensor: QTensor, name: &str, len: usize) -> Result<Vec<f32>> {
    let values = tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
    if values.len() != len {
        bail!("the tensor `{name}` has {} elements where the metadata implies {len}", values.len());
    }
    Ok(values)
}

/// The key-value part of a model file.
#[derive(Clone, Copy)]
pub struct Metadata<'a>(&'a Content);

impl<'a> Metadata<'a> {
    /// The raw value of a key.
    pub fn get(self, key: &str) -> Option<&'a Value> {
        self.0.metadata.get(key)
    }

    /// All keys and values.
    pub fn entries(self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.0.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The key's value, or an error that names the missing key.
    pub fn require<T>(self, key: &str, value: Option<T>) -> Result<T> {
        value.with_context(|| match self.get(key) {
            None => format!("the model file has no `{key}`"),
            Some(other) => format!("`{key}` in the model file has the unexpected type {:?}", other.value_type()),
        })
    }

    /// A whole number, whatever its width.
    pub fn integer(self, key: &str) -> Option<usize> {
        self.get(key).and_then(integer)
    }

    /// A number that may be stored as an integer or a float.
    pub fn float(self, key: &str) -> Option<f64> {
        match self.get(key)? {
            Value::F32(x) => Some(f64::from(*x)),
            Value::F64(x) => Some(*x),
            other => integer(other).map(|x| x as f64),
        }
    }

    /// A truth value.
    pub fn boolean(self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(x) => Some(*x),
            _ => None,
        }
    }

    /// A text.
    pub fn text(self, key: &str) -> Option<&'a str> {
        match self.get(key)? {
            Value::String(x) => Some(x),
            _ => None,
        }
    }

    /// A list of texts.
    pub fn texts(self, key: &str) -> Option<Vec<&'a str>> {
        let texts = self.list(key)?.iter().map(|value| match value {
            Value::String(x) => Some(x.as_str()),
            _ => None,
        });
        texts.collect()
    }

    /// A list of whole numbers.
    pub fn integers(self, key: &str) -> Option<Vec<usize>> {
        self.list(key)?.iter().map(integer).collect()
    }

    fn list(self, key: &str) -> Option<&'a [Value]> {
        match self.get(key)? {
            Value::Array(values) => Some(values),
            _ => None,
        }
    }
}

fn integer(value: &Value) -> Option<usize> {
    match *value {
        Value::U8(x) => Some(x.into()),
        Value::U16(x) => Some(x.into()),
        Value::U32(x) => x.try_into().ok(),
        Value::U64(x) => x.try_into().ok(),
        Value::I8(x) => x.try_into().ok(),
        Value::I16(x) => x.try_into().ok(),
        Value::I32(x) => x.try_into().ok(),
        Value::I64(x) => x.try_into().ok(),
        _ => None,
    }
}
