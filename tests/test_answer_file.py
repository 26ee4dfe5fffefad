"""Answers in a database: several processes, killed ones, damage, a file that grows too large."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import pytest

from headstart.errors import UserError
from headstart.support import answer_file
from headstart.support.answer_file import AnswerFile, read_answers, write_answers

TARGET, OTHER = "0a" * 16, "0b" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "f"


@pytest.fixture
def file(path: Path) -> AnswerFile:
    return AnswerFile(path, TARGET)


def answers(count: int, seed: int = 0, length: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(50_000) for _ in range(rng.randint(1, length))] for _ in range(count)]


def test_two_handles_share_a_file(path: Path) -> None:
    ours, theirs = (AnswerFile(path, TARGET) for _ in range(2))
    first, second, third = answers(3)
    ours.add([first])
    assert theirs.read_new() == ([first], False)
    theirs.add([second, third])
    assert theirs.read_new() == ([second, third], False)
    assert theirs.read_new() == ([], False)
    assert ours.read_new() == ([first, second, third], False)
    assert AnswerFile(path, TARGET).read_new() == ([first, second, third], False)
    assert [file.name for file in path.parent.iterdir()] == ["f"], "deleting the file deletes everything"


def test_another_targets_answers_are_kept_and_reported(path: Path) -> None:
    handles, texts = [AnswerFile(path, target) for target in (TARGET, OTHER)], answers(2)
    for handle, text in zip(handles, texts, strict=True):
        handle.add([text])
    for handle, text in zip(handles, texts, strict=True):
        with pytest.warns(UserWarning, match="1 rows .* another target's"):
            assert handle.read_new() == ([text], False)


def test_new_files_follow_the_umask(path: Path) -> None:
    before = os.umask(0o002)
    try:
        AnswerFile(path, TARGET)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o664


ADDING = """
import sys
from pathlib import Path
from headstart.support import answer_file
from headstart.support.answer_file import AnswerFile
print("ready", flush=True)
sys.stdin.readline()
file = AnswerFile(Path(sys.argv[1]), "0a" * 16)
for number in range(int(sys.argv[3])):
    file.add([[int(sys.argv[2]), number] * 50])
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from headstart.support import answer_file
from headstart.support.answer_file import AnswerFile
with AnswerFile(Path(sys.argv[1]), "0a" * 16)._open() as database:
    database.execute("PRAGMA cache_size = 1")  # pages go to the file before the commit
    database.execute("BEGIN IMMEDIATE")
    database.execute("UPDATE answers SET packed = zeroblob(9000)")
    database.executemany("INSERT INTO answers (target, packed) VALUES (?, zeroblob(9000))", [("0a" * 16,)] * 50)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_processes_create_and_add_at_once(path: Path) -> None:
    each = 60
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ADDING, path, str(name), str(each)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name in (1, 2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait() for process in processes] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read, _ = AnswerFile(path, TARGET).read_new()
    for name in (1, 2):
        assert [answer[1] for answer in read if answer[0] == name] == list(range(each)), "all of them, in order"


def test_a_process_that_is_killed_in_a_write_loses_nothing_but_its_own_answers(path: Path, file: AnswerFile) -> None:
    first, second = answers(2)
    file.add([first])
    size = path.stat().st_size
    killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert killed.returncode == -signal.SIGKILL and path.stat().st_size > size
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert file.read_new() == ([first], False)
        file.add([second])
        assert file.read_new() == ([second], False)
        assert AnswerFile(path, TARGET).read_new() == ([first, second], False)


