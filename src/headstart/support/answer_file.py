"""Earlier answers of a target in one file: token ids, added by any number of processes, each record whole or ignored.

A record is a head (a mark, the target's fingerprint, length and checksum of what follows) and some answers, compressed.
It is written at the end of the file at once, under the file's lock. What a process leaves half-written when it is
killed is known by its checksum: it is skipped, and a warning says how much; what stands before and after it is whole.
"""

from __future__ import annotations

import fcntl
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headstart.errors import UserError
from headstart.support.files import append_whole, write_atomic

MOST_BYTES = 8_000_000
"""Of a file that is added to: beyond it the older half of its records goes. About 4 million tokens."""
_MARK = b"\x93answer\n"
_HEAD = struct.Struct("<8s16sII")  # mark, fingerprint, bytes that follow, their CRC-32
_END = -1  # after each answer of a record
_TOGETHER = 16_384  # tokens of a record of `write_answers`: zlib looks 32 kB back


class _Record(NamedTuple):
    """A whole record: where it stands in the bytes that were read, whose answers they are, and they as packed."""

    start: int
    stop: int
    target: bytes
    packed: bytes


class AnswerFile:
    """A file of answers that processes share. An object serves one thread at a time.

    Args:
        path: of the file, which is made where there is none.
        target: fingerprint of the target, see `headstart.target.identity`; answers of others are left alone.
        most_bytes: see `MOST_BYTES`.

    Raises:
        UserError: the file cannot be written or locked, or holds something else.
    """

    def __init__(self, path: Path, target: str, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._target = bytes.fromhex(target)
        self._most_bytes = most_bytes
        self._inode = self._read_to = 0  # of the file that was read, and as far as it was
        try:
            with self._opened(fcntl.LOCK_SH) as file:
                _check_ours(os.pread(file, len(_MARK), 0), path)
        except OSError as error:
            problem = f"Cannot write answers to {path} ({error.strerror or error})."
            raise UserError(problem, "Name a file of yours, on a disk with locks.") from None

    def add(self, answers: Sequence[Sequence[int]]) -> None:
        """Add answers, in one record; an OSError where the system refuses, the file being as it was."""
        record = _record(self._target, answers)
        with self._opened(fcntl.LOCK_EX) as file:
            append_whole(file, record)
            if (size := os.fstat(file).st_size) > self._most_bytes:
                self._shorten(file, size)

    def new(self) -> tuple[list[list[int]], bool]:
        """Answers that were added since the last call, by any process, and whether the file is another one since then:
        shortened, or deleted. Then they are all that it holds."""
        try:
            known = os.stat(self.path)
        except FileNotFoundError:
            known = None
        if known is not None and (known.st_ino, known.st_size) == (self._inode, self._read_to):
            return [], False
        with self._opened(fcntl.LOCK_SH) as file:
            now = os.fstat(file)
            begun_anew = self._inode != 0 and (now.st_ino != self._inode or now.st_size < self._read_to)
            begin = 0 if begun_anew else self._read_to
            data = _read(file, begin, now.st_size)
        _check_ours(data[: len(_MARK)] if begin == 0 else _MARK, self.path)
        self._inode, self._read_to = now.st_ino, begin + len(data)
        records = list(_whole(data))
        _say_lost(len(data), records, self.path)
        if others := sum(record.target != self._target for record in records):
            warnings.warn(f"{others} records of {self.path} are another target's answers: ignored.", stacklevel=2)
        return [answer for each in records if each.target == self._target for answer in _answers(each)], begun_anew

    @contextmanager
    def _opened(self, lock: int) -> Iterator[int]:
        """The file, locked; again where another process has put a shorter one in its place meanwhile."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                fcntl.flock(file, lock)
                if _is_at(file, self.path):
                    yield file
                    return
            finally:
                os.close(file)  # which unlocks it

    def _shorten(self, file: int, size: int) -> None:
        """Keep the newest records, half of what there may be; other targets' among them."""
        data, kept, room = _read(file, 0, size), list[bytes](), self._most_bytes // 2
        for record in reversed(list(_whole(data))):
            room -= record.stop - record.start
            if room < 0 and kept:
                break
            kept.append(data[record.start : record.stop])
        write_atomic(self.path, lambda partial: partial.write_bytes(b"".join(reversed(kept))))


def write_answers(path: Path, target: str, answers: Iterable[Sequence[int]], most_bytes: int) -> None:
    """Write a file of answers, in place: the first ones, as many as fit; none where there are no answers."""
    records, size = list[bytes](), 0
    for together in _grouped(answers):
        record = _record(bytes.fromhex(target), together)
        size += len(record)
        if size > most_bytes:
            break
        records.append(record)
    if records:
        path.write_bytes(b"".join(records))


def read_answers(path: Path) -> list[list[int]]:
    """All answers of a file, of whatever target; a UserError where it holds something else."""
    data = path.read_bytes()
    _check_ours(data[: len(_MARK)], path)
    records = list(_whole(data))
    _say_lost(len(data), records, path)
    return [answer for record in records for answer in _answers(record)]


def check_answers(path: Path) -> None:
    """See (UserError) that a file which `write_answers` wrote is whole, as far as its checksums say; cheap."""
    data = path.read_bytes()
    whole = sum(record.stop - record.start for record in _whole(data))
    if not data or whole < len(data):
        raise UserError(
            f"{path} is cut short or damaged: {len(data) - whole} of its {len(data)} bytes are no whole answers.",
            "Export or fetch the heads again, or delete the file: heads draft without it.",
        )


def _grouped(answers: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    together: list[Sequence[int]] = []
    for answer in answers:
        together.append(answer)
        if sum(map(len, together)) >= _TOGETHER:
            yield together
            together = []
    if together:
        yield together


def _record(target: bytes, answers: Sequence[Sequence[int]]) -> bytes:
    tokens = np.array([token for answer in answers for token in (*answer, _END)], dtype="<i4")
    packed = zlib.compress(tokens.tobytes(), 9)
    return _HEAD.pack(_MARK, target, len(packed), zlib.crc32(target + packed)) + packed


def _answers(record: _Record) -> list[list[int]]:
    tokens = np.frombuffer(zlib.decompress(record.packed), dtype="<i4")
    ends = np.flatnonzero(tokens == _END)
    return [part[part != _END].tolist() for part in np.split(tokens, ends[:-1])]


def _whole(data: bytes) -> Iterator[_Record]:
    """The whole records among bytes that may begin or end anywhere."""
    start = data.find(_MARK)
    while start >= 0:
        begin = start + _HEAD.size
        if begin <= len(data):
            _, target, length, checksum = _HEAD.unpack_from(data, start)
            packed = data[begin : begin + length]
            if len(packed) == length and zlib.crc32(target + packed) == checksum:
                yield _Record(start, begin + length, target, packed)
                start = data.find(_MARK, begin + length)
                continue
        start = data.find(_MARK, start + 1)


def _read(file: int, begin: int, end: int) -> bytes:
    parts = []
    while begin < end and (part := os.pread(file, end - begin, begin)):
        parts.append(part)
        begin += len(part)
    return b"".join(parts)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _check_ours(beginning: bytes, path: Path) -> None:
    if not _MARK.startswith(beginning[: len(_MARK)]):
        raise UserError(f"{path} holds something else than answers.", "Name another file, or one that does not exist.")


def _say_lost(size: int, records: Sequence[_Record], path: Path) -> None:
    if lost := size - sum(record.stop - record.start for record in records):
        problem = f"{lost} bytes of {path} are no whole record, as when a process is killed while it writes: ignored."
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
