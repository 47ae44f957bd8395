//! Compiles the SIMT runtime, the driver and the library's kernels into one `libcuda.so`, and each seeded bug into a library of
//! its own. Without a C++ compiler, or on a processor that fibers are not written for, there is no driver, and tests skip.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "src/seeded.rs"]
mod seeded;

const RUNTIME_FLAGS: [&str; 5] = ["-std=c++17", "-O2", "-g1", "-fPIC", "-Wall"];
/// Kernels are hidden so that a seeded kernel is not replaced by the right one of the same name when its library is loaded.
/// Products fuse where the source says so, as on the device.
const KERNEL_FLAGS: [&str; 11] = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-mavx2",
    "-mfma",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-DCUDA_HOST_SHIM",
];

/// What `WAKEKV_SANITIZE` asks for: `address`, with checks for undefined behaviour, or `thread`.
#[derive(Clone, Copy, PartialEq)]
enum Sanitizer {
    None,
    Address,
    Thread,
}

impl Sanitizer {
    fn wanted() -> Sanitizer {
        match std::env::var("WAKEKV_SANITIZE").as_deref() {
            Ok("address") => Sanitizer::Address,
            Ok("thread") => Sanitizer::Thread,
            Ok(other) if !other.is_empty() => panic!("WAKEKV_SANITIZE is address or thread, not {other}"),
            _ => Sanitizer::None,
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Sanitizer::None => &[],
            Sanitizer::Address => &["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1"],
            // Fences are no news to it; the kernels that have them have a barrier as well.
            Sanitizer::Thread => &["-fsanitize=thread", "-Wno-tsan", "-O1"],
        }
    }

    /// Instrumented attention takes long to compile, and its shapes differ by constants alone: here is one whose lanes all read, and
    /// one in which some do not.
    fn attention_flags(self) -> &'static [&'static str] {
        if self == Sanitizer::None {
            return &[];
        }
        &["-DWAKEKV_ATTEND=ATTEND_DIM(__half,f16,64) ATTEND_DIM(__nv_bfloat16,bf16,64) ATTEND_DIM(__half,f16,80)"]
    }

    /// Whether the bug is for the tests of this build: those of plain builds find it by wrong results, or the sanitizer has to.
    fn plants(self, bug: &str) -> bool {
        match self {
            Sanitizer::None => bug != seeded::OUT_OF_BOUNDS,
            Sanitizer::Address => bug == seeded::OUT_OF_BOUNDS,
            Sanitizer::Thread => bug == seeded::MISSING_BARRIER,
        }
    }

    /// See `simt/sanitizers.h`.
    fn simt_flags(self) -> &'static [&'static str] {
        if self == Sanitizer::Thread { &["-DWAKEKV_TSAN"] } else { self.flags() }
    }
}

fn main() {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let kernels = here.join("../../kernels");
    for watched in ["simt", "driver", "shim", "src/seeded.rs"].map(|path| here.join(path)).iter().chain([&kernels]) {
        println!("cargo:rerun-if-changed={}", watched.display());
    }
    println!("cargo:rerun-if-env-changed=WAKEKV_REQUIRE_ALL");
    println!("cargo:rerun-if-env-changed=WAKEKV_SANITIZE");
    println!("cargo:rustc-check-cfg=cfg(emulator_sanitizer, values(\"address\", \"thread\"))");
    let built = build(&here, &kernels, &out);
    if let Err(reason) = &built {
        let required = std::env::var_os("WAKEKV_REQUIRE_ALL").is_some_and(|value| value == "1");
        assert!(!required, "WAKEKV_REQUIRE_ALL is set, but {reason}");
    }
    let reason = built.err().unwrap_or_default();
    println!("cargo:rustc-env=WAKEKV_EMULATOR_MISSING={}", reason.lines().next().unwrap_or_default());
    println!("cargo:rustc-env=WAKEKV_EMULATOR_DIR={}", out.display());
}

