"""Just-in-time compilation of our C and C++, cached in `$XDG_CACHE_HOME/headstart/compiled` (`~/.cache` by default).

A library's file name has hashes of source, flags and processor, of the compiler's command, and of its own content.
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
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from headstart.support.files import file_hash, write_atomic
from headstart.support.lock import one_at_a_time

# -ffast-math without its side effect on the loading process (flushing denormals to zero).
_FLAGS = "-O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -fPIC"
_WIDE = "-mprefer-vector-width=512"
_THREADED = "-Wl,-z,defs -Wl,-Bsymbolic"
"""Linker options with threads (Linux only); they fail with a compiler for another OpenMP."""
_VECTORS = ("AVX2", "AVX512")
_TIMEOUT = 60.0
"""Timeout of the compiler in seconds."""
_HASH = 16
"""Digits of the content hash in a name."""


def compiler() -> list[str]:
    """Return the command of the C compiler: $CC, or the first of gcc, cc and clang in PATH; empty if there is none."""
    commands = [["gcc"], ["cc"], ["clang"]]
    if cc := os.environ.get("CC"):
        try:
            commands = [shlex.split(cc)]
        except ValueError:  # an unbalanced quote
            commands = [[cc]]
    return next((command for command in commands if command and shutil.which(command[0])), [])


def library(source: Path, names: Sequence[str] = (), threads: bool = False) -> ctypes.CDLL | None:
    """Compile a source with these macros defined, or load it from the cache.

    With `threads`, uses torch's OpenMP threads, which must be GNU's. Returns None, with a warning, if torch uses other
    threads, or there is neither a cached library nor a working compiler.
    """
    program, runtime = compiler(), torch_threads() if threads else None
    is_clang = bool(program) and "clang" in os.path.realpath(shutil.which(program[0]) or "")
    if threads and (runtime is None or is_clang):
        culprit = shlex.join(program) if runtime else "torch"
        _warn("threads", f"{culprit} does not use GNU OpenMP (libgomp){_SLOWER}Install gcc, and torch with pip.")
        return None
    flags = [*_FLAGS.split(), *([_WIDE] if platform.machine() == "x86_64" else []), *(["-fopenmp"] if threads else [])]
    compiling = [*flags, *(f"-D{name}" for name in names), "-c", str(source)]
    linking = ["-shared", *(_THREADED.split() if threads else [])]
    libraries = [*([str(runtime)] if runtime else []), "-lm", "-pthread"]
    return _load_or_compile(source, program, compiling, linking, libraries)


def torch_library(source: Path) -> ctypes.CDLL | None:
    """Compile a C++ source that uses c10, or load it from the cache; None without torch's headers, or as `library`."""
    folder = Path(torch.__file__).parent
    if not (folder / "include" / "c10").is_dir():
        return None
    compiling = ["-x", "c++", "-std=c++20", "-O2", "-fPIC", f"-I{folder / 'include'}", "-c", str(source)]
    return _load_or_compile(source, compiler(), compiling, ["-shared"], [str(folder / "lib" / "libc10.so")])


