"""`headstart adapt`: heads that learn from served requests. Imports inside functions, as in `headstart.cli.app`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headstart.adapt.options import AdaptOptions
from headstart.cli.options import JsonFile, Overrides, with_options
from headstart.servers.names import FormatName
from headstart.support.terminal import Group, program, say, tell

if TYPE_CHECKING:
    from headstart.adapt.update import Update

adapt_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Heads that go on learning from what is served, and serve only when they are better.\n\n"
    "Example: headstart adapt watch runs/quickstart --log traffic",
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run that trained the heads.")]
LogFolder = Annotated[Path, typer.Option(help="The log: a folder that a decoder, or an engine's JSONL, is kept in.")]


@adapt_app.command("log")
def log(
    run: RunFolder,
    log: LogFolder,
    delete: Annotated[bool, typer.Option("--delete", help="Delete all that was kept of what was served.")] = False,
) -> None:
    """Say what a log holds and what of it cannot be learnt from, or delete it.

    Example: headstart adapt log runs/quickstart --log traffic --delete
    """
    from headstart.data.served.log import delete_update, prune, segments
    from headstart.data.served.reading import read_log
    from headstart.support.files import format_bytes, no_folder, remove
    from headstart.support.lock import locked

    console = Console()
    if delete:
        if not log.is_dir():
            raise no_folder(log, "Check the path: nothing was deleted.")
        with locked(log, "Wait for it, or stop it and delete then."):  # the bounds stay: a decoder may still write
            delete_update(log)
            for path in segments(log):
                remove(path)
        others = sorted(file.name for file in log.glob("*.jsonl"))
        kept = f" Not written by headstart, so left there: {', '.join(others)}." if others else ""
        tell(console, f"Deleted the log in {log} and what an update had made of it.{kept}")
        return
    prune(log)
    served, left_out = read_log(log, _update(run, log).target)
    size = sum(file.stat().st_size for file in log.glob("*.jsonl"))
    tokens = sum(len(item.answer) for item in served)
    cut, drawn = sum(item.finish == "length" for item in served), sum(bool(item.sampling) for item in served)
    tell(
        console,
        f"Requests: {len(served)}, with {tokens} answer tokens, {format_bytes(size)}; "
        f"{cut} were cut by their length and {drawn} were sampled, and count as the others do.",
    )
    for reason, count in left_out.counts.items():
        tell(console, f"    {count} left out: {reason} (the first: {left_out.examples[reason]})")


@adapt_app.command("train")
@with_options(without=("fall",))
def train(run: RunFolder, log: LogFolder, overrides: Overrides = None, options: AdaptOptions = AdaptOptions()) -> None:
    """Train an update of the heads in service, from recent requests and the run's own conversations.

    Settings are those of a recipe's `train`: headstart recipes show adapt --all.

    Example: headstart adapt train runs/quickstart --log traffic train.epochs=2
    """
    heads = _update(run, log, options, overrides).train()
    say(Console(), ("Heads", heads), ("Judge them", f"{program()} adapt gate {run} --log {log}"))


@adapt_app.command("gate")
@with_options(without=("requests", "mix"))
def gate(run: RunFolder, log: LogFolder, options: AdaptOptions = AdaptOptions()) -> None:
    """Judge the update: it serves if it is better on later requests and no worse on the run's own texts.

    Exits with 1 where it is refused.

    Example: headstart adapt gate runs/quickstart --log traffic
    """
    from headstart.adapt.report import show_update

    judged = _update(run, log, options).gate()
    show_update(judged, Console())
    if not judged["accepted"]:
        raise typer.Exit(1)


@adapt_app.command("swap")
def swap(
    run: RunFolder, update: Annotated[int, typer.Argument(help="Number of the update; 0 are the heads of the run.")]
) -> None:
    """Have the heads of an update serve, whatever the gate said of them.

    Example: headstart adapt swap runs/quickstart 2
    """
    _serve(run, update)


@adapt_app.command("back")
def back(run: RunFolder) -> None:
    """Have the heads serve that served before.

    Example: headstart adapt back runs/quickstart
    """
    _serve(run, None)


def _serve(run: Path, update: int | None) -> None:
    """Put an update into service, or for None the previous one."""
    from headstart.adapt.service import Service

    service = Service(run)
    with service.held():
        if update is None:
            service.back()
        else:
            service.serve(update, "swap")
    say(Console(), ("Serving", f"update {service.serving}, {service.link}"))


@adapt_app.command("report")
def report(
    run: RunFolder,
    log: Annotated[Path | None, typer.Option(help="Also say what each version was worth in service.")] = None,
    json: JsonFile = None,
) -> None:
    """Print what serves, every update with its figures, and acceptance in service by day and version.

    The first time, the heads of the run are what serves.

    Example: headstart adapt report runs/quickstart --log traffic
    """
    from headstart.adapt.report import show, summary
    from headstart.adapt.service import Service
    from headstart.support.files import write_json

    found = summary(Service(run), log)
    show(found, Console())
    if json is not None:
        write_json(json, found)


@adapt_app.command("engine")
def engine(
    run: RunFolder,
    log: LogFolder,
    out: Annotated[Path, typer.Option(help="Write them into a folder of their own in this one.")],
    format: Annotated[FormatName, typer.Option(help="What the engine reads.")] = "vllm",
    server: Annotated[str | None, typer.Option(help="Address of a running engine, to see what it drafts with.")] = None,
) -> None:
    """Write the heads in service for a serving engine, beside those that it has, and see whether it drafts with them.

    No engine takes new heads from a folder while it runs: the command that starts it with them is printed. Which heads
    a running one drafts with shows in what it accepts of drafts for the newest requests. Exits with 1 where it is not
    those in service: restart it then.

    Example: headstart adapt engine runs/quickstart --log traffic --out served --server http://localhost:8000
    """
    from headstart.adapt.engine import drafting
    from headstart.hub.engines.export import export_for

    console, update = Console(), _update(run, log)
    number = update.service.serving
    exported = export_for(update.service.heads(number), out / f"{number:04d}", format, update.target)
    say(console, (f"Update {number}", exported.folder))
    say(console, *((f"Start {name} with", command) for name, command in exported.commands.items()))
    if server is None:
        return
    found = drafting(server, update)
    say(console, ("Engine", found))
    if not found.is_of(number):
        raise typer.Exit(1)


@adapt_app.command("watch")
@with_options()
def watch(
    run: RunFolder,
    log: LogFolder,
    overrides: Overrides = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks at the log.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="End when there is nothing to do.")] = False,
    options: AdaptOptions = AdaptOptions(),
) -> None:
    """Go on making updates while requests come, and have those serve that the gate lets pass.

    It takes what others leave of the processors (nice 19), and goes on where it was when it is started again.

    Example: headstart adapt watch runs/quickstart --log traffic
    """
    from headstart.adapt.report import show_update
    from headstart.adapt.update import Waiting
    from headstart.data.served.log import prune
    from headstart.support.lock import Busy

    os.nice(19)
    console, update = Console(), _update(run, log, options, overrides)
    say(console, ("Serving", f"update {update.service.serving}, {update.service.link}"))
    while True:
        prune(log)
        try:
            update.train()
            show_update(update.gate(), console)
        except (Waiting, Busy) as waiting:
            tell(console, waiting.problem, style="dim")
            if once:
                return
            time.sleep(every)


def _update(run: Path, log: Path, options: AdaptOptions = AdaptOptions(), overrides: list[str] | None = None) -> Update:
    """The current or next update of a run's heads."""
    from headstart.adapt.service import recipe_of
    from headstart.adapt.update import Update
    from headstart.pipeline.run import Run
    from headstart.recipes.recipe import load_recipe

    return Update(Run(load_recipe(str(recipe_of(run))), run, Console()), log, options, overrides or ())
