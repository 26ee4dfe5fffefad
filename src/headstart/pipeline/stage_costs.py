"""What each stage of a run takes, from sizes, lengths and measured speeds: a function per stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstart.data.prompts.questions import read_questions
from headstart.data.states.shards import shard_size
from headstart.data.states.store import estimate_bytes
from headstart.data.writing.in_process import CACHE_PEAK
from headstart.heads.base import DraftHead
from headstart.pipeline.lengths import SAMPLE, Lengths, answer_tokens
from headstart.pipeline.speeds import Speeds
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import TrainSection
from headstart.target.memory import free_bytes
from headstart.target.model import Target
from headstart.target.outline import Outline
from headstart.train.optimizers import Muon, make_optimizers
from headstart.train.wrapped import learning_numbers

_PROMPT_STEPS = 127
"""Forwards in which a batch of self-prompts is written."""
_PADDED = 1.08
"""Tokens of training batches, padding included, as a multiple of those without."""
_FORWARD = 1 / 3
"""Of a training step, what its forward takes."""
_SHAPES = 4
"""Memory of many steps as a multiple of that of a few, on a CPU with subsampled drafts: each step has other shapes, and
what the allocator keeps of them adds up."""
_DISK = 4e8
"""Bytes a second that heads are written with."""
_METHODS = 4
"""That every report compares: with the heads, plain, transformers' plain and by lookup. Each is taken to be as slow as
plain decoding, and so is each drafter of eval.compare."""
_TIMED = 32
"""Forwards that tuning times for each width of tree."""
_CONVERSATION_BYTES = 21
"""Bytes of a token in the files of conversations: as text and as an id, in a part and in a split."""


@dataclass(frozen=True)
class Cost:
    """Seconds, bytes that a stage leaves on disk, bytes that a process holds at most (on its GPU where it has one)."""

    seconds: float
    disk: int
    memory: int


@dataclass(frozen=True)
class Planned:
    """What the costs of a run follow from.

    Attributes:
        needed: layers whose states are kept.
        processes: that train, each on a device of its own, or beside each other on a CPU.
        at_once: how many times as fast they are together as one of them.
        workers: batches that a process writes at once.
        held: bytes that a process holds with the target loaded, on its GPU where it has one.
        bare: bytes that it holds without the target; 0 on a GPU.
        conversations: to train on, that will be written.
        train_tokens: of those that there are prompts and minutes for; not all of their states may fit the byte budget.
    """

    recipe: Recipe
    target: Target | Outline
    heads: DraftHead
    needed: list[int]
    lengths: Lengths
    speeds: Speeds
    processes: int = 1
    at_once: float = 1.0
    workers: int = 1
    held: int = 0
    bare: int = 0
    conversations: float = 0.0
    train_tokens: int = 0
    validation_tokens: int = 0

    @property
    def weights(self) -> int:
        """Numbers that the heads hold."""
        return sum(parameter.numel() for parameter in self.heads.parameters())

    @property
    def learning(self) -> int:
        """Numbers that training changes: all, or low-rank updates of the matrices."""
        return learning_numbers(self.heads, self.recipe.train.lora_rank)

    @property
    def tokens(self) -> int:
        """Of the conversations that will be written: writing ends where the byte budget of their states is full."""
        return self.trained_tokens + self.validation_tokens

    @property
    def state_bytes(self) -> int:
        """Of a token on disk."""
        target, states_dtype = self.target, self.recipe.data.states_dtype
        return estimate_bytes(1, len(self.needed), target.hidden_size, target.dtype, states_dtype)

    @property
    def wanted_states(self) -> int:
        """Bytes of hidden states on disk, if there were no budget."""
        tokens = self.train_tokens + self.validation_tokens
        return 0 if self.recipe.data.online else tokens * self.state_bytes

    @property
    def states(self) -> int:
        return min(self.wanted_states, int(1e9 * self.recipe.data.cache_gigabytes))

    @property
    def trained_tokens(self) -> int:
        """Of the training conversations, those whose states fit the byte budget."""
        if self.recipe.data.online:
            return self.train_tokens
        return max(0, self.states // self.state_bytes - self.validation_tokens)

    @property
    def read_seconds(self) -> float:
        """Of a token's states; 0 where the system keeps all of them in memory."""
        kept = self.recipe.data.online or self.states <= free_bytes(torch.device("cpu"))
        return 0.0 if kept else self.speeds.disk * self.state_bytes

    @property
    def on_cpu(self) -> bool:
        return self.target.device.type == "cpu"

    @property
    def captured(self) -> bool:
        """Whether hidden states are kept as conversations are written: on a CPU, in this process."""
        return self.on_cpu and not self.recipe.data.server and not self.recipe.data.online


