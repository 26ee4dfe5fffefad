"""C and C++ of ours, compiled by the machine's own compiler when it is first needed, and kept for later processes.

Libraries lie under `$XDG_CACHE_HOME/headstart/compiled` (`~/.cache` when that is not set), named after what they were
made from, how, and for which processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

# What -ffast-math says, but for what it does to a process that loads the result (denormals become zero in all of it).
_FLAGS = "-O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -fPIC"
_WIDE = "-mprefer-vector-width=512"
_THREADED = "-Wl,-z,defs -Wl,-Bsymbolic"
"""Linking with threads, which only Linux has here: a compiler that means other threads fails."""
_VECTORS = ("AVX2", "AVX512")
_COMPILING = 60.0
"""Seconds after which a compiler is given up."""


def compiler() -> list[str]:
    """The command of this machine's C compiler, $CC or the first of gcc, cc and clang that there is; empty if none."""
    commands = [["gcc"], ["cc"], ["clang"]]
    if asked := os.environ.get("CC"):
        try:
            commands = [shlex.split(asked)]
        except ValueError:  # a quote without its other
            commands = [[asked]]
    return next((command for command in commands if command and shutil.which(command[0])), [])


def library(source: Path, names: Sequence[str] = (), threads: bool = False) -> ctypes.CDLL | None:
    """What a source gives with these names defined; `threads` are those that torch itself has, GNU's. None where there
    is no compiler, or no such threads, which clang has not."""
    program, runtime = compiler(), torch_threads() if threads else None
    if not program or (threads and (runtime is None or "clang" in os.path.realpath(shutil.which(program[0]) or ""))):
        return None
    flags = [*_FLAGS.split(), *([_WIDE] if platform.machine() == "x86_64" else []), *(["-fopenmp"] if threads else [])]
    compiling = [*program, *flags, *(f"-D{name}" for name in names), "-c", str(source)]
    linking = [*program, "-shared", *(_THREADED.split() if threads else [])]
    libraries = [*([str(runtime)] if runtime else []), "-lm"]
    return _loaded(source, program, compiling, linking, libraries)


def torch_library(source: Path) -> ctypes.CDLL | None:
    """What a source in C++ gives that uses torch's own classes of tensors' memory; None where there is no compiler for
    it, or torch has no headers with it."""
    folder, program = Path(torch.__file__).parent, compiler()
    if not program or not (folder / "include" / "c10").is_dir():
        return None
    compiling = [*program, "-x", "c++", "-std=c++20", "-O2", "-fPIC", f"-I{folder / 'include'}", "-c", str(source)]
    return _loaded(source, program, compiling, [*program, "-shared"], [str(folder / "lib" / "libc10.so")])


def _loaded(
    source: Path, program: Sequence[str], compiling: Sequence[str], linking: Sequence[str], libraries: Sequence[str]
) -> ctypes.CDLL | None:
    """What these commands make of a source, or made before; a compiler that fails is warned about."""
    texts = [file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))]
    how = repr([compiling, linking, libraries, torch.__version__, _processor()])
    key = hashlib.sha256(b"\0".join([how.encode(), *texts])).hexdigest()[:16]
    kept = _kept()
    file = kept / f"{source.stem}-{key}.so" if kept else None
    if file:
        with suppress(OSError):  # not there, or not whole
            return ctypes.CDLL(str(file))
    wrong: Exception | None = None
    for place in [kept, None] if kept else [None]:  # libraries can be loaded from most folders, but not from all
        try:
            with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
                made = Path(folder, "made.so")
                _make(compiling, linking, libraries, made)
                loaded = ctypes.CDLL(str(made))
                if file and place:
                    made.replace(file)
                return loaded
        except (OSError, subprocess.SubprocessError) as error:
            wrong = error
    said = shorten(str(getattr(wrong, "stderr", None) or wrong).strip().rpartition("\n")[2], 200)
    why = f"{shlex.join(program)} cannot compile {source.name}: torch's is slower ({said})."
    warnings.warn(why, stacklevel=3)
    return None


def vector_library(source: Path, dtype: torch.dtype, *names: str) -> Any:
    """`library` with threads, for bfloat16 or float32, of a source that is written for AVX2 and AVX-512; None where
    torch finds neither."""
    if torch.backends.cpu.get_cpu_capability() not in _VECTORS:
        return None
    return library(source, [*names, *(["BFLOAT16"] if dtype == torch.bfloat16 else [])], threads=True)


def why_no_vectors() -> tuple[str, str]:
    """Say why `vector_library` returns None on this machine, and what to do about it."""
    if torch.backends.cpu.get_cpu_capability() not in _VECTORS:
        return "this processor has no AVX2", "Use another processor"
    if not (program := compiler()):
        return "this machine has no C compiler", "Install gcc"
    return f"{shlex.join(program)} does not compile them for torch's threads", "Install gcc and set CC=gcc"


@cache
def may_use_tiles() -> bool:
    """Whether this process may use tiles of bfloat16 (AMX): Linux wants to be asked, once for all threads."""
    ask = getattr(torch.cpu, "_init_amx", None)
    return bool(torch.cpu.get_capabilities().get("amx_bf16") and ask and ask())


def _make(compiling: Sequence[str], linking: Sequence[str], libraries: Sequence[str], made: Path) -> None:
    compiled = str(made.with_suffix(".o"))
    for command in ([*compiling, "-o", compiled], [*linking, compiled, *libraries, "-o", str(made)]):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILING)
    with made.open("rb+") as whole:
        os.fsync(whole.fileno())


def _kept() -> Path | None:
    """The folder of what is kept, this user's alone to write: what lies there is run. None where there can be none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "headstart" / "compiled"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    return folder if mine and not found.st_mode & stat.S_IWOTH and os.access(folder, os.W_OK) else None


@cache
def torch_threads() -> Path | None:
    """The library of GNU's OpenMP whose threads torch computes with: a second one would have its threads wait for the
    same cores. None where torch has others."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return None
    mapped = {Path(line.split(maxsplit=5)[-1]) for line in lines if "/libgomp" in line}
    folder = Path(torch.__file__).parent
    beside = [path for path in mapped if {folder, folder.with_name("torch.libs")} & {*path.parents}]
    found = beside or list(mapped)
    return found[0] if len(found) == 1 else None


@cache
def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
