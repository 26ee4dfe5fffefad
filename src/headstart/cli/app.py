"""The command line. Commands import what they use, so that `headstart --help` is fast."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headstart.cli.adapt import adapt_app
from headstart.cli.doctor import doctor
from headstart.cli.engines import engine_table, export, import_checkpoint
from headstart.cli.heads import audit, chat, evaluate, generate, load_decoder, race
from headstart.cli.options import (
    JsonFile,
    Loading,
    Overrides,
    Processes,
    RecipeName,
    RunDir,
    TrustOption,
    check_engine_options,
    given,
    open_run,
    with_options,
)
from headstart.cli.report import report_app
from headstart.cli.serve import serve
from headstart.decode.options import EngineOptions
from headstart.errors import UserError
from headstart.support.terminal import Commands, DataCommands, Group, format_seconds, program, say, show_warning, tell

if TYPE_CHECKING:
    from headstart.pipeline.run import Run, Stage


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut names and types short where a terminal has 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train draft heads for a frozen language model, and decode losslessly with them.\n\n"
    "Example: headstart run quickstart",
)
data_app = typer.Typer(
    cls=DataCommands,
    no_args_is_help=True,
    help="Write conversations and hidden states, and look at them.\n\nExample: headstart data build quickstart",
)
recipes_app = typer.Typer(
    cls=Group,
    help="List the packaged recipes, show one, or explain settings.\n\nExample: headstart recipes show quickstart",
)
app.add_typer(data_app, name="data")
app.add_typer(adapt_app, name="adapt")
app.add_typer(report_app, name="report")
app.add_typer(recipes_app, name="recipes")


# -- runs ------------------------------------------------------------------------------------------------------------


@app.command()
def run(recipe: RecipeName, overrides: Overrides = None, run_dir: RunDir = None, processes: Processes = None) -> None:
    """Train and measure heads: write data, train, tune, export, report.

    Finished stages are skipped; an interrupted run continues where it stopped.

    Example: headstart run quickstart minutes=60

    Example: headstart run eagle3-8b target=path/to/model --processes 8
    """
    from headstart.eval.report import show_results
    from headstart.pipeline.launch import check_gpus
    from headstart.pipeline.run import HEADS, REPORT
    from headstart.pipeline.stages import STAGES
    from headstart.support.files import read_json

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"headstart run works in one process, and a launcher started {os.environ['WORLD_SIZE']}.",
            "Start it without a launcher, and set the number of training processes with --processes.",
        )
    began = perf_counter()
    work = open_run(recipe, overrides, run_dir, processes)
    check_gpus(work)
    worked, now = _execute(work, STAGES), perf_counter() - began
    every = sum(record.seconds for stage in STAGES if (record := work.record(stage.name)))
    if not worked:
        tell(work.console, f"Nothing was left to do. The finished stages took {format_seconds(every)} in all.\n")
    else:
        earlier = f", with earlier commands {format_seconds(every)}" if every > 1.1 * now else ""
        tell(work.console, f"This took {format_seconds(now)}{earlier}.\n")
    show_results(read_json(work.folder / REPORT / "results.json"), f"{work.recipe.name}: measured", work.console)
    say(
        work.console,
        ("Report", work.folder / REPORT / "report.html"),
        ("Heads", work.folder / HEADS),
        ("Try them", f"{program()} chat {work.folder / HEADS}"),
    )


Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")]


@app.command("runs")
def list_runs(folder: Runs = Path("runs")) -> None:
    """List the runs in a folder with their state, heads, τ, speed-up, size and age.

    Example: headstart runs
    """
    from headstart.pipeline.inventory import run_states, show_runs

    states = run_states(folder)
    if not states:
        raise UserError(f"There are no runs in {folder}.", "Start one: headstart run quickstart")
    show_runs(states, Console())


@app.command()
def gc(
    folder: Runs = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only list.")] = False,
    states_gigabytes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Keep at most this many GB of hidden states; deletes the least recently read states of finished "
            "trainings first.",
        ),
    ] = None,
) -> None:
    """List unused files with their sizes, and delete them after confirmation.

    No other command deletes files that runs share. Training deletes its older checkpoints (train.keep_checkpoints).

    Example: headstart gc --dry-run

    Example: headstart gc --states-gigabytes 200
    """
    from headstart.pipeline.inventory import deletable, delete
    from headstart.support.files import format_bytes

    console = Console()
    maximum = None if states_gigabytes is None else int(states_gigabytes * 1e9)
    unused = deletable(folder, maximum)
    for item in unused:
        tell(console, f"{format_bytes(item.bytes):>9}  {item.path}  ({item.what})")
    total = format_bytes(sum(item.bytes for item in unused))
    if not unused:
        tell(console, f"Nothing to delete: the runs in {folder} use every file there.")
    elif dry_run:
        tell(console, f"{len(unused)} items to delete, up to {total}.")
    elif yes or typer.confirm(f"Delete these {len(unused)} items, up to {total}?"):
        tell(console, f"Freed {format_bytes(delete(folder, unused, maximum))}.")
    else:
        tell(console, "Nothing was deleted.")


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Plan for this many training processes, each on its own GPU.", show_default="as for run"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Assume prompts of this many tokens instead of reading some of them.")
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(min=1e-3, help="Speed at which the servers write answers, all together.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Estimate memory, disk space, network traffic and time of a run.

    Times come from about half a minute of writing, prefill and training, if the target's weights are on this machine.
    Sizes come from its config.json.

    Example: headstart plan quickstart data.conversations=5000

    Example: headstart plan eagle3-8b --processes 8
    """
    from headstart.pipeline.plan import make_plan, show_plan
    from headstart.pipeline.stages import STAGES, check_inputs
    from headstart.support.files import write_json

    work = open_run(recipe, overrides, run_dir, processes)
    check_inputs(work.recipe, STAGES)
    estimate = make_plan(work, processes, prompt_tokens, tokens_per_second)
    show_plan(work, estimate)
    if json is not None:
        write_json(json, estimate.to_json())
    for problem in estimate.problems:
        tell(work.console, f"Problem: {problem}", style="bold red")
    if estimate.problems:
        raise typer.Exit(2)


