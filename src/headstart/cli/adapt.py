"""`headstart adapt`: heads that learn from served requests. Imports inside functions, as in `headstart.cli.app`."""

from __future__ import annotations

import os
import shlex
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
    help="Keep training heads on served requests, and serve new heads only if they are better.\n\n"
    "Example: headstart adapt watch runs/quickstart --log traffic",
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run that trained the heads.")]
LogFolder = Annotated[Path, typer.Option(help="Folder of the request log, from a decoder or an engine's JSONL.")]


@adapt_app.command("log")
def log(
    run: RunFolder,
    log: LogFolder,
    delete: Annotated[bool, typer.Option("--delete", help="Delete all logged requests.")] = False,
) -> None:
    """Summarise a request log and the requests unusable for training, or delete it.

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
        with locked(log, "Wait for it, or stop it first."):  # the bounds stay: a decoder may still write
            delete_update(log)
            for path in segments(log):
                remove(path)
        others = sorted(file.name for file in log.glob("*.jsonl"))
        kept = f" Kept, not written by headstart: {', '.join(others)}." if others else ""
        tell(console, f"Deleted the log in {log} and its unfinished update.{kept}")
        return
    prune(log)
    served, left_out = read_log(log, _update(run, log).target)
    size = format_bytes(sum(file.stat().st_size for file in log.glob("*.jsonl")))
    tokens = sum(len(item.answer) for item in served)
    cut, sampled = sum(item.finish == "length" for item in served), sum(bool(item.sampling) for item in served)
    answers = f"{tokens} answer tokens, {size}; {cut} were cut by their length limit and {sampled} were sampled"
    tell(console, f"Requests: {len(served)}, with {answers}.")
    for reason, count in left_out.counts.items():
        tell(console, f"    {count} left out: {reason} (first: {left_out.examples[reason]})")


@adapt_app.command("train")
@with_options(without=("fall",))
def train(run: RunFolder, log: LogFolder, overrides: Overrides = None, options: AdaptOptions = AdaptOptions()) -> None:
    """Train an update of the heads in service, from recent requests and the run's own conversations.

    Takes the settings of a recipe's `train`: headstart recipes show adapt --all.

    Example: headstart adapt train runs/quickstart --log traffic train.epochs=2
    """
    heads = _update(run, log, options, overrides).train()
    say(Console(), ("Heads", heads), ("Judge them", f"{program()} adapt gate {run} --log {log}"))


@adapt_app.command("gate")
@with_options(without=("requests", "mix"))
def gate(run: RunFolder, log: LogFolder, options: AdaptOptions = AdaptOptions()) -> None:
    """Judge the update: serve it if it is better on later requests and no worse on the run's own texts.

    Exits with 1 if it is refused.

    Example: headstart adapt gate runs/quickstart --log traffic
    """
    from headstart.adapt.report import show_update

    judged = _update(run, log, options).gate()
    show_update(judged, Console())
    if not judged["accepted"]:
        raise typer.Exit(1)


@adapt_app.command("swap")
def swap(
    run: RunFolder, update: Annotated[int, typer.Argument(help="Number of the update; 0 for the heads of the run.")]
) -> None:
    """Serve the heads of an update, even if the gate refused them.

    Example: headstart adapt swap runs/quickstart 2
    """
    _serve(run, update)


@adapt_app.command("back")
def back(run: RunFolder) -> None:
    """Serve the previous heads again.

    Example: headstart adapt back runs/quickstart
    """
    _serve(run)


def _serve(run: Path, update: int | None = None) -> None:
    """Put an update into service, by default the previous one."""
    from headstart.adapt.service import Service

    service = Service(run)
    with service.lock():
        if update is None:
            service.back()
        else:
            service.serve(update, "swap")
    say(Console(), ("Serving", f"update {service.serving}, {service.link}"))


@adapt_app.command("report")
def report(
    run: RunFolder,
    log: Annotated[Path | None, typer.Option(help="Also report acceptance in service from this log.")] = None,
    json: JsonFile = None,
) -> None:
    """Print the heads in service, every update with its figures, and acceptance in service by day and version.

    At first the heads of the run serve.

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
    out: Annotated[Path, typer.Option(help="Write them into a new subfolder of this folder.")],
    format: Annotated[FormatName, typer.Option(help="Format of the engine.")] = "vllm",
    server: Annotated[str | None, typer.Option(help="Address of a running engine, to check its heads.")] = None,
) -> None:
    """Export the heads in service for a serving engine, and check whether a running engine drafts with them.

    Engines do not reload heads, so the command that starts the engine with them is printed. The heads of a running
    engine are identified by its acceptance on the newest requests. Exits with 1 if they are not the heads in service:
    restart the engine then.

    Example: headstart adapt engine runs/quickstart --log traffic --out served --server http://localhost:8000
    """
    from headstart.adapt.engine import check_engine
    from headstart.hub.engines.export import export_for

    console, update = Console(), _update(run, log)
    number = update.service.serving
    exported = export_for(update.service.heads(number), out / f"{number:04d}", format, update.target)
    say(console, (f"Update {number}", exported.folder))
    commands = exported.words(exported.drafts)
    say(console, *((f"Start {name} with", shlex.join(words)) for name, words in commands.items()))
    if server is None:
        return
    figures, serves = check_engine(server, update)
    say(console, ("Engine", figures))
    if not serves:
        raise typer.Exit(1)


@adapt_app.command("watch")
@with_options()
def watch(
    run: RunFolder,
    log: LogFolder,
    overrides: Overrides = None,
    every: Annotated[float, typer.Option(min=0.1, help="Polling interval in seconds.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Exit when there is nothing to do.")] = False,
    options: AdaptOptions = AdaptOptions(),
) -> None:
    """Train an update whenever there are enough new requests, and serve it if it passes the gate.

    Runs at low priority (nice 19). If killed, it resumes where it stopped.

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
    from headstart.adapt.service import recipe_file
    from headstart.adapt.update import Update
    from headstart.pipeline.run import Run
    from headstart.recipes.recipe import load_recipe

    return Update(Run(load_recipe(str(recipe_file(run))), run, Console()), log, options, overrides or ())
