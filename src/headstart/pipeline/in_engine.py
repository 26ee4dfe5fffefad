"""Tune the number of drafts in a serving engine on this machine: export heads, serve them, send requests."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from rich.console import Console

from headstart.data.conversations.records import read_conversations
from headstart.decode.options import EngineOptions
from headstart.errors import UserError, nearest
from headstart.eval.environment import machine
from headstart.heads.io import heads_folder
from headstart.hub.card import add_engine_figures
from headstart.hub.engine_tuning import DRAFTS, Asked, EngineTuning, tune_engine, write_engine_tuning
from headstart.hub.engines.export import Exported, export_for
from headstart.hub.engines.importing import GUESSED
from headstart.hub.engines.known_engines import drafts_to_try
from headstart.hub.format import CALIBRATION, refuse_other_files
from headstart.pipeline.actions import add_engines_to_report, validation_file
from headstart.pipeline.run import HEADS
from headstart.servers.engines import ENGINES, ServingEngine
from headstart.servers.fleet import gpu_groups
from headstart.servers.process import Server
from headstart.support.files import read_json
from headstart.support.terminal import program

def served_with(engine: ServingEngine, exported: Exported, drafts: int) -> list[str]:
    """Return the arguments that add heads to a server of their target, cut from the command that `export` prints."""
    words = exported.words({engine.name: {1: drafts}})[engine.name]
    return words[len(shlex.split(engine.command)) + len(engine.target_option) + 1 :]


def tune_in_engine(
    heads: Path, validation: Path | None, console: Console, target: str | None, options: EngineOptions
) -> EngineTuning:
    """Measure how many drafts pay in a serving engine, and add the result to the heads and their card.

    `heads` is their folder or run. Prompts come from `validation`, by default the run's validation conversations.
    Logs are kept if the error refers to them.
    """
    name, folder = options.engine, heads_folder(heads)
    if name not in ENGINES:
        raise UserError(f"Unknown engine {name!r}.", nearest(name, list(ENGINES)))
    engine, drafts = ENGINES[name], _numbers(options.engine_drafts, "--engine-drafts", 16)
    requests = sorted(set(_numbers(options.engine_requests, "--engine-requests", 1024))) or [1]
    if requests != [1] and not engine.drafts_by_load:
        raise UserError(
            f"{name} drafts the same number of tokens, however many requests there are.", "Leave out --engine-requests."
        )
    refuse_other_files(folder)
    conversations = read_conversations(validation_file(folder, validation))
    prompts = [list(item.tokens[: item.supervised_spans[0][0]]) for item in conversations if item.supervised_spans]
    measured_here = read_json(folder / CALIBRATION)
    with TemporaryDirectory(prefix="headstart-engine-") as place, console.status("exporting") as status:
        exported = export_for(folder, Path(place) / "heads", engine.format, target)
        steps = exported.published.steps
        served = options.engine_target or engine.own_target(exported.facts.folder, exported.facts.gguf)
        if not served:
            raise UserError(
                f"{name} cannot load {exported.facts.name} from where the heads have it.",
                f"Say where {name} finds it with --engine-target.",
            )
        if measured_here.get("settings", {}).get("acceptance") == GUESSED:
            raise UserError(
                "These heads were imported, and how often their drafts are accepted was never measured.",
                f"Tune them first: {program()} tune {heads} --conversations FILE.jsonl",
            )
        if max(drafts, default=0) > steps:
            raise UserError(
                f"The heads were trained to draft {steps} tokens in a row, not {max(drafts)}.",
                f"Give --engine-drafts up to {steps}.",
            )

        groups = gpu_groups(options.engine_arguments)
        gpus = (groups[0], groups[1]) if len(groups) > 1 else ("", "")  # both see all

        def start(drafting: Sequence[str], what: str) -> Server:
            return Server(
                engine,
                served,
                drafting,
                Path(place) / "logs" / f"{what}.log",
                command=options.engine_command,
                options=options.engine_arguments,
                gpus=gpus[bool(drafting)],
            )

        asked = Asked(prompts[: options.engine_prompts], options.engine_tokens, measured_here["acceptance"], requests)
        try:
            version, compared = tune_engine(
                start,
                lambda count: served_with(engine, exported, count),
                drafts or drafts_to_try(exported.published, DRAFTS),
                asked=asked,
                progress=status.update,
            )
        except UserError as error:
            if place not in error.remedy:
                raise
            raise UserError(error.problem, error.remedy.replace(place, _kept(Path(place)))) from None
    tuning = EngineTuning(
        engine=name,
        version=version,
        target=Path(served).name,
        prompts=len(asked.prompts),
        max_new_tokens=asked.max_new_tokens,
        same_texts=(sum(each.same for each in compared), sum(len(each.drafted) for each in compared)),
        rows=tuple(each.row for each in compared),
        environment=machine(),
    )
    write_engine_tuning(folder, tuning)
    add_engine_figures(folder)
    if folder.name == HEADS:
        add_engines_to_report(folder.parent)
    return tuning


def describe_engine_tuning(tuning: EngineTuning) -> str:
    """Return one line per number of concurrent requests."""
    lines = []
    for requests, best in tuning.best.items():
        figures = (
            f"expected {best.expected:.2f}x over its plain decoding with {best.drafts} drafts "
            f"(measured {best.speedup:.2f}x: {best.tokens_per_second:.1f} against {best.plain_tokens_per_second:.1f} "
            "tokens/s)"
        )
        at = f"{tuning.engine} with {requests} requests at a time" if requests > 1 else tuning.engine
        pays = f"{at}: " if best.expected > 1 else f"No number of drafts pays in {at} on this machine: "
        lines.append(pays + figures)
    return "\n".join(lines)


def _numbers(typed: str, option: str, most: int) -> list[int]:
    """Parse comma-separated numbers from 1 to `most`."""
    parts = [part.strip() for part in typed.split(",") if part.strip()]
    if any(not part.isdigit() or not 1 <= int(part) <= most for part in parts):
        raise UserError(f"{option} is {typed!r}, not numbers from 1 to {most}.", f"For example: {option} 1,2,3")
    return [int(part) for part in parts]


def _kept(place: Path) -> str:
    """Move an engine's logs out of the temporary folder `place`; returns the folder that replaces it."""
    kept = Path(mkdtemp(prefix="headstart-engine-"))
    shutil.move(place / "logs", kept / "logs")
    return str(kept)
