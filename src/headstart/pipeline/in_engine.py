"""Tune the number of drafts in a serving engine on this machine: export heads, serve them, send requests."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import torch
from rich.console import Console

from headstart.data.conversations.records import read_conversations
from headstart.decode.options import EngineOptions
from headstart.errors import UserError, nearest
from headstart.eval.environment import machine
from headstart.heads.io import heads_folder
from headstart.hub.card import add_engine_figures
from headstart.hub.engine_tuning import DRAFTS, EngineTuning, EngineWorkload, tune_engine, write_engine_tuning
from headstart.hub.engines.export import Exported, export_for
from headstart.hub.engines.importing import GUESSED
from headstart.hub.engines.known_engines import drafts_to_try
from headstart.hub.format import CALIBRATION, refuse_other_files
from headstart.pipeline.actions import add_engines_to_report, validation_file
from headstart.pipeline.run import HEADS
from headstart.servers.engines import ENGINES, ServingEngine
from headstart.servers.process import Server
from headstart.support.files import read_json
from headstart.support.terminal import program

_GPUS_OF_AN_ENGINE = {f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "data")} | {"-tp", "-pp", "-dp"}
"""Options that multiply the number of GPUs vLLM uses."""


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
    refuse_other_files(folder)
    calibration = read_json(folder / CALIBRATION)
    workload = _workload(engine, validation_file(folder, validation), calibration["acceptance"], options)
    gpus = _halves_of_gpus(options.engine_arguments)
    with _work_folder() as place, console.status("exporting") as status:
        exported = export_for(folder, place / "heads", engine.format, target)
        served = options.engine_target or engine.own_target(exported.facts.folder, exported.facts.gguf)
        if not served:
            raise UserError(
                f"{name} cannot load {exported.facts.name} from where the heads have it.",
                f"Say where {name} finds it with --engine-target.",
            )
        if calibration.get("settings", {}).get("acceptance") == GUESSED:
            raise UserError(
                "The acceptance of these imported heads is a guess.",
                f"Tune them first: {program()} tune {heads} --conversations FILE.jsonl",
            )
        if max(drafts, default=0) > (steps := exported.published.steps):
            raise UserError(
                f"The heads were trained to draft {steps} tokens in a row, not {max(drafts)}.",
                f"Give --engine-drafts up to {steps}.",
            )

        def start(drafting: Sequence[str], name: str) -> Server:
            return Server(
                engine,
                served,
                drafting,
                place / "logs" / f"{name}.log",
                command=options.engine_command,
                options=options.engine_arguments,
                gpus=gpus[bool(drafting)],
            )

        version, measured = tune_engine(
            start,
            lambda count: served_with(engine, exported, count),
            drafts or drafts_to_try(exported.published, DRAFTS),
            workload,
            progress=status.update,
        )
    tuning = EngineTuning(
        engine=name,
        version=version,
        target=Path(served).name,
        prompts=len(workload.prompts),
        max_new_tokens=workload.max_new_tokens,
        same_texts=(sum(each.same for each in measured), sum(len(each.answers) for each in measured)),
        rows=tuple(each.row for each in measured),
        environment=machine(),
    )
    write_engine_tuning(folder, tuning)
    add_engine_figures(folder)
    if folder.name == HEADS:
        add_engines_to_report(folder.parent)
    return tuning


def _workload(
    engine: ServingEngine, validation: Path, acceptance: list[list[float]], options: EngineOptions
) -> EngineWorkload:
    requests = sorted(set(_numbers(options.engine_requests, "--engine-requests", 1024))) or [1]
    if requests != [1] and not engine.drafts_by_load:
        raise UserError(
            f"{engine.name} drafts the same number of tokens for any number of requests.",
            "Leave out --engine-requests.",
        )
    conversations = read_conversations(validation)
    prompts = [list(item.tokens[: item.supervised_spans[0][0]]) for item in conversations if item.supervised_spans]
    return EngineWorkload(prompts[: options.engine_prompts], options.engine_tokens, acceptance, requests)


@contextmanager
def _work_folder() -> Iterator[Path]:
    """Yield a temporary folder; its logs are kept if a UserError refers to them."""
    with TemporaryDirectory(prefix="headstart-engine-") as place:
        try:
            yield Path(place)
        except UserError as error:
            if place not in error.remedy:
                raise
            kept = mkdtemp(prefix="headstart-engine-")
            shutil.move(Path(place) / "logs", Path(kept) / "logs")
            raise UserError(error.problem, error.remedy.replace(place, kept)) from None


def _halves_of_gpus(arguments: str) -> tuple[str, str]:
    """Return the GPUs of the plain server and of the server with heads: half each, or empty (both see all) where the
    engine's arguments ask for more than half."""
    words, needed = shlex.split(arguments.replace("=", " ")), 1
    for word, count in pairwise(words):
        needed *= int(count) if word in _GPUS_OF_AN_ENGINE and count.isdigit() else 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = visible.split(",")[: torch.cuda.device_count()]
    half = len(gpus) // 2
    return ("", "") if half < needed else (",".join(gpus[:half]), ",".join(gpus[half : 2 * half]))


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
