"""The commands that exchange heads with serving engines: export and import. Rooms are imported inside."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from headstart.cli.options import LoadOptions, TargetOption, listed, with_options
from headstart.errors import UserError
from headstart.support.terminal import program, say

if TYPE_CHECKING:
    from headstart.hub.engine_tuning import EngineTuning


class FormatChoice(StrEnum):
    """What `--format` takes."""

    headstart = "headstart"
    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"
    gguf = "gguf"


class WeightDtype(StrEnum):
    """What `--dtype` of an export takes."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    q8_0 = "q8_0"


def export(
    heads: Annotated[
        str | None,
        typer.Argument(metavar="HEADS", help="A folder of heads, the folder of a run, or a Hub id (user/name)."),
    ] = None,
    format: Annotated[
        list[FormatChoice] | None,
        typer.Option(
            help="headstart is our own; the others are for engines, and gguf goes with one of them in one folder.",
            show_default="headstart",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    dtype: Annotated[
        WeightDtype | None, typer.Option(help="Of the weights; q8_0 in GGUF files alone.", show_default="bfloat16")
    ] = None,
    target: TargetOption = None,
    check: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a folder (or GGUF file) of heads, whoever wrote it.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,NAME...", help="With --check: vllm, sglang, llama.cpp or speculators."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="HEADS", help="With --check: heads of ours that the folder should hold.")
    ] = None,
) -> None:
    """Write heads for a serving engine, or check a folder of heads; prints the command that serves them.

    Example: headstart export runs/quickstart --format vllm --out served

    Example: headstart export runs/quickstart --format vllm --format gguf --out served

    Example: headstart export --check served --engine vllm,sglang
    """
    if check is not None:
        if heads is not None or out is not None:
            raise UserError(
                "--check writes nothing.", f"Leave HEADS and --out away: {program()} export --check {check}"
            )
        _check(check, listed(engine), against, target)
        return
    if heads is None or out is None:
        missing = "HEADS" if heads is None else "--out"
        raise UserError(f"{missing} is missing.", f"For example: {program()} export runs/quickstart --out my-heads")
    if engine or against:
        raise UserError("--engine and --against belong to --check.", "Choose what is written with --format.")
    from headstart.hub.pull import locate

    folder = locate(heads)
    formats = format or [FormatChoice.headstart]
    if FormatChoice.headstart in formats:
        if len(formats) > 1:
            raise UserError(
                "Our own format has a config.json of its own, which engines cannot read.",
                "Write it into another folder than those for engines.",
            )
        _copy(folder, out, dtype)
        return
    console = Console()
    with console.status("exporting"):
        from headstart.hub.engines.export import export_for

        done = export_for(folder, out, [each.value for each in formats], target=target, dtype=dtype and dtype.value)
    for remark in done.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    say(console, ("Heads", out), *((f"Serve with {name}", command) for name, command in done.commands.items()))


@with_options(without=("target", "any_target", "exact", "quantization"))
def import_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER|USER/NAME", help="A published checkpoint: a folder, or a Hub id.")
    ],
    target: Annotated[str, typer.Option(help="The model that the heads were trained on.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    loading: LoadOptions = LoadOptions(),
) -> None:
    """Make heads of ours from a published EAGLE, EAGLE-3, DFlash, DSpark or Medusa checkpoint, to decode with and tune.

    They can be trained further, too. Weights are read from safetensors files alone; pickled ones are refused.

    Example: headstart import user/eagle3-heads --target user/model --out heads
    """
    from headstart.hub.engines.export import refuse_used
    from headstart.pipeline.actions import refuse_other_files

    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        if out.is_dir() and (out / "tree.json").is_file():
            refuse_other_files(out)
        else:
            refuse_used(out)
    console = Console()
    with console.status("importing"):
        from headstart.hub.engines.importing import import_heads
        from headstart.target.loading import load_target

        heads = import_heads(source, load_target(target, loading.dtype), out, loading.revision)
    say(
        console,
        ("Heads", f"{out} ({heads.family})"),
        ("Tune them", f"{program()} tune {out} --conversations FILE.jsonl"),
        ("Train them further", f"{program()} run RECIPE target={target} train.start_from={out}"),
    )


def engine_table(measured: EngineTuning) -> Table:
    """A row for each number of drafts."""
    from headstart.hub.engine_tuning import engine_rows

    rows = engine_rows({measured.engine: measured})
    table = Table(box=None, pad_edge=False)
    for name in list(rows[0])[2:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*list(row.values())[2:])
    return table


def _copy(folder: Path, out: Path, dtype: WeightDtype | None) -> None:
    from headstart.pipeline.actions import copy_heads

    if dtype is not None:
        raise UserError("Our own format keeps the dtype that the heads have.", "Leave --dtype out.")
    copy_heads(folder, out)
    say(Console(), ("Heads", out), ("Share them", f"{program()} push {out} user/name"))


def _check(folder: Path, engines: tuple[str, ...], against: Path | None, target: str | None) -> None:
    """Print what is wrong, and exit with 1 if anything is."""
    from headstart.hub.engines.export import check_export, export_remarks, readers_of

    findings = check_export(folder, engines, against, target)
    console = Console()
    for finding in findings:
        line = f"{finding.engine}: {finding.problem} {finding.remedy}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if findings:
        raise typer.Exit(1)
    names = " and ".join(readers_of(folder, engines))
    for line in (f"{folder} is whole, and all of it is read by {names}.", *export_remarks(folder, engines)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
