"""What each stage of a run costs: a function per stage, from sizes, lengths and speeds to seconds, disk and memory.

A setting that changes what a stage costs is reckoned with in the function of that stage, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from headstart.data.conversations.sampling import CACHE_PEAK
from headstart.data.prompts.questions import read_questions
from headstart.data.states.shards import shard_size
from headstart.data.states.store import CACHE_BYTES, estimate_bytes
from headstart.heads.base import DraftHead
from headstart.pipeline.lengths import SAMPLE, Lengths, answer_tokens
from headstart.pipeline.speeds import Speeds
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import TrainSection
from headstart.support.gpus import Gpu
from headstart.target.model import Target
from headstart.target.outline import Outline
from headstart.train.optimizers import Muon, make_optimizers
from headstart.train.wrapped import learning_numbers

MACHINE = 8
"""GPUs of a machine; more processes than these are on several."""
NETWORK = 25e9
"""Bytes a second that a GPU sends to another machine: a network of 200 Gbit/s for each."""
_WORKERS_GAIN = 1.3
"""What two batches side by side bring on a CPU; see `headstart.data.conversations.workers`."""
_PROMPT_STEPS, _PROMPT_ROW = 127, 52
"""Forwards in which a batch of self-prompts is written, and tokens of one on average, those left out included."""
_ACCEPTED = 0.78
"""Of self-prompts, the share that is good enough to be answered."""
_PADDED = 1.08
"""Tokens of training batches, padding included, as a multiple of those without."""
_SHAPES = 300
"""Steps after which memory on a CPU is taken to grow no more."""
_LOOKED_AT = 200_000
"""Tokens that a closed-form start looks at, at most."""
_DISK = 4e8
"""Bytes a second that checkpoints are written with."""
_DECODED, _DECODED_TOKENS = 4, 64
"""Prompts that train.decode_every decodes, and tokens of each."""
_WARM_UP = 32
"""Tokens that a report decodes with each method before it measures."""
_METHODS = {"heads": 0.8, "plain": 1.0, "transformers": 1.6, "lookup": 1.1}
"""What every report times, each with its seconds for a token as a multiple of our plain loop's."""
_COMPARED = 0.8
"""The same for each drafter of eval.compare."""
_JUDGED = 3
"""Forwards over the answers that say whether rounding explains a difference, in float32."""
_TUNED = 24
"""Answers that tuning samples, of `_DECODED_TOKENS` tokens at most."""
_CONVERSATION_BYTES = 10.5
"""Bytes of a token in a file of conversations, once as text and once as an id; parts and splits both have it."""


@dataclass(frozen=True)
class Cost:
    """What a stage takes.

    Attributes:
        seconds: from its beginning to its end.
        disk: bytes that it leaves.
        at_peak: bytes that it writes beside these for a while.
        memory: bytes on one device at most, what is held of the target among them.
        network: bytes that each process sends in a step.
    """

    seconds: float
    disk: int = 0
    at_peak: int = 0
    memory: int = 0
    network: int = 0


