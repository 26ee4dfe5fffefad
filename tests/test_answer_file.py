"""Answers in a file: several processes, killed ones, damage, a file that grows too large."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from headstart.errors import UserError
from headstart.support.answer_file import AnswerFile, read_answers, write_answers

TARGET, OTHER = "0a" * 16, "0b" * 16


def answers(count: int, seed: int = 0, length: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(50_000) for _ in range(rng.randint(1, length))] for _ in range(count)]


def test_what_one_adds_the_other_reads(tmp_path: Path) -> None:
    ours, theirs = (AnswerFile(tmp_path / "f", TARGET) for _ in range(2))
    first, second, third = answers(3)
    ours.add([first])
    assert theirs.new() == ([first], False)
    theirs.add([second, third])
    assert theirs.new() == ([second, third], False)
    assert theirs.new() == ([], False)
    assert ours.new() == ([first, second, third], False)
    assert AnswerFile(tmp_path / "f", TARGET).new() == ([first, second, third], False)
    assert read_answers(tmp_path / "f") == [first, second, third]


def test_another_targets_answers_are_left_alone_and_said(tmp_path: Path) -> None:
    ours, theirs = AnswerFile(tmp_path / "f", TARGET), AnswerFile(tmp_path / "f", OTHER)
    first, second = answers(2)
    ours.add([first])
    theirs.add([second])
    with pytest.warns(UserWarning, match="1 records .* another target's"):
        assert ours.new() == ([first], False)
    with pytest.warns(UserWarning, match="1 records .* another target's"):
        assert theirs.new() == ([second], False)


ADDING = """
import sys
from pathlib import Path
from headstart.support.answer_file import AnswerFile
file = AnswerFile(Path(sys.argv[1]), "0a" * 16)
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    file.add([[int(sys.argv[2]), number] * 50])
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from headstart.support import answer_file
write = os.write

def half(file, data):
    write(file, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

answer_file.os.write = half
answer_file.AnswerFile(Path(sys.argv[1]), "0a" * 16).add([[7] * 50])
"""


def test_two_processes_add_at_once(tmp_path: Path) -> None:
    path, each = tmp_path / "f", 60
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
        read, _ = AnswerFile(path, TARGET).new()
    for name in (1, 2):
        assert [answer[1] for answer in read if answer[0] == name] == list(range(each)), "all of them, in order"


def test_a_process_that_is_killed_in_a_write_loses_nothing_but_its_own_record(tmp_path: Path) -> None:
    path = tmp_path / "f"
    ours = AnswerFile(path, TARGET)
    first, second = answers(2)
    ours.add([first])
    assert ours.new() == ([first], False)
    size = path.stat().st_size
    killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert killed.returncode == -signal.SIGKILL and path.stat().st_size > size
    with pytest.warns(RuntimeWarning, match=f"{path.stat().st_size - size} bytes .* no whole record"):
        assert ours.new() == ([], False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.new() == ([], False), "said once"
        ours.add([second])
        assert ours.new() == ([second], False)
    with pytest.warns(RuntimeWarning, match="no whole record"):
        assert AnswerFile(path, TARGET).new() == ([first, second], False)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 31, 32, 33, 40])
def test_whatever_is_left_of_a_record_those_around_it_are_whole(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = AnswerFile(path, TARGET)
    first, second, third = answers(3)
    file.add([first])
    begin = path.stat().st_size
    file.add([second])
    os.truncate(path, begin + cut)
    file.add([third])
    with pytest.warns(RuntimeWarning, match=f"{cut} bytes"):
        assert AnswerFile(path, TARGET).new()[0] == [first, third]


def test_a_flipped_bit_costs_its_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = AnswerFile(path, TARGET)
    texts, ends = answers(3), [0]
    for text in texts:
        file.add([text])
        ends.append(path.stat().st_size)
    data = bytearray(path.read_bytes())
    for place in range(ends[1], ends[2]):
        data[place] ^= 16
        path.write_bytes(data)
        with pytest.warns(RuntimeWarning, match="no whole record"):
            assert read_answers(path) == [texts[0], texts[2]]
        data[place] ^= 16


def test_a_file_that_is_too_large_loses_its_older_half_and_nothing_that_is_added_meanwhile(tmp_path: Path) -> None:
    path, most = tmp_path / "f", 4000
    ours, theirs = (AnswerFile(path, TARGET, most) for _ in range(2))
    texts = answers(200)
    seen: list[list[int]] = []
    for number, text in enumerate(texts):
        (ours if number % 2 else theirs).add([text])
        assert path.stat().st_size <= most
        new, begun_anew = ours.new()
        seen = new if begun_anew else seen + new
        assert seen[-1] == text and seen == texts[number + 1 - len(seen) : number + 1]
    assert 10 < len(seen) < 100
    path.unlink()
    assert ours.new() == ([], True), "deleted: everything is forgotten"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    file = AnswerFile(path, TARGET)
    first, second = answers(2)
    file.add([first])
    before, write = path.read_bytes(), os.write

    def full(handle: int, data: bytes) -> int:
        if path.stat().st_size > len(before):
            raise OSError(28, "No space left on device")
        return write(handle, data[:20])

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("headstart.support.answer_file.os.write", full)
        file.add([second])
    assert path.read_bytes() == before


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("Chapter 1")
    for read in (lambda path: AnswerFile(path, TARGET), read_answers):
        with pytest.raises(UserError, match="something else"):
            read(tmp_path / "thesis")
    assert (tmp_path / "thesis").read_text() == "Chapter 1"
    with pytest.raises(UserError, match="Cannot write answers"):
        AnswerFile(tmp_path / "nowhere" / "f", TARGET)


def test_what_is_shipped_keeps_to_its_size(tmp_path: Path) -> None:
    texts = answers(3000, length=60)
    write_answers(tmp_path / "all", TARGET, texts, 10_000_000)
    assert read_answers(tmp_path / "all") == texts
    write_answers(tmp_path / "part", TARGET, iter(texts), 100_000)
    kept = read_answers(tmp_path / "part")
    assert (tmp_path / "part").stat().st_size <= 100_000
    assert 0 < len(kept) < 3000 and kept == texts[: len(kept)]
    write_answers(tmp_path / "none", TARGET, [], 100)
    assert not (tmp_path / "none").exists()
