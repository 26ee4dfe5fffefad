"""Engines that a run starts and stops, and the servers that generate its conversations."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from headstart.data.generation.servers import Servers
from headstart.errors import UserError
from headstart.model.loading import gguf_file, loadable_folder
from headstart.pipeline.run import Run
from headstart.recipes.sections import TargetSection
from headstart.servers.engines import ENGINES
from headstart.servers.fleet import Fleet, gpu_groups
from headstart.servers.names import split_words
from headstart.servers.process import Server, check_command
from headstart.support.terminal import tell

LOGS = "logs"
"""Folder of the engines' logs, in the folder of the run."""


def check_commands(run: Run, stages: Container[str]) -> None:
    """Raise a UserError if one of these unfinished stages will start an engine whose command is missing here.

    Conversations and stored states may exist already, from other runs, so only their start needs the command.
    """
    data, (measuring, _) = run.recipe.data, run.recipe.measuring_engine
    streams = data.online and data.states_source == ("vllm",)
    for stage, name, typed, setting in (
        ("train", "vllm" if streams else None, data.server_command, "data.server_command"),
        ("eval", run.recipe.eval.engine, measuring, "eval.engine_command"),
    ):
        if name in ENGINES and stage in stages and run.finished_record(stage) is None:
            engine = ENGINES[name]
            check_command(engine, split_words(typed, setting) or engine.command.split(), setting)


@contextmanager
def generation_servers(run: Run) -> Iterator[Servers | None]:
    """Yield the recipe's servers, or None to generate in this process. Engines start if a conversation is missing, and
    end with the context."""
    data, target = run.recipe.data, run.described
    if not data.server or not data.own_answers:
        yield None
    elif data.engine is None:
        yield Servers(data.server, target, data.server_requests)
    else:
        with ExitStack() as stack:
            fleet = Fleet(engines(run, data.engine))

            def start() -> list[str]:
                tell(run.console, f"    Starting {data.engine}; its log is in {run.folder / LOGS}", style="dim")
                return stack.enter_context(fleet).urls

            yield Servers(start, target, data.server_requests, fleet.recover)


def engines(
    run: Run,
    name: str,
    log: str = "",
    more: Callable[[int], Sequence[str]] = lambda number: (),
    environment: Mapping[str, str] | None = None,
) -> list[Server]:
    """Create (but do not start) engines of the run's target, one per group of GPUs.

    `log` is the prefix of their log files, by default `name`. `more` returns further arguments for the engine with this
    number, which override the recipe's.
    """
    engine, section, data = ENGINES[name], run.recipe.target, run.recipe.data
    spec = section.spec
    if section.adapter or section.quantization != "none":
        raise UserError(
            f"{name} serves {spec} alone, without target.adapter and target.quantization.",
            "Start a server of that model yourself, and give its address instead of the engine's name.",
        )
    target = engine.target_argument(loadable_folder(spec), gguf_file(spec) if engine.needs_gguf else None)
    if not target:
        raise UserError(f"{name} needs a GGUF file, and {spec} is none.", "Set data.server=vllm or null.")
    return [
        Server(
            engine,
            target,
            target_options(section, name),
            run.folder / LOGS / f"{log or name}-{number}.log",
            command=data.server_command,
            options=f"{data.server_arguments} {shlex.join(more(number))}",
            gpus=gpus,
            environment=environment,
            many=True,
        )
        for number, gpus in enumerate([""] if engine.needs_gguf else gpu_groups(data.server_arguments))
    ]


def target_options(section: TargetSection, name: str) -> list[str]:
    """Return the options of an engine for the target's revision, dtype and code; a GGUF file needs none."""
    if ENGINES[name].needs_gguf:
        return []
    revision = ["--revision", section.revision] if section.revision else []
    dtype = ["--dtype", section.dtype] if section.dtype != "auto" else []
    return [*revision, *dtype, *["--trust-remote-code"] * section.trust_remote_code]
