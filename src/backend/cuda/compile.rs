//! The kernels from their embedded sources, compiled at first use and kept for the next process.

use std::path::{Path, PathBuf};
use std::{env, fs};

use super::images::{HEADERS, SOURCES};
use super::nvrtc::Nvrtc;
use crate::error::Error;
use crate::geometry::{DType, Geometry};

/// Compiles the embedded sources with NVRTC, or takes what an earlier process has compiled from the folder.
///
/// # Errors
/// There is no NVRTC, or it fails.
pub(super) fn compile(capability: u32, geometry: &Geometry, folder: Option<&Path>) -> Result<Vec<Vec<u8>>, Error> {
    let nvrtc = Nvrtc::load()?;
    // A newer device than the compiler knows runs code for an older one.
    let arch = nvrtc.architectures()?.into_iter().filter(|&arch| arch <= capability).max();
    let arch = arch.ok_or_else(|| Error::CudaKernels {
        reason: format!("NVRTC {} has no architecture for compute capability {capability}", nvrtc.version()),
    })?;
    let machine_code = arch / 10 == capability / 10;
    let compile = |&(file, source): &(&str, &str)| {
        let source = format!("{}\n{source}", wanted(geometry));
        let kind = if machine_code { "cubin" } else { "ptx" };
        let name = format!("{file}-sm_{arch}-{:016x}.{kind}", key(nvrtc.version(), &source));
        let path = folder.map(|folder| folder.join(name));
        if let Some(image) = path.as_ref().and_then(|path| kept(path)) {
            return Ok(image);
        }
        tracing::info!(file, arch, "compiling CUDA kernels");
        let mut image = nvrtc.compile(file, &source, HEADERS, arch, machine_code)?;
        image.push(0); // PTX is text, and the driver takes a C string
        if let Some(path) = path {
            keep(&path, &image);
        }
        Ok(image)
    };
    SOURCES.iter().map(compile).collect()
}

/// Of the attention kernels only those of one dtype and head dim: all of them take minutes.
fn wanted(geometry: &Geometry) -> String {
    let (element, name) = match geometry.dtype() {
        DType::BF16 => ("__nv_bfloat16", "bf16"),
        _ => ("__half", "f16"),
    };
    format!("#define WAKEKV_ATTEND ATTEND_DIM({element}, {name}, {})", geometry.head_dim())
}

/// Where compiled kernels are kept unless the user says otherwise.
pub(super) fn default_folder() -> Option<PathBuf> {
    let caches = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home =
        || env::var_os("HOME").or_else(|| env::var_os("USERPROFILE")).map(|home| Path::new(&home).join(".cache"));
    Some(caches.or_else(home)?.join("wakekv").join("kernels"))
}

/// A number that changes with the compiler and the text. Files of other numbers are left to lie.
fn key(version: &str, source: &str) -> u64 {
    let headers = HEADERS.iter().map(|(_, text)| *text);
    hash([version, source].into_iter().chain(headers).flat_map(|text| text.bytes().chain([0])))
}

/// FNV-1a.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// An image that was kept, if it is as it was written: its hash stands behind it.
fn kept(path: &Path) -> Option<Vec<u8>> {
    let mut image = fs::read(path).ok()?;
    let stored = image.split_off(image.len().checked_sub(size_of::<u64>())?);
    (stored == hash(image.iter().copied()).to_le_bytes()).then_some(image)
}

/// Keeps an image for the next process, whole or not at all. That it cannot be kept costs the next process its time, no more.
fn keep(path: &Path, image: &[u8]) {
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    let kept = path
        .parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&temporary, [image, &hash(image.iter().copied()).to_le_bytes()].concat()))
        .and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = kept {
        tracing::warn!(%error, path = %path.display(), "compiled kernels cannot be kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_whole_or_not_there() {
        let folder = env::temp_dir().join(format!("wakekv-kept-{}", std::process::id()));
        let path = folder.join("image");
        assert_eq!(kept(&path), None);
        keep(&path, b"machine code\0");
        assert_eq!(kept(&path).as_deref(), Some(&b"machine code\0"[..]));
        let whole = fs::read(&path).unwrap();
        for damaged in [&whole[..0], &whole[..5], &whole[..whole.len() - 1], &[&whole[1..], &[7]].concat()] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(kept(&path), None);
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
