"""A folder takes a single run, on any file system."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
from collections.abc import Callable
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.errors import UserError
from headstart.support.artifacts import Artifact, lock_artifact
from headstart.support.lock import Busy, locked


def refusing(number: int) -> Callable[..., None]:
    def lock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return lock


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_falls_back_to_lockf_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOTSUP))
    with locked(tmp_path / "run"):
        # These locks hold between processes: try it from another one.
        ask = f"import fcntl; fcntl.lockf(open({str(tmp_path / 'run' / 'lock')!r}, 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        asked = subprocess.run(["python3", "-c", ask], capture_output=True, text=True)
        assert "BlockingIOError" in asked.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, kind, refusing(errno.ENOLCK))


def test_without_file_locks_a_marker_names_the_process(tmp_path: Path, without_locks: None) -> None:
    mine = rf"process {os.getpid()}\)"
    with locked(tmp_path):
        with pytest.raises(UserError, match=mine) as refused, locked(tmp_path):
            pytest.fail("held twice")
        assert refused.value.remedy == "Wait for it, or choose another --run-dir."
    with locked(tmp_path):
        pass
    assert not (tmp_path / "lock.held").exists()


def test_a_killed_process_marker_is_taken_over_on_its_machine(tmp_path: Path, without_locks: None, gone: int) -> None:
    mark = tmp_path / "lock.held"
    mark.write_text(f"{gone} on {socket.gethostname()}")
    with locked(tmp_path):
        assert mark.read_text().startswith(f"{os.getpid()} on ")
    for words in (f"{gone} on elsewhere", "", "half a wo"):
        mark.write_text(words)
        with pytest.raises(UserError, match="Another run") as refused, locked(tmp_path):
            pytest.fail("that process may still run")
        assert f"rm {mark}" in refused.value.remedy


def test_a_vanishing_marker_still_counts(tmp_path: Path, without_locks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, read = tmp_path / "lock.held", Path.read_text

    def leave_first(path: Path, **how: Any) -> str:
        path.unlink()
        return read(path, **how)

    mark.touch()
    monkeypatch.setattr(Path, "read_text", leave_first)
    with pytest.raises(Busy), locked(tmp_path):
        pytest.fail("held twice")
    with locked(tmp_path):
        pass


def test_other_disk_errors_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(UserError, match=r"Cannot lock .*/lock: Input/output error"), locked(tmp_path):
        pytest.fail("not locked")


def test_an_unwritable_folder_is_one_sentence() -> None:
    with pytest.raises(UserError, match="Cannot write in /proc/x") as refused, locked(Path("/proc/x")):
        pytest.fail("not there")
    assert "--run-dir" in refused.value.remedy


@pytest.mark.parametrize("where", ["elsewhere", "here"])
def test_a_long_wait_names_the_lock_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    polls, made = count(), Artifact(tmp_path / "states" / "x", {})
    console = Console(file=StringIO(), width=500)

    def sleep(_: float) -> None:
        if next(polls) == 150:
            raise TimeoutError

    monkeypatch.setattr("time.sleep", sleep)
    with locked(made.folder):
        holder = f"17 on {where}" if where == "elsewhere" else "17"
        (made.folder / "lock").write_text(holder)
        with pytest.raises(TimeoutError), lock_artifact(made, console):
            pytest.fail("held twice")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(f"waiting: Another run (process {holder}) is working in {made.folder}") == 2
    assert text.count(f"rm {made.folder}/lock") == 1