def teacher_bytes(planned: Planned) -> int:
    """What training reads of the target: embeddings, LM head, the last layers that heads start from."""
    target = planned.target
    tables = (target.embedding_weight, target.model.get_output_embeddings().weight)
    numbers = sum({weight.data_ptr() or id(weight): weight.numel() for weight in tables}.values())
    for layer in range(min(getattr(planned.heads.config, "start_layers", 1), target.num_layers)):
        named = target.layers[-1 - layer].named_parameters()
        numbers += sum(weight.numel() for name, weight in named if ".experts." not in f".{name}")
    return numbers * target.dtype.itemsize


# -- conversations and states ------------------------------------------------------------------------------------------


def expecting_conversations(planned: Planned) -> Planned:
    """With those that the recipe asks for, as far as there are prompts, minutes and room for their states."""
    data, lengths = planned.recipe.data, planned.lengths
    count = float(data.conversations)
    if 0 < lengths.prompts < SAMPLE and not data.self_share:  # these are all there are
        count = min(count, max(1.0, lengths.prompts - data.heldout - data.validation))
    seconds = _writing(planned, count)
    if data.minutes is not None and seconds > 60 * data.minutes:
        count *= 60 * data.minutes / seconds
    tokens = int(count * lengths.tokens), int(data.validation * lengths.tokens)
    planned = replace(planned, train_tokens=tokens[0], validation_tokens=tokens[1])
    return replace(planned, conversations=count * planned.trained_tokens / max(1, tokens[0]))


def _writing(planned: Planned, count: float) -> float:
    data, lengths = planned.recipe.data, planned.lengths
    steps = data.max_new_tokens * lengths.turns + _PROMPT_STEPS * data.self_share
    return planned.speeds.forwards(count / data.batch_size * steps, count * lengths.tokens) / planned.at_once


def conversations_cost(planned: Planned) -> Cost:
    data, target = planned.recipe.data, planned.target
    captured = 0
    if planned.captured:  # those of a batch, and once more while a shard is written
        captured = 2 * data.batch_size * planned.lengths.cached * planned.state_bytes
    logits = data.batch_size * target.vocab_size * (target.dtype.itemsize + 4)
    cache = CACHE_PEAK * data.batch_size * planned.lengths.cached * target.kv_bytes_per_token
    memory = planned.held + planned.workers * int(cache + logits + captured)
    seconds = _writing(planned, planned.conversations + data.validation + data.heldout)
    return Cost(seconds, _CONVERSATION_BYTES * planned.tokens, memory)


def states_cost(planned: Planned) -> Cost:
    target = planned.target
    if planned.recipe.data.online:
        return Cost(0.1, 0, 0)
    tokens = 0 if planned.captured else planned.states / planned.state_bytes
    seconds = 0.1 + tokens * planned.speeds.token / planned.at_once
    reading = 2048 * target.hidden_size * target.dtype.itemsize * (4 + len(planned.needed))
    return Cost(seconds, planned.states + teacher_bytes(planned), planned.held + reading + shard_size(planned.states))


# -- training ----------------------------------------------------------------------------------------------------------


def step_tokens(planned: Planned) -> int:
    """Tokens of an optimiser step, padding included, over all processes."""
    section = planned.recipe.train
    return section.batch_tokens * section.gradient_accumulation_steps * planned.processes


def gradient_bytes(planned: Planned) -> int:
    """What each process sends in a step: a ring adds up float32 gradients, each part going round twice."""
    return int(2 * (planned.processes - 1) / planned.processes * 4 * planned.learning)


def optimizer_bytes(heads: DraftHead, section: TrainSection) -> int:
    """What the optimisers keep of the weights: two moments of AdamW, one of muon, in float32."""
    if section.lora_rank:
        return 8 * learning_numbers(heads, section.lora_rank)
    count = 0
    for optimizer in make_optimizers(heads, section):
        each = 4 if isinstance(optimizer, Muon) else 8
        count += each * sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    return count


