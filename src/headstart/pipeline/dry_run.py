"""Half a minute of a run's own work, to estimate its duration for `headstart plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headstart.heads.base import DraftHead, HeadBatch
from headstart.model.model import Target
from headstart.pipeline.lengths import Lengths
from headstart.recipes.sections import TrainSection
from headstart.train.batches import subsampled
from headstart.train.losses import LOSSES
from headstart.train.optimizers import make_optimizers
from headstart.train.summing import Teacher, weighted
from headstart.tree.tree import TreeBatch

SECONDS = 30.0
"""Wall-clock limit of a dry run. Work in progress is completed, so each measurement starts small."""
_TEXT = 16
"""Tokens of the smallest text."""


@dataclass(frozen=True)
class Speeds:
    """Seconds per unit of work; all 0 where nothing was measured.

    Attributes:
        step: a forward of one token.
        token: each further token of a forward.
        batch: a training step on `train.batch_tokens`, optimizer update included.
        batch_bytes: bytes saved for the backward of such a batch.
        measured: the measurements as text.
    """

    step: float = 0.0
    token: float = 0.0
    batch: float = 0.0
    batch_bytes: int = 0
    measured: str = ""

    def forwards(self, count: float, tokens: float) -> float:
        """Return the seconds of `count` forwards over `tokens` in total."""
        return count * self.step + tokens * self.token


def dry_run(
    target: Target,
    heads: DraftHead,
    needed: list[int],
    section: TrainSection,
    lengths: Lengths,
    report: Callable[[str], None],
    limit: float = SECONDS,
) -> Speeds:
    """Time decoding, prefill that returns the states `needed`, and training (which changes the heads)."""
    start, measured, longest = perf_counter(), list[str](), min(256, target.max_length)
    cache, root = target.new_cache(1, 2 * _TEXT), TreeBatch.roots([1], target.device)

    def decode() -> None:
        target.forward_tree(cache, root, needed)
        cache.commit([[]])

    def read(size: int) -> int:
        length = min(size, longest)
        target.hidden_states([_text(length, target)] * (size // length), needed)
        return size // length * length

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def times(work: Callable[[], object]) -> Callable[[int], int]:
        return lambda count: len([work() for _ in range(count)])

    def timed(what: str, work: Callable[[int], int], size: int, most: int, share: float) -> float:
        """Return the seconds per unit of work. The size doubles until it takes a quarter of its share of the remaining
        time, so that all sizes together stay within the share."""
        report(what)
        while True:
            begun = perf_counter()
            done = work(size)
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            seconds = perf_counter() - begun
            if 2 * size > most or seconds >= share * left / 4:
                measured.append(f"{done} {what} in {seconds:.2f} s")
                return seconds / done
            size *= 2

    report("a warm-up")
    target.prefill(cache, [_text(_TEXT, target)])
    decode()
    trial, optimizers = _Trial(target, heads, needed, section, lengths), make_optimizers(heads, section)
    trial.learn(trial.shortest)
    left = max(0.0, limit - (perf_counter() - start))
    step = timed("decoding steps", times(decode), 1, 1024, 0.2)
    token = timed("tokens read", read, _TEXT, 4 * longest, 0.2)
    learning = timed("tokens learned", trial.learn, 2 * trial.shortest, section.batch_tokens, 0.4)
    batch = learning * section.batch_tokens + timed("updates of the heads", times(update), 1, 16, 0.2)
    return Speeds(step, token, batch, trial.saved_bytes(section.batch_tokens), ", ".join(measured))


class _Trial:
    """Training on batches of any size, as the recipe trains."""

    def __init__(
        self, target: Target, heads: DraftHead, needed: list[int], section: TrainSection, lengths: Lengths
    ) -> None:
        self._target, self._heads, self._section = target, heads, section
        self.shortest = max(_TEXT, heads.draft_steps + 5)
        self._length = max(2 * self.shortest, min(int(lengths.tokens), section.batch_tokens, target.max_length))
        self._answers = min(1.0, lengths.answer / max(1.0, lengths.tokens))
        (self._states,) = target.hidden_states([_text(self.shortest, target)], needed)
        self._teacher = Teacher(target, heads.draft_to_target_D, section.loss_tokens)
        self._saved: list[tuple[int, int]] = []

    def learn(self, size: int) -> int:
        """Run forward and backward on a batch of about `size` tokens; returns the actual number."""
        target, heads, section = self._target, self._heads, self._section
        length = min(size, self._length)
        rows, answer = max(1, size // length), max(self.shortest - 1, round(length * self._answers))
        supervised_BT = torch.zeros(rows, length, dtype=torch.bool, device=target.device)
        supervised_BT[:, -answer:] = True
        index_T = torch.arange(length, device=target.device) % self.shortest
        states = {
            layer: state_TE.to(target.device, target.dtype)[index_T].expand(rows, -1, -1)
            for layer, state_TE in self._states.items()
        }
        tokens_BT = torch.tensor([_text(length, target)], device=target.device).expand(rows, -1)
        batch, saved = HeadBatch(tokens_BT, supervised_BT, states), dict[int, int]()
        if section.position_weight == "subsampled":
            batch = subsampled(batch, section.step_weight, [0, 0, 0])
        weights = {parameter.untyped_storage().data_ptr() for parameter in heads.parameters()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        heads.zero_grad(set_to_none=True)
        autocast = torch.autocast(target.device.type, dtype=target.dtype, enabled=target.dtype != torch.float32)
        with autocast, saved_tensors_hooks(note, lambda tensor: tensor):
            loss = weighted(heads.unroll(batch), LOSSES[section.loss], self._teacher.read(batch), 1.0)
        torch.autograd.backward([loss])
        self._saved.append((rows * length, sum(saved.values())))
        return rows * length

    def saved_bytes(self, tokens: int) -> int:
        """Extrapolate the bytes saved for the backward; weights among them do not grow with the batch."""
        (least, fewer), (most, more) = self._saved[0], self._saved[-1]
        return int(more + (more - fewer) / (most - least) * (tokens - most))


def _text(length: int, target: Target) -> list[int]:
    return [1 + (7 * i) % (target.vocab_size - 1) for i in range(length)]
