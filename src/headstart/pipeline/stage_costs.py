"""What each stage of a run takes: a function per stage, from sizes, lengths and measured speeds to seconds, disk and
memory. A setting that changes what a stage takes is reckoned with in the function of that stage, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstart.data.prompts.questions import read_questions
from headstart.data.states.shards import shard_size
from headstart.data.states.store import CACHE_BYTES, estimate_bytes
from headstart.data.writing.in_process import CACHE_PEAK
from headstart.heads.base import DraftHead
from headstart.pipeline.lengths import SAMPLE, Lengths, answer_tokens
from headstart.pipeline.speeds import Speeds
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import TrainSection
from headstart.target.model import Target
from headstart.target.outline import Outline
from headstart.train.optimizers import Muon, make_optimizers
from headstart.train.wrapped import learning_numbers

_WORKERS_GAIN = 1.3
"""What two batches side by side bring on a CPU; see `headstart.data.conversations.workers`."""
_PROMPT_STEPS, _PROMPT_ROW = 127, 52
"""Forwards in which a batch of self-prompts is written, and tokens of one on average, those left out included."""
_ACCEPTED = 0.78
"""Of self-prompts, the share that is good enough to be answered."""
_PADDED = 1.08
"""Tokens of training batches, padding included, as a multiple of those without."""
_FORWARD = 1 / 3
"""Of a training step, what its forward takes."""
_SHAPES = 300
"""Steps after which memory on a CPU is taken to grow no more."""
_DISK = 4e8
"""Bytes a second that checkpoints are written with."""
_WARM_UP = 32
"""Tokens that a report decodes with each method before it measures."""
_METHODS, _COMPARED = 0.8 + 1.0 + 1.6 + 1.1, 0.8
"""Seconds for a token of a report as multiples of our plain loop's: with the heads, plain, of transformers and by
lookup, taken together; with each drafter of eval.compare."""
_JUDGED = 3
"""Forwards over the answers that say whether rounding explains a difference, in float32."""
_TUNED, _TUNED_TOKENS = 24, 64
"""Answers that tuning samples, and tokens of each at most."""
_CONVERSATION_BYTES = 10.5
"""Bytes of a token in a file of conversations, once as text and once as an id; parts and splits both have it."""


@dataclass(frozen=True)
class Cost:
    """What a stage takes: seconds, bytes that it leaves on disk and that stand beside these for a while, bytes that a
    process holds at most (on its GPU where it has one)."""

    seconds: float
    disk: int
    at_peak: int
    memory: int


@dataclass(frozen=True)
class Amounts:
    """Conversations and hidden states that the data stages make, or have made.

    Attributes:
        conversations: to train on.
        tokens: of these, and of the validation conversations.
        trained: tokens of those whose states fit the byte budget.
        written: tokens of all that is written, what nobody asked for among it.
        seconds: to write them all, those kept apart included.
        states: bytes of hidden states on disk.
        wanted: bytes of hidden states, if there were no budget.
    """

    conversations: float
    tokens: int
    trained: int
    written: int
    seconds: float
    states: int
    wanted: int


@dataclass(frozen=True)
class Planned:
    """What the costs of a run follow from.

    Attributes:
        target: the model, or its outline where the weights are not here.
        needed: layers whose states are kept.
        speeds: measured; all 0 where the weights are not here.
        processes: that train, each on a device of its own, or beside each other on a CPU.
        crowding: how many times as long a step takes since processes share a CPU's cores.
        workers: batches that a process writes at once.
        held: bytes that a process holds with the target loaded, on its GPU where it has one.
        bare: bytes that it holds without the target; 0 on a GPU.
    """

    recipe: Recipe
    target: Target | Outline
    heads: DraftHead
    needed: list[int]
    lengths: Lengths
    speeds: Speeds
    processes: int = 1
    crowding: float = 1.0
    workers: int = 1
    held: int = 0
    bare: int = 0

    @property
    def weights(self) -> int:
        """Numbers that the heads hold."""
        return sum(parameter.numel() for parameter in self.heads.parameters())

    @property
    def learning(self) -> int:
        """Numbers of the heads that training changes: all, or low-rank updates of the matrices."""
        return learning_numbers(self.heads, self.recipe.train.lora_rank)

    @property
    def cache_bytes(self) -> int:
        """KV cache of a batch of the longest conversations."""
        return self.recipe.data.batch_size * self.lengths.cached * self.target.kv_bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Of a token on disk."""
        target, states_dtype = self.target, self.recipe.data.states_dtype
        return estimate_bytes(1, len(self.needed), target.hidden_size, target.dtype, states_dtype)

    @property
    def on_cpu(self) -> bool:
        """Whether the target computes on a CPU here."""
        return self.target.device.type == "cpu"

    @property
    def online(self) -> bool:
        """Whether training computes hidden states itself and nothing is stored."""
        return self.recipe.data.states == "online"

    @property
    def captured(self) -> bool:
        """Whether hidden states are kept as conversations are written: on a CPU, in this process."""
        return self.on_cpu and not self.recipe.data.server and not self.online

    @property
    def needs_target(self) -> bool:
        """Whether training needs the whole target: to compute states, to decode now and then, or to learn too."""
        return self.online or self.recipe.train.needs_target


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