def _load_or_compile(
    source: Path, program: Sequence[str], compiling: Sequence[str], linking: Sequence[str], libraries: Sequence[str]
) -> ctypes.CDLL | None:
    """Load a library from the cache, or compile it under a lock. Without a compiler, loads a cached library of any
    compiler."""
    texts = [file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))]
    settings = repr([compiling, linking, libraries, torch.__version__, _processor()])
    key = hashlib.sha256(b"\0".join([settings.encode(), *texts])).hexdigest()[:16]
    by = hashlib.sha256(repr(program).encode()).hexdigest()[:8] if program else "*"
    cache, name = _cache_folder(), f"{source.stem}-{key}-{by}"
    found = _load_intact(cache, name)
    if not found and not program:
        tried = f"CC={os.environ['CC']}" if os.environ.get("CC") else "gcc, cc, clang"
        _warn("compiler", f"No C compiler found ({tried}){_SLOWER}Install gcc, or set CC to a C compiler.")
    if found or not program:
        return found
    try:
        with ExitStack() as stack:
            if cache:
                with suppress(OSError):  # a folder without write access, as in an image
                    stack.enter_context(one_at_a_time(cache / "lock"))
            if found := _load_intact(cache, name):
                return found
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            built = Path(folder, "built.so")
            for command in ([*compiling, "-o", f"{built}.o"], [*linking, f"{built}.o", *libraries, "-o", str(built)]):
                run = [*program, *command]
                subprocess.run(run, check=True, capture_output=True, text=True, timeout=_TIMEOUT)
            if cache:
                file = cache / f"{name}-{file_hash(built)[:_HASH]}.so"
                with suppress(OSError):  # the disk is full, or mounted noexec
                    write_atomic(file, partial(shutil.copyfile, built))
                    return ctypes.CDLL(str(file))
            return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines() or [""]
        reason = shorten(next((line for line in lines if "error" in line), lines[-1]), 200)
        remedy = "Install g++." if "cc1plus" in reason else "Set CC to another compiler."
        _warn(source.suffix, f"{shlex.join(program)} cannot compile {source.name} ({reason}){_SLOWER}{remedy}")
        return None


def _load_intact(folder: Path | None, name: str) -> ctypes.CDLL | None:
    """Load a library from the cache if it matches the hash in its name; a damaged one would crash the process."""
    for file in sorted(folder.glob(f"{name}-*.so")) if folder else []:
        with suppress(OSError):
            if file_hash(file)[:_HASH] == file.stem[-_HASH:]:
                return ctypes.CDLL(str(file))
    return None


_WARNED = set[str]()
_SLOWER = ": torch's slower code is used. "


def _warn(kind: str, text: str) -> None:
    """Warn once per process and kind of problem."""
    if kind not in _WARNED:
        _WARNED.add(kind)
        warnings.warn(text, stacklevel=4)


def vector_library(source: Path, dtype: torch.dtype, *names: str) -> Any:
    """Return a threaded `library` for bfloat16 or float32; None if torch finds neither AVX2 nor AVX-512."""
    if torch.backends.cpu.get_cpu_capability() not in _VECTORS:
        return None
    return library(source, [*names, *(["BFLOAT16"] if dtype == torch.bfloat16 else [])], threads=True)


def why_no_vectors() -> tuple[str, str]:
    """Explain a None of `vector_library` on this machine; return the reason and a remedy."""
    if torch.backends.cpu.get_cpu_capability() not in _VECTORS:
        return "this processor has no AVX2", "Use another processor"
    if not (program := compiler()):
        return "this machine has no C compiler", "Install gcc"
    return f"{shlex.join(program)} does not compile them for torch's threads", "Install gcc and set CC=gcc"


@cache
def may_use_tiles() -> bool:
    """Request permission for bfloat16 AMX tiles from Linux, once for all threads; return whether they are usable."""
    init_amx = getattr(torch.cpu, "_init_amx", None)
    return bool(torch.cpu.get_capabilities().get("amx_bf16") and init_amx and init_amx())


def _cache_folder() -> Path | None:
    """Return the cache's folder; None if it cannot be made, or other users can write there: its files are executed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "headstart" / "compiled"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    problem = f"Other users may write in {folder}, so every start compiles again."
    _warn("folder", f"{problem} Delete it (rm -r {folder}), or set XDG_CACHE_HOME to a folder of your own.")
    return None


@cache
def torch_threads() -> Path | None:
    """Return torch's GNU OpenMP library, or None; a second one would compete for the same cores."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return None
    mapped = {Path(line.split(maxsplit=5)[-1]) for line in lines if "/libgomp" in line}
    folder = Path(torch.__file__).parent
    of_torch = [path for path in mapped if {folder, folder.with_name("torch.libs")} & {*path.parents}]
    found = of_torch or list(mapped)
    return found[0] if len(found) == 1 else None


@cache
def _processor() -> str:
    """Describe the processor's properties that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
