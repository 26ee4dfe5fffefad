"""C of ours: compiled once, kept for later processes, and never the reason why something ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headstart.support import compiled
from headstart.support.compiled import compiler, library

pytestmark = pytest.mark.skipif(not compiler(), reason="this machine has no C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "answer.c"
    file.write_text('#include "plus.h"\nint answer(void) { return ANSWER PLUS; }\n')
    (tmp_path / "plus.h").write_text("#define PLUS\n")
    return file


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of compilers."""
    asked: list[str] = []
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(command))
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    return asked


def said(library: Any) -> int:
    assert library is not None
    return int(library.answer())


def test_it_is_compiled_once_for_all_processes(source: Path, runs: list[str]) -> None:
    assert said(library(source, ["ANSWER=41"])) == 41
    (file,) = (source.parent / "cache/headstart/compiled").iterdir()
    assert file.name.startswith("answer-") and len(runs) == 2, "compiled, linked, and nothing left behind"
    assert said(library(source, ["ANSWER=41"])) == 41 and len(runs) == 2
    assert said(library(source, ["ANSWER=42"])) == 42 and len(runs) == 4
    (source.parent / "plus.h").write_text("#define PLUS + 1\n")
    assert said(library(source, ["ANSWER=42"])) == 43, "another text"


def test_what_is_damaged_is_made_anew(source: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(library(source, ["ANSWER=5"])) == 5
    (file,) = (source.parent / "cache/headstart/compiled").iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "other"))
    damaged = source.parent / "other/headstart/compiled" / file.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(file.read_bytes()[:100])
    assert said(library(source, ["ANSWER=5"])) == 5 and len(runs) == 4
    assert damaged.stat().st_size == file.stat().st_size


def test_what_others_could_have_written_is_not_run(source: Path, runs: list[str]) -> None:
    assert said(library(source, ["ANSWER=4"])) == 4
    (source.parent / "cache/headstart/compiled").chmod(0o777)
    assert said(library(source, ["ANSWER=4"])) == 4 and len(runs) == 4


def test_where_nothing_can_be_loaded_from_another_folder_serves(
    source: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a home that is mounted without the right to run what lies there."""
    real = ctypes.CDLL

    def load(path: str) -> ctypes.CDLL:
        if "cache" in path:
            raise OSError("failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert said(library(source, ["ANSWER=3"])) == 3 and len(runs) == 4


def test_where_nothing_can_be_kept_it_is_made_each_time(source: Path, runs: list[str]) -> None:
    (source.parent / "cache").write_text("a file, not a folder")
    for count in (2, 4):
        assert said(library(source, ["ANSWER=6"])) == 6 and len(runs) == count


def test_no_place_for_anything_is_a_warning(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent / "cache").write_text("a file, not a folder")
    monkeypatch.setattr("tempfile.tempdir", str(source.parent / "nowhere"))
    with pytest.warns(UserWarning, match=r"cannot compile answer\.c: torch's is slower \(.*nowhere"):
        assert library(source, ["ANSWER=7"]) is None


def test_a_mistake_is_told_in_a_line(source: Path) -> None:
    with pytest.warns(UserWarning, match=r"cannot compile answer\.c") as told:
        assert library(source) is None
    assert len(str(told[0].message)) < 300


def test_no_compiler_and_other_threads_are_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("CC", "no-such-compiler")
        assert library(source, ["ANSWER=8"]) is None
        patched.setenv("CC", 'no "such')
        assert library(source, ["ANSWER=8"]) is None
    clang = source.with_name("clang-14")
    clang.write_text("#!/bin/sh\nexit 1\n")
    clang.chmod(0o755)
    source.with_name("cc").symlink_to(clang)
    with monkeypatch.context() as patched:
        patched.setenv("CC", str(source.with_name("cc")))
        assert library(source, ["ANSWER=8"], threads=True) is None, "its threads are others: not even tried"
    monkeypatch.setattr(compiled, "torch_threads", lambda: None)
    assert library(source, ["ANSWER=8"], threads=True) is None
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
