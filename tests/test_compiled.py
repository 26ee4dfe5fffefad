"""The C kernels: compiled once, cached for later processes, and never a reason to abort."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headstart.support import compiled
from headstart.support.compiled import compiler, library, torch_library
from tests.forks import Forks

pytestmark = pytest.mark.skipif(not compiler(), reason="this machine has no C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_WARNED", set())
    file = tmp_path / "answer.c"
    file.write_text('#include "plus.h"\nint answer(void) { return ANSWER PLUS; }\n')
    (tmp_path / "plus.h").write_text("#define PLUS\n")
    return file


@pytest.fixture
def runs(spy: Any) -> list[Any]:
    """Runs of compilers."""
    calls: list[Any] = spy(subprocess, "run")
    return calls


def said(library: Any) -> int:
    assert library is not None
    return int(library.answer())


def kept(source: Path) -> list[Path]:
    return sorted((source.parent / "cache/headstart/compiled").glob("*.so"))


def test_it_is_compiled_once_for_all_processes(source: Path, runs: list[Any]) -> None:
    assert said(library(source, ["ANSWER=41"])) == 41
    assert [file.name.split("-")[0] for file in kept(source)] == ["answer"] and len(runs) == 2, "compiled and linked"
    assert said(library(source, ["ANSWER=41"])) == 41 and len(runs) == 2
    assert said(library(source, ["ANSWER=42"])) == 42 and len(runs) == 4
    (source.parent / "plus.h").write_text("#define PLUS + 1\n")
    assert said(library(source, ["ANSWER=42"])) == 43, "another text"


ANSWER = """
import sys
from pathlib import Path
from headstart.support.compiled import library
print(library(Path(sys.argv[1]), ["ANSWER=5"]).answer())
"""


def test_ranks_that_start_at_once_compile_once(source: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    log, counting = source.with_name("log"), source.with_name("counting-cc")
    counting.write_text(f'#!/bin/sh\necho "$@" >> {log}\nsleep 0.2\nexec {compiler()[0]} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setenv("CC", str(counting))
    ranks = [forks.start("-c", ANSWER, source) for _ in range(4)]
    assert [(rank.wait(), rank.out.read_text()) for rank in ranks] == [(0, "5\n")] * 4
    assert len(log.read_text().splitlines()) == 2, "one rank compiles and links"
    assert len(kept(source)) == 1


@pytest.mark.parametrize("damage", ["truncated", "zeros", "another library"])
def test_a_damaged_library_is_compiled_again(damage: str, source: Path, forks: Forks, runs: list[Any]) -> None:
    assert said(library(source, ["ANSWER=5"])) == 5
    (file,) = kept(source)
    sound = file.read_bytes()
    if damage == "another library":
        other = source.with_name("other.c")
        other.write_text("int other(void) { return 1; }\n")
        assert library(other) is not None
        damaged = next(made for made in kept(source) if made != file).read_bytes()
    else:
        half = sound[: len(sound) // 2]
        damaged = half if damage == "truncated" else half + bytes(len(sound) - len(half))
    file.unlink()  # it is mapped here: writing into it would crash the tests
    file.write_bytes(damaged)
    done = forks.run("-c", ANSWER, source)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    assert file.read_bytes() == sound


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_cache_that_others_may_write_is_not_used(mode: int, source: Path, runs: list[Any]) -> None:
    assert said(library(source, ["ANSWER=4"])) == 4
    (source.parent / "cache/headstart/compiled").chmod(mode)
    with pytest.warns(UserWarning, match=r"Other users may write in .*compiled.*rm -r "):
        assert said(library(source, ["ANSWER=4"])) == 4 and len(runs) == 4


def test_a_cache_without_write_access_is_read(source: Path, runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container image; root may write anywhere, so opening the lock is made to fail."""
    assert said(library(source, ["ANSWER=2"])) == 2

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(compiled, "one_at_a_time", refuse)
    monkeypatch.setattr(compiled, "write_atomic", refuse)
    assert said(library(source, ["ANSWER=2"])) == 2 and len(runs) == 2
    assert said(library(source, ["ANSWER=1"])) == 1 and len(kept(source)) == 1


