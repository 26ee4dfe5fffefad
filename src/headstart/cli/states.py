"""`headstart data import-states`. Imports inside functions, as in `headstart.cli.app`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headstart.cli.options import Overrides, RecipeName, RunDir, open_run
from headstart.errors import UserError
from headstart.support.terminal import program, say


def import_states(
    recipe: RecipeName,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="FOLDER|ADDRESS",
            help="Folder of vLLM's files, or address of its server (several with commas). Without: how to start one.",
        ),
    ] = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
) -> None:
    """Import the target's hidden states from vLLM instead of computing them here.

    Missing conversations are written first. Imported states are checked against the target's own.

    Example: headstart data import-states eagle3-8b

    Example: headstart data import-states eagle3-8b http://localhost:8000
    """
    from headstart.pipeline.run import NoTarget, execute
    from headstart.pipeline.stages import check_inputs, stages_until
    from headstart.pipeline.vllm_states import import_states as take
    from headstart.pipeline.vllm_states import refuse_online, serve_command

    changes = list(overrides or [])
    if source is not None and "=" in source and "/" not in source.partition("=")[0]:
        changes, source = [source, *changes], None
    run = open_run(recipe, changes, run_dir)
    refuse_online(run)
    try:
        if source is None:
            print(serve_command(run))
            again = ["data", "import-states", recipe, "http://localhost:8000"]
            say(Console(stderr=True), ("Then", _command(*again, *changes, run_dir=run_dir)))
            return
        stages = stages_until("conversations")
        check_inputs(run.recipe, stages)
        execute(run, stages)
        done = take(run, source)
    except NoTarget as error:
        compares = "import-states checks imported states against the target's own: run it where the target is."
        raise UserError(error.problem, f"{error.remedy} {compares}") from None
    for reason, files in done.left_out.items():
        names = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        print(f"Left out {len(files)} file{'s' * (len(files) > 1)}: {reason} ({names}).")
    lacking = len(done.waiting)
    if done.left_out and not done.imported and lacking:
        raise UserError("None of the files could be imported.", "See the reasons above.")
    before = f"; {done.known} already had states" if done.known else ""
    print(f"Imported the states of {done.imported} conversations{before}.")
    if lacking:
        print(f"{lacking} have no states yet: headstart computes them here when they are needed.")
    say(run.console, ("Train", _command("train", recipe, *changes, run_dir=run_dir)))


def _command(*words: str, run_dir: Path | None) -> str:
    return f"{program()} {shlex.join([*words, *(['--run-dir', str(run_dir)] if run_dir else [])])}"