fn build(here: &Path, kernels: &Path, out: &Path) -> Result<(), String> {
    let target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if (target("ARCH"), target("OS")) != ("x86_64".into(), "linux".into()) {
        return Err("the emulated driver is written for x86-64 Linux".into());
    }
    let tool = cc::Build::new().cpp(true).cargo_metadata(false).cargo_warnings(false).try_get_compiler();
    let tool = tool.map_err(|error| format!("there is no C++ compiler: {error}"))?;
    if tool.to_command().arg("--version").output().is_err() {
        return Err(format!("there is no C++ compiler: {} does not run", tool.path().display()));
    }
    let compiler = || Command::new(tool.path());
    let sanitizer = Sanitizer::wanted();
    match sanitizer {
        Sanitizer::None => {}
        Sanitizer::Address => println!("cargo:rustc-cfg=emulator_sanitizer=\"address\""),
        Sanitizer::Thread => println!("cargo:rustc-cfg=emulator_sanitizer=\"thread\""),
    }

    // From here on a failure is a mistake in the sources, and must not look like a missing compiler.
    let mut objects = Vec::new();
    for (folder, flags) in [("simt", sanitizer.simt_flags()), ("driver", sanitizer.flags())] {
        for source in sources(&here.join(folder), "cpp") {
            objects.push(compile(compiler().args(RUNTIME_FLAGS).args(flags), &source, out));
        }
    }
    let shim = here.join("shim/cuda_host_shim.h");
    let kernel_object = |source: &Path, out: &Path, flags: &[&str]| {
        let mut command = compiler();
        command.args(KERNEL_FLAGS).args(sanitizer.flags()).args(flags).arg("-include").arg(&shim).args(["-x", "c++"]);
        compile(&mut command, source, out)
    };
    let attention = sanitizer.attention_flags();
    objects.extend(sources(kernels, "cu").iter().map(|source| kernel_object(source, out, attention)));
    link(compiler().args(sanitizer.flags()).arg("-Wl,-soname,libcuda.so"), &objects, &out.join("libcuda.so"));

    for bug in seeded::BUGS.iter().filter(|bug| sanitizer.plants(bug.name)) {
        let folder = out.join("seeded").join(bug.name);
        fs::create_dir_all(&folder).expect("the build folder is writable");
        for source in sources(kernels, "cu").into_iter().chain(sources(kernels, "cuh")) {
            let name = source.file_name().expect("a file").to_owned();
            let mut text = fs::read_to_string(&source).expect("kernels are readable");
            if name == bug.file {
                assert_eq!(text.matches(bug.right).count(), 1, "seeded bug {}: not one place to plant it", bug.name);
                text = text.replace(bug.right, bug.wrong);
            }
            fs::write(folder.join(name), text).expect("the build folder is writable");
        }
        // One head dim shows a bug as well as five, and builds faster.
        let object = kernel_object(&folder.join(bug.kernel), &folder, &["-DWAKEKV_ATTEND=ATTEND_DIM(__half,f16,64)"]);
        link(compiler().args(sanitizer.flags()), &[object], &out.join(format!("{}.so", bug.name)));
    }
    Ok(())
}

fn sources(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("source folders are readable");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("source folders are readable").path())
        .filter(|path| path.extension() == Some(OsStr::new(extension)))
        .collect();
    files.sort();
    files
}

fn compile(command: &mut Command, source: &Path, out: &Path) -> PathBuf {
    let folder = source.parent().and_then(Path::file_name).unwrap_or_default();
    let stem = source.file_stem().expect("a file");
    let object = out.join(format!("{}-{}.o", folder.to_string_lossy(), stem.to_string_lossy()));
    succeed(command.arg("-c").arg(source).arg("-o").arg(&object));
    object
}

fn link(command: &mut Command, objects: &[PathBuf], library: &Path) {
    succeed(command.arg("-shared").args(objects).arg("-o").arg(library).args(["-lpthread", "-ldl"]));
}

fn succeed(command: &mut Command) {
    let output = command.output().expect("the compiler runs");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}
