"""`python -m headstart.train RECIPE [key=value ...]`: the training stage alone, also under `accelerate launch`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.markup import escape

from headstart.data.store import StateStore
from headstart.errors import UserError
from headstart.lock import locked
from headstart.target import load_target
from headstart.train.config import load_recipe
from headstart.train.loop import train

app = typer.Typer(add_completion=False)


@app.command()
def main(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.lr=3e-4.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; runs/<name> by default.")] = None,
) -> None:
    """Train draft heads on the states that `headstart data RECIPE` stored.

    Example: accelerate launch -m headstart.train quickstart train.minutes=3
    """
    console = Console(stderr=True)
    try:
        _train(recipe, overrides or [], run_dir, console)
    except UserError as error:
        message = escape(f"{error.problem}\n{error.remedy}")
        console.print(f"[bold red]Error:[/] {message}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _train(name: str, overrides: list[str], run_dir: Path | None, console: Console) -> None:
    recipe = load_recipe(name, overrides)
    run = run_dir or Path("runs") / recipe.name
    on_cpu = recipe.target.device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu)
    places = {part: run / "data" / "states" / part for part in ("train", "calibration")}
    for place in places.values():
        if not place.is_dir():
            raise UserError(
                f"The run has no stored states at {place}.",
                f"Make them first: headstart data {' '.join([name, *overrides])}"
                + (f" --run-dir {run_dir}" if run_dir else ""),
            )
    with _held(run, state):
        stores = {part: StateStore(place) for part, place in places.items()}
        section = recipe.target
        device = str(state.device) if section.device == "auto" and not on_cpu else section.device
        target = load_target(section.spec, section.dtype, device, section.revision)
        result = train(recipe, target, stores["train"], stores["calibration"], run / "train", console)
    if state.is_main_process:
        tau = result.metrics["tau"]
        console.print(
            f"{result.steps} steps; best heads (step {result.metrics['step']}, predicted {tau:.2f} tokens per round): "
            f"{result.heads_folder}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    state.destroy_process_group()


@contextmanager
def _held(run: Path, state: PartialState) -> Iterator[None]:
    """Hold the run's folder as `headstart run` does: the main process for all of them.

    Raises:
        UserError: on the main process, when another run works there.
        SystemExit: on the others then, so that none waits for a main process that is gone.
    """
    with ExitStack() as stack:
        refusal: UserError | OSError | None = None
        if state.is_main_process:
            try:
                stack.enter_context(locked(run))
            except (UserError, OSError) as error:
                refusal = error
        refused = [refusal is not None]
        broadcast_object_list(refused)
        if refusal is not None:
            raise refusal
        if refused[0]:
            raise SystemExit(2)
        yield


if __name__ == "__main__":
    sys.exit(app())
