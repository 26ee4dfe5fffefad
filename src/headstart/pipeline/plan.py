"""What a recipe will cost, said before any work: bytes, memory, time and network, and what to change so that it fits.

Times come from a few forwards timed on this machine, or, for a GPU that is not here, from the table of GPUs; then the
target's config is enough.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import psutil
import torch
from rich.markup import escape
from rich.table import Table

from headstart.data.conversations.workers import Workers
from headstart.data.prompts.chat import check_prompts
from headstart.decode.costs import core_count
from headstart.errors import UserError
from headstart.heads.base import DraftHead, family, make_config
from headstart.pipeline.advice import Change, advise, gpus_for, room
from headstart.pipeline.costs import COSTS, Cost, Place, Planned, steps_of
from headstart.pipeline.data_stages import aux_layers
from headstart.pipeline.formats import check_formats
from headstart.pipeline.lengths import (
    Lengths,
    expected_lengths,
    given_lengths,
    prompts_of,
    usual_answer,
    written_lengths,
)
from headstart.pipeline.run import Run, left_to_do
from headstart.pipeline.speeds import from_table, measure
from headstart.pipeline.stages import STAGES
from headstart.support.artifacts import referred
from headstart.support.files import format_bytes
from headstart.support.gpus import Gpu, find_gpu
from headstart.support.terminal import format_seconds
from headstart.target.fitting import FINAL
from headstart.target.memory import free_bytes, most_resident
from headstart.target.model import Target
from headstart.target.outline import Outline, outline

_SAME = ("data.prompts", "data.max_new_tokens", "data.max_prompt_tokens", "data.seed_prompts", "data.regenerate")
"""Settings that say how long conversations are: what was written under the same ones says it better."""


@dataclass(frozen=True)
class Plan:
    """The estimate.

    Attributes:
        facts: (what, how much) for people.
        seconds: by stage, from its beginning to its end, whether it is done or not.
        left: the stages still to do, each with why (`headstart.pipeline.run.left_to_do`).
        disk: bytes by stage that it leaves under the run's folder.
        disk_bytes: that the stages left may still write there, what stands beside them for a while included.
        free_bytes: free there; None where the plan is for another machine.
        memory: bytes on a device by stage at most, what is held of the target among them.
        process: bytes of the process of a stage's own command at most, libraries and loading included; empty for GPUs.
        room: bytes of a device that a process can use, the target among them.
        network: bytes that each process sends in a step of training.
        steps: of training.
        problems: sentences about what would fail.
        changes: of settings, so that it fits or uses what there is.
        how: where the times come from.
    """

    facts: list[tuple[str, str]]
    seconds: dict[str, float]
    left: dict[str, str]
    disk: dict[str, int]
    disk_bytes: int
    free_bytes: int | None
    memory: dict[str, int]
    process: dict[str, int]
    room: int
    network: int
    steps: float
    problems: list[str]
    changes: list[Change] = field(default_factory=list)
    how: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {**asdict(self), "facts": dict(self.facts)}


def make_plan(run: Run, processes: int = 1, device: str | None = None, prompt_tokens: int | None = None) -> Plan:
    """Estimate a run.

    Args:
        run: recipe and folder.
        processes: that train, each on a device of its own; on a CPU they share its cores.
        device: a GPU of the table, for which the target's config is enough; None times this machine.
        prompt_tokens: of a prompt, template included, instead of reading some.

    Raises:
        UserError: anything in the recipe that would stop the run before its first minute, or a GPU that the table does
            not have.
    """
    if processes < 1:
        raise UserError(f"A plan for {processes} processes.", "Give --processes 1 or more.")
    if device is not None:
        return _elsewhere(run, processes, find_gpu(device), prompt_tokens)
    return _here(run, processes, prompt_tokens)


def _here(run: Run, processes: int, prompt_tokens: int | None) -> Plan:
    recipe, data = run.recipe, run.recipe.data
    own = psutil.Process()
    libraries, start = own.memory_info().rss, perf_counter()
    target = run.target
    loading = perf_counter() - start
    resident, peak = own.memory_info().rss, most_resident()
    check_prompts(target.tokenizer, data.prompts)
    needed = aux_layers(run)
    check_formats(run, target)
    config = make_config(recipe.heads, target)
    heads = family(config.family)(config).to(target.device)
    heads.warm_start(target)
    heads.gradient_checkpointing = recipe.train.gradient_checkpointing
    lengths, problems = _lengths(run, target, prompt_tokens, answered=True)
    speeds = measure(target, heads, needed, data.batch_size, recipe.train, lengths)
    threads = torch.get_num_threads()
    place = Place(str(target.device), processes, core_count() or 1, threads, None, free_bytes(target.device))
    workers = Workers(target.device, -(-data.conversations // data.batch_size)).count
    planned = Planned(recipe, target, heads, needed, speeds, lengths, workers, place)
    left = left_to_do(run, STAGES)
    free = shutil.disk_usage(_existing(run.folder)).free
    how = "estimated from forwards timed on this machine now"
    plan = _plan(planned, {"target": loading}, left, free, problems, how)
    if target.device.type == "cpu":
        beside = {stage: memory - planned.own_bytes for stage, memory in plan.memory.items()}
        plan.process.update({stage: max(peak, resident + more) for stage, more in beside.items()})
        if not planned.needs_target:  # the target is not loaded at all
            plan.process["train"] = libraries + plan.memory["train"]
    return plan


def _elsewhere(run: Run, processes: int, gpu: Gpu, prompt_tokens: int | None) -> Plan:
    recipe, data = run.recipe, run.recipe.data
    section = recipe.target
    target = outline(section.spec, section.dtype, section.revision)
    shapes = cast(Target, target)  # which is all that heads on the meta device ask for
    config = make_config(recipe.heads, shapes)
    with torch.device("meta"):
        heads: DraftHead = family(config.family)(config)
    heads.bind(shapes)
    needed = sorted({*heads.aux_layers, FINAL})
    lengths, problems = _lengths(run, target, prompt_tokens)
    per_copy = gpus_for(target.parameters * target.dtype.itemsize, gpu.memory)
    served = bool(data.server)
    rows = data.batch_size
    speeds = from_table(target, heads, gpu, rows, recipe.train, lengths, min(per_copy, processes), served)
    place = Place(gpu.name, processes, 0, 0, gpu, int(gpu.memory), per_copy)
    planned = Planned(recipe, target, heads, needed, speeds, lengths, 1, place)
    loading = planned.own_bytes / 2e9
    left = dict.fromkeys((stage.name for stage in STAGES), "")
    how = f"from the table of GPUs: {gpu.flops / 1e12:.0f} TFLOPS in bfloat16, {gpu.bandwidth / 1e9:.0f} GB/s"
    return _plan(planned, {"target": loading}, left, None, problems, how)


def _plan(
    planned: Planned, seconds: dict[str, float], left: dict[str, str], free: int | None, problems: list[str], how: str
) -> Plan:
    costs = {stage: cost(planned) for stage, cost in COSTS.items()}
    still = [cost for stage, cost in costs.items() if stage in left]
    beside = max((cost.at_peak for cost in still), default=0)
    disk = sum(cost.disk for cost in still) + beside
    found, changes = advise(planned, costs, disk, free)
    return Plan(
        facts=_facts(planned, costs, disk - beside, beside, free),
        seconds={**seconds, **{stage: cost.seconds for stage, cost in costs.items()}},
        left=left,
        disk={stage: cost.disk for stage, cost in costs.items()},
        disk_bytes=disk,
        free_bytes=free,
        memory={stage: cost.memory for stage, cost in costs.items()},
        process={},
        room=room(planned),
        network=costs["train"].network,
        steps=steps_of(planned),
        problems=[*problems, *found],
        changes=changes,
        how=how,
    )


def _lengths(
    run: Run, target: Target | Outline, prompt_tokens: int | None, answered: bool = False
) -> tuple[Lengths, list[str]]:
    """What to expect of the conversations; prompts that cannot be read are a problem, and are assumed.

    Args:
        run: recipe and folder.
        target: the model.
        prompt_tokens: as of `make_plan`.
        answered: whether the target answers some of the prompts, to see how long its answers are.
    """
    data = run.recipe.data
    if prompt_tokens is not None:
        return given_lengths(data, target, prompt_tokens), []
    if (written := _written(run, target)) is not None:
        return written, []
    try:
        prompts = prompts_of(data, target.tokenizer)
        usual = None
        if answered and isinstance(target, Target) and not data.server:
            usual = usual_answer(data, target, prompts)
        return expected_lengths(data, target, prompts, usual), []
    except UserError as error:
        return expected_lengths(data, target), [f"{error.problem} {error.remedy}"]


def _written(run: Run, target: Target | Outline) -> Lengths | None:
    """What the run's own conversations say, where some were written under the same settings."""
    record, folder = run.record("conversations"), referred(run.folder, "conversations")
    if record is None or folder is None:
        return None
    settings = {f"data.{name}": value for name, value in run.recipe.data.model_dump(mode="json").items()}
    if any(record.settings.get(name) != settings[name] for name in _SAME):
        return None
    try:
        return written_lengths(run.recipe.data, target, sorted((folder / "parts").glob("*-train.jsonl")))
    except UserError:  # a part that is damaged: whoever writes says so
        return None