def amounts_of(planned: Planned) -> Amounts:
    """Conversations as `headstart.data.conversations.write` writes them: in parts, held-out and validation ones
    first."""
    data, lengths = planned.recipe.data, planned.lengths
    count = float(data.conversations)
    if 0 < lengths.prompts < SAMPLE:  # these are all there are
        count = min(count, max(1.0, lengths.prompts - data.heldout - data.validation))
    apart, validation = _writing(planned, data.validation)
    if data.heldout:
        apart += _writing(planned, data.heldout, answered=False)[0]
    seconds, rows = _writing(planned, count)
    if data.minutes is not None and seconds > 60 * data.minutes:
        share = 60 * data.minutes / seconds
        count, rows, seconds = count * share, rows * share, 60 * data.minutes
    amounts = amounts_with(planned, count, int(count * lengths.tokens), int(data.validation * lengths.tokens))
    written = int((rows + validation) * lengths.tokens)
    wanted = amounts.wanted
    if planned.captured:  # those of conversations that nobody asked for are kept too
        wanted = written * planned.state_bytes
    states = min(wanted, int(1e9 * data.cache_gigabytes))
    return replace(amounts, written=written, seconds=seconds + apart, states=states, wanted=wanted)


def amounts_with(planned: Planned, conversations: float, train: int, validation: int) -> Amounts:
    """With so many conversations to train on, and so many tokens of them and of the validation conversations."""
    tokens = train + validation
    if planned.online:
        return Amounts(conversations, tokens, train, tokens, 0.0, 0, 0)
    budget, wanted = int(1e9 * planned.recipe.data.cache_gigabytes), tokens * planned.state_bytes
    trained = min(train, max(0, int(budget / planned.state_bytes) - validation))
    return Amounts(conversations, tokens, trained, tokens, 0.0, min(wanted, budget), wanted)


def _writing(planned: Planned, count: float, answered: bool = True) -> tuple[float, float]:
    """(seconds, conversations) of writing at least `count` conversations: whole parts are written."""
    data, lengths, speeds = planned.recipe.data, planned.lengths, planned.speeds
    given = data.prompts != "self"
    most = float(data.batch_size) if given else min(_ACCEPTED * data.batch_size, count + math.ceil(count / 8))
    most = max(1.0, min(most, count) if given else most)
    parts = math.ceil(count / most - 1e-9)
    rows = count if given else parts * most
    seconds = 0.0
    if not given:
        prompts = parts * data.batch_size
        seconds += speeds.forwards(parts * _PROMPT_STEPS, prompts * _PROMPT_ROW)
        seconds += prompts * lengths.prompt / 2 * speeds.prefill_token
    if answered:
        usual = lengths.answer / max(1.0, lengths.turns)
        seconds += speeds.forwards(parts * data.max_new_tokens * lengths.turns, rows * lengths.turns * usual)
        seconds += rows * lengths.read * speeds.prefill_token
    gain = _WORKERS_GAIN if planned.workers > 1 else 1.0
    return seconds / gain / planned.processes * planned.crowding, rows