def training(planned: Planned) -> tuple[float, float]:
    """(optimiser steps, seconds), as far as the clock lets them."""
    section, speeds = planned.recipe.train, planned.speeds
    padded = 1.0 if section.packing else _PADDED
    batches = padded * planned.trained_tokens / section.batch_tokens
    whole = max(1, math.ceil(batches))
    group = planned.processes * section.gradient_accumulation_steps
    most = section.epochs * max(1.0, whole // group)
    steps = float(min(most, section.steps or most))
    batch = speeds.train_step + (section.batch_tokens * speeds.token if planned.recipe.data.online else 0.0)
    full = batches / whole  # few batches are not full ones
    # The processes of a machine compute beside each other, and share its disk.
    each = group * full * max(batch / planned.at_once, section.batch_tokens * planned.read_seconds)
    judging = planned.validation_tokens / section.batch_tokens * _FORWARD * speeds.train_step / planned.at_once
    each_with = each + judging / section.eval_every
    if section.minutes is not None and steps * each_with > 60 * section.minutes:
        steps = max(1.0, 60 * section.minutes / each_with)
    return steps, steps * each_with + 2 * judging


def checkpoint_bytes(planned: Planned) -> int:
    return 4 * planned.weights + optimizer_bytes(planned.heads, planned.recipe.train)


def train_cost(planned: Planned) -> Cost:
    section, heads, target = planned.recipe.train, planned.heads, planned.target
    steps, seconds = training(planned)
    weights = 4 * planned.weights
    saves = max(1, min(section.keep_checkpoints, math.ceil(steps / section.save_every)))
    disk = saves * checkpoint_bytes(planned) + (saves + 1) * weights  # each with the best heads of then, and the last
    needs_target = planned.recipe.data.online or section.needs_target
    memory = planned.held if needs_target else planned.bare + teacher_bytes(planned)
    memory += checkpoint_bytes(planned) + 4 * planned.learning + section.batch_tokens * batch_token_bytes(planned)
    if heads.config.draft_width < target.vocab_size:  # the teacher's LM head, cut to the draft vocabulary
        memory += heads.config.draft_width * target.hidden_size * target.dtype.itemsize
    if section.lora_rank:  # the sums of weights and updates, and their gradients
        memory += 8 * planned.weights
    if planned.on_cpu:
        memory += weights  # bytes that are being written
    many = _SHAPES if planned.on_cpu and section.position_weight == "subsampled" else 1
    return Cost(seconds, disk, memory + many * planned.speeds.training_bytes)


def batch_token_bytes(planned: Planned) -> int:
    """Of a token of a batch: its states and the teacher's logits, and the states of batches read ahead."""
    target, heads = planned.target, planned.heads
    ahead = 0 if planned.recipe.data.online else planned.recipe.train.prefetch
    batches = 1 + (ahead if planned.on_cpu else min(1, ahead))  # to a GPU the next one is copied, others wait outside
    drafts, some = heads.config.draft_width, planned.recipe.train.loss_tokens
    item = 4 if target.dtype == torch.float32 else target.dtype.itemsize
    logits = 4 * some if 0 < some < drafts else item * drafts  # raised ones are not rounded
    return item * batches * len(planned.needed) * target.hidden_size + logits


# -- after training ----------------------------------------------------------------------------------------------------


def tune_cost(planned: Planned) -> Cost:
    widths = planned.recipe.tune.widths
    tokens = _TIMED * sum(widths) + planned.validation_tokens
    return Cost(planned.speeds.forwards(_TIMED * len(widths), tokens), 30_000, _decoding_memory(planned))


def export_cost(planned: Planned) -> Cost:
    size = planned.weights * planned.target.dtype.itemsize
    return Cost(0.2 + size / _DISK, size, planned.held + 2 * size)


def eval_cost(planned: Planned) -> Cost:
    section, prompts = planned.recipe.eval, planned.recipe.data.heldout
    if section.questions != "heldout":
        prompts = len(read_questions(Path(section.questions).expanduser()))
    tokens = min(prompts, section.limit or prompts) * answer_tokens(section.max_new_tokens)
    seconds = (_METHODS + len(section.compare)) * tokens * planned.speeds.step
    return Cost(seconds, 250_000, _decoding_memory(planned))


def _decoding_memory(planned: Planned) -> int:
    """Of decoding one conversation, with our cache and transformers' own beside it."""
    recipe, target = planned.recipe, planned.target
    # Where a difference is judged, one part of the target at a time is cast to float32: the largest is the LM head.
    exact = 4 * target.vocab_size * target.hidden_size if target.dtype.itemsize < 4 else 0
    tokens = recipe.data.max_prompt_tokens + recipe.eval.max_new_tokens + recipe.tune.max_nodes
    return planned.held + planned.weights * target.dtype.itemsize + exact + 2 * tokens * target.kv_bytes_per_token


COSTS: Mapping[str, Callable[[Planned], Cost]] = {
    "conversations": conversations_cost,
    "states": states_cost,
    "train": train_cost,
    "tune": tune_cost,
    "export": export_cost,
    "eval": eval_cost,
}
"""By stage. That of the target is how long it took to load."""
