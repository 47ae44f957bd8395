"""Where the CUDA compilers are: of CUDA_HOME, else of the PATH, else the pinned ones from PyPI, in a folder that is kept."""

import glob
import os
import pathlib
import shutil
import subprocess
import sys

# The headers of cccl are needed although nvcc does not depend on them.
PACKAGES = ["nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88",
            "nvidia-cuda-cccl==13.0.85", "nvidia-cuda-nvrtc==13.0.88",
            "nvidia-cuda-cuobjdump==13.2.51", "nvidia-cuda-nvdisasm==13.2.51"]
PINNED = "13.0.88"


def toolkit(*needed):
    """The root of a toolkit that has the files `needed`, which may be patterns."""
    if os.environ.get("CUDA_HOME"):
        root, origin = pathlib.Path(os.environ["CUDA_HOME"]), "CUDA_HOME"
    elif nvcc := shutil.which("nvcc"):
        root, origin = pathlib.Path(nvcc).resolve().parent.parent, "the PATH"
    else:
        root, origin = from_pypi(), "PyPI"
    for pattern in needed:
        if not glob.glob(str(root / pattern)):
            sys.exit(f"the CUDA toolkit of {origin} has no {pattern}: looked in {root}. CUDA_HOME may name another one")
    return root


def from_pypi():
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    venv = cache / "wakekv" / f"cuda-{PINNED}"
    installed = venv / "installed"
    if not installed.exists() or installed.read_text() != repr(PACKAGES):
        for command in [[sys.executable, "-m", "venv", venv], [venv / "bin" / "pip", "install", "--quiet", *PACKAGES]]:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"the CUDA compiler could not be installed from PyPI; CUDA_HOME may name one.\n{done.stdout}{done.stderr}")
        installed.write_text(repr(PACKAGES))
    found = glob.glob(str(venv / "lib" / "python3*" / "site-packages" / "nvidia" / "*" / "bin" / "nvcc"))
    if not found:
        sys.exit(f"the wheels of {PACKAGES[0]} keep nvcc where this script does not look: nothing is nvidia/*/bin/nvcc in {venv}")
    return pathlib.Path(found[0]).parent.parent


def version(root):
    """Of nvcc, such as 13.0.88."""
    text = subprocess.run([root / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return text.rpartition("V")[2].split()[0]
