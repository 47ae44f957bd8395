//! npz archives: named arrays in a zip file, as `numpy.savez` writes them.

use std::fs::File;
use std::io::{BufReader, BufWriter, Error as IoError};
use std::path::Path;

use npyz::{AutoSerialize, Deserialize, NpyFile, Order, WriterBuilder, npz};
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::TraceError;

pub(super) fn io(what: &Path) -> impl Fn(IoError) -> TraceError {
    let what = what.display().to_string();
    move |source| TraceError::Io { what: what.clone(), source }
}

pub(super) fn format(what: impl ToString, reason: impl ToString) -> TraceError {
    TraceError::Format { what: what.to_string(), reason: reason.to_string() }
}

/// An archive that is being written.
pub(super) struct Writer {
    what: String,
    zip: ZipWriter<BufWriter<File>>,
}

impl Writer {
    pub(super) fn create(path: &Path) -> Result<Self, TraceError> {
        let file = File::create(path).map_err(io(path))?;
        Ok(Writer { what: path.display().to_string(), zip: ZipWriter::new(BufWriter::new(file)) })
    }

    /// Adds an array in C order. There must be as many values as the shape says.
    pub(super) fn array<T: AutoSerialize>(
        &mut self,
        name: &str,
        shape: &[u64],
        values: impl IntoIterator<Item = T>,
    ) -> Result<(), TraceError> {
        self.packed(CompressionMethod::Deflated, name, shape, values)
    }

    /// The same without compression, for numbers that do not compress.
    pub(super) fn plain_array<T: AutoSerialize>(
        &mut self,
        name: &str,
        shape: &[u64],
        values: impl IntoIterator<Item = T>,
    ) -> Result<(), TraceError> {
        self.packed(CompressionMethod::Stored, name, shape, values)
    }

    fn packed<T: AutoSerialize>(
        &mut self,
        method: CompressionMethod,
        name: &str,
        shape: &[u64],
        values: impl IntoIterator<Item = T>,
    ) -> Result<(), TraceError> {
        let failed = |source| TraceError::Io { what: format!("{}: {name}", self.what), source };
        let options = SimpleFileOptions::default().compression_method(method).large_file(true);
        self.zip
            .start_file(npz::file_name_from_array_name(name), options)
            .map_err(|error| failed(IoError::other(error)))?;
        let options = npyz::WriteOptions::new().default_dtype().shape(shape);
        let mut writer = options.writer(&mut self.zip).begin_nd().map_err(failed)?;
        writer.extend(values).map_err(failed)?;
        writer.finish().map_err(failed)
    }

    pub(super) fn finish(self) -> Result<(), TraceError> {
        let what = self.what;
        let failed = |source| TraceError::Io { what: what.clone(), source };
        let buffer = self.zip.finish().map_err(|error| failed(IoError::other(error)))?;
        buffer.into_inner().map_err(|error| failed(error.into_error()))?.sync_all().map_err(failed)
    }
}

/// The shape of an array and its values in C order.
type Values<T> = (Vec<u64>, Vec<T>);

/// An archive that is being read.
pub(super) struct Reader {
    what: String,
    zip: ZipArchive<BufReader<File>>,
}

impl Reader {
    pub(super) fn open(path: &Path) -> Result<Self, TraceError> {
        let file = BufReader::new(File::open(path).map_err(io(path))?);
        let zip = ZipArchive::new(file).map_err(|error| format(path.display(), error))?;
        Ok(Reader { what: path.display().to_string(), zip })
    }

    /// Shape and values of an array in C order, or `None` if there is no such array.
    pub(super) fn optional<T: Deserialize>(&mut self, name: &str) -> Result<Option<Values<T>>, TraceError> {
        let what = format!("{}: {name}", self.what);
        let file = match self.zip.by_name(&npz::file_name_from_array_name(name)) {
            Err(ZipError::FileNotFound) => return Ok(None),
            file => file.map_err(|error| format(&what, error))?,
        };
        let array = NpyFile::new(file).map_err(|error| format(&what, error))?;
        let shape = array.shape().to_vec();
        if array.order() != Order::C && shape.len() > 1 {
            return Err(format(&what, "the array is in Fortran order"));
        }
        // A shape that lies must not make room for more than the file holds.
        let values = array.data::<T>().map_err(|error| format(&what, error))?;
        let values = values.collect::<Result<Vec<T>, _>>().map_err(|error| format(&what, error))?;
        Ok(Some((shape, values)))
    }

    pub(super) fn array<T: Deserialize>(&mut self, name: &str) -> Result<Values<T>, TraceError> {
        self.optional(name)?.ok_or_else(|| format(&self.what, format_args!("there is no array {name}")))
    }
}