def conversations_cost(planned: Planned, amounts: Amounts) -> Cost:
    """Writing conversations; on a CPU their hidden states are kept as they are computed."""
    data, lengths, target = planned.recipe.data, planned.lengths, planned.target
    captured = 0
    if planned.captured:  # those of a batch, and once more while a shard is written
        captured = int(2 * data.batch_size * (lengths.prompt + data.max_new_tokens) * planned.state_bytes)
    logits = data.batch_size * target.vocab_size * (target.dtype.itemsize + 4)
    memory = planned.held + planned.workers * int(CACHE_PEAK * planned.cache_bytes + logits + captured)
    return Cost(amounts.seconds, int(_CONVERSATION_BYTES * (amounts.written + amounts.tokens)), 0, memory)


def states_cost(planned: Planned, amounts: Amounts) -> Cost:
    """Computing hidden states, where writing has not kept them; the teacher lies beside them."""
    target = planned.target
    if planned.online:
        return Cost(0.1, 0, 0, 0)
    seconds = amounts.states / 4e9 + 0.1
    if not planned.captured:
        tokens = min(amounts.tokens, amounts.states / planned.state_bytes)
        seconds += tokens * planned.speeds.prefill_token / planned.processes * planned.crowding
    reading = 2048 * target.hidden_size * target.dtype.itemsize * (4 + len(planned.needed))
    disk = amounts.states + teacher_bytes(planned)
    return Cost(seconds, disk, 0, planned.held + reading + shard_size(int(amounts.states)))


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


