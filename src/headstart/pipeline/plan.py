"""What a recipe will take, said before any work: bytes on disk, memory, tokens, steps and hours, and what would fail.

What a stage that is done has made is read from its records and its files. Of the others, sizes follow from the recipe
and the target's config; hours follow from forwards and training steps that are timed here, where the target's weights
are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, cast

import psutil
import torch
from rich.markup import escape
from rich.table import Table

from headstart.data.conversations.jobs import Workers
from headstart.data.prompts.chat import check_prompts
from headstart.decode.costs import core_count
from headstart.errors import UserError
from headstart.heads.base import DraftHead, family, make_config
from headstart.pipeline.data_stages import check_formats, conversations
from headstart.pipeline.lengths import Lengths, assumed_lengths, counted_lengths, prompts_of, written_lengths
from headstart.pipeline.run import Run, left_to_do
from headstart.pipeline.speeds import Speeds, disk_seconds, measure
from headstart.pipeline.stage_costs import (
    COSTS,
    Planned,
    checkpoint_bytes,
    expecting_conversations,
    gradient_bytes,
    step_tokens,
    training,
)
from headstart.pipeline.stages import STAGES
from headstart.support.artifacts import referred
from headstart.support.files import format_bytes, free_disk, size
from headstart.support.terminal import format_seconds
from headstart.target.fitting import FINAL
from headstart.target.memory import free_bytes
from headstart.target.model import Target
from headstart.target.outline import Outline, outline, weights_are_here


@dataclass(frozen=True)
class Plan:
    """What a run takes: `seconds`, bytes on `disk` and bytes in `memory` by stage.

    Attributes:
        left: the stages still to do, each with why (`headstart.pipeline.run.left_to_do`).
        done: the others, each with what came of it.
        seconds: stages to do are left out where nothing could be timed.
        free_bytes: of the disk; None where the weights are not here, and the run is for another machine.
        facts: (what, how much) for people.
        disk_bytes: that the stages left may still write, a checkpoint that is about to replace another included.
        memory: that a process holds at most: on its GPU, or in all where it computes on a CPU; of stages to do.
        room: bytes that a process can have; None as `free_bytes`.
        network: bytes that each process sends in a step of training.
        steps: of training; None when it is done.
        problems: sentences about what would fail.
        how: where the seconds come from, as a sentence.
    """

    left: dict[str, str]
    done: dict[str, str]
    seconds: dict[str, float]
    disk: dict[str, int]
    free_bytes: int | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    disk_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    room: int | None = None
    network: int = 0
    steps: float | None = None
    problems: list[str] = field(default_factory=list)
    how: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "facts": dict(self.facts)}


def make_plan(run: Run, processes: int = 1, prompt_tokens: int | None = None) -> Plan:
    """Estimate a run in which so many processes train, each on a device of its own; on a CPU they share its cores.

    Prompts are read to see how long they are, unless `prompt_tokens` says so, template included. Anything in the recipe
    that would stop the run before its first minute is a UserError.
    """
    if processes < 1:
        raise UserError(f"There is no plan for {processes} processes.", "Give --processes 1 or more.")
    section = run.recipe.target
    left, here = left_to_do(run, STAGES), weights_are_here(section.spec, section.revision)
    if "target" in left and here and (record := run.whole_record("target")):
        # Its files or settings are others than they were; the model may be the same.
        vars(run)["target"] = loaded = run.load(section.adapter)
        if loaded.whole_identity == record.identity:
            left = left_to_do(run, STAGES, unchanged={"target"})
    records = {stage.name: run.record(stage.name) for stage in STAGES if stage.name not in left}
    done = {name: record for name, record in records.items() if record is not None}
    folders = {name: referred(run.folder, name) for name in done}
    plan = Plan(
        left=left,
        done={name: record.summary for name, record in done.items()},
        seconds={name: record.seconds for name, record in done.items()},
        disk={name: size(folder) for name, folder in folders.items() if folder is not None},
    )
    if not left.keys() - {"target"}:
        return plan
    if here:
        return _timed(run, plan, processes, prompt_tokens)
    return _sized(run, plan, processes, prompt_tokens)


def _timed(run: Run, plan: Plan, processes: int, prompt_tokens: int | None) -> Plan:
    """With the target loaded: some forwards and steps are timed."""
    recipe, data = run.recipe, run.recipe.data
    bare, start = _resident(), perf_counter()
    target = run.target
    loading = perf_counter() - start
    held, at_once = _resident(), float(processes)
    if target.device.type == "cpu":
        at_once = min(at_once, max(1.0, (core_count() or 1) / torch.get_num_threads()))
    else:
        bare, held = 0, target.parameters * target.dtype.itemsize
    check_prompts(target.tokenizer, data.self_share > 0)
    check_formats(run, target)
    config = make_config(recipe.heads, target)
    heads = family(config.family)(config).to(target.device)
    heads.warm_start(target)
    heads.gradient_checkpointing = recipe.train.gradient_checkpointing
    needed = sorted({*heads.aux_layers, FINAL})
    lengths, problems = _lengths(run, target, plan, prompt_tokens)
    speeds = replace(measure(target, heads, needed, recipe.train, lengths), disk=disk_seconds(run.folder))
    workers = Workers(target.device, -(-data.conversations // data.batch_size)).count
    planned = Planned(recipe, target, heads, needed, lengths, speeds, processes, at_once, workers, held, bare)
    plan = replace(
        plan,
        problems=problems,
        room=held + free_bytes(target.device) // processes,
        free_bytes=free_disk(run.folder),
        seconds={"target": loading, **plan.seconds},
        how="Times come from forwards and training steps measured on this machine now.",
    )
    return _estimate(run, planned, plan)


def _sized(run: Run, plan: Plan, processes: int, prompt_tokens: int | None) -> Plan:
    """Of a target whose config alone is here: nothing can be timed."""
    recipe, section = run.recipe, run.recipe.target
    target = outline(section.spec, section.dtype, section.revision, section.trust_remote_code)
    shapes = cast(Target, target)  # which is all that heads on the meta device ask for
    config = make_config(recipe.heads, shapes)
    with torch.device("meta"):
        heads: DraftHead = family(config.family)(config)
    heads.bind(shapes)
    lengths, problems = _lengths(run, target, plan, prompt_tokens)
    held, needed = target.parameters * target.dtype.itemsize, sorted({*heads.aux_layers, FINAL})
    planned = Planned(recipe, target, heads, needed, lengths, Speeds(), processes, held=held)
    how = f"Times are unknown, because the weights of {target.name} are not on this machine."
    return replace(_estimate(run, planned, replace(plan, problems=problems)), seconds=plan.seconds, how=how)


def _estimate(run: Run, planned: Planned, plan: Plan) -> Plan:
    """The plan with all that follows for the stages that are left."""
    if "conversations" in plan.left:
        planned = expecting_conversations(planned)
    else:
        splits = [conversations(run, split) for split in ("train", "validation")]
        train, validation = (sum(len(item.tokens) for item in split) for split in splits)
        planned = replace(planned, conversations=len(splits[0]), train_tokens=train, validation_tokens=validation)
    costs = {stage: cost(planned) for stage, cost in COSTS.items() if stage in plan.left}
    trains = "train" in plan.left
    plan = replace(
        plan,
        seconds={**plan.seconds, **{stage: cost.seconds for stage, cost in costs.items()}},
        disk={**plan.disk, **{stage: cost.disk for stage, cost in costs.items()}},
        disk_bytes=sum(cost.disk for cost in costs.values()) + (checkpoint_bytes(planned) if trains else 0),
        memory={stage: cost.memory for stage, cost in costs.items()},
        network=gradient_bytes(planned),
        steps=training(planned)[0] if trains else None,
    )
    return replace(plan, facts=_facts(planned, plan), problems=[*plan.problems, *_problems(planned, plan)])


def _lengths(run: Run, target: Target | Outline, plan: Plan, prompt_tokens: int | None) -> tuple[Lengths, list[str]]:
    """Of the conversations, as they are written or as to be expected; prompts that cannot be read are a problem."""
    data, longest, tokenizer = run.recipe.data, target.max_length, target.tokenizer
    if "conversations" not in plan.left:
        return written_lengths(data, longest, conversations(run, "train")), []
    if prompt_tokens is not None or tokenizer is None:
        return assumed_lengths(data, longest, prompt_tokens), []
    try:
        return counted_lengths(data, tokenizer, longest, prompts_of(data, tokenizer)), []
    except UserError as error:
        return assumed_lengths(data, longest), [f"{error.problem} {error.remedy}"]


# -- what would fail ---------------------------------------------------------------------------------------------------


def _problems(planned: Planned, plan: Plan) -> list[str]:
    """What would fail, as sentences that name the settings to change."""
    data, target, problems = planned.recipe.data, planned.target, list[str]()
    if plan.free_bytes is not None and plan.free_bytes < 1.05 * plan.disk_bytes:
        problems.append(
            f"The disk has {format_bytes(plan.free_bytes)} free and the run may write {format_bytes(plan.disk_bytes)}: "
            "free some space, choose another --run-dir, or lower data.cache_gigabytes."
        )
    longest = data.max_prompt_tokens + data.max_new_tokens
    if longest > target.max_length:
        problems.append(
            f"A prompt and its answer may take {longest} tokens and {target.name} reads {target.max_length}: lower "
            "data.max_prompt_tokens or data.max_new_tokens."
        )
    for stage, what, remedy in (
        ("train", "Training", "lower train.batch_tokens, and raise train.gradient_accumulation_steps as much"),
        ("eval", "The report", "lower eval.max_new_tokens"),
    ):
        needed = plan.memory.get(stage, 0)
        if plan.room is not None and needed > plan.room:
            problems.append(
                f"{what} takes about {format_bytes(needed)}, and {format_bytes(plan.room)} is available to a process "
                f"on {target.device}: {remedy}."
            )
    return problems


# -- for people --------------------------------------------------------------------------------------------------------


def _facts(planned: Planned, plan: Plan) -> list[tuple[str, str]]:
    """What the stages left work on and take."""
    target, heads, lengths, data = planned.target, planned.heads, planned.lengths, planned.recipe.data
    count = f"{target.parameters / 1e9:.1f} B" if target.parameters >= 1e9 else f"{target.parameters / 1e6:.1f} M"
    where = "" if plan.room is None else f" on {target.device}"
    facts = [
        ("Target", f"{target.name}, {str(target.dtype).removeprefix('torch.')}{where}"),
        ("Parameters", f"{count}, {format_bytes(target.parameters * target.dtype.itemsize)}"),
        (
            "Heads",
            f"{heads.config.family}, {heads.draft_steps} draft steps, {planned.learning / 1e6:.1f} M weights to train",
        ),
        ("Compute per draft", f"{heads.flops_per_draft() / 1e6:.1f} MFLOP"),
    ]
    if "conversations" in plan.left:
        turns = f"{lengths.turns:.1f} answers" if lengths.turns else "answers as given"
        facts += [
            (
                "Conversations",
                f"about {planned.conversations:.0f} (at most {data.conversations}), {planned.tokens} tokens",
            ),
            ("A conversation", f"about {lengths.tokens:.0f} tokens, {turns} ({lengths.source})"),
        ]
        if data.server:
            servers = ", ".join(data.server)
            facts.append(
                ("Written by", f"{servers}; the times and memory below assume that this machine writes instead")
            )
    if planned.recipe.data.online and plan.left.keys() & {"states", "train"}:
        facts.append(("Hidden states", f"not stored: training computes {len(planned.needed)} per token in each epoch"))
    elif "states" in plan.left:
        states = f"{format_bytes(planned.states)}, {len(planned.needed)} per token"
        if planned.states < planned.wanted_states:
            states += f"; storing all would take {format_bytes(planned.wanted_states)} (data.cache_gigabytes)"
        facts.append(("Hidden states on disk", states))
        if planned.speeds.disk:
            facts.append(("That disk reads", f"{format_bytes(1 / planned.speeds.disk)} a second, measured now"))
    free = "" if plan.free_bytes is None else f"; {format_bytes(plan.free_bytes)} free"
    every, to_write = format_bytes(sum(plan.disk.values())), format_bytes(plan.disk_bytes)
    facts.append(("Disk space", f"{every} in all, up to {to_write} of it still to write{free}"))
    about, room = "at least", ""
    if plan.room is not None:
        about, room = "about", f" of {format_bytes(plan.room)} available to a process"
    names = {"conversations": "while writing data", "train": "while training", "eval": "of the report"}
    facts += [
        (f"Memory {name}", f"{about} {format_bytes(plan.memory[stage])}{room}")
        for stage, name in names.items()
        if stage in plan.memory
    ]
    if plan.steps is not None:
        facts.append(("Training", f"about {plan.steps:.0f} steps of {step_tokens(planned)} tokens"))
    if plan.steps is not None and plan.network:
        facts.append(("Network", f"each process sends {format_bytes(plan.network)} per step (DDP)"))
    return facts


def show_plan(run: Run, plan: Plan) -> None:
    console = run.console
    facts = Table(title=f"Plan of {run.recipe.name}", title_justify="left", show_header=False, box=None)
    for what, much in plan.facts:
        facts.add_row(what, escape(much))
    console.print(facts)
    if plan.how:
        console.print(f"\n{plan.how}", style="italic", highlight=False, soft_wrap=True)
    stages = Table(box=None)
    stages.add_column("stage")
    for name in ("time", "disk"):
        stages.add_column(name, justify="right")
    stages.add_column("")
    for stage in STAGES:
        seconds, disk = plan.seconds.get(stage.name), plan.disk.get(stage.name, 0)
        note = plan.left.get(stage.name, f"done: {plan.done.get(stage.name)}")
        time = "–" if seconds is None else format_seconds(seconds)
        stages.add_row(stage.name, time, format_bytes(disk) if disk else "", escape(note))
    if plan.left and plan.left.keys() <= plan.seconds.keys():
        stages.add_row("left", format_seconds(sum(plan.seconds[name] for name in plan.left)), style="bold")
    console.print(stages)
    if not plan.left.keys() - {"target"}:
        again = "every stage is done" if not plan.left else "the target has new files, and is the same model"
        console.print(f"Nothing is left to do: {again}.", style="bold")


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
