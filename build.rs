//! With the feature `cuda`: compiles the CUDA kernels where there is an nvcc, and embeds their images and their sources.
//!
//! Without nvcc the list of images is empty, and the sources are compiled at first use. The environment decides:
//!
//! * `CUDA_HOME`, `CUDA_PATH`, `PATH`: where nvcc is looked for, in this order.
//! * `WAKEKV_NVCC`: 0 does not look for it, 1 fails the build where it is missing or fails. Otherwise the latter is a warning.
//! * `WAKEKV_CUDA_ARCHS`: architectures instead of all, such as "80 90".

use std::ffi::OsStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

const ARCHS: &str = "80 86 89 90 100 120";
/// What a device that no image is for compiles by itself.
const PTX_ARCH: u32 = 80;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["CUDA_HOME", "CUDA_PATH", "WAKEKV_NVCC", "WAKEKV_CUDA_ARCHS"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=kernels");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let kernels = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("kernels");
    let sources = files(&kernels, "cu");
    let images = match env::var("WAKEKV_NVCC").as_deref() {
        Ok("0") => Vec::new(),
        Ok("1") => compile_all(&sources, &out).unwrap_or_else(|reason| panic!("WAKEKV_NVCC is 1, but {reason}")),
        _ if find_nvcc().is_none() => Vec::new(),
        _ => compile_all(&sources, &out).unwrap_or_else(|reason| {
            let first_line = reason.lines().next().unwrap_or_default();
            println!("cargo:warning=no CUDA images, the kernels are compiled at first use: {first_line}");
            Vec::new()
        }),
    };
    fs::write(out.join("images.rs"), generate(&sources, &files(&kernels, "cuh"), &images))
        .expect("OUT_DIR is writable");
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("kernels are readable");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("kernels are readable").path())
        .filter(|path| path.extension() == Some(OsStr::new(extension)))
        .collect();
    files.sort();
    files
}

fn find_nvcc() -> Option<PathBuf> {
    let name = format!("nvcc{}", env::consts::EXE_SUFFIX);
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(|home| Path::new(&home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let found = homes.chain(env::split_paths(&path)).map(|folder| folder.join(&name)).find(|nvcc| nvcc.is_file());
    match &found {
        Some(nvcc) => println!("cargo:rerun-if-changed={}", nvcc.display()),
        None => println!("cargo:rerun-if-env-changed=PATH"),
    }
    found
}

/// What one run of nvcc makes of one file.
struct Image {
    source: PathBuf,
    arch: u32,
    ptx: bool,
    output: PathBuf,
}

fn compile_all(sources: &[PathBuf], out: &Path) -> Result<Vec<Image>, String> {
    let nvcc = find_nvcc().ok_or("there is no nvcc in CUDA_HOME, CUDA_PATH or PATH")?;
    let listed =
        Command::new(&nvcc).arg("--list-gpu-code").output().map_err(|error| format!("nvcc does not run: {error}"))?;
    let known = String::from_utf8_lossy(&listed.stdout).into_owned();
    let wanted = env::var("WAKEKV_CUDA_ARCHS").unwrap_or(ARCHS.into());
    let wanted: Result<Vec<u32>, _> = wanted.split_whitespace().map(str::parse).collect();
    let mut archs = wanted.map_err(|error| format!("WAKEKV_CUDA_ARCHS: {error}"))?;
    archs.retain(|arch| known.lines().any(|line| line == format!("sm_{arch}")));

    let kinds = archs.iter().map(|&arch| (arch, false)).chain([(PTX_ARCH, true)]);
    let images: Vec<_> = kinds
        .flat_map(|(arch, ptx)| sources.iter().map(move |source| (arch, ptx, source.clone())))
        .map(|(arch, ptx, source)| {
            let stem = source.file_stem().expect("a file").to_string_lossy();
            let output = out.join(format!("{stem}-{arch}.{}", if ptx { "ptx" } else { "cubin" }));
            Image { source, arch, ptx, output }
        })
        .collect();
    // Every job takes the next image. What takes longest is one file for all architectures, so their order is as good as any.
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1).clamp(1, images.len());
    let next = AtomicUsize::new(0);
    let job = || -> Result<(), String> {
        while let Some(image) = images.get(next.fetch_add(1, Ordering::Relaxed)) {
            compile(&nvcc, image)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let jobs: Vec<_> = (0..jobs).map(|_| scope.spawn(job)).collect();
        jobs.into_iter().try_for_each(|job| job.join().expect("jobs do not panic"))
    })?;
    Ok(images)
}

fn compile(nvcc: &Path, image: &Image) -> Result<(), String> {
    let (kind, target) = if image.ptx { ("-ptx", "compute") } else { ("-cubin", "sm") };
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", kind]).arg(format!("-arch={target}_{}", image.arch));
    let output = command.arg(&image.source).arg("-o").arg(&image.output).output();
    let output = output.map_err(|error| format!("nvcc does not run: {error}"))?;
    if !output.status.success() {
        return Err(format!("nvcc failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    if image.ptx {
        let mut text = fs::read(&image.output).map_err(|error| format!("nvcc left no PTX: {error}"))?;
        text.push(0); // the driver takes a C string
        fs::write(&image.output, text).map_err(|error| format!("PTX cannot be written: {error}"))?;
    }
    Ok(())
}

/// Rust text that `src/backend/cuda` includes, where `Image`, `ImageKind` and `Aligned` are.
fn generate(sources: &[PathBuf], headers: &[PathBuf], images: &[Image]) -> String {
    let name = |path: &Path| path.file_name().expect("a file").to_string_lossy().into_owned();
    let mut text = String::new();
    for (list, files) in [("SOURCES", sources), ("HEADERS", headers)] {
        writeln!(text, "pub(crate) static {list}: &[(&str, &str)] = &[").expect("a string grows");
        for file in files {
            writeln!(text, "    ({:?}, include_str!({file:?})),", name(file)).expect("a string grows");
        }
        text += "];\n";
    }
    text += "pub(crate) static IMAGES: &[Image] = &[\n";
    for Image { source, arch, ptx, output } in images {
        let (file, kind) = (name(source), if *ptx { "Ptx" } else { "Cubin" });
        let bytes = format!("&Aligned(*include_bytes!({output:?})).0");
        writeln!(text, "    Image {{ file: {file:?}, arch: {arch}, kind: ImageKind::{kind}, bytes: {bytes} }},")
            .expect("a string grows");
    }
    text + "];\n"
}
