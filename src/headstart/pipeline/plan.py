"""Estimates of a run's time, disk and memory, and problems to expect, before any work.

Finished stages are read from their records. Counts, bytes and memory follow from the recipe and the target's config,
hours from a dry run if the target's weights are on this machine.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from time import perf_counter
from typing import Any, cast

import psutil
import torch
from rich.markup import escape
from rich.table import Table

from headstart.data.generation.in_process import InProcess
from headstart.data.prompts.chat import check_prompts
from headstart.decode.costs import core_count
from headstart.errors import UserError
from headstart.heads.base import DraftHead, family, make_config
from headstart.kernels.memory import free_bytes
from headstart.model.model import Target
from headstart.model.outline import Outline, outline, weights_are_here
from headstart.pipeline.data_stages import check_formats, conversations, shared_data
from headstart.pipeline.dry_run import SECONDS, dry_run, workers_of
from headstart.pipeline.run import Run, left_to_do
from headstart.pipeline.stages import STAGES
from headstart.pipeline.workload import Lengths, Speeds, Workload, assumed_lengths, counted_lengths
from headstart.replay.patch import FINAL
from headstart.support.artifacts import referred
from headstart.support.files import format_bytes, free_disk, size
from headstart.support.terminal import format_seconds, tell

_FEW_STEPS = 50
"""Plans with fewer training steps give advice: a quickstart takes hundreds."""


@dataclass(frozen=True)
class Plan:
    """Estimates of a run: `seconds` (where measured), bytes on `disk` and peak `memory` of a process by stage.

    Attributes:
        left: stages still to do, with the reason (`headstart.pipeline.run.left_to_do`); `done` ones have a summary.
        free_bytes: free disk space, and `room`, the memory available to a training process; None without weights here.
        facts: (name, value) pairs to display.
        left_bytes: bytes still to write; `peak_bytes` includes a checkpoint before an older one is deleted.
        network: bytes each process sends per training step.
        steps: training steps; None when training is done.
        problems: failures to expect; `notes` are the origin of the numbers, options without effect, and advice.
    """

    left: dict[str, str]
    done: dict[str, str]
    seconds: dict[str, float]
    disk: dict[str, int]
    free_bytes: int | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    left_bytes: int = 0
    peak_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    room: int | None = None
    network: int = 0
    steps: float | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "facts": dict(self.facts)}


def make_plan(
    run: Run, processes: int | None = None, prompt_tokens: int | None = None, tokens_per_second: float | None = None
) -> Plan:
    """Estimate a run with this many training processes (None: the run's), each on its own GPU or sharing one CPU.

    `prompt_tokens` (template included) replaces the count of the prompts, `tokens_per_second` the measured speed of
    writing answers. A recipe that would fail in its first minute is a UserError.
    """
    recipe, section, plan, ranks = run.recipe, run.recipe.target, _finished(run), processes or run.processes
    for option, is_given, stage in (
        ("--processes", processes is not None, "train"),
        ("--prompt-tokens", prompt_tokens is not None, "conversations"),
        ("--tokens-per-second", tokens_per_second is not None, "conversations"),
    ):
        if is_given and stage not in plan.left:
            plan.notes.append(f"{option} has no effect: the stage {stage} is done.")
    if not plan.left.keys() - {"target"}:
        return plan
    here = weights_are_here(section.spec, section.revision)
    before, start = _resident(), perf_counter()
    if here:
        tell(run.console, f"Loading {section.spec} ...", style="dim")
        target: Target | Outline = run.target
        check_prompts(target.tokenizer, recipe.data.self_share > 0)
        check_formats(run, run.target)
        with suppress(UserError):  # unreadable prompts are reported below
            plan.notes.extend(
                f"The run reuses {stage} in {folder} where they fit. Time and disk count them as still to be made."
                for stage, folder in shared_data(run).items()
                if stage in plan.left
            )
    else:
        target = outline(section.spec, section.dtype, section.revision, section.trust_remote_code)
    loading, shapes = perf_counter() - start, cast(Target, target)
    bytes_with_target = (
        _resident() if here and target.device.type == "cpu" else target.parameters * target.dtype.itemsize
    )
    free = free_bytes(target.device) if here else None
    config = make_config(recipe.heads, shapes)
    with torch.device("cpu" if here else "meta"):
        heads: DraftHead = family(config.family)(config)
    layers, lengths = sorted({*heads.aux_layers, FINAL}), _lengths(run, target, plan, prompt_tokens)
    speeds = Speeds(written=0.0 if tokens_per_second is None else 1 / tokens_per_second)
    work = Workload(
        recipe,
        target,
        heads,
        layers,
        lengths,
        speeds,
        ranks,
        ranks,
        bytes_with_target=bytes_with_target,
        free=free,
    )
    if not here:
        heads.bind(shapes)
        plan.notes.append(f"Times are unknown, because the weights of {target.name} are not on this machine.")
        return _estimate(run, work, plan)
    if target.device.type == "cpu":
        cores = (core_count() or 1) / torch.get_num_threads()
        work = replace(work, bytes_without_target=before, parallel_speed=min(ranks, max(1.0, cores)))
    work = _measure(run, work, plan)
    plan = replace(
        plan, room=work.room("train"), free_bytes=free_disk(run.folder), seconds={"target": loading, **plan.seconds}
    )
    return _estimate(run, work, plan)


def _measure(run: Run, work: Workload, plan: Plan) -> Workload:
    """Add measured speeds to the work, and their origin to the plan."""
    recipe, heads, target = run.recipe, work.heads, run.target
    heads.to(target.device).warm_start(target)
    heads.gradient_checkpointing = recipe.train.gradient_checkpointing
    tell(run.console, f"Measuring on {target.device}, about {SECONDS:.0f} s at most ...", style="dim")
    speeds = dry_run(target, heads, work.layers, recipe, work.lengths)
    if work.speeds.written:
        speeds = replace(speeds, written=work.speeds.written)
    elif recipe.data.server and "conversations" in plan.left:
        plan.notes.append(
            "The time of writing assumes this machine instead of the servers: give their speed with "
            "--tokens-per-second."
        )
    plan.notes.append(
        f"Measured here: loading, {speeds.measured}. Other times, and memory while training, are estimated from that; "
        "the other bytes from the recipe and the target's config."
    )
    return replace(work, speeds=speeds, workers=workers_of(recipe, target, InProcess(target)).count)


def _finished(run: Run) -> Plan:
    section, left = run.recipe.target, left_to_do(run, STAGES)
    record = run.finished_record("target") if "target" in left else None
    if record is not None and weights_are_here(section.spec, section.revision):
        # Files or settings changed; the model may be the same.
        vars(run)["target"] = loaded = run.load()
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


def _lengths(run: Run, target: Target | Outline, plan: Plan, prompt_tokens: int | None) -> Lengths:
    """Return the lengths of conversations; adds a problem to the plan if the prompts cannot be read."""
    data, context, tokenizer = run.recipe.data, target.max_length, target.tokenizer
    if "conversations" not in plan.left:
        written = conversations(run, "train")
        tokens, answer = fmean(len(item.tokens) for item in written), fmean(sum(item.supervised) for item in written)
        return Lengths(tokens, answer, turns=0, longest=0)
    if prompt_tokens is None and tokenizer is not None:
        try:
            return counted_lengths(data, tokenizer, context)
        except UserError as error:
            plan.problems.append(f"{error.problem} {error.remedy}")
    return assumed_lengths(data, context, prompt_tokens)


def _estimate(run: Run, work: Workload, plan: Plan) -> Plan:
    if "conversations" in plan.left:
        work = work.expected()
    else:
        splits = [conversations(run, split) for split in ("train", "validation")]
        work = work.with_tokens(*(sum(len(item.tokens) for item in split) for split in splits))
    speeds, left, processes = work.speeds, plan.left, work.processes
    timed = [name for name in left if speeds.measured or (name == "conversations" and speeds.written)]
    disk = {name: count for name, count in work.disk().items() if name in left}
    written, trains = sum(disk.values()), "train" in left
    plan = replace(
        plan,
        seconds={**plan.seconds, **{name: took for name, took in work.seconds().items() if name in timed}},
        disk={**plan.disk, **disk},
        left_bytes=written,
        peak_bytes=written + (work.checkpoint_bytes if trains else 0),
        memory={name: count for name, count in work.memory().items() if name in left},
        network=int(8 * (processes - 1) / processes * work.trained_weights),  # a ring all-reduce of float32 gradients
        steps=work.training()[0] if trains else None,
    )
    if plan.steps is not None and plan.steps < _FEW_STEPS and work.recipe.train.steps is None:
        plan.notes.append(
            f"Heads draft badly after only {plan.steps:.0f} steps: raise minutes (or train.minutes and "
            "data.conversations), or choose a smaller target."
        )
    return replace(plan, facts=_facts(work, plan), problems=[*plan.problems, *_problems(work, plan)])


def _problems(work: Workload, plan: Plan) -> list[str]:
    data, target, problems = work.recipe.data, work.target, list[str]()
    if plan.free_bytes is not None and plan.free_bytes < 1.05 * plan.peak_bytes:
        problems.append(
            f"The disk has {format_bytes(plan.free_bytes)} free and the run may write {format_bytes(plan.peak_bytes)}: "
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
    target, heads, lengths, data = work.target, work.heads, work.lengths, work.recipe.data
    count = f"{target.parameters / 1e9:.1f} B" if target.parameters >= 1e9 else f"{target.parameters / 1e6:.1f} M"
    where = "" if plan.room is None else f" on {target.device}"
    trained = f"{work.trained_weights / 1e6:.1f} M weights to train"
    facts = [
        ("Target", f"{target.name}, {str(target.dtype).removeprefix('torch.')}{where}"),
        ("Parameters", f"{count}, {format_bytes(target.parameters * target.dtype.itemsize)}"),
        ("Heads", f"{heads.config.family}, {heads.draft_steps} draft steps, {trained}"),
        ("Compute per draft", f"{heads.flops_per_draft() / 1e6:.1f} MFLOP"),
    ]
    if "conversations" in plan.left:
        turns = f"{lengths.turns:.1f} answers" if lengths.turns else "answers as given"
        tokens = work.train_tokens + work.validation_tokens
        expected = f"about {work.conversations:.0f} (at most {data.conversations}), {tokens} tokens"
        facts.append(("Conversations", expected))
        facts.append(("A conversation", f"about {lengths.tokens:.0f} tokens, {turns} ({lengths.source})"))
        if data.server:
            facts.append(("Written by", ", ".join(data.server)))
    if data.online and plan.left.keys() & {"states", "train"}:
        how = "servers stream" if data.states_source else "training computes"
        facts.append(("Hidden states", f"not stored: {how} {len(work.layers)} per token in each epoch"))
    elif "states" in plan.left:
        states = f"{format_bytes(work.kept_states)}, {len(work.layers)} per token"
        if work.kept_states < work.all_states:
            states += f"; storing all would take {format_bytes(work.all_states)} (data.cache_gigabytes)"
        facts.append(("Hidden states on disk", states))
    room = "" if plan.free_bytes is None else f"; {format_bytes(plan.free_bytes)} free"
    every, left, peak = map(format_bytes, (sum(plan.disk.values()), plan.left_bytes, plan.peak_bytes))
    facts.append(("Disk space", f"{every} at the end, {left} of it still to write, at most {peak} at a time{room}"))
    for stage, when in (
        ("conversations", "while writing data"),
        ("train", "while training"),
        ("eval", "of the report"),
    ):
        if stage in plan.memory:
            needed, available = format_bytes(plan.memory[stage]), work.room(stage)
            of = "" if available is None else f" of {format_bytes(available)} available to a process"
            facts.append((f"Memory {when}", f"about {needed}{of}" if of else f"at least {needed}"))
    if plan.steps is not None:
        section = work.recipe.train
        tokens = section.batch_tokens * section.gradient_accumulation_steps * work.processes
        facts.append(("Training", f"about {plan.steps:.0f} steps of {tokens} tokens"))
        if data.states_source:
            kept = work.train_tokens + work.validation_tokens
            anew = max(kept, round(plan.steps * tokens))
            facts.append(
                (
                    "Stored or streamed",
                    f"stored: servers read {kept} tokens once, and {format_bytes(kept * work.state_bytes)} are on "
                    f"disk; streamed: they read about {anew} tokens during training, and nothing is on disk",
                )
            )
        if plan.network:
            facts.append(("Network", f"each process sends {format_bytes(plan.network)} per step (DDP)"))
    return facts


def show_plan(run: Run, plan: Plan) -> None:
    console = run.console
    facts = Table(title=f"Plan of {run.recipe.name}", title_justify="left", show_header=False, box=None)
    for name, value in plan.facts:
        facts.add_row(name, escape(value))
    console.print(facts)
    for note in plan.notes:
        console.print(f"\n{note}", style="italic", highlight=False, markup=False, soft_wrap=True)
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
