"""Tune the number of drafts in a serving engine on this machine: export heads, serve them, send requests."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
from rich.console import Console

from headstart.data.conversations.records import read_conversations
from headstart.data.prompts.chat import with_template_kwargs
from headstart.data.prompts.questions import Question
from headstart.decode.options import EngineOptions, ServingOptions
from headstart.errors import UserError, nearest
from headstart.eval.divergence import compare_texts
from headstart.eval.environment import machine
from headstart.eval.evaluate import ask_first, measure_methods, select_questions
from headstart.eval.labels import HEADS, PLAIN
from headstart.eval.options import EvalOptions
from headstart.eval.served import Served
from headstart.heads.io import heads_folder
from headstart.hub.card import add_engine_figures
from headstart.hub.engine_tuning import DRAFTS, EngineTuning, EngineWorkload, tune_engine, write_engine_tuning
from headstart.hub.engines.export import Exported, export_for
from headstart.hub.engines.importing import GUESSED
from headstart.hub.engines.known_engines import drafts_to_try
from headstart.hub.format import CALIBRATION, refuse_other_files
from headstart.hub.target_facts import TargetFacts, kind_of
from headstart.model.loading import WEIGHT_SUFFIXES, load_target
from headstart.model.model import Target
from headstart.model.outline import Outline, unloaded
from headstart.pipeline.actions import add_engines_to_report, validation_file
from headstart.pipeline.run import HEADS as HEADS_FOLDER
from headstart.servers.engines import ENGINES, ServingEngine
from headstart.servers.fleet import gpu_groups, parallel_size, visible_gpus
from headstart.servers.names import MEMORY_SHARE, option_values, split_words
from headstart.servers.process import Recorded, Server
from headstart.support.files import read_json
from headstart.support.terminal import program

_USED = 0.9
"""Fraction of free GPU memory that two servers may use together."""
_WORKING = 3e9
"""Bytes that a server needs besides weights."""


def served_with(engine: ServingEngine, exported: Exported, drafts: Mapping[int, int]) -> list[str]:
    """Return the arguments that add heads to a server of their target, cut from the command that `export` prints.

    `drafts` are numbers of drafts by the number of concurrent requests; empty for the format's own.
    """
    words = exported.words({engine.name: drafts} if drafts else {})[engine.name]
    return words[len(shlex.split(engine.command)) + len(engine.target_option) + 1 :]


@dataclass(frozen=True)
class _Servable:
    """Heads exported for an engine. `start` creates a server from drafting arguments and the name of its log. `at_once`
    is whether two servers fit in memory."""

    engine: ServingEngine
    exported: Exported
    target: str
    start: Callable[[Sequence[str], str], Server]
    at_once: bool


def _engine_named(name: str) -> ServingEngine:
    if name not in ENGINES:
        raise UserError(f"Unknown engine {name!r}.", nearest(name, list(ENGINES)))
    return ENGINES[name]


@contextmanager
def exported_heads(
    folder: Path, target: str | None, options: ServingOptions, requests: int = 1, trust_remote_code: bool = False
) -> Iterator[_Servable]:
    """Export heads for the engine of the options into a temporary folder; logs are kept if an error refers to them.

    Servers answer at most `requests` at a time.
    """
    engine = _engine_named(options.engine)
    split_words(options.engine_command, "--engine-command")
    split_words(options.engine_arguments, "--engine-arguments")
    groups = gpu_groups(options.engine_arguments)
    gpus = (groups[0], groups[1]) if len(groups) > 1 else ("", "")  # both see all
    with _work_folder() as place:
        exported = export_for(folder, place / "heads", engine.format, target, None, trust_remote_code)
        served = options.engine_target or engine.target_argument(exported.facts.folder, exported.facts.gguf)
        if not served:
            raise UserError(
                f"{engine.name} cannot load {exported.facts.name} from where the heads have it.",
                f"Say where {engine.name} finds it with --engine-target.",
            )

        plain = [] if engine.needs_gguf else exported.facts.server_options
        at_once, arguments = True, options.engine_arguments
        if len(groups) == 1 and (visible := visible_gpus()):
            free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(len(visible))]
            room = min(free) * parallel_size(arguments)
            at_once, arguments = fits_twice(engine, arguments, _bytes(served, place / "heads"), room)

        def start(drafting: Sequence[str], name: str) -> Server:
            return Server(
                engine,
                served,
                drafting or plain,
                place / "logs" / f"{name}.log",
                command=options.engine_command,
                options=arguments,
                gpus=gpus[bool(drafting)],
                requests=requests,
            )

        yield _Servable(engine, exported, served, start, at_once)


def fits_twice(engine: ServingEngine, arguments: str, weights: int | None, room: int) -> tuple[bool, str]:
    """Return whether two servers fit into `room` bytes of GPU memory, and the arguments to start them with.

    vLLM allocates a fraction of the memory, --gpu-memory-utilization. If it is not given, each of two servers gets less
    than half. Weights of unknown size (None) count as too large.

    >>> vllm = ENGINES["vllm"]
    >>> fits_twice(vllm, "", 16 * 10**9, 80 * 10**9), fits_twice(vllm, "", 16 * 10**9, 24 * 10**9)
    ((True, '--gpu-memory-utilization 0.45'), (False, ''))
    """
    given = [float(value) for option, value in option_values(arguments) if option == MEMORY_SHARE]
    if given:
        return given[-1] <= 0.5, arguments
    fits = weights is not None and 2 * (weights + _WORKING) <= _USED * room
    share = "" if engine.needs_gguf or not fits else f"{MEMORY_SHARE} {_USED / 2:.2f}"
    return fits, f"{arguments} {share}".strip()


def _bytes(*paths: str | Path) -> int | None:
    """Return the bytes of weights in files and folders; None if a path does not exist."""
    places = [Path(path).expanduser() for path in paths]
    if not all(place.exists() for place in places):
        return None
    files = [file for place in places for file in (place.iterdir() if place.is_dir() else [place])]
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES)


def tune_in_engine(
    heads: Path, validation: Path | None, console: Console, target: str | None, options: EngineOptions
) -> EngineTuning:
    """Measure how many drafts pay in a serving engine, and add the result to the heads and their card.

    `heads` is their folder or run. Prompts come from `validation`, by default the run's validation conversations.
    """
    folder, engine = heads_folder(heads), _engine_named(options.engine)
    refuse_other_files(folder)
    calibration = read_json(folder / CALIBRATION)
    workload = _workload(engine, validation_file(folder, validation), calibration["acceptance"], options)
    with console.status("exporting") as status, exported_heads(folder, target, options) as servable:
        served, exported = servable.target, servable.exported
        if calibration.get("settings", {}).get("acceptance") == GUESSED:
            raise UserError(
                "The acceptance of these imported heads is a guess.",
                f"Tune them first: {program()} tune {heads} --conversations FILE.jsonl",
            )
        if max(options.engine_drafts, default=0) > (steps := exported.published.steps):
            raise UserError(
                f"The heads were trained to draft {steps} tokens in a row, not {max(options.engine_drafts)}.",
                f"Give --engine-drafts up to {steps}.",
            )
        version, measured = tune_engine(
            servable.start,
            lambda count: served_with(engine, exported, {1: count}),
            options.engine_drafts or drafts_to_try(exported.published, DRAFTS),
            workload,
            progress=status.update,
            at_once=servable.at_once,
        )
    tuning = EngineTuning(
        engine=engine.name,
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
    if folder.name == HEADS_FOLDER:
        add_engines_to_report(folder.parent)
    return tuning


def evaluate_in_engine(
    heads: Path,
    questions: Sequence[Question],
    options: EvalOptions,
    serving: ServingOptions,
    target: str | None,
    console: Console,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Measure heads in a serving engine on questions, against the engine without them, through its API.

    Two servers answer in turns, with one request and with each number of concurrent requests in `sweep_batch`. If
    memory holds only one server, they run one after the other, without heads first. The number of drafts comes from
    `tune_in_engine`, or else from the format.

    Returns the content of results.json, see `headstart.eval.evaluate`. A UserError for options of headstart's own loop.
    """
    defaults = EvalOptions()
    own = [item.name for item in fields(EvalOptions) if item.name not in _FOR_ENGINES]
    if unused := [name for name in own if getattr(options, name) != getattr(defaults, name)]:
        problem = f"--{unused[0].replace('_', '-')} is for headstart's own loop."
        raise UserError(problem, "Leave it out with --engine; --sweep-batch sets concurrent requests.")
    requests = max((1, *options.sweep_batch))
    with (
        console.status("exporting") as status,
        exported_heads(heads_folder(heads), target, serving, requests, trust_remote_code) as servable,
    ):
        engine, exported = servable.engine, servable.exported
        facts, published = exported.facts, exported.published
        reads = read_tokenizer(facts)
        variables = options.chat_template_kwargs or dict(facts.chat_template_kwargs)
        tokenizer = with_template_kwargs(reads.tokenizer, variables)
        questions = select_questions(reads, tokenizer, questions, options, console)
        drafting = served_with(engine, exported, exported.drafts.get(engine.name, {}))
        status.update(f"starting {engine.name}")
        templated = reads.with_tokenizer(tokenizer)
        with ExitStack() as stack:
            server = stack.enter_context(servable.start((), "plain"))
            plain = Served(server if servable.at_once else Recorded(server), options, has_heads=False)
            if not servable.at_once:
                status.stop()
                ask_first(templated, questions, options, plain, console)
                stack.close()
                status.start()
            drafted = stack.enter_context(servable.start(drafting, "heads"))
            status.stop()
            method = Served(drafted, options, has_heads=True)
            methods = {HEADS: method, PLAIN: plain}
            results = measure_methods(templated, questions, options, methods, compare_texts, console)
            if not method.drafts:
                raise drafted.drafted_nothing()
            environment = {"engine": f"{engine.name} {drafted.version()}".strip(), "command": shlex.join(drafted.words)}
    results["settings"] |= {
        "heads": {"family": kind_of(published), "drafts in a row": str(published.steps)},
        "served": Path(servable.target).name,
        **({} if servable.at_once else {"servers": "one after the other, without heads first"}),
    }
    # Counters do not tell the order of rounds within an answer, which these need.
    return {**results, "places": [], "replays": [], "environment": {**environment, **machine()}}


def read_tokenizer(facts: TargetFacts) -> Outline | Target:
    """Return the target for its tokenizer; load the weights only if its files do not suffice."""
    if not facts.spec:
        raise UserError(
            f"The tokenizer of {facts.name} is needed, but the model is not where the heads recorded it.",
            "Add --target.",
        )
    trusted = facts.trust_remote_code
    return unloaded(facts.spec, trust_remote_code=trusted) or load_target(
        facts.spec, device="cpu", trust_remote_code=trusted
    )


_FOR_ENGINES = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "seed", "chat_template_kwargs"),
    *("limit", "sweep_batch", "multi_turn", "heads_name", "questions_name"),
)
"""Options of `eval` that apply to engines."""


def _workload(
    engine: ServingEngine, validation: Path, acceptance: list[list[float]], options: EngineOptions
) -> EngineWorkload:
    requests = sorted(set(options.engine_requests))
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
