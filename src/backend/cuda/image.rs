//! Where the kernels' machine code comes from: images that were built with the crate, or the embedded sources, compiled at first use.

use std::path::{Path, PathBuf};
use std::{env, fs};

use super::nvrtc::Nvrtc;
use crate::error::Error;

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// One source file, compiled for one architecture.
pub(crate) struct Image {
    file: &'static str,
    /// The compute capability, 10 × major + minor.
    arch: u32,
    kind: ImageKind,
    bytes: &'static [u8],
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "without nvcc there are no images")]
pub(crate) enum ImageKind {
    /// Machine code: for this architecture and later ones of the same major version.
    Cubin,
    /// Text that the driver compiles: for this architecture and all later ones.
    Ptx,
}

/// The driver reads images as structures of 8-byte words.
#[repr(align(8))]
#[allow(dead_code, reason = "without nvcc there are no images")]
struct Aligned<const N: usize>([u8; N]);

/// The images for a device, one per source file, in the order in which they are to be tried: if the driver refuses one set, as too new for it
/// perhaps, the next may do.
pub(super) fn built_in(capability: u32) -> impl Iterator<Item = Vec<Vec<u8>>> {
    [ImageKind::Cubin, ImageKind::Ptx].into_iter().filter_map(move |kind| {
        let fits = |image: &&Image| {
            let same_major = image.arch / 10 == capability / 10;
            image.kind == kind && image.arch <= capability && (same_major || kind == ImageKind::Ptx)
        };
        let best_of = |file: &str| {
            let of_file = IMAGES.iter().filter(|image| image.file == file).filter(fits);
            of_file.max_by_key(|image| image.arch).map(|image| image.bytes.to_vec())
        };
        SOURCES.iter().map(|(file, _)| best_of(file)).collect()
    })
}

/// Compiles the embedded sources with NVRTC, or takes what an earlier process has compiled from the folder.
///
/// # Errors
/// There is no NVRTC, or it fails.
pub(super) fn compile(capability: u32, folder: Option<&Path>) -> Result<Vec<Vec<u8>>, Error> {
    let nvrtc = Nvrtc::load()?;
    // A newer device than the compiler knows runs code for an older one.
    let known = nvrtc.architectures()?;
    let arch = known.into_iter().filter(|&arch| arch <= capability).max().ok_or_else(|| Error::CudaKernels {
        reason: format!("NVRTC {} has no architecture for compute capability {capability}", nvrtc.version()),
    })?;
    let machine_code = arch / 10 == capability / 10;
    let compile = |&(file, source): &(&str, &str)| {
        let kind = if machine_code { "cubin" } else { "ptx" };
        let path = folder
            .map(|folder| folder.join(format!("{}-sm_{arch}-{:016x}.{kind}", file, key(nvrtc.version(), source))));
        if let Some(image) = path.as_ref().and_then(|path| fs::read(path).ok()) {
            return Ok(image);
        }
        tracing::info!(file, arch, "compiling CUDA kernels");
        let image = nvrtc.compile(file, source, HEADERS, arch, machine_code)?;
        if let Some(path) = path {
            keep(&path, &image);
        }
        Ok(image)
    };
    SOURCES.iter().map(compile).collect()
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
    let bytes = [version, source].into_iter().chain(headers).flat_map(|text| text.bytes().chain([0]));
    // FNV-1a.
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Keeps an image for the next process, whole or not at all. That it cannot be kept costs the next process its time, no more.
fn keep(path: &Path, image: &[u8]) {
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    let kept = path
        .parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(&temporary, image))
        .and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = kept {
        tracing::warn!(%error, path = %path.display(), "compiled kernels cannot be kept");
    }
}
