"""What would fail in a plan, and which settings to change so that it fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headstart.pipeline.costs import Cost, Planned
from headstart.support.files import format_bytes

_SPARE = 0.92
"""Of a GPU's memory, what work should be planned for: the rest goes to CUDA itself and to what lies between blocks."""
_FULL = 0.8
"""Of a GPU's memory, what a target may take: conversations need the rest."""


@dataclass(frozen=True)
class Change:
    """One setting to change.

    Attributes:
        setting: as in a recipe, or an option of the command.
        value: to give it.
        why: in a few words.
    """

    setting: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value} ({self.why})"


def room(planned: Planned) -> int:
    """Bytes that one process can use on its device, the target among them."""
    place = planned.place
    if place.gpu is not None:
        return int(_SPARE * place.gpu.memory)
    return planned.own_bytes + place.free // place.processes


def gpus_for(target_bytes: int, memory: float) -> int:
    """How many GPUs hold a target together: the least power of two.

    >>> gpus_for(16_000_000_000, 85e9), gpus_for(141_000_000_000, 85e9), gpus_for(960_000_000_000, 150e9)
    (1, 4, 8)
    """
    return 1 << max(0, math.ceil(math.log2(max(1.0, target_bytes / (_FULL * memory)))))


def advise(planned: Planned, costs: Mapping[str, Cost], disk: int, free: int | None) -> tuple[list[str], list[Change]]:
    """(what would fail, as sentences; what to change).

    Args:
        planned: what was planned.
        costs: of its stages.
        disk: bytes still to be written.
        free: bytes free where they go; None where that is not known.
    """
    problems: list[str] = []
    changes: list[Change] = []
    for found, wanted in (
        _disk(planned, disk, free),
        _context(planned),
        _copy(planned),
        _writing(planned, costs["conversations"]),
        _training(planned, costs["train"]),
        _report(planned, costs["eval"]),
        _budget(planned),
    ):
        problems += found
        changes += wanted
    return problems, changes


Found = tuple[list[str], list[Change]]


def _disk(planned: Planned, disk: int, free: int | None) -> Found:
    if free is None or free >= 1.05 * disk:
        return [], []
    states = planned.amounts.states
    left = max(0.0, free / 1.05 - (disk - states))
    what = (
        f"The disk has {format_bytes(free)} free and the run may write {format_bytes(disk)}: free some space, choose "
    )
    what += "another --run-dir, or lower data.cache_gigabytes."
    gigabytes = left / 1e9
    return [what], [
        Change("data.cache_gigabytes", f"{gigabytes:.3g}", "what the disk holds")
    ] if gigabytes > 0.01 else []


def _context(planned: Planned) -> Found:
    data, target = planned.recipe.data, planned.target
    longest = data.max_prompt_tokens + data.max_new_tokens
    if longest <= target.max_length:
        return [], []
    what = f"A prompt and its answer may take {longest} tokens and {target.name} reads {target.max_length}: lower "
    what += "data.max_prompt_tokens or data.max_new_tokens."
    new = min(data.max_new_tokens, target.max_length // 2)
    wanted = [Change("data.max_new_tokens", str(new), "the target's context")] if new < data.max_new_tokens else []
    prompt = target.max_length - new
    if prompt < data.max_prompt_tokens:
        wanted.append(Change("data.max_prompt_tokens", str(prompt), "the target's context"))
    return [what], wanted


def _copy(planned: Planned) -> Found:
    """Whether the GPUs hold the target at all."""
    place = planned.place
    if place.gpu is None or place.per_copy <= place.processes:
        return [], []
    size = planned.target.parameters * planned.target.dtype.itemsize
    return [
        f"{planned.target.name} takes {format_bytes(size)}: {place.per_copy} GPUs of {format_bytes(place.gpu.memory)} "
        f"hold it together, and the plan has {place.processes}. Use --processes {place.per_copy}, or larger GPUs."
    ], [Change("--processes", str(place.per_copy), "to hold the target while data is written")]


def _writing(planned: Planned, cost: Cost) -> Found:
    data, available = planned.recipe.data, room(planned)
    if cost.memory <= available or data.server:  # servers plan their memory themselves
        return [], []
    rows = planned.workers * data.batch_size
    each = (cost.memory - planned.own_bytes) / max(1, rows)
    fitting = int((available - planned.own_bytes) / each / planned.workers)
    one = planned.lengths.cached * planned.target.kv_bytes_per_token // planned.place.per_copy
    if one > available - planned.own_bytes:
        return [
            _too_much(planned, "Writing the longest conversation", one, "data.max_new_tokens or data.max_prompt_tokens")
        ], []
    # Not a problem: what does not fit is halved; but it is found out by trying.
    return [], [Change("data.batch_size", str(max(1, fitting)), "larger batches are written in halves")]


def _training(planned: Planned, cost: Cost) -> Found:
    section, available = planned.recipe.train, room(planned)
    if cost.memory <= available:
        return [], []
    problem = _too_much(planned, "Training", cost.memory - planned.own_bytes, "train.batch_tokens")
    heads = planned.heads
    size = 4 if planned.target.dtype.itemsize == 4 else planned.target.dtype.itemsize
    by_token = planned.speeds.kept_bytes / section.batch_tokens
    by_token += (len(planned.needed) * planned.target.hidden_size + heads.config.draft_width) * size
    fixed = cost.memory - by_token * section.batch_tokens
    if available - fixed < 64 * by_token:
        wanted = "16000" if heads.config.draft_width > 16000 else "4000"
        if heads.config.draft_width > int(wanted):
            return [problem], [Change("heads.draft_vocab_size", wanted, "the heads' own LM head is smaller")]
        return [problem], []
    tokens = 1 << int(math.log2((available - fixed) / by_token))
    parts = math.ceil(section.batch_tokens / tokens)
    return [problem], [
        Change("train.batch_tokens", str(tokens), "a batch fits"),
        Change("train.gradient_accumulation_steps", str(parts * section.gradient_accumulation_steps), "as many a step"),
    ]


def _report(planned: Planned, cost: Cost) -> Found:
    available = room(planned)
    if cost.memory <= available or (planned.place.gpu is not None and planned.place.per_copy > 1):
        return [], []  # a target on several GPUs is measured where it is served
    problem = _too_much(planned, "The report", cost.memory - planned.own_bytes, "eval.max_new_tokens")
    by_token = 2 * planned.target.kv_bytes_per_token
    fixed = cost.memory - by_token * planned.recipe.eval.max_new_tokens
    tokens = int((available - fixed) / by_token)
    return [problem], [Change("eval.max_new_tokens", str(tokens), "its cache fits")] if tokens > 0 else []


def _budget(planned: Planned) -> Found:
    """The byte budget leaves conversations out: no problem, but better known."""
    amounts, data = planned.amounts, planned.recipe.data
    if amounts.wanted <= 1.02 * amounts.states:
        return [], []
    share = amounts.states / amounts.wanted
    return [], [
        Change(
            "data.cache_gigabytes",
            f"{math.ceil(amounts.wanted / 1e9)}",
            f"{data.cache_gigabytes:g} hold {share:.0%} of the conversations; or data.conversations="
            f"{int(amounts.conversations * share)}",
        )
    ]


def _too_much(planned: Planned, what: str, more: int, remedy: str) -> str:
    free = max(0, room(planned) - planned.own_bytes)
    where = planned.place.name if planned.place.gpu is not None else planned.target.device
    return (
        f"{what} takes about {format_bytes(more)} beside the target, and {format_bytes(free)} are free on {where}: "
        f"lower {remedy}."
    )
