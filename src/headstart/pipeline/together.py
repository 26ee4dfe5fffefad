"""Several processes on one run, over a shared file system: they write its data together, or train its heads.

All run the same command. For data, the first process locks the run and plans jobs (see
`headstart.data.conversations.jobs`); the others work on them, and one takes over if the first dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headstart.data.conversations.jobs import JOBS, Board, Taker, Workers, help_others
from headstart.data.conversations.part_writer import PART, help_writing
from headstart.data.states.shards import Capture, compute_shard
from headstart.data.writing.in_process import InProcess
from headstart.errors import UserError
from headstart.pipeline.run import Outcome, Run, Stage, execute, left_to_do
from headstart.pipeline.stages import check_inputs, stages_until
from headstart.support.artifacts import referred
from headstart.support.lock import Busy
from headstart.train.processes import broadcast_from_main, count_processes, is_main, join_processes, raise_on_all_ranks

_IDLE = 0.5
"""Seconds between polls of an idle helper."""


def execute_together(run: Run, stages: Sequence[Stage]) -> None:
    """Run `execute`, or help the process that holds the run's lock."""
    helper: _Helper | None = None
    while True:
        try:
            execute(run, stages)
            return
        except Busy as busy:
            last = run.record(stages[-1].name)
            if last is not None and last.whole and not left_to_do(run, stages):
                run.console.print(f"{busy.problem} There is no data left to write.", highlight=False, soft_wrap=True)
                return
            if helper is None:
                run.console.print(f"{busy.problem} Helping it: work is shared.", highlight=False, soft_wrap=True)
                helper = _Helper(run)
        if not helper.help():
            time.sleep(_IDLE)


class _Helper:
    """Worker for the jobs of a run that another process holds."""

    def __init__(self, run: Run) -> None:
        self._run, self._most = run, 2 if InProcess(run.described).shareable else 1
        self._owner = run.described.whole_identity
        self._refused: set[str] = set()  # jobs that cannot be done here

    def help(self) -> int:
        """Do the available jobs; returns their number."""
        folders = (referred(self._run.folder, stage) for stage in ("conversations", "states"))  # stages with jobs
        boards = [Board(folder / JOBS) for folder in folders if folder is not None]
        if not any(board.names() for board in boards):
            return 0
        with Workers(self._run.described.device, self._most) as workers:
            do = partial(self._do, check=workers.check)
            return help_others(boards, Taker(do, workers, lambda what: what["target"] == self._owner, self._refused))

    def _do(self, what: dict[str, Any], check: Callable[[], None]) -> dict[str, Any]:
        target, shards = self._run.target, referred(self._run.folder, "states")
        if what["kind"] == PART:
            return help_writing(target, what, lambda *how: Capture(_known(shards), target, *how), check)
        return compute_shard(target, what, _known(shards), check)


def _known(shards: Path | None) -> Path:
    assert shards is not None, "the run refers to them before it has jobs"
    return shards


def train_together(run: Run) -> None:
    """Bring a run up to date through training; called on every rank.

    A single process writes missing data first; several only train. A UserError on one rank is raised on all.
    """
    *data, training = stages_until("train")
    check_inputs(run.recipe, [training])
    run.device = join_processes(run.recipe.target.device)
    run.console.quiet |= not is_main()
    with raise_on_all_ranks():
        unfinished = left_to_do(run, data) if is_main() else {}
        check_inputs(run.recipe, [stage for stage in data if stage.name in unfinished])
        if unfinished and count_processes() > 1:
            stage, reason = next(iter(unfinished.items()))
            raise UserError(
                f"Several processes can only train on finished data, and {run.folder} lacks it "
                f"({stage}: {reason or 'missing'}).",
                "Write it first: headstart data build, with the same recipe, settings and --run-dir.",
            )
    if not is_main():
        told = broadcast_from_main(None)
        if isinstance(told, tuple):
            raise UserError(*told)
        if told:
            training.do(run)
        return
    begun = False

    def work(run: Run) -> Outcome:
        nonlocal begun
        begun = broadcast_from_main(True)
        return training.work(run)

    try:
        execute(run, [*data, replace(training, work=work)])
    except UserError as refusal:
        if not begun:
            broadcast_from_main((refusal.problem, refusal.remedy))
        raise
    if not begun:
        broadcast_from_main(False)