def _facts(
    planned: Planned, costs: dict[str, Cost], to_write: int, beside: int, free: int | None
) -> list[tuple[str, str]]:
    """What is planned and what it takes, for people.

    Args:
        planned: what is estimated.
        costs: by stage.
        to_write: bytes of what the stages leave that are not written yet.
        beside: bytes that stand beside these for a while.
        free: bytes of the disk; None for another machine.
    """
    target, heads, lengths, data = planned.target, planned.heads, planned.lengths, planned.recipe.data
    amounts, place = planned.amounts, planned.place
    cache = f"{format_bytes(planned.cache_bytes)} at most, {data.batch_size} conversations of {lengths.cached} tokens"
    cache += ", and two batches at once" if planned.workers > 1 else ""
    if costs["conversations"].memory > room(planned) and not data.server:
        spare = max(0, room(planned) - planned.own_bytes)
        cache += f"; {format_bytes(spare)} are free: larger batches are written in halves"
    where = place.name if place.processes == 1 else f"{place.processes} x {place.name}"
    by_servers = f"{', '.join(data.server)}; time and memory below are as if these devices wrote" if data.server else ""
    free_text = "" if free is None else f"; {format_bytes(free)} free"
    beside_text = f", and {format_bytes(beside)} more for a while" if beside else ""
    dtype = str(target.dtype).removeprefix("torch.")
    shared = f", {place.per_copy} GPUs hold a copy" if place.per_copy > 1 else ""
    active = ""
    if isinstance(target, Outline) and target.experts != (1, 1):
        experts, chosen = target.experts
        used = target.parameters - target.expert_parameters * (1 - chosen / experts)
        active = f", {used / 1e9:.1f} B of them for a token"
    return [
        ("Target", f"{target.name}, {dtype} on {where}{shared}"),
        ("Parameters", f"{_count(target.parameters)}{active}, {format_bytes(planned.own_bytes * place.per_copy)}"),
        (
            "Heads",
            f"{heads.config.family}, {heads.draft_steps} steps, {planned.learning / 1e6:.1f} M to train",
        ),
        ("A drafted token", f"{heads.flops_per_draft() / 1e6:.1f} MFLOP"),
        (
            "Conversations",
            f"about {amounts.conversations:.0f} (of {data.conversations} at most), {amounts.tokens} tokens",
        ),
        ("A conversation", _described(lengths)),
        *([("Written by", by_servers)] if by_servers else []),
        ("Hidden states on disk", f"{format_bytes(amounts.states)} ({len(planned.needed)} of each token)"),
        *((f"Disk, {stage}", format_bytes(cost.disk)) for stage, cost in costs.items() if cost.disk >= 1e6),
        (
            "Disk in all",
            f"{format_bytes(sum(one.disk for one in costs.values()))}, of which {format_bytes(to_write)} is still to "
            f"write{beside_text}{free_text}",
        ),
        ("KV cache while writing data", cache),
        ("Memory while writing data", _of_room(planned, costs["conversations"])),
        ("Memory while training", _of_room(planned, costs["train"])),
        ("Memory of the report", _of_room(planned, costs["eval"])),
        ("Training", f"about {steps_of(planned):.0f} steps of {_step_tokens(planned)} tokens"),
        *(
            [("Network", f"{format_bytes(costs['train'].network)} sent by each process in a step (DDP)")]
            if costs["train"].network
            else []
        ),
    ]


