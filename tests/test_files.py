"""Files and folders are replaced atomically."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from headstart.errors import UserError
from headstart.support.files import PARTIAL, check_writable, read_json, read_jsonl, write_atomic, write_json
from tests.forks import Forks


def folder_of(*names: str) -> Callable[[Path], None]:
    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        for name in names:
            (partial / name).write_text(name)

    return write


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_replaces_a_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "heads.old").mkdir()  # not headstart's
    for content in (("a", "b"), ("b", "c")):
        write_atomic(tmp_path / "heads", folder_of(*content))
        assert names(tmp_path / "heads") == set(content)
    assert names(tmp_path) == {"heads", "heads.old"}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "heads", folder_of("a"))
    write_json(tmp_path / "x.json", 1)

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise OSError("full")

    for path in (tmp_path / "heads", tmp_path / "x.json"):
        with pytest.raises(OSError, match="full"):
            write_atomic(path, fail)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.replace", lambda *_: fail(tmp_path / "elsewhere"))
        with pytest.raises(OSError, match="full"):
            write_json(tmp_path / "x.json", 2)
    (tmp_path / "elsewhere").unlink()
    assert names(tmp_path / "heads") == {"a"}
    assert (tmp_path / "x.json").read_text() == "1\n"
    assert names(tmp_path) == {"heads", "x.json"}, "no half of anything is left"


def test_skips_a_byte_order_mark(tmp_path: Path) -> None:
    (file := tmp_path / "questions.jsonl").write_bytes(b'\xef\xbb\xbf{"turns": ["a"]}\r\n{"turns": ["b"]}\r\n')
    assert list(read_jsonl(file)) == [(1, {"turns": ["a"]}), (2, {"turns": ["b"]})]
    (file := tmp_path / "prompts.json").write_bytes(b'\xef\xbb\xbf["a"]')
    assert read_json(file) == ["a"]


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headstart.support.files.os.fsync", full)
    for path in (tmp_path / "x.json", tmp_path / "deep" / "er" / "x.json"):
        with pytest.raises(OSError, match="No space"):
            write_json(path, 1)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "new" / "heads", folder_of("a"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_check_writable_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "er")
    check_writable(tmp_path)
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/x")):
        with pytest.raises(UserError, match="Cannot write to") as caught:
            check_writable(bad)
        assert str(bad) in caught.value.problem
    assert names(tmp_path) == {"file"}


KILLED = """
import os, signal, sys
from pathlib import Path
from headstart.support.files import write_atomic

def write(partial):
    partial.mkdir()
    (partial / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)

write_atomic(Path(sys.argv[1]), write)
"""


def test_the_next_write_cleans_up_after_a_killed_process_only(tmp_path: Path, forks: Forks) -> None:
    assert forks.run("-c", KILLED, tmp_path / "heads").returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.suffix == PARTIAL and names(left) == {"half"}

    def write(partial: Path) -> None:
        partial.mkdir()
        write_atomic(tmp_path / "heads", folder_of("other"))  # as another thread or process does meanwhile
        (partial / "mine").touch()

    write_atomic(tmp_path / "heads", write)
    assert names(tmp_path) == {"heads"} and names(tmp_path / "heads") == {"mine"}


MEET = """
import sys, time
from pathlib import Path

def meet(folder, count):
    (folder / f"here-{time.monotonic_ns()}").touch()
    while len(list(folder.glob("here-*"))) < count:
        time.sleep(0.001)
"""
PROCESSES, ROUNDS = 4, 15
SAME_PATHS = f"""{MEET}
from headstart.data.served.log import RequestLog
from headstart.support.answer_file import AnswerFile
from headstart.support.artifacts import set_symlink
from headstart.support.files import remove, write_atomic, write_json
place = Path(sys.argv[1])
meet(place, {PROCESSES})
for number in range({ROUNDS}):
    write_json(place / "costs.json", list(range(number)))
    write_atomic(place / "heads", lambda partial: (partial.mkdir(), (partial / "a").touch()))
    set_symlink(place / "serving", place / str(number % 3))
    remove(place / "old" / str(number))
    RequestLog(place / "log")
    AnswerFile(place / "answers", "00" * 16, 500).add([[number] * 30])
"""


def test_processes_write_the_same_paths_at_once(tmp_path: Path, forks: Forks) -> None:
    for number in range(ROUNDS):
        folder_of(*map(str, range(20)))(tmp_path / "old" / str(number))
    begun = [forks.start("-c", SAME_PATHS, tmp_path) for _ in range(PROCESSES)]
    assert [(fork.wait(), fork.err.read_text()) for fork in begun] == [(0, "")] * PROCESSES
    assert not list(tmp_path.rglob(f"*{PARTIAL}")) and not names(tmp_path / "old")
    assert read_json(tmp_path / "costs.json") == list(range(ROUNDS - 1)) and names(tmp_path / "heads") == {"a"}


READER = f"""{MEET}
import os
place, missed = Path(sys.argv[1]), 0
meet(place, 2)
while not (place / "done").exists():
    missed += not os.path.exists(place / "heads")
print(missed)
"""


def test_a_folder_that_is_replaced_is_never_missing(tmp_path: Path, forks: Forks) -> None:
    write_atomic(tmp_path / "heads", folder_of("a"))
    reader = forks.start("-c", READER, tmp_path)
    (tmp_path / "here-test").touch()
    until = time.monotonic() + 30
    while len(list(tmp_path.glob("here-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    for _ in range(30):
        write_atomic(tmp_path / "heads", folder_of("a"))
    (tmp_path / "done").touch()
    assert reader.wait() == 0 and reader.out.read_text() == "0\n"


def test_a_folder_is_replaced_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, and on file systems without RENAME_EXCHANGE."""
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace())
    for content in ("a", "b"):
        write_atomic(tmp_path / "heads", folder_of(content))
        assert names(tmp_path / "heads") == {content} and names(tmp_path) == {"heads"}


def test_written_files_follow_the_umask(tmp_path: Path) -> None:
    """safetensors writes files for their owner alone, but another user may serve the heads."""
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "one", lambda partial: save_file({"a": torch.zeros(1)}, partial))
        write_atomic(tmp_path / "heads", lambda partial: (partial.mkdir(), save_file({}, partial / "weights")))
        write_json(tmp_path / "plain.json", 1)
    finally:
        os.umask(before)
    files = [tmp_path / "one", tmp_path / "heads" / "weights", tmp_path / "plain.json"]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640] * 3
