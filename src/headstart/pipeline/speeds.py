"""Seconds of forwards and of training steps, timed on a few of them with the target and the heads of a recipe.

Shape suffixes: B rows, T tokens, D draft vocabulary.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headstart.heads.base import DraftHead, HeadBatch
from headstart.pipeline.lengths import Lengths
from headstart.recipes.sections import TrainSection
from headstart.support.files import existing
from headstart.target.memory import forget_most_resident, most_resident
from headstart.target.model import Target
from headstart.train.batches import subsampled
from headstart.train.losses import LOSSES
from headstart.train.optimizers import make_optimizers
from headstart.train.summing import Teacher, weighted
from headstart.train.tensor_memory import keeping_memory
from headstart.tree.tree import TreeBatch

_SUBSAMPLE_SEED = [0, 0, 0]
_PROBE = 1 << 25
"""Bytes that are read from a disk to time it."""
_TIMES = 3
"""Forwards or steps of each kind that are timed, after one that is not."""


@dataclass(frozen=True)
class Speeds:
    """Seconds of the parts that work is made of; all 0 where nothing was timed.

    Attributes:
        step: a forward that reads one new token.
        token: each token more that a forward reads.
        train_step: learning from one batch of train.batch_tokens, the update of the weights included.
        training_bytes: memory that training on such batches takes beside weights, gradients, optimisers and batches.
        disk: a byte that is read from the disk of the run, where the system does not have it in memory.
    """

    step: float = 0.0
    token: float = 0.0
    train_step: float = 0.0
    training_bytes: int = 0
    disk: float = 0.0

    def forwards(self, count: float, tokens: float) -> float:
        """Seconds of so many forwards that read so many new tokens in all."""
        return count * self.step + tokens * self.token


def measure(target: Target, heads: DraftHead, needed: list[int], section: TrainSection, lengths: Lengths) -> Speeds:
    """Time a few forwards that keep the states of the layers `needed`, and training steps on conversations of these
    lengths, which change the heads; some seconds on a small model."""
    cache = target.new_cache(1, 160)
    target.prefill(cache, [[1] * 128])
    root = TreeBatch.roots([1], target.device)

    def step() -> None:
        target.forward_tree(cache, root, needed)
        cache.commit([[]])

    texts = [_text(max(16, min(256, target.max_length)), target)] * 4
    read = _seconds(lambda: target.hidden_states(texts, needed), target)
    train_step, training_bytes = _training(target, heads, needed, section, lengths)
    return Speeds(_seconds(step, target), read / sum(map(len, texts)), train_step, training_bytes)


def disk_seconds(folder: Path) -> float:
    """Seconds of a byte that is read from the disk of a folder, or of its nearest parent that there is; 0 where nothing
    can be written, or the system cannot be told to forget it."""
    if not hasattr(os, "posix_fadvise"):
        return 0.0
    with suppress(OSError), tempfile.TemporaryFile(dir=existing(folder)) as handle:
        handle.write(os.urandom(_PROBE))
        handle.flush()
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = perf_counter()
        os.preadv(handle.fileno(), [bytearray(_PROBE)], 0)
        return (perf_counter() - start) / _PROBE
    return 0.0


def _training(
    target: Target, heads: DraftHead, needed: list[int], section: TrainSection, lengths: Lengths
) -> tuple[float, int]:
    """(seconds of learning from a batch of train.batch_tokens, bytes that this takes).

    The bytes are those by which memory grew, or what was kept for the backward where that is more: a process may have
    had memory to spare.
    """
    device, least = target.device, heads.draft_steps + 5
    length = max(least, min(int(lengths.tokens), section.batch_tokens, target.max_length))
    answer = max(least - 1, round(length * min(1.0, lengths.answer / max(1.0, lengths.tokens))))
    rows = max(1, section.batch_tokens // length)
    tokens = _text(length, target)
    (states,) = target.hidden_states([tokens], needed)
    supervised_BT = torch.zeros(rows, length, dtype=torch.bool, device=device)
    supervised_BT[:, length - answer :] = True
    whole = HeadBatch(
        torch.tensor([tokens], device=device).expand(rows, -1),
        supervised_BT,
        {layer: state.to(target.dtype).expand(rows, -1, -1) for layer, state in states.items()},
    )
    teacher, optimizers = Teacher(target, heads.draft_to_target_D, section.loss_tokens), make_optimizers(heads, section)

    def learn() -> None:
        drawn = section.position_weight == "subsampled"
        batch = subsampled(whole, section.step_weight, _SUBSAMPLE_SEED) if drawn else whole
        with torch.autocast(device.type, dtype=target.dtype, enabled=target.dtype != torch.float32):
            loss = weighted(heads.unroll(batch), LOSSES[section.loss], teacher.read(batch), 1.0)
        torch.autograd.backward([loss])
        for optimizer in optimizers:
            optimizer.step()
        heads.zero_grad(set_to_none=True)

    if device.type == "cpu":
        before = forget_most_resident()
    else:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with keeping_memory(device):
        seconds = _seconds(learn, target)
    grown = (most_resident() if device.type == "cpu" else torch.cuda.max_memory_allocated(device)) - before
    moments = [state for optimizer in optimizers for state in optimizer.state.values()]
    grown -= sum(value.nbytes for state in moments for value in state.values() if isinstance(value, Tensor))
    grown -= 4 * heads.trainable_parameters
    share = section.batch_tokens / (rows * length)
    return share * seconds, max(int(share * _kept_for_backward(learn, heads)), grown)


def _kept_for_backward(learn: Callable[[], None], heads: DraftHead) -> int:
    """Bytes that a forward keeps, the heads' own weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in heads.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        learn()
    return sum(kept.values())


def _text(length: int, target: Target) -> list[int]:
    return [1 + (7 * i) % (target.vocab_size - 1) for i in range(length)]


def _seconds(work: Callable[[], object], target: Target) -> float:
    """The median of a few timings; with one thread by the processor's own clock, which neighbours do not slow down."""
    clock = process_time if target.device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    taken = []
    for _ in range(_TIMES + 1):
        start = clock()
        work()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        taken.append(clock() - start)
    return median(taken[1:])