def test_a_flipped_bit_never_makes_answers_up(path: Path, file: AnswerFile) -> None:
    """Either the damaged answer is skipped, or the file is refused."""
    texts = answers(3)
    for text in texts:
        file.add([text])
    data, refused, left_out = bytearray(path.read_bytes()), 0, 0
    used = [place for place, byte in enumerate(data) if byte]
    for place in used[:: 1 + len(used) // 150]:
        data[place] ^= 16
        path.write_bytes(data)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                read = AnswerFile(path, TARGET).read_new()[0]
                assert all(answer in texts for answer in read)
                left_out += len(read) < 3
            except UserError:
                refused += 1
        data[place] ^= 16
    assert refused > 5 and left_out > 20


def test_a_damaged_answer_is_skipped_and_reported(path: Path, file: AnswerFile) -> None:
    texts = answers(3)
    for text in texts:
        file.add([text])
    with sqlite3.connect(path) as database:
        database.execute("UPDATE answers SET packed = substr(packed, 1, length(packed) - 1) WHERE id = 2")
    with pytest.warns(RuntimeWarning, match="1 rows of .* are damaged"):
        assert file.read_new() == ([texts[0], texts[2]], False)


def test_a_file_that_is_too_large_loses_its_older_half_and_nothing_that_is_added_meanwhile(path: Path) -> None:
    most = 40_000
    ours, theirs = (AnswerFile(path, TARGET, most) for _ in range(2))
    texts = answers(200, length=600)
    seen: list[list[int]] = []
    for number, text in enumerate(texts):
        (ours if number % 2 else theirs).add([text])
        assert path.stat().st_size <= most
        new, recreated = ours.read_new()
        assert not recreated
        seen += new
    assert seen == texts
    kept = AnswerFile(path, TARGET).read_new()[0]
    assert 10 < len(kept) < 100 and kept == texts[-len(kept) :]
    path.unlink()
    theirs.add([texts[0]])
    assert theirs.read_new() == ([texts[0]], False)


def test_a_full_disk_leaves_the_file_as_it_was(path: Path, file: AnswerFile) -> None:
    first, second = answers(1)[0], answers(1, seed=1, length=40_000)[0]
    file.add([first])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4096, limits[1]))
    try:
        with pytest.raises(UserError, match="Cannot keep answers"):
            file.add([second])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_new() == ([first], False)
    file.add([second])
    assert file.read_new() == ([second], False)


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("Chapter 1")
    with sqlite3.connect(tmp_path / "database") as database:
        database.execute("CREATE TABLE answers (id INTEGER PRIMARY KEY, target TEXT, packed BLOB)")
    for name in ("thesis", "database"):
        before = (tmp_path / name).read_bytes()
        for read in (lambda path: AnswerFile(path, TARGET), read_answers):
            with pytest.raises(UserError, match="something else"):
                read(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    for path in (tmp_path / "nowhere" / "f", tmp_path):
        with pytest.raises(UserError, match="Cannot keep answers"):
            AnswerFile(path, TARGET)


def test_a_database_that_cannot_be_written_is_refused_at_once(path: Path, file: AnswerFile) -> None:
    data = bytearray(path.read_bytes())
    data[18] = 3  # a format that this SQLite reads and does not write
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"Cannot keep answers.*readonly"):
        AnswerFile(path, TARGET)


def test_shipped_answers_respect_the_size_limit(tmp_path: Path) -> None:
    texts = answers(3000, length=60)
    write_answers(tmp_path / "all", texts, 10_000_000)
    assert read_answers(tmp_path / "all") == texts
    write_answers(tmp_path / "part", iter(texts), 100_000)
    kept = read_answers(tmp_path / "part")
    assert 34_000 < (tmp_path / "part").stat().st_size <= 100_000
    assert 0 < len(kept) < 3000 and kept == texts[: len(kept)]
    write_answers(tmp_path / "none", [], 100)
    assert not (tmp_path / "none").exists()


def test_any_truncation_of_shipped_answers_is_noticed(path: Path) -> None:
    write_answers(path, answers(3), 100_000)
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"cut short|something else"):
            read_answers(path)


@pytest.mark.parametrize("unpacked", [bytes(3), bytes(200_000_000)], ids=["no tokens", "far too many"])
def test_a_file_that_unpacks_to_something_else_is_damaged(unpacked: bytes, path: Path) -> None:
    path.write_bytes(answer_file._MAGIC + zlib.compress(unpacked, 1))
    with pytest.raises(UserError, match="damaged"):
        read_answers(path)
