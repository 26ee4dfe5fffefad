"""A log of what was served, to learn from: kept only where it is asked for, within bounds, deleted by one call.

    log.json                 the bounds: bytes and days, of all who write here
    served-<ms>-<pid>.jsonl  a segment: one answered request a line, written by one process

Each line holds token ids of a prompt and its answer, how the answer was drawn, the target and chat template, the heads
that drafted, when, and who asked, if the server says so. Nothing else is kept, and no text. Whole segments are deleted,
the oldest first, where the folder holds more bytes or older requests than it may. Other JSONL files in the folder, of
serving engines (see `headstart.data.served.reading`), are read beside them and left as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.prompts.chat import template_kwargs
from headstart.errors import UserError
from headstart.support.files import append_whole, read_json, remove, write_json

BOUNDS = "log.json"
UPDATE, PLAN = "update", "plan.json"
"""Where an update under way lies in the folder, and the file of it that is written last (`headstart.adapt.update`)."""
_BOUNDS = {"gigabytes": 1.0, "days": 30.0}
_SEGMENTS = 8
"""Parts of the bounds after which a segment is closed, so that deleting the oldest loses little."""
_DAY = 86400.0


@dataclass(frozen=True)
class Served:
    """One answered request.

    Attributes:
        prompt: token ids that the target read; `answer` those that it wrote.
        finish: why the answer ended: "end", "length" or "stop".
        sampling: how tokens were drawn, where not greedily; "processed" where anything but the target's own
            distribution decided (penalties, biases, grammars).
        time: in seconds since 1970.
        target: fingerprint of the model, and `template` a hash of its chat template; empty where an engine does not
            say.
        source: who asked, as the server knows it; empty where it does not.
        heads: version of the heads that drafted, and `rounds` how many forwards the answer took; empty and 0 where an
            engine does not say.
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

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Served:
        """Back from its fields; a KeyError, TypeError or ValueError where they are none."""
        prompt, answer = ([int(token) for token in row[name]] for name in ("prompt", "answer"))
        target, template, source, heads = (str(row.get(name, "")) for name in ("target", "template", "source", "heads"))
        sampling, rounds = dict(row.get("sampling", {})), int(row.get("rounds", 0))
        finish, moment = str(row["finish"]), float(row["time"])
        return cls(prompt, answer, finish, moment, sampling, target, template, source, heads, rounds)


Keep = Callable[[Served], Served | None]
"""What is kept of a request: as it is, changed (`dataclasses.replace`), or None for nothing. Called in the thread that
decodes: what it is to know of who asked comes with the request (`source`)."""


class RequestLog:
    """Writes what is served into a folder; safe for threads, and for several processes, each with its own segments.

    What cannot be written (the disk is full) is counted in `lost` and told once as a Python warning: answers never wait
    or fail for it, and the line is taken back whole. A filter that raises keeps nothing, and is told too.

    Args:
        folder: made if need be, readable by its owner alone.
        gigabytes: most gigabytes (1e9 bytes) kept in it; as the folder has it where it is not given, else 1.
        days: most days that a request is kept, an eighth more where little is served; likewise, else 30.
        keep: see `Keep`; without one every request is kept.
    """

    def __init__(
        self,
        folder: str | Path,
        gigabytes: float | None = None,
        days: float | None = None,
        keep: Keep | None = None,
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
        self._told: set[str] = set()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.folder / BOUNDS, self._bounds)
        prune(self.folder)

    def add(self, served: Served) -> None:
        """Keep a request, as far as the filter lets it."""
        kept: Served | None = served
        try:
            kept = served if self._keep is None else self._keep(served)
        except Exception as error:  # whatever it was to hide stays hidden
            kept = None
            self._tell(f"The filter of the log raised {type(error).__name__}: {error}; such requests are not kept.")
        if kept is None:
            return
        line = (json.dumps(asdict(kept), separators=(",", ":")) + "\n").encode()
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self.lost += 1
                self._tell(f"The log in {self.folder} cannot be written ({error.strerror}); requests are not kept.")

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
        append_whole(self._segment, line)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def segments(folder: Path) -> list[Path]:
    """What `RequestLog` wrote, the oldest first."""
    return sorted(folder.glob("served-*.jsonl"), key=lambda file: (int(file.stem.split("-")[1]), file.name))


def prune(folder: Path, room: int = 0) -> None:
    """Delete the segments that a log's bounds do not allow beside so many bytes to come, and an update under way that
    is as old."""
    if not (folder / BOUNDS).is_file():
        return
    bounds, kept = read_json(folder / BOUNDS), list[tuple[Path, int]]()
    oldest = time.time() - bounds["days"] * _DAY
    for file in segments(folder):
        with suppress(FileNotFoundError):  # another process deletes them, too
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
    """Delete what an update under way has made of a log; without its plan, which goes first, it is begun anew."""
    (folder / UPDATE / PLAN).unlink(missing_ok=True)
    remove(folder / UPDATE)


def template_version(tokenizer: Any) -> str:
    """A hash of a chat template with the variables it is always rendered with; empty where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    return hashlib.sha256(f"{template} {json.dumps(template_kwargs(tokenizer), sort_keys=True)}".encode()).hexdigest()[
        :12
    ]
