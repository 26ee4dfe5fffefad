"""What a training says, on the console and, with the time, in a file beside its results."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console

FILE = "log.txt"


class Log:
    """The voice of the main process.

    The file is begun when the context is entered: a training that is refused before leaves no trace. What was said
    until then is written with the time at which it was said. Later sessions add to the file.

    Args:
        console: where sentences go; None shows nothing.
        folder: for the file `log.txt`; None writes none (every process but the main one).

    Attributes:
        console: as given.
    """

    def __init__(self, console: Console | None, folder: Path | None) -> None:
        self.console = console
        self._path = None if folder is None else folder / FILE
        self._waiting: list[str] | None = []

    def __enter__(self) -> Log:
        waiting, self._waiting = self._waiting or [], None
        for line in waiting:
            self._write(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.note(f"Error: {error}")

    def say(self, text: str) -> None:
        """One line on the console and in the file."""
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.note(text)

    def note(self, text: str) -> None:
        """One line in the file only."""
        line = f"{datetime.now().astimezone().isoformat(' ', 'seconds')} {' '.join(text.split())}\n"
        if self._waiting is not None:
            self._waiting.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as handle:
                handle.write(line)
