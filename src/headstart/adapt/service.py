"""Which heads of a run serve, which did before, and which were refused.

    RUN/adapt/heads -> updates/0002/heads    what serves: `headstart.load("RUN/adapt/heads", follow=True)`
    RUN/adapt/service.json                   every change of it, the oldest first
    RUN/adapt/updates/0000/heads             those of the run itself
    RUN/adapt/updates/0001/                  an update, accepted or refused: heads, and update.json with the figures

Updates are written whole and never changed, so that whoever reads heads through the link reads those of one version.
The run itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.heads.io import RUN_RECIPE, heads_folder, version_of
from headstart.hub.format import check_folder
from headstart.support.artifacts import give, point
from headstart.support.files import read_json, write_atomic, write_json
from headstart.support.lock import locked

_FOLDER = "adapt"
_HISTORY = "service.json"
_FIGURES = "update.json"
BUSY = "Wait for it, or stop it: what it has made is kept."
"""What to do while another process adapts."""


def recipe_of(run: Path) -> Path:
    """The recipe of a run; a UserError where the folder is none."""
    if not (run / RUN_RECIPE).is_file():
        remedy = "Give the folder of the run that trained the heads: its conversations keep them from forgetting."
        raise UserError(f"{run} is not the folder of a run.", remedy)
    return run / RUN_RECIPE


class Service:
    """The heads of a run in service; made at first use, with those of the run.

    Raises:
        UserError: the folder is no run, or it has no heads yet.
    """

    def __init__(self, run: Path) -> None:
        run = recipe_of(run).parent.resolve()
        self.folder = run / _FOLDER
        self.link = self.folder / "heads"
        if not self._changes() or self.link.resolve() != self.heads(self.serving).resolve():
            with self.held():
                self._begin(heads_folder(run))

    def _begin(self, heads: Path) -> None:
        """Serve the heads of the run where nothing does, and mend what a killed process left."""
        check_folder(heads)
        if not self.heads(0).is_dir():
            give(heads, self.heads(0))
        if not self._changes():
            self._note(0, "the heads of the run")
        point(self.link, self.heads(self.serving))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Work on it while no other process does; Busy (a UserError) where one does."""
        with locked(self.folder, BUSY):
            yield

    def check_current(self) -> None:
        """Refuse (UserError) to learn from heads that the run no longer has, since it was trained again."""
        run = self.folder.parent
        if version_of(heads_folder(run)) != version_of(self.heads(0)):
            raise UserError(
                f"The heads of {run} are others than when adapting began.",
                f"To begin anew with them: rm -r {self.folder}",
            )

    def heads(self, number: int) -> Path:
        """The folder of the heads of an update."""
        return self._update(number) / "heads"

    @property
    def serving(self) -> int:
        """The number of the update that serves."""
        return int(self._changes()[-1]["update"])

    @property
    def next_number(self) -> int:
        """Of an update that is to come."""
        return 1 + max(int(path.name) for path in (self.folder / "updates").glob("[0-9]*[0-9]"))

    def updates(self) -> list[dict[str, Any]]:
        """The figures of all updates that were judged, in order, each with its `number`."""
        files = sorted((self.folder / "updates").glob(f"[0-9]*[0-9]/{_FIGURES}"))
        return [{"number": int(file.parent.name), **read_json(file)} for file in files]

    def add(self, number: int, heads: Path, figures: dict[str, Any]) -> None:
        """Keep the heads of an update that was judged, with its figures."""

        def fill(partial: Path) -> None:
            give(heads, partial / "heads")
            write_json(partial / _FIGURES, figures)

        write_atomic(self._update(number), fill)

    def serve(self, number: int, why: str) -> None:
        """Have these heads serve from now on; decoders that follow take them before their next request."""
        if not self.heads(number).is_dir():
            known = ", ".join(str(path) for path in range(self.next_number) if self.heads(path).is_dir())
            raise UserError(f"There is no update {number} in {self.folder}.", f"Here are: {known}.")
        check_folder(self.heads(number))
        if number != self.serving:
            self._note(number, why)
        point(self.link, self.heads(number))

    @property
    def earlier(self) -> int | None:
        """The number of the update that served before, which `back` goes to; None where none did."""
        stack: list[int] = []
        for change in self._changes():
            if change["why"] == "back":
                stack.pop()
            else:
                stack.append(int(change["update"]))
        return stack[-2] if len(stack) > 1 else None

    def back(self) -> None:
        """Have the heads serve that served before."""
        if (number := self.earlier) is None:
            raise UserError(
                f"No heads served before those of update {self.serving}.", "There is nothing to go back to."
            )
        self.serve(number, "back")

    def _update(self, number: int) -> Path:
        return self.folder / "updates" / f"{number:04d}"

    def _changes(self) -> list[dict[str, Any]]:
        file = self.folder / _HISTORY
        return list(read_json(file)) if file.is_file() else []

    def _note(self, number: int, why: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        change = {"time": now, "update": number, "version": version_of(self.heads(number)), "why": why}
        write_json(self.folder / _HISTORY, [*self._changes(), change])
