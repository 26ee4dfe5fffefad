"""Commands that exchange heads with serving engines: export and import. Imports inside functions, as in `app`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from headstart.cli.options import HEADS, Loading, TargetOption, TrustOption, listed, names, with_options
from headstart.errors import UserError
from headstart.servers.names import FORMATS, KNOWN_ENGINES
from headstart.support.terminal import program, say, tell

if TYPE_CHECKING:
    from headstart.hub.engine_tuning import EngineTuning
    from headstart.model.frozen import FrozenModel

VLLM_ON_A_CPU = (
    "On a CPU vLLM also needs --dtype bfloat16 --no-enable-prefix-caching. If its vllm command does not find its "
    "package, replace `vllm serve` with `python -m vllm.entrypoints.openai.api_server --model`."
)


def export(
    heads: Annotated[str | None, HEADS] = None,
    format: Annotated[
        list[str] | None,
        names(
            f"headstart (its own format), {FORMATS}, checkpoint (a copy of the target's, with its own module trained); "
            "gguf may be combined with one other format.",
            "headstart",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write this folder.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "q8_0"] | None,
        typer.Option(help="Dtype of the stored weights; q8_0 only in GGUF files.", show_default="bfloat16"),
    ] = None,
    target: TargetOption = None,
    trust_remote_code: TrustOption = False,
    check: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a folder (or GGUF file) of heads from any source.")
    ] = None,
    engine: Annotated[list[str] | None, names(f"With --check: {KNOWN_ENGINES}.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="HEADS", help="With --check: headstart heads that the folder should equal.")
    ] = None,
) -> None:
    """Write heads for serving engines and print the commands that serve them, or check a folder of heads.

    Example: headstart export runs/quickstart --format vllm --out served

    Example: headstart export runs/quickstart --format vllm --format gguf --out served

    Example: headstart export --check served --engine vllm,sglang
    """
    if check is not None:
        if heads is not None or out is not None:
            raise UserError("--check writes nothing.", f"Leave out HEADS and --out: {program()} export --check {check}")
        _check(check, listed(engine), against, target, trust_remote_code)
        return
    if heads is None or out is None:
        missing = "HEADS" if heads is None else "--out"
        raise UserError(f"{missing} is missing.", f"For example: {program()} export runs/quickstart --out my-heads")
    if engine or against:
        raise UserError("--engine and --against belong to --check.", "Choose the format to write with --format.")
    _write(heads, out, listed(format) or ("headstart",), dtype, target, trust_remote_code)


def _write(
    heads: str, out: Path, formats: tuple[str, ...], dtype: str | None, target: str | None, trusted: bool
) -> None:
    from headstart.hub.pull import locate

    console = Console()
    teacher = _of_run(Path(heads).expanduser(), console)
    folder = locate(heads)
    if alone := next((name for name in formats if name in ("headstart", "checkpoint")), None):
        if len(formats) > 1:
            problem = f"The format {alone} has its own config.json, so it goes with no other format."
            raise UserError(problem, "Write it to a separate folder.")
        if dtype is not None:
            raise UserError(f"The format {alone} keeps the dtype of each tensor.", "Leave out --dtype.")
    if alone == "checkpoint":
        from headstart.hub.engines.into_checkpoint import export_checkpoint

        with console.status("exporting"):
            copy = export_checkpoint(folder, out, target, trusted)
        changed = f"with {len(copy.changed)} tensors of the heads" if copy.changed else "without changes"
        tell(console, f"{out} is a copy of the target's checkpoint {changed}.")
        say(console, ("Checkpoint", out), *((f"Serve with {name}", words) for name, words in copy.commands.items()))
        return
    if alone == "headstart":
        from headstart.pipeline.actions import copy_heads

        copy_heads(folder, out)
        say(console, ("Heads", out), ("Share them", f"{program()} push {out} user/name"))
        return
    with console.status("exporting"):
        import torch

        from headstart.hub.engines.export import export_for
        from headstart.hub.engines.known_engines import VLLM_ON_GPUS

        done = export_for(folder, out, formats, target or teacher, dtype, trusted)
    for remark in done.remarks:
        tell(console, remark)
    say(console, ("Heads", out), *((f"Serve with {name}", command) for name, command in done.commands.items()))
    on_gpus = torch.cuda.is_available() or done.published.layout in VLLM_ON_GPUS
    if "vllm" in done.commands and not on_gpus:
        tell(console, VLLM_ON_A_CPU)


def _of_run(folder: Path, console: Console) -> FrozenModel | None:
    """Return the teacher kept with a run's states, None if `folder` is not a run; saves untuned heads first."""
    from headstart.heads.io import RUN_RECIPE
    from headstart.pipeline.report_stages import keep_untuned
    from headstart.pipeline.run import HEADS as KEPT
    from headstart.pipeline.run import Run
    from headstart.recipes.recipe import load_recipe

    try:
        run = Run(load_recipe(str(folder / RUN_RECIPE)), folder, console, device="cpu")
    except UserError:  # no run, or an unreadable recipe: the heads may still be readable
        return None
    if keep_untuned(run):
        tell(console, f"This run is not tuned yet. Its heads are now in {folder / KEPT} and draft a chain.")
    return run.teacher()


