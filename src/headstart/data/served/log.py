"""An opt-in, bounded log of served requests, to train on.

    log.json                 limits in gigabytes and days, shared by all writers
    served-<ms>-<pid>.jsonl  a segment: one answered request a line, written by one process

A line holds no text: token ids of prompt and answer, sampling settings, target, chat template, heads, time, and the
source if the server provides one. The oldest segments are deleted if the folder exceeds its limits. JSONL files of
serving engines in the folder are read too (see `headstart.data.served.reading`) and never deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.prompts.chat import template_kwargs
from headstart.errors import UserError
from headstart.support.files import append_atomic, read_json, remove, write_json

BOUNDS = "log.json"
UPDATE, PLAN = "update", "plan.json"
"""Folder of an update in progress, and its last written file (`headstart.adapt.update`)."""
_BOUNDS = {"gigabytes": 1.0, "days": 30.0}
_SEGMENTS = 8
"""Segments within the limits: deleting the oldest loses an eighth."""
_DAY = 86400.0


@dataclass(frozen=True)
class Served:
    """One answered request.

    Attributes:
        prompt, answer: token ids.
        finish: why the answer ended: "end", "length" or "stop".
        sampling: sampling settings, empty if greedy; "processed" marks penalties, biases and grammars.
        time: Unix time in seconds.
        target: fingerprint of the target; `template`: hash of its chat template; empty if unknown.
        source: the client, as the server knows it; empty if unknown.
        heads: version of the drafting heads; `rounds`: forwards of the answer; empty and 0 if unknown.
    """

    prompt: list[int]
    answer: list[int]
    finish: str
    time: float
    sampling: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    template: str = ""
    source: str = ""
    heads: str = ""
    rounds: int = 0


Keep = Callable[[Served], Served | None]
"""Filter that returns a request as it is, changed (`dataclasses.replace`), or None to drop it. Runs in the decoding
thread; information about the client comes with the request (`source`)."""


class RequestLog:
    """A thread-safe writer of a log folder; each process has its own segments.

    A failed write (disk full) is undone, counted in `lost` and warned about once; it never fails an answer. A filter
    that raises drops the request, with a warning.

    Args:
        folder: created if missing, with access for its owner only.
        gigabytes: maximum size in 1e9 bytes; the folder's setting by default, else 1.
        days: maximum age of a request (up to an eighth more at low traffic); the folder's setting by default, else 30.
        keep: see `Keep`; None keeps every request.
    """

    def __init__(
        self, folder: str | Path, gigabytes: float | None = None, days: float | None = None, keep: Keep | None = None
    ) -> None:
        self.folder, self.lost = Path(folder).expanduser(), 0
        given = {"gigabytes": gigabytes, "days": days}
        known = read_json(self.folder / BOUNDS) if (self.folder / BOUNDS).is_file() else _BOUNDS
        self._bounds: dict[str, float] = {**known, **{name: most for name, most in given.items() if most is not None}}
        if not min(self._bounds.values()) > 0:
            words = " and ".join(f"{most:g} {name}" for name, most in self._bounds.items())
            raise UserError(f"A log of {words} holds nothing.", "Give more than 0.")
        self._keep = keep
        self._lock = threading.Lock()
        self._segment, self._began = -1, 0.0
        self._warned: set[str] = set()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.folder / BOUNDS, self._bounds)
        prune(self.folder)

    def add(self, served: Served) -> None:
        """Log a request if the filter keeps it."""
        kept: Served | None = None
        try:
            kept = served if self._keep is None else self._keep(served)
        except Exception as error:  # fail closed: the filter may hide private data
            self._warn(f"The filter of the log raised {type(error).__name__}: {error}; such requests are not kept.")
        if kept is None:
            return
        line = (json.dumps(asdict(kept), separators=(",", ":")) + "\n").encode()
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self.lost += 1
                self._warn(f"The log in {self.folder} cannot be written ({error.strerror}); requests are not kept.")

    def _append(self, line: bytes) -> None:
        most, oldest = 1e9 * self._bounds["gigabytes"] / _SEGMENTS, self._bounds["days"] * _DAY / _SEGMENTS
        if self._segment >= 0:
            known = os.fstat(self._segment)
            if not known.st_nlink or known.st_size + len(line) > most or time.time() > self._began + oldest:
                os.close(self._segment)
                self._segment = -1
        if self._segment < 0:
            prune(self.folder, room=int(most))
            self._began = time.time()
            file = self.folder / f"served-{int(1e3 * self._began)}-{os.getpid()}.jsonl"
            self._segment = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        append_atomic(self._segment, line)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def segments(folder: Path) -> list[Path]:
    """List the segments of a log, oldest first."""
    return sorted(folder.glob("served-*.jsonl"), key=lambda file: (int(file.stem.split("-")[1]), file.name))


def prune(folder: Path, room: int = 0) -> None:
    """Delete segments beyond the limits, with `room` bytes to spare, and an update in progress that is too old."""
    if not (folder / BOUNDS).is_file():
        return
    bounds, kept = read_json(folder / BOUNDS), list[tuple[Path, int]]()
    oldest = time.time() - bounds["days"] * _DAY
    for file in segments(folder):
        with suppress(FileNotFoundError):  # another process may have deleted it
            known = file.stat()
            if known.st_mtime < oldest:
                file.unlink()
            else:
                kept.append((file, known.st_size))
    while kept and sum(size for _, size in kept) + room > 1e9 * bounds["gigabytes"]:
        kept.pop(0)[0].unlink(missing_ok=True)
    plan = folder / UPDATE / PLAN
    if plan.is_file() and plan.stat().st_mtime < oldest:
        delete_update(folder)


def delete_update(folder: Path) -> None:
    """Delete an update in progress; its plan goes first, since an update without a plan starts over."""
    (folder / UPDATE / PLAN).unlink(missing_ok=True)
    remove(folder / UPDATE)


def template_version(tokenizer: Any) -> str:
    """Hash a chat template with its bound variables; empty without a template."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    known = f"{template} {json.dumps(template_kwargs(tokenizer), sort_keys=True)}"
    return hashlib.sha256(known.encode()).hexdigest()[:12]