def test_falls_back_to_another_folder_if_noexec(source: Path, runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.CDLL

    def load(path: str | None) -> ctypes.CDLL:
        if "cache" in str(path):
            raise OSError("failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert said(library(source, ["ANSWER=3"])) == 3 and len(runs) == 2


def test_compiles_in_each_process_if_nothing_can_be_cached(source: Path, runs: list[Any]) -> None:
    (source.parent / "cache").write_text("a file, not a folder")
    for count in (2, 4):
        assert said(library(source, ["ANSWER=6"])) == 6 and len(runs) == count


def test_no_place_for_anything_is_a_warning(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent / "cache").write_text("a file, not a folder")
    monkeypatch.setattr("tempfile.tempdir", str(source.parent / "nowhere"))
    with pytest.warns(UserWarning, match=r"cannot compile answer\.c \(.*nowhere"):
        assert library(source, ["ANSWER=7"]) is None


def test_a_compiler_that_fails_is_named_once_with_its_first_error(source: Path, runs: list[Any]) -> None:
    with pytest.warns(UserWarning, match=r"cannot compile answer\.c \(.*ANSWER.*\): torch's slower") as told:
        assert [library(source), library(source, ["OTHER"])] == [None, None]
    assert len(told) == 1 and len(str(told[0].message)) < 350
    assert len(runs) == 2, "once for each library"


@pytest.mark.parametrize(("asked", "named"), [("no-such-compiler", "CC=no-such"), ('no "such', 'CC=no "such')])
def test_without_a_compiler_the_cache_is_used_and_one_warning_given(
    source: Path, asked: str, named: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    assert said(library(source, ["ANSWER=8"])) == 8
    monkeypatch.setenv("CC", asked)
    assert said(library(source, ["ANSWER=8"])) == 8 and not recwarn.list
    assert library(source, ["ANSWER=9"]) is None and library(source, ["ANSWER=10"]) is None
    (warning,) = recwarn.list
    assert named in str(warning.message) and "Install gcc, or set CC" in str(warning.message)


def test_no_compiler_in_path(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(source.parent))
    with pytest.warns(UserWarning, match=r"No C compiler found \(gcc, cc, clang\): torch's slower .* Install gcc"):
        assert library(source, ["ANSWER=8"]) is None


def test_gcc_without_cplusplus(source: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    only_c = source.with_name("only-c")
    only_c.write_text(
        '#!/bin/sh\ncase "$*" in *c++*) echo "gcc: fatal error: cannot execute \'cc1plus\': execvp: No such file or '
        f'directory\ncompilation terminated." >&2; exit 1;; esac\nexec {compiler()[0]} "$@"\n'
    )
    only_c.chmod(0o755)
    monkeypatch.setenv("CC", str(only_c))
    (both := source.with_suffix(".cpp")).write_text("")
    assert torch_library(both) is None and torch_library(both) is None
    assert said(library(source, ["ANSWER=8"])) == 8
    (warning,) = recwarn.list
    assert "cannot compile answer.cpp" in str(warning.message) and "Install g++." in str(warning.message)


def test_names_other_openmp(source: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    clang = source.with_name("clang-14")
    clang.write_text("#!/bin/sh\nexit 1\n")
    clang.chmod(0o755)
    source.with_name("cc").symlink_to(clang)
    with monkeypatch.context() as patched:
        patched.setenv("CC", str(source.with_name("cc")))
        assert library(source, ["ANSWER=8"], threads=True) is None
    assert f"{source.with_name('cc')} does not use GNU OpenMP" in str(recwarn.pop().message) and not recwarn.list
    compiled._WARNED.clear()

    read = Path.read_text
    maps = lambda path, *how: "" if str(path) == "/proc/self/maps" else read(path, *how)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", maps)  # no libgomp in this process
    monkeypatch.setattr(compiled, "torch_threads", compiled.torch_threads.__wrapped__)
    assert library(source, ["ANSWER=8"], threads=True) is None and library(source, threads=True) is None
    assert "torch does not use GNU OpenMP" in str(recwarn.pop().message) and not recwarn.list
    assert said(library(source, ["ANSWER=8"])) == 8


@pytest.mark.skipif(compiled.torch_threads() is None, reason="this torch has no threads of GNU's OpenMP")
def test_threads_are_torchs_own(source: Path) -> None:
    source.write_text(
        "int answer(void) {\n    int count = 0;\n#pragma omp parallel for num_threads(2)\n"
        "    for (int i = 0; i < 8; i++) {\n#pragma omp atomic\n        count += i;\n    }\n    return count;\n}\n"
    )
    assert said(library(source, threads=True)) == 28
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    assert loaded == {os.fspath(compiled.torch_threads() or "")}, "no second pool of threads"