@with_options(without=("target", "any_target", "exact", "quantization"))
def import_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER|USER/NAME", help="A published checkpoint: a folder or a Hub id.")
    ],
    target: Annotated[str, typer.Option(help="The model that the heads were trained on.")],
    out: Annotated[Path, typer.Option(help="Write this folder.")],
    loading: Loading = Loading(),
) -> None:
    """Make headstart heads from a published EAGLE, EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark or Medusa checkpoint.

    They can decode, be tuned and be trained further. Weights must be safetensors files; pickled files are refused.

    Example: headstart import user/eagle3-heads --target user/model --out heads
    """
    from headstart.hub.format import refuse_other_files

    refuse_other_files(out)  # before the target is loaded
    console = Console()
    with console.status("importing"):
        from headstart.hub.engines.importing import import_heads
        from headstart.model.loading import load_target

        trained_on = load_target(target, loading.dtype, loading.device, trust_remote_code=loading.trust_remote_code)
        heads = import_heads(source, trained_on, out, loading.revision)
    say(
        console,
        ("Heads", f"{out} ({heads.family})"),
        ("Tune them", f"{program()} tune {out} --conversations FILE.jsonl"),
        ("Train them further", f"{program()} run RECIPE target={target} train.start_from={out}"),
    )


def engine_table(measured: EngineTuning) -> Table:
    """Build a table with a row for each number of drafts."""
    from headstart.hub.engine_tuning import engine_rows

    rows = engine_rows({measured.engine: measured})
    table = Table(box=None, pad_edge=False)
    for name in list(rows[0])[2:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*list(row.values())[2:])
    return table


def _check(folder: Path, engines: tuple[str, ...], against: Path | None, target: str | None, trusted: bool) -> None:
    """Print all findings, and exit with 1 if there are any."""
    from headstart.hub.engines.export import check_export, export_remarks, readers_of
    from headstart.hub.engines.into_checkpoint import ENGINES, check_checkpoint
    from headstart.model.shipped import ships_modules

    console = Console()
    if is_target := ships_modules(folder):
        findings = check_checkpoint(folder, engines, against, trusted)
        readers = [engine for engine in engines or ENGINES if engine in ENGINES]
    else:
        findings = check_export(folder, engines, against, target, trusted)
        readers = list(readers_of(folder, engines))
    for finding in findings:
        tell(console, f"{finding.engine}: {finding.problem} {finding.remedy}")
    at_fault = {finding.engine for finding in findings}
    if sound := [engine for engine in readers if engine not in at_fault]:
        what = "its own module" if is_target else "every tensor"
        tell(console, f"{folder} is complete; {' and '.join(sound)} read{'s' * (len(sound) == 1)} {what}.")
    if findings:
        raise typer.Exit(1)
    if is_target:
        return
    for remark in export_remarks(folder, engines, against, target, trusted):
        tell(console, remark)
