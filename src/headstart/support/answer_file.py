"""Earlier answers of a target as token ids: a SQLite database shared by processes, and the packed file beside heads.

The published file is not SQLite, which is not safe on untrusted files.
"""

from __future__ import annotations

import random
import sqlite3
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from headstart.errors import UserError

MOST_BYTES = 8_000_000
"""Database size at which the older half of the answers is dropped: about 4 million tokens."""
_MAGIC = b"\x93answers\n"
_APPLICATION = int.from_bytes(b"head")  # SQLite's application_id
_END = -1  # follows each answer
_MOST_UNPACKED = 64_000_000
"""Bytes that one packed row or file may unpack to, four times the largest one written."""
_ZLIB_BUFFER = 66_000
"""Upper bound of zlib's internal buffer in bytes."""
_CREATE = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY, target TEXT NOT NULL, packed BLOB NOT NULL);
PRAGMA application_id = {application};
PRAGMA user_version = {identity};
COMMIT;
"""


class AnswerFile:
    """A SQLite database of answers, shared by processes and threads.

    Args:
        path: created if missing.
        target: fingerprint of the target (`headstart.model.identity`); `read_new` skips other targets' answers.
        most_bytes: see `MOST_BYTES`.

    Raises:
        UserError: (from methods too) the file cannot be written or locked, is damaged, or holds something else.
    """

    def __init__(self, path: Path, target: str, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._target = target
        self._most_bytes = most_bytes
        self._identity = self._last_row = 0  # database and row that `read_new` read last
        with self._open() as database:
            database.execute("DELETE FROM answers WHERE FALSE")  # fails where nothing can be written

    def add(self, answers: Sequence[Sequence[int]]) -> None:
        """Add answers as one row, atomically."""
        with self._open() as database:
            database.execute(
                "INSERT INTO answers (target, packed) VALUES (?, ?)", (self._target, zlib.compress(_tokens(answers), 9))
            )
            if _number(database, "page_count") * _number(database, "page_size") > self._most_bytes:
                database.execute("DELETE FROM answers WHERE id < (SELECT (min(id) + max(id) + 1) / 2 FROM answers)")
                database.execute("VACUUM")

    def read_new(self) -> tuple[list[list[int]], bool]:
        """Return answers added since the last call, and whether the file was recreated since (then all its answers)."""
        with self._open() as database:
            identity = _number(database, "user_version")
            recreated = self._identity not in (0, identity)
            self._last_row = 0 if recreated else self._last_row
            query = "SELECT id, target, packed FROM answers WHERE id > ? ORDER BY id"
            rows = database.execute(query, (self._last_row,)).fetchall()
        self._identity = identity
        self._last_row = rows[-1][0] if rows else self._last_row
        answers, damaged = list[list[int]](), 0
        for _, target, packed in rows:
            try:
                answers += _unpack(packed) if target == self._target else []
            except (zlib.error, TypeError):
                damaged += 1
        if damaged:
            warnings.warn(f"{damaged} rows of {self.path} are damaged: ignored.", RuntimeWarning, stacklevel=2)
        if others := sum(target != self._target for _, target, _ in rows):
            warnings.warn(f"{others} rows of {self.path} are another target's answers: ignored.", stacklevel=2)
        return answers, recreated

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Connect for one operation: a connection survives neither a fork nor a deleted file."""
        try:
            if not self.path.exists():
                self.path.touch()  # SQLite would create it without group write access
            with closing(sqlite3.connect(self.path, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = OFF")  # an answer does not wait for the disk
                if not _number(database, "page_count"):
                    identity = random.SystemRandom().randrange(1, 1 << 31)
                    database.executescript(_CREATE.format(application=_APPLICATION, identity=identity))
                if _number(database, "application_id") != _APPLICATION:
                    raise _foreign(self.path)
                yield database
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                raise _foreign(self.path) from None
            reason = error.strerror if isinstance(error, OSError) else error
            remedy = "Name a file of yours, on a disk with locks and room. If it is malformed, delete it."
            raise UserError(f"Cannot keep answers in {self.path} ({reason}).", remedy) from None


def write_answers(path: Path, answers: Iterable[Sequence[int]], most_bytes: int) -> None:
    """Write the leading answers that fit in `most_bytes`; write no file if there are none."""
    data, packer, kept = bytearray(_MAGIC), zlib.compressobj(9), 0
    for answer in answers:
        tokens = _tokens([answer])
        if len(data) + len(tokens) > most_bytes - _ZLIB_BUFFER:
            break
        data += packer.compress(tokens)
        kept += 1
    if kept:
        path.write_bytes(data + packer.flush())


def read_answers(path: Path) -> list[list[int]]:
    """Read a file of `write_answers`; a UserError if it is damaged or of another kind."""
    data, remedy = path.read_bytes(), "Export or fetch the heads again, or delete the file: heads draft without it."
    if not data.startswith(_MAGIC):
        raise UserError(f"{path} holds something else than answers.", remedy)
    try:
        return _unpack(data.removeprefix(_MAGIC))
    except zlib.error as error:
        raise UserError(f"{path} is cut short or damaged ({error}).", remedy) from None


def _foreign(path: Path) -> UserError:
    return UserError(f"{path} holds something else than answers.", "Name another file, or one that does not exist.")


def _tokens(answers: Sequence[Sequence[int]]) -> bytes:
    return np.array([token for answer in answers for token in (*answer, _END)], "<i4").tobytes()


def _unpack(packed: bytes) -> list[list[int]]:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(packed, _MOST_UNPACKED)
    if not unpacker.eof or len(data) % 4:
        raise zlib.error("incomplete, or larger than any file of answers")
    tokens = np.frombuffer(data, "<i4")
    return [part[:-1].tolist() for part in np.split(tokens, np.flatnonzero(tokens == _END) + 1)[:-1]]


def _number(database: sqlite3.Connection, pragma: str) -> int:
    return int(database.execute(f"PRAGMA {pragma}").fetchone()[0])