@data_app.command("build")
def data_build(recipe: RecipeName, overrides: Overrides = None, run_dir: RunDir = None) -> None:
    """Write a recipe's conversations and the target's hidden states for them.

    Several processes started for the same run, by hand or by torchrun, share the work.

    Example: headstart data build quickstart data.conversations=200
    """
    from headstart.pipeline.run import CONVERSATIONS
    from headstart.pipeline.stages import check_inputs, stages_until
    from headstart.pipeline.together import execute_together

    work, stages = open_run(recipe, overrides, run_dir), stages_until("states")
    check_inputs(work.recipe, stages)
    execute_together(work, stages)
    say(work.console, ("Conversations", work.folder / CONVERSATIONS), ("Look", f"headstart data show {work.folder}"))


@data_app.command("show")
def data_show(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_FILE", help="A run's folder, or a conversation file.")],
    index: Annotated[int, typer.Option(help="Show this conversation, counted from 0.")] = 0,
    target: Annotated[str | None, typer.Option(help="Use this model's tokenizer, for a file outside a run.")] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Print a conversation as training sees it, with the tokens that heads learn from in colour.

    Example: headstart data show runs/quickstart --index 3
    """
    from headstart.data.conversations.records import read_conversations, show_conversation
    from headstart.pipeline.actions import tokenizer_for
    from headstart.pipeline.run import CONVERSATIONS

    file = source / CONVERSATIONS / "train.jsonl" if source.is_dir() else source
    if source.is_dir() and not file.is_file():
        raise UserError(f"{source} has no conversations yet.", "Write them with: headstart data build RECIPE")
    conversations = read_conversations(file)
    if not 0 <= index < len(conversations):
        raise UserError(f"There is no conversation {index} in {file}.", f"It holds 0 to {len(conversations) - 1}.")
    show_conversation(conversations[index], tokenizer_for(file, target, trust_remote_code), Console())


@app.command()
def train(recipe: RecipeName, overrides: Overrides = None, run_dir: RunDir = None, processes: Processes = None) -> None:
    """Train heads. Missing data is written first.

    On several machines: headstart data build RECIPE, then accelerate launch -m headstart.train RECIPE on each.

    Example: headstart train quickstart train.minutes=3
    """
    from headstart.pipeline.generation_servers import check_commands
    from headstart.pipeline.launch import check_gpus, is_part_of
    from headstart.pipeline.run import TRAIN
    from headstart.pipeline.together import train_together
    from headstart.train.processes import exit_together

    with exit_together():
        work = open_run(recipe, overrides, run_dir, processes)
        check_gpus(work)
        check_commands(work, ("train",))
        train_together(work)
    if is_part_of(work):
        return
    say(
        work.console,
        ("Heads", work.folder / TRAIN / "best"),
        ("Go on", f"{program()} run {work.folder / 'recipe.yaml'} --run-dir {work.folder}"),
    )


@app.command()
@with_options(without=("any_target", "exact", "revision"))
def tune(
    path: Annotated[str, typer.Argument(metavar="RUN_OR_HEADS", help="A run's folder, or a folder of heads.")],
    conversations: Annotated[
        Path | None, typer.Option(help="Validation conversations to tune on, for heads outside their run.")
    ] = None,
    loading: Loading = Loading(),
    options: EngineOptions = EngineOptions(),
) -> None:
    """Measure costs on this machine and choose the fastest tree for it.

    With --engine, measure a serving engine instead: with and without heads, for several numbers of drafts.

    Example: headstart tune runs/quickstart

    Example: headstart tune runs/quickstart --engine llama.cpp --engine-command ~/llama.cpp/build/bin/llama-server
    """
    from headstart.pipeline.run import HEADS

    folder = Path(path).expanduser()
    in_run = not options.engine and (folder / "recipe.yaml").is_file()
    check_engine_options(options, loading, but=("target",))
    if in_run and (unused := [*given(loading, but=("device",)), *["--conversations"] * bool(conversations)]):
        raise UserError(
            f"{unused[0]} is not for a run, which is tuned as its recipe says.",
            f"Tune the heads alone, in place: {program()} tune {folder / HEADS} {unused[0]} ...",
        )
    if options.engine:
        from headstart.pipeline.in_engine import describe_engine_tuning, tune_in_engine

        measured = tune_in_engine(folder, conversations, Console(), target=loading.target, options=options)
        Console().print(engine_table(measured))
        tell(Console(), describe_engine_tuning(measured))
        return
    from headstart.pipeline.actions import retune
    from headstart.pipeline.stages import stages_until

    if in_run:
        work = open_run(str(folder / "recipe.yaml"), [], folder)
        work.device = None if loading.device == "auto" else loading.device  # once: the recipe keeps its own
        _execute(work, stages_until("export"), again={"tune"})
        return
    tell(Console(), retune(load_decoder(path, loading), folder, conversations, Console()))


@app.command()
def push(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="A folder of heads, or the folder of a run.")],
    repo_id: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository on the Hub.")],
    private: Annotated[bool, typer.Option(help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option(help="List the files, and upload nothing.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Upload to this branch; it is created if missing.", show_default="main")
    ] = None,
    message: Annotated[
        str, typer.Option(help="Commit message.", show_default="Upload draft heads with headstart")
    ] = "",
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Upload the conversations of a run instead, as a dataset.")
    ] = False,
) -> None:
    """Upload heads to the Hub, or the conversations of a run.

    Example: headstart push runs/quickstart user/name --private

    Example: headstart push runs/quickstart user/texts --conversations
    """
    from headstart.hub.push import push as upload
    from headstart.support.files import format_bytes

    console = Console()
    done = upload(
        heads,
        repo_id,
        conversations=conversations,
        private=private,
        dry_run=dry_run,
        revision=revision,
        message=message,
    )
    for name, size in done.files:
        tell(console, f"  {name}  {format_bytes(size)}")
    for name in done.left_out:
        tell(console, f"  {name}  skipped: headstart did not write it")
    verb = "Would upload" if dry_run else "Uploaded"
    total = format_bytes(sum(size for _, size in done.files))
    tell(console, f"{verb} {len(done.files)} files, {total}, to {done.url or repo_id}")


# -- heads -----------------------------------------------------------------------------------------------------------


app.command()(export)
app.command("import")(import_checkpoint)
app.command("eval")(evaluate)
app.command()(audit)
app.command()(doctor)
app.command()(generate)
app.command()(chat)
app.command()(race)
app.command()(serve)


@recipes_app.callback(invoke_without_command=True)
def recipes(ctx: typer.Context) -> None:
    """List the packaged recipes.

    Example: headstart recipes
    """
    if ctx.invoked_subcommand is not None:
        return
    from rich.table import Table

    from headstart.recipes.values import packaged_recipes, read_values

    table = Table(box=None)
    table.add_column("recipe", style="bold")
    table.add_column("target")
    table.add_column("description")
    for name in packaged_recipes():
        values = read_values(name)  # loads neither torch nor transformers
        table.add_row(name, values["target"]["spec"], values["description"])
    Console().print(table)


@recipes_app.command("show")
def recipes_show(
    recipe: RecipeName,
    overrides: Overrides = None,
    explained: Annotated[
        bool, typer.Option("--all", help="List every setting with its value, default and meaning.")
    ] = False,
) -> None:
    """Print a recipe to save and edit, with all settings except those derived from its minutes.

    Example: headstart recipes show quickstart > mine.yaml
    """
    from headstart.recipes.recipe import load_recipe
    from headstart.recipes.values import text_to_edit

    loaded = load_recipe(recipe, overrides or [])
    if explained:
        from headstart.recipes.docs import show_settings

        show_settings(loaded, Console())
    else:
        typer.echo(text_to_edit(loaded), nl=False)


@recipes_app.command("docs")
def recipes_docs() -> None:
    """Print the page that explains every recipe setting, in Markdown.

    Example: headstart recipes docs > docs/recipes.md
    """
    from headstart.recipes.docs import markdown

    typer.echo(markdown(), nl=False)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        from headstart import __version__

        typer.echo(__version__)
        raise typer.Exit


# -- shared ----------------------------------------------------------------------------------------------------------


def _execute(work: Run, stages: Sequence[Stage], again: Collection[str] = ()) -> bool:
    from headstart.pipeline.generation_servers import check_commands
    from headstart.pipeline.run import execute
    from headstart.pipeline.stages import check_inputs

    check_inputs(work.recipe, stages)
    check_commands(work, [stage.name for stage in stages])
    return execute(work, stages, again)


def main() -> None:
    """Run the console script."""
    warnings.showwarning = show_warning
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # end as on Ctrl-C, so that temporary files are deleted
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="headstart")
