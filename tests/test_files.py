"""Files and folders are replaced whole, or left as they were."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headstart.errors import UserError
from headstart.support.files import check_writable, read_json, read_jsonl, write_atomic, write_json


def folder_of(*names: str) -> Callable[[Path], None]:
    def write(partial: Path) -> None:
        partial.mkdir()
        for name in names:
            (partial / name).write_text(name)

    return write


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_replaces_a_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "heads.old").mkdir()  # somebody's own
    for content in (("a", "b"), ("b", "c")):
        write_atomic(tmp_path / "heads", folder_of(*content))
        assert names(tmp_path / "heads") == set(content)
    assert names(tmp_path) == {"heads", "heads.old"}


def test_what_fails_half_way_leaves_the_old(tmp_path: Path) -> None:
    write_atomic(tmp_path / "heads", folder_of("a"))
    write_json(tmp_path / "x.json", 1)

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise OSError("full")

    for path in (tmp_path / "heads", tmp_path / "x.json"):
        with pytest.raises(OSError, match="full"):
            write_atomic(path, fail)
    assert names(tmp_path / "heads") == {"a"}
    assert (tmp_path / "x.json").read_text() == "1\n"
    assert names(tmp_path) == {"heads", "x.json"}, "no half of anything is left"


def test_the_mark_that_some_editors_put_before_utf_8_is_no_part_of_a_file(tmp_path: Path) -> None:
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


def test_whether_a_folder_can_be_written_to_is_found_out_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "er")
    check_writable(tmp_path)
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/x")):
        with pytest.raises(UserError, match="Cannot write to") as caught:
            check_writable(bad)
        assert str(bad) in caught.value.problem
    assert names(tmp_path) == {"file"}


def test_a_kill_between_the_two_steps_of_a_folder_is_mended_by_the_next_write(tmp_path: Path) -> None:
    (tmp_path / "heads.old.partial").mkdir()
    (tmp_path / "heads.partial").mkdir()
    write_atomic(tmp_path / "heads", folder_of("a"))
    assert names(tmp_path) == {"heads"}


def test_others_may_read_what_a_library_writes_for_its_owner_alone(tmp_path: Path) -> None:
    """Heads may be served by another user than the one who trained them."""
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "one", lambda partial: save_file({"a": torch.zeros(1)}, partial))
        write_atomic(tmp_path / "heads", lambda partial: (partial.mkdir(), save_file({}, partial / "weights")))
        write_json(tmp_path / "plain.json", 1)
    finally:
        os.umask(before)
    files = [tmp_path / "one", tmp_path / "heads" / "weights", tmp_path / "plain.json"]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640] * 3
