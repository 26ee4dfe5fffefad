"""Several processes on one run, over a shared file system: joint writing of its data, or training of its heads.

All run the same command. For data, the first process locks the run and completes its stages. The others write batches
of conversations and shards of states meanwhile (`help_with_data`), and one takes over if the first dies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from headstart.errors import UserError
from headstart.pipeline.data_stages import help_with_data
from headstart.pipeline.launch import is_part_of
from headstart.pipeline.run import Outcome, Run, Stage, execute, left_to_do
from headstart.pipeline.stages import check_inputs, stages_until
from headstart.support.lock import Busy
from headstart.train.processes import broadcast_from_main, count_processes, is_main, join_processes, raise_on_all_ranks

_IDLE = 0.5
"""Seconds between polls of an idle process."""


def execute_together(run: Run, stages: Sequence[Stage]) -> None:
    """Run `execute`, or help the process that holds the run's lock."""
    done: set[str] | None = None
    while True:
        try:
            execute(run, stages)
            return
        except Busy as busy:
            last = run.record(stages[-1].name)
            if last is not None and last.is_complete and not left_to_do(run, stages):
                run.console.print(f"{busy.problem} There is no data left to write.", highlight=False, soft_wrap=True)
                return
            if done is None:
                run.console.print(f"{busy.problem} Helping it: work is shared.", highlight=False, soft_wrap=True)
                done = set()
        help_with_data(run, done)
        time.sleep(_IDLE)


def train_together(run: Run) -> None:
    """Bring a run up to date through training; called on every rank.

    A single process writes missing data first; several only train. A UserError on one rank is raised on all. Ranks from
    `launch_training` leave lock, data and records of the run to the launching command.
    """
    *data, training = stages_until("train")
    check_inputs(run.recipe, [training])
    run.device = join_processes(run.recipe.target.device)
    run.console.quiet |= not is_main()
    if is_part_of(run):
        training.do(run)
        return
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
        signal = broadcast_from_main(None)
        if isinstance(signal, tuple):
            raise UserError(*signal)
        if signal:
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
