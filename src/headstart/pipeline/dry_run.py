"""Half a minute of a run's own work, to estimate its duration for `headstart plan`."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch

from headstart.data.generation.generator import Continuation
from headstart.data.generation.in_process import InProcess
from headstart.data.workers import Workers
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.heads.base import DraftHead, HeadBatch
from headstart.model.model import Target
from headstart.pipeline.peak_memory import peak_bytes
from headstart.pipeline.workload import Lengths, Speeds
from headstart.recipes.recipe import Recipe
from headstart.train.batches import sample_anchors, subsample
from headstart.train.fused_loss import Teacher, batch_loss
from headstart.train.losses import LOSSES
from headstart.train.optimizers import make_optimizers

SECONDS = 30.0
"""Wall-clock target of a dry run. Work in progress is completed, so each measurement starts small."""
_TEXT = 16  # tokens of the smallest text
_PREFILL = 64  # tokens of the first prefill
_ROWS, _WRITTEN = 8, 8  # rows of the first batch to write, and tokens written in each


def dry_run(
    target: Target, heads: DraftHead, layers: list[int], recipe: Recipe, lengths: Lengths, limit: float = SECONDS
) -> Speeds:
    """Time plain decoding, writing, prefill (with the states of `layers`) and training (which changes the heads).

    The size of each measurement doubles until it takes a quarter of its share of the remaining time, so that all sizes
    together stay within the share.
    """
    start = perf_counter()
    work = _DryRun(target, heads, layers, recipe, lengths)
    left = max(limit / 2, limit - (perf_counter() - start))  # a warm-up on a busy machine may take long
    seconds, measured, trained_on = list[float](), list[str](), 0
    for units, run, size, maximum, share in (
        ("decoding steps", work.decode, 2, work.longest - 1, 0.15),
        ("tokens written", work.write, min(_ROWS, recipe.data.batch_size), recipe.data.batch_size, 0.2),
        ("tokens of prompts", work.prefill, min(_PREFILL, work.longest), 4 * work.longest, 0.15),
        ("tokens trained on", work.train, 2 * work.shortest, recipe.train.batch_tokens, 0.35),
        ("updates of the heads", work.update, 1, 16, 0.15),
    ):
        while True:
            begun = perf_counter()
            done = run(size)
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            took = perf_counter() - begun
            if 2 * size > maximum or took >= share * left / 4:
                break
            size *= 2
        seconds.append(took / done)
        measured.append(f"{done} {units} in {took:.2f} s")
        trained_on = size if units == "tokens trained on" else trained_on
    step, written, token, trained, update = seconds
    tokens = recipe.train.batch_tokens
    return Speeds(step, token, written, trained * tokens + update, work.step_bytes(trained_on), ", ".join(measured))


class _DryRun:
    """The work of a run, in any size; each method returns the units of work done."""

    def __init__(self, target: Target, heads: DraftHead, layers: list[int], recipe: Recipe, lengths: Lengths) -> None:
        self._target, self._heads, self._layers, self._recipe = target, heads, layers, recipe
        self.longest, self.shortest = min(256, target.max_length), max(_TEXT, heads.draft_steps + 5)
        length = min(int(lengths.tokens), recipe.train.batch_tokens, target.max_length)
        self._length = max(2 * self.shortest, length)
        self._answers = min(1.0, lengths.answer / max(1.0, lengths.tokens))
        self._optimizers = make_optimizers(heads, recipe.train)
        self._teacher = Teacher(target, heads.draft_to_target_D, recipe.train.loss_tokens)
        (self._states,) = target.hidden_states([self._text(self.shortest)], layers)
        self._loop = DecodeLoop(target)
        self._writer = InProcess(target.in_int8() if recipe.data.in_int8 else target)
        self.decode(2)
        self.write(1)
        self._warm_up = self._train_peak(self.shortest)
        self.update(1)

    def decode(self, steps: int) -> int:
        self._loop.generate([[1]], DecodeOptions(max_new_tokens=steps, ignore_end=True))
        return steps

    def write(self, rows: int) -> int:
        """Write a few tokens of this many rows in each worker."""
        write = partial(
            self._writer.continue_rows, [[1]] * rows, Continuation(_WRITTEN, [0.0] * rows, ends=frozenset(), seed=0)
        )
        with workers_of(self._recipe, self._target, self._writer) as workers:
            jobs = [workers.begin(write) for _ in range(workers.count)]
            return sum(len(row) for job in jobs for row in job.result())

    def prefill(self, size: int) -> int:
        length = min(size, self.longest)
        self._target.hidden_states([self._text(length)] * (size // length), self._layers)
        return size // length * length

    def train(self, size: int) -> int:
        """Run forward and backward on a batch of about `size` tokens."""
        target, heads, section = self._target, self._heads, self._recipe.train
        length = min(size, self._length)
        rows, answer = max(1, size // length), max(self.shortest - 1, round(length * self._answers))
        supervised_BT = torch.zeros(rows, length, dtype=torch.bool)
        supervised_BT[:, -answer:] = True
        index_T = torch.arange(length, device=target.device) % self.shortest
        states = {
            layer: state_TE.to(target.device, target.dtype)[index_T].expand(rows, -1, -1)
            for layer, state_TE in self._states.items()
        }
        tokens_BT = torch.tensor([self._text(length)], device=target.device).expand(rows, -1)
        batch = stored = HeadBatch(tokens_BT, supervised_BT, states)
        seed = [0, 0, 0]
        if section.position_weight == "subsampled":
            batch = subsample(batch, section.step_weight, seed)
        if section.anchors:
            batch = sample_anchors(batch, section.anchors, seed)
        heads.zero_grad(set_to_none=True)
        autocast = torch.autocast(target.device.type, dtype=target.dtype, enabled=target.dtype != torch.float32)
        with autocast:
            teacher = self._teacher.logits(stored)
            predictions = heads.unroll(batch)
            loss = batch_loss(predictions, LOSSES[section.loss], teacher, section.step_weight, section.position_weight)
        torch.autograd.backward([loss])
        return rows * length

    def update(self, count: int) -> int:
        for _ in range(count):
            for optimizer in self._optimizers:
                optimizer.step()
        return count

    def step_bytes(self, size: int) -> int:
        """Extrapolate the peak bytes of a full batch, forward and backward, from `size` tokens and the warm-up."""
        (fewer, least), (more, most) = self._warm_up, self._train_peak(size)
        return int(more + (more - fewer) / (most - least) * (self._recipe.train.batch_tokens - most))

    def _train_peak(self, size: int) -> tuple[int, int]:
        return peak_bytes(self._target.device, partial(self.train, size))

    def _text(self, length: int) -> list[int]:
        return [1 + (7 * i) % (self._target.vocab_size - 1) for i in range(length)]


def workers_of(recipe: Recipe, target: Target, writer: InProcess) -> Workers:
    """Return the workers that write the conversations of a recipe in this process."""
    size = recipe.data.batch_size
    return Workers(target.device, -(-recipe.data.conversations // size), writer.concurrent_batches(size))