@dataclass(frozen=True)
class Place:
    """Where a plan's work runs.

    Attributes:
        name: of the device, for people.
        processes: that train, each on a device of its own, or beside each other on a CPU.
        cores: of a CPU that all processes share.
        threads: of each process on a CPU.
        gpu: of the table; None where work was timed here.
        free: bytes of a device that are free, the target not counted; of a GPU of the table all that PyTorch has.
        per_copy: GPUs that hold one copy of the target together.
    """

    name: str
    processes: int
    cores: int
    threads: int
    gpu: Gpu | None
    free: int
    per_copy: int = 1

    @property
    def copies(self) -> int:
        """Copies of the target that work side by side while data is written."""
        return max(1, self.processes // self.per_copy)

    @property
    def crowding(self) -> float:
        """How many times as long a step takes since processes share a CPU's cores."""
        if self.gpu is not None:
            return 1.0
        return max(1.0, self.processes * self.threads / max(1, self.cores))


@dataclass(frozen=True)
class Planned:
    """What an estimate starts from.

    Attributes:
        recipe: settings.
        target: the model, or its outline.
        heads: as the recipe wants them.
        needed: layers whose states are kept.
        speeds: timed or from the table.
        lengths: of the conversations to expect.
        workers: batches that are written at once by a process.
        place: where it runs.
    """

    recipe: Recipe
    target: Target | Outline
    heads: DraftHead
    needed: list[int]
    speeds: Speeds
    lengths: Lengths
    workers: int
    place: Place

    @property
    def weights(self) -> int:
        """Numbers that the heads hold."""
        return sum(parameter.numel() for parameter in self.heads.parameters())

    @cached_property
    def learning(self) -> int:
        """Numbers of the heads that training changes: all, or low-rank updates of the matrices."""
        return learning_numbers(self.heads, self.recipe.train.lora_rank)

    @cached_property
    def own_bytes(self) -> int:
        """What the target itself takes on a device."""
        return self.target.parameters * self.target.dtype.itemsize // self.place.per_copy

    @cached_property
    def teacher_bytes(self) -> int:
        """What training reads of the target: embeddings, LM head, the last layers that heads start from."""
        target = self.target
        tables = {weight.data_ptr() or id(weight): weight.numel() for weight in _tables(target)}
        layers = getattr(self.heads.config, "start_layers", 1)
        dense = sum(_dense_parameters(target.layers[-1 - layer]) for layer in range(min(layers, target.num_layers)))
        return (sum(tables.values()) + dense) * target.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """KV cache of a batch of the longest conversations, on a device."""
        rows = self.recipe.data.batch_size
        return rows * self.lengths.cached * self.target.kv_bytes_per_token // self.place.per_copy

    @property
    def state_bytes(self) -> int:
        """Of a token on disk."""
        target, kept = self.target, self.recipe.data.states_dtype
        return estimate_bytes(1, len(self.needed), target.hidden_size, target.dtype, kept)

    @cached_property
    def amounts(self) -> Amounts:
        """See `Amounts`."""
        return _amounts(self)

    @property
    def online(self) -> bool:
        """Whether training computes hidden states itself and nothing is stored."""
        return self.recipe.data.states == "online"

    @property
    def needs_target(self) -> bool:
        """Whether training needs the whole target: to compute states, to decode now and then, or to learn too."""
        return self.online or self.recipe.train.needs_target

    @property
    def captured(self) -> bool:
        """Whether hidden states are kept as conversations are written: on a CPU, in this process."""
        here = self.place.gpu is None and self.target.device.type == "cpu"
        return here and not self.recipe.data.server and not self.online


@dataclass(frozen=True)
class Amounts:
    """How much the data stages make.

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


def _tables(target: Target | Outline) -> tuple[torch.Tensor, ...]:
    return target.embedding_weight, target.model.get_output_embeddings().weight


def _dense_parameters(layer: torch.nn.Module) -> int:
    return sum(weight.numel() for name, weight in layer.named_parameters() if ".experts." not in f".{name}")


# -- conversations -----------------------------------------------------------------------------------------------------


def _amounts(planned: Planned) -> Amounts:
    """Conversations as `headstart.data.conversations.write` writes them: in parts, held-out and validation ones first."""
    data, lengths = planned.recipe.data, planned.lengths
    count = float(data.conversations)
    if 0 < lengths.sample < SAMPLE:  # these are all there are
        count = min(count, max(1.0, lengths.sample - data.heldout - data.validation))
    validation = _writing(planned, data.validation)
    kept_apart = validation[0] + (_writing(planned, data.heldout, answered=False)[0] if data.heldout else 0.0)
    seconds, rows = _writing(planned, count)
    if data.minutes is not None and seconds > 60 * data.minutes:
        share = 60 * data.minutes / seconds
        count, rows, seconds = count * share, rows * share, 60 * data.minutes
    each = lengths.tokens
    tokens = int((count + data.validation) * each)
    kept = rows + validation[1] if planned.captured else count + data.validation
    wanted = int(kept * each) * planned.state_bytes
    if planned.online:
        made = int((rows + validation[1]) * each)
        return Amounts(count, tokens, int(count * each), made, seconds + kept_apart, 0, 0)
    budget = int(1e9 * data.cache_gigabytes)
    trained = min(int(count * each), max(0, int(budget / planned.state_bytes - data.validation * each)))
    return Amounts(
        count, tokens, trained, int((rows + validation[1]) * each), seconds + kept_apart, min(wanted, budget), wanted
    )


def _writing(planned: Planned, count: float, answered: bool = True) -> tuple[float, float]:
    """(seconds, conversations) of writing at least `count` conversations: whole parts are written."""
    data, lengths, speeds, place = planned.recipe.data, planned.lengths, planned.speeds, planned.place
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
    side_by_side = place.copies if place.gpu is not None else place.processes / place.crowding
    return seconds / (_WORKERS_GAIN if planned.workers > 1 else 1.0) / side_by_side, rows


def conversations_cost(planned: Planned) -> Cost:
    """Writing conversations; on a CPU their hidden states are kept as they are computed."""
    amounts, data, lengths, target = planned.amounts, planned.recipe.data, planned.lengths, planned.target
    captured = 0
    if planned.captured:  # those of a batch, and once more while a shard is written
        captured = int(2 * data.batch_size * (lengths.prompt + data.max_new_tokens) * planned.state_bytes)
    logits = data.batch_size * target.vocab_size * (target.dtype.itemsize + 4) // planned.place.per_copy
    memory = planned.own_bytes + planned.workers * int(CACHE_PEAK * planned.cache_bytes + logits + captured)
    return Cost(amounts.seconds, int(_CONVERSATION_BYTES * (amounts.written + amounts.tokens)), 0, memory)


# -- states ------------------------------------------------------------------------------------------------------------


def states_cost(planned: Planned) -> Cost:
    """Computing hidden states, where writing has not kept them; the teacher lies beside them."""
    amounts, place, target = planned.amounts, planned.place, planned.target
    if planned.online:
        return Cost(0.1)
    seconds = amounts.states / 4e9 + 0.1
    if not planned.captured:
        side_by_side = place.copies if place.gpu is not None else place.processes / place.crowding
        seconds += (
            min(amounts.tokens, amounts.states / planned.state_bytes) * planned.speeds.prefill_token / side_by_side
        )
    reading = 2048 * target.hidden_size * target.dtype.itemsize * (4 + len(planned.needed))
    left = amounts.states + planned.teacher_bytes
    return Cost(seconds, left, 0, planned.own_bytes + reading + shard_size(int(amounts.states)))


# -- training ----------------------------------------------------------------------------------------------------------


def padded(section: TrainSection) -> float:
    """Tokens of batches as a multiple of those without padding."""
    return 1.0 if section.packing else _PADDED


def steps_of(planned: Planned) -> float:
    """Optimiser steps, as far as the clock lets them."""
    section, place = planned.recipe.train, planned.place
    batches = math.ceil(padded(section) * planned.amounts.trained / section.batch_tokens)
    group = place.processes * section.gradient_accumulation_steps
    steps = section.epochs * max(1.0, batches // group)
    return float(min(steps, section.steps or steps))


def gradient_bytes(planned: Planned) -> int:
    """What each process sends in a step: a ring adds up float32 gradients, each part going round twice."""
    processes = planned.place.processes
    return int(2 * (processes - 1) / processes * 4 * planned.learning)


def step_seconds(planned: Planned) -> float:
    """Of an optimiser step, all processes taken together."""
    section, place, speeds = planned.recipe.train, planned.place, planned.speeds
    batches = padded(section) * planned.amounts.trained / section.batch_tokens
    full = batches / math.ceil(max(batches, 1e-9))  # few batches are not full ones
    batch = speeds.train_step + (section.batch_tokens * speeds.prefill_token if planned.online else 0.0)
    seconds = (section.gradient_accumulation_steps * full * batch + speeds.update) * place.crowding
    return seconds + (gradient_bytes(planned) / _link(place) if place.gpu is not None else 0.0)


def _link(place: Place) -> float:
    return NETWORK if place.processes > MACHINE else place.gpu.link if place.gpu is not None else NETWORK


def optimizer_bytes(planned: Planned) -> int:
    """What the optimisers keep of the weights: two moments of AdamW, one of muon, in float32."""
    if planned.recipe.train.lora_rank:
        return 8 * planned.learning
    count = 0
    for optimizer in make_optimizers(planned.heads, planned.recipe.train):
        each = 4 if isinstance(optimizer, Muon) else 8
        count += each * sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    return count


def held_in_training(planned: Planned) -> int:
    """What is held of the target: the teacher, which lies beside stored states, or all of it where that is needed."""
    return planned.own_bytes if planned.needs_target else planned.teacher_bytes


def train_cost(planned: Planned) -> Cost:
    """Training: steps, validations, checkpoints."""
    recipe, speeds, place, heads, target = (
        planned.recipe,
        planned.speeds,
        planned.place,
        planned.heads,
        planned.target,
    )
    section, data = recipe.train, recipe.data
    steps, each = steps_of(planned), step_seconds(planned)
    judged = padded(section) * data.validation * planned.lengths.tokens / section.batch_tokens / place.processes
    judged *= speeds.judge_step * place.crowding
    averages = 0 if section.ema is None else 4 * planned.learning
    weights, moments = 4 * planned.weights, optimizer_bytes(planned) + averages
    saving = (weights + moments) / _DISK
    decoding = 0.0
    if section.decode_every:
        decoding = _DECODED * _DECODED_TOKENS * (speeds.step + speeds.draft) / 1.5 / section.decode_every
    setup = min(_LOOKED_AT, planned.amounts.trained) * speeds.fit_token * place.crowding + judged
    seconds = setup + steps * (each + judged / section.eval_every + saving / section.save_every + decoding)
    if section.minutes is not None:
        seconds = min(seconds, 60 * section.minutes)
        steps = min(steps, max(1.0, (seconds - setup) / max(1e-9, each)))
    seconds += judged + saving
    saves = max(1, min(section.keep_checkpoints, math.ceil(steps / section.save_every)))
    left = saves * (weights + moments) + (saves + 1) * weights  # each with the best heads it knows of, and the last
    width = heads.config.draft_width
    size = 4 if target.dtype == torch.float32 else target.dtype.itemsize
    # The teacher's LM head is the target's own unless it is cut to the draft vocabulary.
    teacher = width * target.hidden_size * target.dtype.itemsize if width < target.vocab_size else 0
    batch = section.batch_tokens * (len(planned.needed) * target.hidden_size + width) * size
    if target.device.type == "cpu" and not planned.online:  # on a GPU, batches that are read ahead wait outside of it
        batch += section.prefetch * section.batch_tokens * len(planned.needed) * target.hidden_size * size
    memory = held_in_training(planned) + weights + 4 * planned.learning + moments + teacher + batch
    if section.lora_rank:  # the sums of weights and updates, and their gradients
        memory += 8 * planned.weights
    memory += max(speeds.kept_bytes, int(speeds.working_bytes * _grown(planned, steps)))
    if target.device.type == "cpu":  # the bytes of weights that are being written
        memory += weights
    if target.device.type == "cpu" and planned.amounts.states <= CACHE_BYTES:  # stores are kept in memory once read
        memory += planned.amounts.states
    return Cost(seconds, left, weights + moments, memory, gradient_bytes(planned) if place.processes > 1 else 0)


def _grown(planned: Planned, steps: float) -> float:
    """Memory of many steps on a CPU as a multiple of that of a few.

    Where drafts are subsampled no two steps have the same shapes, and what the allocator and oneDNN keep of each adds
    up: 1.6 times as much after 16 steps as after four, 2.7 times after 60.
    """
    if planned.place.gpu is not None or planned.recipe.train.position_weight != "subsampled":
        return 1.0
    return math.cbrt(max(4.0, min(steps, _SHAPES)) / 4)


# -- after training ----------------------------------------------------------------------------------------------------


def tune_cost(planned: Planned) -> Cost:
    """Timing trees and drafts, and replaying acceptance on the validation conversations."""
    recipe, speeds = planned.recipe, planned.speeds
    forwards = 32 * len(recipe.tune.widths) + 2 * 2 * 42
    seconds = speeds.forwards(forwards, 32 * sum(recipe.tune.widths) + 2 * 2 * 42)
    seconds += 2 * 2 * 42 * speeds.draft
    texts = min(_TUNED, recipe.data.validation)
    answer = min(_DECODED_TOKENS, answer_tokens(recipe.data.max_new_tokens))
    seconds += speeds.forwards(_DECODED_TOKENS, _DECODED_TOKENS * texts)
    read = recipe.data.validation * planned.lengths.tokens + texts * (planned.lengths.prompt + answer)
    seconds += read * (speeds.prefill_token + 1.5 * speeds.judge_step / recipe.train.batch_tokens)
    return Cost(seconds, 30_000, 0, report_memory(planned))


def export_cost(planned: Planned) -> Cost:
    """Writing the heads to keep, in the target's dtype."""
    size = planned.weights * planned.target.dtype.itemsize
    return Cost(0.2 + size / _DISK, size, 0, planned.own_bytes + 2 * size)


def eval_cost(planned: Planned) -> Cost:
    """Decoding some prompts in every way that a report compares."""
    recipe, speeds = planned.recipe, planned.speeds
    section = recipe.eval
    asked = recipe.data.heldout
    if section.questions != "heldout":
        asked = len(read_questions(Path(section.questions).expanduser()))
    prompts = min(asked, section.limit or asked)
    usual = planned.lengths.answer / max(1.0, planned.lengths.turns)  # of at most data.max_new_tokens
    longer = answer_tokens(section.max_new_tokens) / answer_tokens(recipe.data.max_new_tokens)
    answer = min(float(section.max_new_tokens), (usual or answer_tokens(recipe.data.max_new_tokens)) * longer)
    answers = prompts * answer + min(_WARM_UP, answer)
    ways = sum(_METHODS.values()) + _COMPARED * len(section.compare)
    seconds = answers * speeds.step * ways
    slower = 1 if planned.target.dtype == torch.float32 else 4  # than in the target's dtype
    seconds += slower * _JUDGED * prompts * (planned.lengths.prompt + section.max_new_tokens) * speeds.prefill_token
    return Cost(seconds, 250_000, 0, report_memory(planned))


def report_memory(planned: Planned) -> int:
    """Of decoding one conversation, with our cache and transformers' own beside it."""
    recipe, target = planned.recipe, planned.target
    exact = 0
    if target.dtype.itemsize < 4:  # where a difference is judged, one part at a time is cast to float32
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in target.layers]
        exact = 4 * max(*layers, target.vocab_size * target.hidden_size) // planned.place.per_copy
    asked = recipe.data.max_prompt_tokens + recipe.eval.max_new_tokens + recipe.tune.max_nodes
    cache = 2 * asked * target.kv_bytes_per_token // planned.place.per_copy
    return planned.own_bytes + planned.weights * target.dtype.itemsize + exact + cache


COSTS: Mapping[str, Callable[[Planned], Cost]] = {
    "conversations": conversations_cost,
    "states": states_cost,
    "train": train_cost,
    "tune": tune_cost,
    "export": export_cost,
    "eval": eval_cost,
}
"""By stage. That of the target is how long it took to load."""
