"""Estimates of a run's time, disk and memory, and problems to expect, before any work.

Finished stages are read from their records. Other sizes follow from the recipe and the target's config, times from a
dry run if the target's weights are on this machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, cast

import psutil
import torch
from rich.markup import escape
from rich.table import Table

from headstart.data.prompts.chat import check_prompts
from headstart.data.workers import Workers
from headstart.decode.costs import core_count
from headstart.errors import UserError
from headstart.heads.base import DraftHead, family, make_config
from headstart.kernels.memory import free_bytes
from headstart.model.model import Target
from headstart.model.outline import Outline, outline, weights_are_here
from headstart.pipeline.data_stages import check_formats, conversations
from headstart.pipeline.dry_run import SECONDS, Speeds, dry_run
from headstart.pipeline.lengths import Lengths, assumed_lengths, counted_lengths, prompts_of, written_lengths
from headstart.pipeline.run import Run, left_to_do
from headstart.pipeline.stage_costs import COSTS, Workload
from headstart.pipeline.stages import STAGES
from headstart.replay.patch import FINAL
from headstart.support.artifacts import referred
from headstart.support.files import format_bytes, free_disk, size
from headstart.support.terminal import format_seconds, tell


@dataclass(frozen=True)
class Plan:
    """Estimates of a run: `seconds`, bytes on `disk` and bytes of `memory` by stage.

    Attributes:
        left: stages still to do, with the reason (`headstart.pipeline.run.left_to_do`).
        done: finished stages, with their summary.
        seconds: measured for finished stages and loading, estimated for others; missing without a dry run.
        free_bytes: free disk space; None if the target's weights are on another machine.
        facts: (name, value) pairs to display.
        disk_bytes: bytes still to write, including the next checkpoint before an older one is deleted.
        memory: peak of a process by stage, on its GPU or in RAM.
        room: bytes available to a training process; None as `free_bytes`.
        network: bytes each process sends per training step.
        steps: training steps; None when training is done.
        problems: failures to expect.
        how: what was measured, and what estimated.
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
    """Estimate a run with this many training processes, each on its own GPU or sharing one CPU.

    `prompt_tokens` (template included) replaces the count of the prompts. A recipe that would fail in its first minute
    is a UserError.
    """
    if processes < 1:
        raise UserError(f"There is no plan for {processes} processes.", "Give --processes 1 or more.")
    recipe, section, plan = run.recipe, run.recipe.target, _finished(run)
    if not plan.left.keys() - {"target"}:
        return plan
    here = weights_are_here(section.spec, section.revision)
    bare, start = _resident(), perf_counter()
    if here:
        tell(run.console, f"Loading {section.spec} ...", style="dim")
        target: Target | Outline = run.target
        check_prompts(target.tokenizer, recipe.data.self_share > 0)
        check_formats(run, run.target)
    else:
        target = outline(section.spec, section.dtype, section.revision, section.trust_remote_code)
    loading, shapes = perf_counter() - start, cast(Target, target)
    loaded, free = _resident(), free_bytes(target.device) if here else None
    config = make_config(recipe.heads, shapes)
    with torch.device("cpu" if here else "meta"):
        heads: DraftHead = family(config.family)(config)
    needed = sorted({*heads.aux_layers, FINAL})
    lengths, problems = _lengths(run, target, plan, prompt_tokens)
    weights = target.parameters * target.dtype.itemsize
    work = Workload(recipe, target, heads, needed, lengths, Speeds(), processes, processes, held=weights, free=free)
    if not here:
        heads.bind(shapes)
        how = f"Times are unknown, because the weights of {target.name} are not on this machine."
        return _estimate(run, work, replace(plan, problems=problems, how=how))
    if target.device.type == "cpu":
        cores = (core_count() or 1) / torch.get_num_threads()
        work = replace(work, bare=bare, held=loaded, at_once=min(processes, max(1.0, cores)))
    heads.to(target.device).warm_start(shapes)
    heads.gradient_checkpointing = recipe.train.gradient_checkpointing
    tell(run.console, f"Measuring on {target.device}, about {SECONDS:.0f} s at most:", style="dim")
    speeds = dry_run(
        shapes, heads, needed, recipe.train, lengths, lambda what: tell(run.console, f"    {what}", style="dim")
    )
    workers = Workers(target.device, -(-recipe.data.conversations // recipe.data.batch_size)).count
    plan = replace(
        plan,
        problems=problems,
        room=work.room("train"),
        free_bytes=free_disk(run.folder),
        seconds={"target": loading, **plan.seconds},
        how=f"Measured here: loading, {speeds.measured}. Other times, and memory while training, are estimated from "
        "that; the other bytes from the recipe and the target's config.",
    )
    return _estimate(run, replace(work, speeds=speeds, workers=workers), plan)


def _finished(run: Run) -> Plan:
    """Return a plan with the records of finished stages."""
    section, left = run.recipe.target, left_to_do(run, STAGES)
    record = run.whole_record("target") if "target" in left else None
    if record is not None and weights_are_here(section.spec, section.revision):
        # Files or settings changed; the model may be the same.
        vars(run)["target"] = loaded = run.load(section.adapter)
        if loaded.whole_identity == record.identity:
            left = left_to_do(run, STAGES, unchanged={"target"})
    records = {stage.name: run.record(stage.name) for stage in STAGES if stage.name not in left}
    done = {name: record for name, record in records.items() if record is not None}
    return Plan(
        left=left,
        done={name: record.summary for name, record in done.items()},
        seconds={name: record.seconds for name, record in done.items()},
        disk={name: size(folder) for name in done if (folder := referred(run.folder, name)) is not None},
    )


def _estimate(run: Run, work: Workload, plan: Plan) -> Plan:
    """Add estimates of the stages to do."""
    if "conversations" in plan.left:
        work = work.expected()
    else:
        splits = [conversations(run, split) for split in ("train", "validation")]
        train, validation = (sum(len(item.tokens) for item in split) for split in splits)
        work = replace(work, conversations=len(splits[0]), train_tokens=train, validation_tokens=validation)
    costs = {stage: cost(work) for stage, cost in COSTS.items() if stage in plan.left}
    timed = {stage: cost.seconds for stage, cost in costs.items()} if work.speeds.measured else {}
    trains, processes = "train" in plan.left, work.processes
    plan = replace(
        plan,
        seconds={**plan.seconds, **timed},
        disk={**plan.disk, **{stage: cost.disk for stage, cost in costs.items()}},
        disk_bytes=sum(cost.disk for cost in costs.values()) + (work.checkpoint_bytes if trains else 0),
        memory={stage: cost.memory for stage, cost in costs.items()},
        network=int(8 * (processes - 1) / processes * work.learning),  # a ring all-reduce of float32 gradients
        steps=work.training()[0] if trains else None,
    )
    return replace(plan, facts=_facts(work, plan), problems=[*plan.problems, *_problems(work, plan)])


def _lengths(run: Run, target: Target | Outline, plan: Plan, prompt_tokens: int | None) -> tuple[Lengths, list[str]]:
    """Return the lengths of conversations, and a problem if the prompts cannot be read."""
    data, longest, tokenizer = run.recipe.data, target.max_length, target.tokenizer
    if "conversations" not in plan.left:
        return written_lengths(data, longest, conversations(run, "train")), []
    if prompt_tokens is not None or tokenizer is None:
        return assumed_lengths(data, longest, prompt_tokens), []
    try:
        return counted_lengths(data, tokenizer, longest, prompts_of(data, tokenizer)), []
    except UserError as error:
        return assumed_lengths(data, longest), [f"{error.problem} {error.remedy}"]


def _problems(work: Workload, plan: Plan) -> list[str]:
    """Describe failures to expect, with the settings to change."""
    data, target, problems = work.recipe.data, work.target, list[str]()
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
        needed, available = plan.memory.get(stage, 0), work.room(stage)
        if available is not None and needed > available:
            problems.append(
                f"{what} takes about {format_bytes(needed)}, and {format_bytes(available)} is available to a process "
                f"on {target.device}: {remedy}."
            )
    return problems


def _facts(work: Workload, plan: Plan) -> list[tuple[str, str]]:
    """Describe the work of the stages to do."""
    target, heads, lengths, data = work.target, work.heads, work.lengths, work.recipe.data
    count = f"{target.parameters / 1e9:.1f} B" if target.parameters >= 1e9 else f"{target.parameters / 1e6:.1f} M"
    where = "" if plan.room is None else f" on {target.device}"
    facts = [
        ("Target", f"{target.name}, {str(target.dtype).removeprefix('torch.')}{where}"),
        ("Parameters", f"{count}, {format_bytes(target.parameters * target.dtype.itemsize)}"),
        (
            "Heads",
            f"{heads.config.family}, {heads.draft_steps} draft steps, {work.learning / 1e6:.1f} M weights to train",
        ),
        ("Compute per draft", f"{heads.flops_per_draft() / 1e6:.1f} MFLOP"),
    ]
    if "conversations" in plan.left:
        turns = f"{lengths.turns:.1f} answers" if lengths.turns else "answers as given"
        expected = f"about {work.conversations:.0f} (at most {data.conversations}), {work.tokens} tokens"
        facts += [
            ("Conversations", expected),
            ("A conversation", f"about {lengths.tokens:.0f} tokens, {turns} ({lengths.source})"),
        ]
        if data.server:
            servers = ", ".join(data.server)
            facts.append(("Written by", f"{servers}; times and memory below assume that this machine writes instead"))
    if data.online and plan.left.keys() & {"states", "train"}:
        facts.append(("Hidden states", f"not stored: training computes {len(work.needed)} per token in each epoch"))
    elif "states" in plan.left:
        states = f"{format_bytes(work.states)}, {len(work.needed)} per token"
        if work.states < work.wanted_states:
            states += f"; storing all would take {format_bytes(work.wanted_states)} (data.cache_gigabytes)"
        facts.append(("Hidden states on disk", states))
    free = "" if plan.free_bytes is None else f"; {format_bytes(plan.free_bytes)} free"
    every, to_write = format_bytes(sum(plan.disk.values())), format_bytes(plan.disk_bytes)
    facts.append(("Disk space", f"{every} in all, up to {to_write} of it still to write{free}"))
    for stage, when in (
        ("conversations", "while writing data"),
        ("train", "while training"),
        ("eval", "of the report"),
    ):
        if stage in plan.memory:
            needed, room = format_bytes(plan.memory[stage]), work.room(stage)
            about = f"at least {needed}"
            if room is not None:
                about = f"about {needed} of {format_bytes(room)} available to a process"
            facts.append((f"Memory {when}", about))
    if plan.steps is not None:
        section = work.recipe.train
        tokens = section.batch_tokens * section.gradient_accumulation_steps * work.processes
        facts.append(("Training", f"about {plan.steps:.0f} steps of {tokens} tokens"))
        if plan.network:
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
        if seconds is not None and stage.name in plan.left and stage.name != "target":
            time = f"about {time}"
        stages.add_row(stage.name, time, format_bytes(disk) if disk else "", escape(note))
    if plan.left and plan.left.keys() <= plan.seconds.keys():
        stages.add_row("left", "about " + format_seconds(sum(plan.seconds[name] for name in plan.left)), style="bold")
    console.print(stages)
    if not plan.left.keys() - {"target"}:
        again = "every stage is done" if not plan.left else "the target has new files, and is the same model"
        console.print(f"Nothing is left to do: {again}.", style="bold")


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