def _step_tokens(planned: Planned) -> int:
    section = planned.recipe.train
    return section.batch_tokens * section.gradient_accumulation_steps * planned.place.processes


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def _of_room(planned: Planned, cost: Cost) -> str:
    return f"about {format_bytes(cost.memory)} of {format_bytes(room(planned))} on a device"


def _described(lengths: Lengths) -> str:
    known = "assumed"
    if lengths.written:
        known = f"as the {lengths.written} that are written"
    elif lengths.sample:
        known = f"from {lengths.sample} of the prompts"
    turns = f"{lengths.turns:.1f} answers" if lengths.turns else "answers as given"
    return f"about {lengths.tokens:.0f} tokens, {turns} ({known})"


def show_plan(run: Run, plan: Plan) -> None:
    """Print a plan."""
    console = run.console
    facts = Table(title=f"Plan of {run.recipe.name}", title_justify="left", show_header=False, box=None)
    for what, much in plan.facts:
        facts.add_row(what, escape(much))
    console.print(facts)
    console.print(f"\nTime, {plan.how}", style="italic", highlight=False, soft_wrap=True)
    times = Table(box=None)
    times.add_column("stage")
    times.add_column("estimate", justify="right")
    times.add_column("")
    for stage in STAGES:
        if stage.name in plan.left:
            times.add_row(stage.name, format_seconds(plan.seconds[stage.name]), escape(plan.left[stage.name]))
        else:
            record = run.record(stage.name)
            assert record is not None, "a stage that is done has a record"
            times.add_row(stage.name, "–", f"done before, {format_seconds(record.seconds)}")
    if len(plan.left) == len(STAGES):
        times.add_row("in all", format_seconds(sum(plan.seconds.values())), style="bold")
    elif plan.left:
        times.add_row("left", format_seconds(sum(plan.seconds[name] for name in plan.left)), style="bold")
    console.print(times)
    if not plan.left:
        console.print("Nothing is left to do: every stage is done.", style="bold")
    if plan.changes:
        console.print("\nTo change:", style="bold")
        for change in plan.changes:
            console.print(f"  {change}", highlight=False, markup=False, soft_wrap=True)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
