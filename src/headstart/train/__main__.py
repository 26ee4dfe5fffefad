"""`python -m headstart.train RECIPE [key=value ...]`: the training stage alone, also under `accelerate launch`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from accelerate import PartialState
from rich.console import Console
from rich.markup import escape

from headstart.data.states.online import States
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import make_config
from headstart.recipes.recipe import load_recipe, recipe_text
from headstart.support.artifacts import held, refer
from headstart.support.files import write_text
from headstart.support.lock import locked
from headstart.support.provenance import note_provenance
from headstart.target.frozen import FrozenModel
from headstart.train.artifact import finished, go_on_from_shorter, training
from headstart.train.loop import train
from headstart.train.processes import (
    LOST_CONTACT,
    has_spoken,
    is_lost_contact,
    join_processes,
    leave_processes,
    speak_once,
    together,
)
from headstart.train.setup import check_training, load_whole, online_states, open_target, sharded_target

app = typer.Typer(add_completion=False)


@app.command()
def main(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.lr=3e-4.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; runs/<name> by default.")] = None,
) -> None:
    """Train draft heads on what `headstart data build RECIPE` wrote.

    Example: accelerate launch -m headstart.train quickstart train.minutes=3
    """
    console = Console(stderr=True)

    def say(message: str) -> None:
        console.print(f"[bold red]Error:[/] {escape(message)}", highlight=False, soft_wrap=True)

    try:
        _train(recipe, overrides or [], run_dir, console)
        leave_processes()
    except UserError as error:
        message = f"{error.problem}\n{error.remedy}"
        speak_once(lambda: say(message))
        raise SystemExit(2) from None
    except OSError as error:
        at = f" at {error.filename}" if error.filename else ""
        message = f"Cannot read or write{at} ({error.strerror})."
        speak_once(lambda: say(message))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        leave_processes()
        raise SystemExit(130) from None
    except RuntimeError as error:
        if not is_lost_contact(error):
            raise
        spoken = has_spoken()
        speak_once(lambda: None if spoken else say(LOST_CONTACT))
        raise SystemExit(2 if spoken else 1) from None


def _train(name: str, overrides: list[str], run_dir: Path | None, console: Console) -> None:
    recipe = load_recipe(name, overrides)
    check_training(recipe)
    run = run_dir or Path("runs") / recipe.name
    state, device = join_processes(recipe.target.device)
    online = recipe.data.states == "online"
    where, suffix = run / "data" / ("conversations" if online else "states"), ".jsonl" if online else ""
    paths = {part: where / f"{part}{suffix}" for part in ("train", "calibration")}
    for path in paths.values():
        if not path.exists():
            raise UserError(
                f"The run has no {'conversations' if online else 'stored states'} at {path}.",
                f"Make them first: headstart data build {' '.join([name, *overrides])}"
                + (f" --run-dir {run_dir}" if run_dir else ""),
            )
    main = state.is_main_process
    with _on_main(state, locked(run)):
        with together():
            stores: Mapping[str, States]
            target: FrozenModel
            if online:
                if recipe.train.shard_target and state.num_processes > 1:
                    target, reads = sharded_target(recipe, device)
                else:
                    reads = load_whole(recipe, device, "Or set data.states=stored: heads then train from a teacher.")
                    target = reads
                stores = online_states(recipe, reads, paths)
            else:
                stored = {part: StateStore(path) for part, path in paths.items()}
                target, stores = open_target(recipe, stored["train"], device), stored
            made = training(run, recipe, make_config(recipe.heads, target), stores["train"], stores["calibration"])
        with _on_main(state, held(made, wait=False)):
            with together():
                if main:
                    write_text(run / "recipe.yaml", recipe_text(recipe))
                    note_provenance(run)
                    if not finished(made.folder):
                        go_on_from_shorter(made, state.num_processes, lambda text: _say(console, text))
                    refer(run, "train", made, "train")
            if finished(made.folder):
                if main:
                    _say(console, f"These heads are trained already: {run / 'train' / 'best'}")
                return
            result = train(recipe, target, stores["train"], stores["calibration"], made.folder, console)
    if main:
        best = f"best heads (step {result.metrics['step']}, predicted {result.metrics['tau']:.2f} tokens per round)"
        _say(console, f"{result.steps} steps; {best}: {run / 'train' / 'best'}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _on_main(state: PartialState, hold: AbstractContextManager[object]) -> Iterator[None]:
    """Hold something as `headstart train` does: the main process for all of them.

    Raises:
        UserError: on all processes, when another run works there.
    """
    with ExitStack() as stack:
        with together():
            if state.is_main_process:
                stack.enter_context(hold)
        yield


if __name__ == "__main__":
    sys.exit(app())
