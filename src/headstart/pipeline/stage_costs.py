"""Formulas for each stage's time, disk and memory, from sizes, lengths and the speeds of a dry run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headstart.data.prompts.questions import read_questions
from headstart.data.states.shards import shard_size
from headstart.data.states.store import estimate_bytes
from headstart.data.writing.in_process import CACHE_PEAK
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.model.outline import Outline
from headstart.pipeline.dry_run import Speeds
from headstart.pipeline.lengths import SAMPLE, Lengths, answer_tokens
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import TrainSection
from headstart.train.optimizers import Muon, make_optimizers
from headstart.train.wrapped import learning_numbers

_PROMPT_STEPS = 127  # decoding steps to write a batch of self-prompts
_PADDED = 1.08  # ratio of training tokens with padding to those without
_FORWARD = 1 / 3  # fraction of a training step spent in the forward
_SHAPES = 4  # subsampled steps vary in shape, and the CPU allocator keeps memory for several
_DISK = 4e8  # bytes written per second
_METHODS = 4  # in every report: heads, plain, transformers' plain and lookup; each is timed as plain decoding
_TIMED = 32  # forwards timed per width
_CONVERSATION_BYTES = 21  # per token, as text and as an id, in a part and in a split


@dataclass(frozen=True)
class Cost:
    """Seconds, bytes left on disk, and the peak memory of a process (on its GPU if it has one)."""

    seconds: float
    disk: int
    memory: int


@dataclass(frozen=True)
class Workload:
    """Inputs of the formulas.

    Attributes:
        needed: layers with stored states.
        processes: training processes, each on its own GPU or sharing one CPU.
        at_once: speed-up of all processes over one.
        workers: batches a process writes concurrently.
        held: bytes in use with the target loaded, on the GPU if there is one.
        bare: bytes in use without the target; 0 on a GPU.
        free: available bytes in addition to `held`; None if unknown.
        conversations: training conversations to write.
        train_tokens: their tokens, before the byte budget of their states cuts them.
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
    free: int | None = None
    conversations: float = 0.0
    train_tokens: int = 0
    validation_tokens: int = 0

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        return sum(parameter.numel() for parameter in self.heads.parameters())

    @property
    def learning(self) -> int:
        """Number of trained weights."""
        return learning_numbers(self.heads, self.recipe.train.lora_rank)

    @property
    def tokens(self) -> int:
        """Tokens of the conversations that fit the byte budget of their states."""
        return self.trained_tokens + self.validation_tokens

    @property
    def trained_tokens(self) -> int:
        if self.recipe.data.online:
            return self.train_tokens
        return max(0, self.states // self.state_bytes - self.validation_tokens)

    @property
    def state_bytes(self) -> int:
        """Bytes of a token's states on disk."""
        target, states_dtype = self.target, self.recipe.data.states_dtype
        return estimate_bytes(1, len(self.needed), target.hidden_size, target.dtype, states_dtype)

    @property
    def wanted_states(self) -> int:
        """Bytes of states without a budget."""
        return 0 if self.recipe.data.online else (self.train_tokens + self.validation_tokens) * self.state_bytes

    @property
    def states(self) -> int:
        return min(self.wanted_states, int(1e9 * self.recipe.data.cache_gigabytes))

    @property
    def checkpoint_bytes(self) -> int:
        return 4 * self.weights + optimizer_bytes(self.heads, self.recipe.train)

    @property
    def _on_cpu(self) -> bool:
        return self.target.device.type == "cpu"

    @property
    def _captured(self) -> bool:
        """Whether states are kept while conversations are written."""
        return self._on_cpu and not self.recipe.data.server and not self.recipe.data.online

    @property
    def _teacher_bytes(self) -> int:
        """Bytes of the embeddings, the LM head, and the last layers that heads start from."""
        target = self.target
        tables = (target.embedding_weight, target.model.get_output_embeddings().weight)
        numbers = sum({weight.data_ptr() or id(weight): weight.numel() for weight in tables}.values())
        for layer in range(min(getattr(self.heads.config, "start_layers", 1), target.num_layers)):
            named = target.layers[-1 - layer].named_parameters()
            numbers += sum(weight.numel() for name, weight in named if ".experts." not in f".{name}")
        return numbers * target.dtype.itemsize

    @property
    def _batch_token_bytes(self) -> int:
        """Bytes per token of a batch: its states, those of prefetched batches, and the teacher's logits."""
        target, heads = self.target, self.heads
        ahead = 0 if self.recipe.data.online else self.recipe.train.prefetch
        batches = 1 + (ahead if self._on_cpu else min(1, ahead))  # a GPU holds the next one only
        drafts, some = heads.config.draft_width, self.recipe.train.loss_tokens
        item = target.dtype.itemsize
        logits = 4 * some if 0 < some < drafts else item * drafts  # corrected logits of sampled softmax stay in float32
        return item * batches * len(self.needed) * target.hidden_size + logits

    @property
    def _decoding_bytes(self) -> int:
        """Peak memory of decoding one conversation, with both our KV cache and transformers'."""
        recipe, target = self.recipe, self.target
        # Divergences are checked in float32, one module of the target at a time; the largest is the LM head.
        exact = 4 * target.vocab_size * target.hidden_size if target.dtype.itemsize < 4 else 0
        tokens = recipe.data.max_prompt_tokens + recipe.eval.max_new_tokens + recipe.tune.max_nodes
        return self.held + self.weights * target.dtype.itemsize + exact + 2 * tokens * target.kv_bytes_per_token

    def room(self, stage: str) -> int | None:
        """Return the memory available to a process; training processes on a CPU share it."""
        shared = self.processes if stage == "train" and self._on_cpu else 1
        return None if self.free is None else (self.held + self.free) // shared

    # -- work ----------------------------------------------------------------------------------------------------------

    def expected(self) -> Workload:
        """Limit the conversations to the prompts, data.minutes and the byte budget."""
        data, lengths = self.recipe.data, self.lengths
        count = float(data.conversations)
        if 0 < lengths.prompts < SAMPLE and not data.self_share:  # all of them were counted
            count = min(count, max(1.0, lengths.prompts - data.heldout - data.validation))
        if data.minutes is not None and (seconds := self._writing(count)) > 60 * data.minutes:
            count *= 60 * data.minutes / seconds
        train, validation = int(count * lengths.tokens), int(data.validation * lengths.tokens)
        filled = replace(self, train_tokens=train, validation_tokens=validation)
        return replace(filled, conversations=count * filled.trained_tokens / max(1, train))

    def _writing(self, count: float) -> float:
        data, lengths = self.recipe.data, self.lengths
        steps = data.max_new_tokens * lengths.turns + _PROMPT_STEPS * data.self_share
        return self.speeds.forwards(count / data.batch_size * steps, count * lengths.tokens) / self.at_once

    def training(self) -> tuple[float, float]:
        """Return (optimiser steps, seconds), within train.minutes."""
        section, speeds = self.recipe.train, self.speeds
        batches = (1.0 if section.packing else _PADDED) * self.trained_tokens / section.batch_tokens
        whole = max(1, math.ceil(batches))
        group = self.processes * section.gradient_accumulation_steps
        most = section.epochs * max(1.0, whole // group)
        steps = float(min(most, section.steps or most))
        batch = speeds.batch + (section.batch_tokens * speeds.token if self.recipe.data.online else 0.0)
        judging = self.validation_tokens / section.batch_tokens * _FORWARD * speeds.batch / self.at_once
        each = group * batches / whole * batch / self.at_once + judging / section.eval_every
        if section.minutes is not None and steps * each > 60 * section.minutes:
            steps = max(1.0, 60 * section.minutes / each)
        return steps, steps * each + 2 * judging

    # -- stages --------------------------------------------------------------------------------------------------------

    def conversations_cost(self) -> Cost:
        data, target, cached = self.recipe.data, self.target, self.lengths.cached
        row = CACHE_PEAK * cached * target.kv_bytes_per_token + target.vocab_size * (target.dtype.itemsize + 4)
        if self._captured:  # twice: while a shard is written
            row += 2 * cached * self.state_bytes
        seconds = self._writing(self.conversations + data.validation + data.heldout)
        return Cost(seconds, _CONVERSATION_BYTES * self.tokens, self.held + self.workers * int(data.batch_size * row))

    def states_cost(self) -> Cost:
        if self.recipe.data.online:
            return Cost(0.1, 0, 0)
        target, tokens = self.target, 0 if self._captured else self.states / self.state_bytes
        reading = 2048 * target.hidden_size * target.dtype.itemsize * (4 + len(self.needed))
        memory = self.held + reading + shard_size(self.states)
        return Cost(0.1 + tokens * self.speeds.token / self.at_once, self.states + self._teacher_bytes, memory)

    def train_cost(self) -> Cost:
        section, heads, target = self.recipe.train, self.heads, self.target
        steps, seconds = self.training()
        weights = 4 * self.weights
        saves = max(1, min(section.keep_checkpoints, math.ceil(steps / section.save_every)))
        disk = saves * self.checkpoint_bytes + (saves + 1) * weights  # best heads beside each and at the end
        needs_target = self.recipe.data.online or section.needs_target
        memory = self.held if needs_target else self.bare + self._teacher_bytes
        memory += self.checkpoint_bytes + 4 * self.learning + section.batch_tokens * self._batch_token_bytes
        if heads.config.draft_width < target.vocab_size:  # the teacher's LM head, cut to the draft vocabulary
            memory += heads.config.draft_width * target.hidden_size * target.dtype.itemsize
        if section.lora_rank:  # merged weights and their gradients
            memory += 8 * self.weights
        if self._on_cpu:
            memory += weights  # bytes being written
        many = _SHAPES if self._on_cpu and section.position_weight == "subsampled" else 1
        return Cost(seconds, disk, memory + many * self.speeds.batch_bytes)

    def tune_cost(self) -> Cost:
        widths = self.recipe.tune.widths
        tokens = _TIMED * sum(widths) + self.validation_tokens
        return Cost(self.speeds.forwards(_TIMED * len(widths), tokens), 30_000, self._decoding_bytes)

    def export_cost(self) -> Cost:
        size = self.weights * self.target.dtype.itemsize
        return Cost(0.2 + size / _DISK, size, self.held + 2 * size)

    def eval_cost(self) -> Cost:
        section, prompts = self.recipe.eval, self.recipe.data.heldout
        if section.questions != "heldout":
            prompts = len(read_questions(Path(section.questions).expanduser()))
        tokens = min(prompts, section.limit or prompts) * answer_tokens(section.max_new_tokens)
        return Cost((_METHODS + len(section.compare)) * tokens * self.speeds.step, 250_000, self._decoding_bytes)


def optimizer_bytes(heads: DraftHead, section: TrainSection) -> int:
    """Return the bytes of optimiser state: two float32 moments of AdamW, one of muon."""
    if section.lora_rank:
        return 8 * learning_numbers(heads, section.lora_rank)
    count = 0
    for optimizer in make_optimizers(heads, section):
        each = 4 if isinstance(optimizer, Muon) else 8
        count += each * sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    return count


COSTS: Mapping[str, Callable[[Workload], Cost]] = {
    "conversations": Workload.conversations_cost,
    "states": Workload.states_cost,
    "train": Workload.train_cost,
    "tune": Workload.tune_cost,
    "export": Workload.export_cost,
    "eval": Workload.eval_cost,
}
"""Cost by stage; that of `target` is its loading time."""
