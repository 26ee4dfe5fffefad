"""Versions of a run's heads: in service, earlier, and refused.

    RUN/adapt/heads -> updates/0002/heads    in service: `headstart.load("RUN/adapt/heads", follow=True)`
    RUN/adapt/service.json                   history of the link, oldest first
    RUN/adapt/updates/0000/heads             the run's own heads
    RUN/adapt/updates/0001/                  an update, accepted or refused: heads, and update.json with the figures

Updates are written atomically and never changed, so a reader of the link always sees one version. The run itself is
never modified.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.heads.io import RUN_RECIPE, heads_folder, version_of
from headstart.hub.format import check_folder
from headstart.support.artifacts import link_into_run, set_symlink
from headstart.support.files import read_json, write_atomic, write_json
from headstart.support.lock import locked

_FOLDER = "adapt"
_HISTORY = "service.json"
_FIGURES = "update.json"
BUSY = "Wait for it, or stop it: it resumes where it stopped."
"""Remedy if another process holds the lock."""


def recipe_file(run: Path) -> Path:
    """Return the recipe file of a run. Raises UserError if the folder is not a run."""
    if not (run / RUN_RECIPE).is_file():
        remedy = "Give the folder of the run that trained the heads: its conversations keep them from forgetting."
        raise UserError(f"{run} is not the folder of a run.", remedy)
    return run / RUN_RECIPE


class Service:
    """The heads of a run in service; created on first use with the run's own heads.

    Raises:
        UserError: the folder is not a run, or has no heads yet.
    """

    def __init__(self, run: Path) -> None:
        run = recipe_file(run).parent.resolve()
        self.folder = run / _FOLDER
        self.link = self.folder / "heads"
        if self._history() and self.link.resolve() == self.heads(self.serving).resolve():
            return
        with self.lock():  # begins with the run's own heads, and repairs the state after a killed process
            check_folder(heads_folder(run))
            if not self.heads(0).is_dir():
                link_into_run(heads_folder(run), self.heads(0))
            if not self._history():
                self._record(0, "the heads of the run")
            set_symlink(self.link, self.heads(self.serving))

    def lock(self) -> AbstractContextManager[object]:
        """Lock the service. Raises Busy (a UserError) if another process holds the lock."""
        return locked(self.folder, BUSY)

    def check_current(self) -> None:
        """Raise UserError if the run was trained again since adapting began."""
        run = self.folder.parent
        if version_of(heads_folder(run)) != version_of(self.heads(0)):
            raise UserError(
                f"The heads of {run} have changed since adapting began.", f"To start over: rm -r {self.folder}"
            )

    def heads(self, number: int) -> Path:
        return self._update(number) / "heads"

    @property
    def serving(self) -> int:
        return int(self._history()[-1]["update"])

    @property
    def next_number(self) -> int:
        return 1 + max(int(path.name) for path in (self.folder / "updates").glob("[0-9]*[0-9]"))

    def updates(self) -> list[dict[str, Any]]:
        """Return the figures of all judged updates in order, each with its `number`."""
        files = sorted((self.folder / "updates").glob(f"[0-9]*[0-9]/{_FIGURES}"))
        return [{"number": int(file.parent.name), **read_json(file)} for file in files]

    def add(self, number: int, heads: Path, figures: dict[str, Any]) -> None:
        def fill(partial: Path) -> None:
            link_into_run(heads, partial / "heads")
            write_json(partial / _FIGURES, figures)

        write_atomic(self._update(number), fill)

    def serve(self, number: int, why: str) -> None:
        """Put these heads in service; decoders that follow the link switch before their next request."""
        if not self.heads(number).is_dir():
            known = ", ".join(str(path) for path in range(self.next_number) if self.heads(path).is_dir())
            raise UserError(f"There is no update {number} in {self.folder}.", f"Here are: {known}.")
        check_folder(self.heads(number))
        if number != self.serving:
            self._record(number, why)
        set_symlink(self.link, self.heads(number))

    @property
    def earlier(self) -> int | None:
        """Number of the update that served before, for `back`; None if there was none."""
        stack: list[int] = []
        for change in self._history():
            if change["why"] == "back":
                stack.pop()
            else:
                stack.append(int(change["update"]))
        return stack[-2] if len(stack) > 1 else None

    def back(self) -> None:
        """Put the heads that served before back in service."""
        if (number := self.earlier) is None:
            raise UserError(f"No heads served before update {self.serving}.", "Use: headstart adapt swap RUN NUMBER")
        self.serve(number, "back")

    def _update(self, number: int) -> Path:
        return self.folder / "updates" / f"{number:04d}"

    def _history(self) -> list[dict[str, Any]]:
        file = self.folder / _HISTORY
        return list(read_json(file)) if file.is_file() else []

    def _record(self, number: int, why: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        change = {"time": now, "update": number, "version": version_of(self.heads(number)), "why": why}
        write_json(self.folder / _HISTORY, [*self._history(), change])