def training(planned: Planned, amounts: Amounts) -> tuple[float, float]:
    """(optimiser steps, seconds), as far as the clock lets them."""
    section, speeds, data = planned.recipe.train, planned.speeds, planned.recipe.data
    padded = 1.0 if section.packing else _PADDED
    batches = padded * amounts.trained / section.batch_tokens
    whole = max(1, math.ceil(batches))
    group = planned.processes * section.gradient_accumulation_steps
    most = section.epochs * max(1.0, whole // group)
    steps = float(min(most, section.steps or most))
    batch = speeds.train_step + (section.batch_tokens * speeds.prefill_token if planned.online else 0.0)
    full = batches / whole  # few batches are not full ones
    each = section.gradient_accumulation_steps * full * batch * planned.crowding
    judged = padded * data.validation * planned.lengths.tokens / section.batch_tokens / planned.processes
    judged *= _FORWARD * speeds.train_step * planned.crowding
    saving = (4 * planned.weights + _moments(planned)) / _DISK if speeds.train_step else 0.0
    each_with = each + judged / section.eval_every + saving / section.save_every
    seconds = judged + steps * each_with
    if section.minutes is not None and seconds > 60 * section.minutes:
        seconds = 60 * section.minutes
        steps = min(steps, max(1.0, (seconds - judged) / each))
    return steps, seconds + judged + saving


def _moments(planned: Planned) -> int:
    """Bytes of the optimisers' moments."""
    return optimizer_bytes(planned.heads, planned.recipe.train)


def train_cost(planned: Planned, amounts: Amounts) -> Cost:
    """Training: steps, validations, checkpoints."""
    section, heads, target = planned.recipe.train, planned.heads, planned.target
    steps, seconds = training(planned, amounts)
    weights, moments = 4 * planned.weights, _moments(planned)
    saves = max(1, min(section.keep_checkpoints, math.ceil(steps / section.save_every)))
    disk = saves * (weights + moments) + (saves + 1) * weights  # each with the best heads it knows of, and the last
    memory = planned.held if planned.needs_target else planned.bare + teacher_bytes(planned)
    memory += weights + 4 * planned.learning + moments + section.batch_tokens * batch_token_bytes(planned)
    if heads.config.draft_width < target.vocab_size:  # the teacher's LM head, cut to the draft vocabulary
        memory += heads.config.draft_width * target.hidden_size * target.dtype.itemsize
    if section.lora_rank:  # the sums of weights and updates, and their gradients
        memory += 8 * planned.weights
    if planned.on_cpu:
        memory += weights  # bytes that are being written
        memory += amounts.states if amounts.states <= CACHE_BYTES else 0  # stores are kept in memory once read
    return Cost(seconds, disk, weights + moments, memory + int(_grown(planned, steps) * planned.speeds.training_bytes))


def _grown(planned: Planned, steps: float) -> float:
    """Memory of many steps as a multiple of that of a few.

    On a CPU with subsampled drafts no two steps have the same shapes, and what the allocator and oneDNN keep of each
    adds up: 1.6 times as much after 16 steps as after four, 2.7 times after 60.
    """
    if not planned.on_cpu or planned.recipe.train.position_weight != "subsampled":
        return 1.0
    return math.cbrt(max(4.0, min(steps, _SHAPES)) / 4)


def batch_token_bytes(planned: Planned) -> int:
    """Of a token of a batch: its states and the teacher's logits, and on a CPU the states of batches read ahead."""
    target, heads = planned.target, planned.heads
    # On a GPU, batches that are read ahead wait outside of it.
    batches = 1 + planned.recipe.train.prefetch if planned.on_cpu and not planned.online else 1
    numbers = batches * len(planned.needed) * target.hidden_size + heads.config.draft_width
    return numbers * (4 if target.dtype == torch.float32 else target.dtype.itemsize)


# -- after training ----------------------------------------------------------------------------------------------------


def tune_cost(planned: Planned, amounts: Amounts) -> Cost:
    """Timing trees and drafts, and replaying acceptance on the validation conversations."""
    recipe, speeds, lengths = planned.recipe, planned.speeds, planned.lengths
    rounds = 2 * 2 * 42
    seconds = speeds.forwards(32 * len(recipe.tune.widths) + rounds, 32 * sum(recipe.tune.widths) + rounds)
    texts = min(_TUNED, recipe.data.validation)
    answer = min(_TUNED_TOKENS, answer_tokens(recipe.data.max_new_tokens))
    seconds += rounds * speeds.draft + speeds.forwards(_TUNED_TOKENS, _TUNED_TOKENS * texts)
    read = recipe.data.validation * lengths.tokens + texts * (lengths.prompt + answer)
    seconds += read * (speeds.prefill_token + 1.5 * _FORWARD * speeds.train_step / recipe.train.batch_tokens)
    return Cost(seconds, 30_000, 0, _decoding_memory(planned))


def export_cost(planned: Planned, amounts: Amounts) -> Cost:
    """Writing the heads to keep, in the target's dtype."""
    size = planned.weights * planned.target.dtype.itemsize
    return Cost(0.2 + size / _DISK, size, 0, planned.held + 2 * size)


def eval_cost(planned: Planned, amounts: Amounts) -> Cost:
    """Decoding some prompts in every way that a report compares."""
    section, data, speeds, lengths = planned.recipe.eval, planned.recipe.data, planned.speeds, planned.lengths
    asked = data.heldout
    if section.questions != "heldout":
        asked = len(read_questions(Path(section.questions).expanduser()))
    prompts = min(asked, section.limit or asked)
    usual = lengths.answer / max(1.0, lengths.turns) or answer_tokens(data.max_new_tokens)
    longer = answer_tokens(section.max_new_tokens) / answer_tokens(data.max_new_tokens)
    answer = min(float(section.max_new_tokens), usual * longer)
    seconds = (prompts * answer + min(_WARM_UP, answer)) * speeds.step * (_METHODS + _COMPARED * len(section.compare))
    slower = 1 if planned.target.dtype == torch.float32 else 4  # than in the target's dtype
    seconds += slower * _JUDGED * prompts * (lengths.prompt + section.max_new_tokens) * speeds.prefill_token
    return Cost(seconds, 250_000, 0, _decoding_memory(planned))


def _decoding_memory(planned: Planned) -> int:
    """Of decoding one conversation, with our cache and transformers' own beside it."""
    recipe, target = planned.recipe, planned.target
    exact = 0
    if target.dtype.itemsize < 4:  # where a difference is judged, one part at a time is cast to float32
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in target.layers]
        exact = 4 * max(*layers, target.vocab_size * target.hidden_size)
    tokens = recipe.data.max_prompt_tokens + recipe.eval.max_new_tokens + recipe.tune.max_nodes
    return planned.held + planned.weights * target.dtype.itemsize + exact + 2 * tokens * target.kv_bytes_per_token


COSTS: Mapping[str, Callable[[Planned, Amounts], Cost]] = {
    "conversations": conversations_cost,
    "states": states_cost,
    "train": train_cost,
    "tune": tune_cost,
    "export": export_cost,
    "eval": eval_cost,
}
"""By stage. That of the target is how long it took to load."""
