//! A reservoir in a file.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::reservoir::Store;

/// A file of exactly the bytes asked for, made for this cache alone. Where the system allows it the name is removed right away, so
/// that the bytes are gone even if the process is killed; elsewhere it is removed on drop.
#[derive(Debug)]
pub(crate) struct FileStore {
    file: File,
    bytes: u64,
    /// A name that is still there.
    named: Option<PathBuf>,
}

impl FileStore {
    pub(crate) fn create(path: &Path, bytes: u64) -> Result<Self, Error> {
        let error = |cause| Error::ReservoirFile { path: path.display().to_string(), bytes, cause };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(path).map_err(error)?;
        // From here on a failure must not leave the file behind.
        let mut store = FileStore { file, bytes, named: Some(path.to_owned()) };
        set_aside(&store.file, bytes).map_err(error)?;
        if cfg!(unix) {
            std::fs::remove_file(path).map_err(error)?;
            store.named = None;
        }
        Ok(store)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if let Some(path) = &self.named {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Store for FileStore {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    #[cfg(unix)]
    fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, into, offset)
    }

    #[cfg(unix)]
    fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(&self.file, from, offset)
    }

    #[cfg(not(unix))]
    fn read(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.read_exact(into)
    }

    #[cfg(not(unix))]
    fn write(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        use std::io::{Seek, SeekFrom, Write};
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.write_all(from)
    }
}

/// Gives the file its size and makes the file system set the blocks aside, so that a full disk shows now.
fn set_aside(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)?;
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::{Errno, retry_on_intr};
        match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
            Ok(()) => return Ok(()),
            // Not every file system or kernel can.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    write_zeros(file, bytes)
}

/// Where the file system cannot allocate by itself.
fn write_zeros(mut file: &File, bytes: u64) -> io::Result<()> {
    use std::io::Write;
    let zeros = vec![0; 1 << 20];
    let mut left = bytes;
    while left > 0 {
        let chunk = left.min(zeros.len() as u64);
        file.write_all(&zeros[..chunk as usize])?;
        left -= chunk;
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("wakekv-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_file_is_private_exact_and_gone() {
        let path = scratch("private");
        let mut store = FileStore::create(&path, 12_345).unwrap();
        let meta = store.file.metadata().unwrap();
        assert_eq!((meta.permissions().mode() & 0o777, meta.len()), (0o600, 12_345));
        assert!(!path.exists());
        store.write(100, &[7; 50]).unwrap();
        let mut back = [0; 52];
        store.read(99, &mut back).unwrap();
        assert_eq!((back[0], back[1], back[50], back[51]), (0, 7, 7, 0));
    }

    #[test]
    fn a_short_read_is_an_error_and_loses_nothing() {
        let mut store = FileStore::create(&scratch("short"), 100).unwrap();
        store.write(0, &[3; 100]).unwrap();
        store.file.set_len(50).unwrap();
        let mut back = [0; 100];
        assert_eq!(store.read(0, &mut back).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        store.read(0, &mut back[..50]).unwrap();
        assert_eq!(back[..50], [3; 50]);
    }

    #[test]
    fn an_existing_file_is_left_alone() {
        let path = scratch("existing");
        std::fs::write(&path, "mine").unwrap();
        let error = FileStore::create(&path, 100).unwrap_err().to_string();
        assert!(error.contains("100 bytes") && error.contains("existing"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_disk_that_is_too_small_leaves_no_file() {
        let path = scratch("full");
        FileStore::create(&path, 1 << 60).unwrap_err();
        assert!(!path.exists());
    }

    #[test]
    fn zeros_fill_a_file_to_the_byte() {
        let path = scratch("zeros");
        let file = File::create(&path).unwrap();
        write_zeros(&file, (1 << 20) + 17).unwrap();
        assert_eq!(file.metadata().unwrap().len(), (1 << 20) + 17);
        std::fs::remove_file(&path).unwrap();
    }
}
