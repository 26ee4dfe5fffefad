"""Work, bytes and memory of a run's stages, from the recipe, the target's config and the speeds of a dry run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from headstart.data.generation.in_process import CACHE_PEAK
from headstart.data.prompts.chat import Unfit, prompt_tokens, with_tools
from headstart.data.prompts.loading import load_prompts
from headstart.data.prompts.questions import read_questions
from headstart.data.prompts.shapes import Prompt
from headstart.data.states.store import estimate_bytes
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.model.outline import Outline
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import DataSection, TrainSection
from headstart.train.optimizers import Muon, make_optimizers
from headstart.train.wrapped import count_trained_parameters

PROMPT_TOKENS = 66
"""Average tokens of a self-written prompt, template included."""
ANSWER_TOKENS = 325
"""Average tokens of an uncut answer; lengths are assumed to be exponentially distributed. Predicts the mean of 1558
answers of SmolLM2-135M-Instruct, cut at 32 to 160 tokens, within 3 %."""
SAMPLE = 1000
"""Maximum number of given prompts to count."""
_SELF_LONGEST = 200  # tokens of the longest self-written prompts, template included
_TURN = 10  # template tokens of each further user turn and its answer
_PADDED = 1.08  # ratio of training tokens with padding to those without
_FORWARD = 1 / 3  # fraction of a training step spent in the forward
_SHAPES = 4  # subsampled steps vary in shape, and the CPU allocator keeps memory for several
_DISK = 4e8  # bytes written per second
_PLAIN, _DRAFTED = 1.75, 0.6
"""Time of a report in units of plain decoding: plain decoding with transformers (plain and lookup, on one prompt in
four), and each drafter."""
_TIMED = 32  # forwards timed per width
_CONVERSATION_BYTES = 21  # per token, as text and as an id, in a batch and in a split


@dataclass(frozen=True)
class Lengths:
    """Expected tokens of a conversation, `answer` of them supervised, in answers to `turns` prompts (0 where given
    answers are kept); averages, except the KV cache length `longest`. `source` says where they come from.

    `prompts` is the number of counted prompts, all there are if below `SAMPLE`; 0 if none were counted.
    """

    tokens: float
    answer: float
    turns: float
    longest: int
    prompts: int = 0
    source: str = "assumed"


def answer_tokens(maximum: int) -> float:
    """Return the average tokens of an answer that is cut at `maximum`.

    >>> round(answer_tokens(64)), round(answer_tokens(160)), round(answer_tokens(4096))
    (58, 126, 325)
    """
    return ANSWER_TOKENS * -math.expm1(-maximum / ANSWER_TOKENS)


def assumed_lengths(data: DataSection, context: int, prompt: int | None = None) -> Lengths:
    """Assume one turn of typical length; `prompt` is the user's own figure for a prompt's tokens, template included."""
    answer, most = answer_tokens(data.max_new_tokens), max(prompt or 0, data.max_prompt_tokens)
    if data.prompts == "self" and prompt is None:
        most = min(most, _SELF_LONGEST)
    read = PROMPT_TOKENS if prompt is None else prompt
    return Lengths(min(read + answer, context), answer, 1.0, min(most + data.max_new_tokens, context))


def counted_lengths(data: DataSection, tokenizer: Any, context: int) -> Lengths:
    """Count the tokens of the first `SAMPLE` given prompts, streaming Hub datasets; assumed lengths without prompts.

    A UserError where they are unreadable.
    """
    if not data.sources:
        return assumed_lengths(data, context)
    prompts = load_prompts(data, tokenizer, limit=SAMPLE, stream=True).prompts
    rows = [_of_prompt(prompt, data, tokenizer, context) for prompt in prompts]
    tokens, answer, turns = (fmean(getattr(row, name) for row in rows) for name in ("tokens", "answer", "turns"))
    longest = max(row.longest for row in rows)
    return Lengths(tokens, answer, turns, longest, len(rows), f"from {len(rows)} of the prompts")


def _of_prompt(prompt: Prompt, data: DataSection, tokenizer: Any, context: int) -> Lengths:
    def count(message: Mapping[str, Any]) -> int:
        return len(tokenizer(message["content"], add_special_tokens=False)["input_ids"])

    try:
        read = len(prompt_tokens(prompt.opening, with_tools(tokenizer, prompt.tools)))
    except Unfit:
        return Lengths(0, 0, 0, 0)
    later, usual, turns = prompt.messages[len(prompt.opening) :], answer_tokens(data.max_new_tokens), 1
    if not data.regenerate and prompt.messages[-1]["role"] == "assistant":
        answers = [count(message) for message in later if message["role"] == "assistant"]
        tokens = read + sum(map(count, later)) + _TURN * (len(answers) - 1)
        return Lengths(min(tokens, context), sum(answers), 0, 0)
    for message in prompt.without_answers[len(prompt.opening) :]:
        room = context - data.max_new_tokens - read - turns * usual
        if (further := count(message) + _TURN) > min(room, data.max_prompt_tokens):
            break
        read, turns = read + further, turns + 1
    longest = min(read + turns * data.max_new_tokens, context)
    return Lengths(min(read + turns * usual, context), turns * usual, turns, longest)


# -- work --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speeds:
    """Seconds of a decoding `step`, a `token` to read, a token `written` in batches by all workers or servers, and a
    training step on a `batch`; 0 if unknown.

    `batch_bytes` is the step's peak of gradients, activations and logits. `measured` lists the measurements.
    """

    step: float = 0.0
    token: float = 0.0
    written: float = 0.0
    batch: float = 0.0
    batch_bytes: int = 0
    measured: str = ""


@dataclass(frozen=True)
class Workload:
    """Recipe, target, heads and speeds of a run; the methods estimate its time, disk and memory.

    Attributes:
        layers: layers with stored states.
        processes: training processes, each on its own GPU or sharing one CPU, `parallel_speed` times as fast as one.
        workers: batches a process writes concurrently.
        bytes_with_target: bytes in use with the target loaded, on the GPU if there is one.
        bytes_without_target: bytes in use before; 0 on a GPU.
        free: available bytes in addition to `bytes_with_target`; None if unknown.
        conversations: training conversations to write, of `train_tokens` within the byte budget of the states.
        all_states: bytes of all states without that budget.
    """

    recipe: Recipe
    target: Target | Outline
    heads: DraftHead
    layers: list[int]
    lengths: Lengths
    speeds: Speeds = Speeds()
    processes: int = 1
    parallel_speed: float = 1.0
    workers: int = 1
    bytes_with_target: int = 0
    bytes_without_target: int = 0
    free: int | None = None
    conversations: float = 0.0
    train_tokens: int = 0
    validation_tokens: int = 0
    all_states: int = 0

    def expected(self) -> Workload:
        """Limit the conversations to the prompts, data.minutes and the byte budget."""
        data, lengths = self.recipe.data, self.lengths
        count = float(data.conversations)
        if 0 < lengths.prompts < SAMPLE and not data.self_share:  # all of them were counted
            count = min(count, max(1.0, lengths.prompts - data.heldout - data.validation))
        if data.minutes is not None and (seconds := self._writing(count)) > 60 * data.minutes:
            count *= 60 * data.minutes / seconds
        filled = self.with_tokens(int(count * lengths.tokens), int(data.validation * lengths.tokens))
        return replace(filled, conversations=filled.train_tokens / max(1.0, lengths.tokens))

    def with_tokens(self, train: int, validation: int) -> Workload:
        """Limit the tokens of the splits to the byte budget of their states."""
        full = 0 if self.recipe.data.online else (train + validation) * self.state_bytes
        if full > (budget := int(1e9 * self.recipe.data.cache_gigabytes)):
            train = max(0, budget // self.state_bytes - validation)
        return replace(self, train_tokens=train, validation_tokens=validation, all_states=full)

    def _writing(self, count: float) -> float:
        data, lengths, speeds = self.recipe.data, self.lengths, self.speeds
        answers = lengths.answer if lengths.turns else 0.0  # given answers are only read
        written, read = answers + data.self_share * PROMPT_TOKENS, lengths.tokens - answers
        writers = 1.0 if data.server else self.parallel_speed  # the speed of servers is of all together
        return count * (written * speeds.written / writers + read * speeds.token / self.parallel_speed)

    def training(self) -> tuple[float, float]:
        """Return (optimiser steps, seconds), within train.minutes."""
        section, speeds = self.recipe.train, self.speeds
        batches = (1.0 if section.packing else _PADDED) * self.train_tokens / section.batch_tokens
        rounded = max(1, math.ceil(batches))
        group = self.processes * section.gradient_accumulation_steps
        most = section.epochs * max(1.0, rounded // group)
        steps = float(min(most, section.steps or most))
        batch = speeds.batch + (section.batch_tokens * speeds.token if self.recipe.data.forwards_in_training else 0.0)
        judging = self.validation_tokens / section.batch_tokens * _FORWARD * speeds.batch / self.parallel_speed
        each = group * batches / rounded * batch / self.parallel_speed + judging / section.eval_every
        if section.minutes is not None and steps * each > 60 * section.minutes:
            steps = max(1.0, 60 * section.minutes / each)
        return steps, steps * each + 2 * judging

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage after `target`."""
        data, section, speeds = self.recipe.data, self.recipe.eval, self.speeds
        widths, states = self.recipe.tune.widths, 0 if self._captured else self.kept_states / self.state_bytes
        prompts = data.heldout
        if section.questions != "heldout":
            prompts = len(read_questions(Path(section.questions).expanduser()))
        answers = min(prompts, section.limit or prompts) * answer_tokens(section.max_new_tokens)
        return {
            "conversations": self._writing(self.conversations + data.validation + data.heldout),
            "states": 0.1 + states * speeds.token / self.parallel_speed,
            "train": self.training()[1],
            "tune": _TIMED * len(widths) * speeds.step + (_TIMED * sum(widths) + self.validation_tokens) * speeds.token,
            "export": 0.2 + self.disk()["export"] / _DISK,
            "eval": (_PLAIN + _DRAFTED * (1 + len(section.compare))) * answers * speeds.step,
        }

    # -- bytes ---------------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        return sum(parameter.numel() for parameter in self.heads.parameters())

    @property
    def trained_weights(self) -> int:
        """Number of trained weights."""
        return count_trained_parameters(self.heads, self.recipe.train.lora_rank)

    @property
    def state_bytes(self) -> int:
        """Bytes of a token's states on disk."""
        target, states_dtype = self.target, self.recipe.data.states_dtype
        return estimate_bytes(1, len(self.layers), target.hidden_size, target.dtype, states_dtype)

    @property
    def kept_states(self) -> int:
        """Bytes of the states within the budget."""
        return min(self.all_states, int(1e9 * self.recipe.data.cache_gigabytes))

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

    def disk(self) -> dict[str, int]:
        """Return the bytes that each stage leaves."""
        section = self.recipe.train
        saves = max(1, min(section.keep_checkpoints, math.ceil(self.training()[0] / section.save_every)))
        return {
            "conversations": _CONVERSATION_BYTES * (self.train_tokens + self.validation_tokens),
            "states": 0 if self.recipe.data.online else self.kept_states + self._teacher_bytes,
            "train": saves * self.checkpoint_bytes + (saves + 1) * 4 * self.weights,  # best heads beside each, and last
            "tune": 30_000,
            "export": self.weights * self.target.dtype.itemsize,
            "eval": 250_000,
        }

    # -- memory --------------------------------------------------------------------------------------------------------

    def room(self, stage: str) -> int | None:
        """Return the memory available to a process; training processes on a CPU share it."""
        shared = self.processes if stage == "train" and self._on_cpu else 1
        return None if self.free is None else (self.bytes_with_target + self.free) // shared

    def memory(self) -> dict[str, int]:
        """Return the peak bytes of a process that writes, trains or makes the report, on its GPU or in RAM."""
        recipe, target, heads, longest = self.recipe, self.target, self.heads, self.lengths.longest
        data, section, item, cache = recipe.data, recipe.train, target.dtype.itemsize, target.kv_bytes_per_token
        row = CACHE_PEAK * longest * cache + target.vocab_size * (item + 4)
        if self._captured:  # twice: while a shard is written
            row += 2 * longest * self.state_bytes

        drafts, candidates = heads.config.draft_width, section.loss_tokens
        ahead = section.prefetch if self._on_cpu else min(1, section.prefetch)
        ahead = 0 if data.forwards_in_training else ahead
        # States of this batch and the prefetched ones.
        states = section.batch_tokens * item * (1 + ahead) * len(self.layers) * target.hidden_size
        has_target = data.forwards_in_training
        training = self.bytes_with_target if has_target else self.bytes_without_target + self._teacher_bytes
        training += self.checkpoint_bytes + states
        if drafts < target.vocab_size:  # the teacher's LM head, cut to the draft vocabulary
            training += drafts * target.hidden_size * item
        # If not measured: gradients and the teacher's logits, which sampled softmax keeps in float32.
        logits = section.batch_tokens * (4 * candidates if 0 < candidates < drafts else item * drafts)
        step = self.speeds.batch_bytes or 4 * self.trained_weights + logits
        if self._on_cpu and section.position_weight == "subsampled":
            step *= _SHAPES
        if section.lora_rank:  # merged weights and their gradients
            step += 8 * self.weights
        training += max(step, 4 * self.weights if self._on_cpu else 0)  # on a CPU: a checkpoint being written

        # The report decodes with our KV cache and transformers'. Divergences are checked in float32, one module at a
        # time; the largest is the LM head.
        exact = 4 * target.vocab_size * target.hidden_size if item < 4 else 0
        tokens = data.max_prompt_tokens + recipe.eval.max_new_tokens + recipe.tune.max_nodes
        writing = (
            {} if data.server else {"conversations": self.bytes_with_target + self.workers * int(data.batch_size * row)}
        )
        return {
            **writing,
            "train": training,
            "eval": self.bytes_with_target + self.weights * item + exact + 2 * tokens * cache,
        }


def optimizer_bytes(heads: DraftHead, section: TrainSection) -> int:
    """Return the bytes of optimiser state: two float32 moments of AdamW, one of muon."""
    if section.lora_rank:
        return 8 * count_trained_parameters(heads, section.lora_rank)
    count = 0
    for optimizer in make_optimizers(heads, section):
        each = 4 if isinstance(optimizer, Muon) else 8
        count += each * sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    return count
