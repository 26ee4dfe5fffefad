"""Batches of stored conversations: grouping, order, sharding over ranks, and prefetching.

The order is a pure function of lengths, batch size, packing, seed and epoch, so a run resumes from the epoch and the
step within it.

With packing, a batch is a single row of concatenated conversations; see `read_batch`.

Shape suffixes: B rows, T tokens, E hidden size, N conversations, M origins of the first draft step, X = B * T flat
positions.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.data.states.shard_format import decode
from headstart.data.states.store import States
from headstart.heads.base import HeadBatch, host_origins
from headstart.recipes.sections import TrainSection
from headstart.support.uploads import upload
from headstart.train.checkpoint import TrainerState

Batch = list[int]  # indices of the conversations of one batch

_ROUND = 16
"""Lengths are rounded up to this multiple, so that conversations of similar length are reshuffled each epoch."""


def epoch_batches(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int, packing: bool = False
) -> list[Batch]:
    """Batch every conversation once, with at most `batch_tokens` tokens per batch.

    A batch pads conversations of similar length; padding counts. With `packing` it fills one row (best-fit decreasing).
    A conversation longer than `batch_tokens` has its own batch. The number of batches is the same in each epoch.

    >>> sorted(map(sorted, epoch_batches([5, 40, 12, 44, 90], batch_tokens=100, seed=0, epoch=0)))
    [[0, 2], [1, 3], [4]]
    >>> sorted(map(sorted, epoch_batches([5, 40, 30, 44, 90], batch_tokens=128, seed=0, epoch=0, packing=True)))
    [[0, 1, 3], [2, 4]]
    """
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(len(lengths)).tolist()
    rounded = [-(-length // _ROUND) * _ROUND for length in lengths]
    # Stable sorts: conversations of equal rounded length stay shuffled.
    order = sorted(shuffled, key=lambda i: -rounded[i] if packing else rounded[i])
    batches = (_pack if packing else _pad)(order, rounded, batch_tokens)
    return [batches[i] for i in random.permutation(len(batches))]


def _pad(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[Batch]:
    batches: list[Batch] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _pack(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[Batch]:
    batches: list[Batch] = []
    free: list[tuple[int, int]] = []  # (free tokens, batch number), ascending
    for index in order:
        best_fit = bisect_left(free, (lengths[index], 0))
        if best_fit < len(free):
            tokens, number = free.pop(best_fit)
            batches[number].append(index)
        else:
            tokens, number = batch_tokens, len(batches)
            batches.append([index])
        if (remaining := tokens - lengths[index]) >= _ROUND:
            insort(free, (remaining, number))
    return batches


def epoch_steps(batches: Sequence[Batch], ranks: int, gradient_accumulation_steps: int) -> list[list[Batch]]:
    """Group the epoch's batches by optimiser step, `ranks * gradient_accumulation_steps` each.

    An incomplete last group is dropped for this epoch; an epoch smaller than one group repeats to fill it.

    >>> epoch_steps([[0], [1], [2], [3], [4]], ranks=2, gradient_accumulation_steps=1)
    [[[0], [1]], [[2], [3]]]
    >>> epoch_steps([[0]], ranks=2, gradient_accumulation_steps=1)
    [[[0], [0]]]
    """
    group = ranks * gradient_accumulation_steps
    if len(batches) < group:
        return [[batches[i % len(batches)] for i in range(group)]]
    return [list(batches[start : start + group]) for start in range(0, len(batches) - group + 1, group)]


def rank_slice(group: Sequence[Batch], rank: int, ranks: int) -> list[Batch]:
    """Return one rank's batches of a group: every `ranks`-th."""
    return list(group[rank::ranks])


@dataclass(frozen=True)
class ReadBatch:
    """A batch in the store's encoding, on the store's device; see `headstart.data.states.shard_format`."""

    batch: HeadBatch  # encoded states are raw bytes of dtype `code`
    scales: dict[int, Tensor]  # of encoded states by layer, [B, T]
    code: torch.dtype | None
    dtype: torch.dtype | None  # of the decoded states; None if they are not encoded

    def pinned(self) -> ReadBatch:
        """Copy to pinned memory, for asynchronous transfers to a GPU."""
        scales = {layer: scales_BT.pin_memory() for layer, scales_BT in self.scales.items()}
        return dataclasses.replace(self, batch=self.batch.each(Tensor.pin_memory), scales=scales)

    def on(self, device: torch.device, dtype: torch.dtype) -> HeadBatch:
        """Move the batch to a device and decode its states there, into this dtype."""

        def move(tensor: Tensor) -> Tensor:
            return tensor if tensor.device.type == device.type else upload(tensor, device)

        batch = self.batch.each(move)
        states = batch.states
        if self.code is not None and self.dtype is not None:
            states = {
                layer: decode(bytes_BTE.view(self.code), move(self.scales[layer]), self.dtype)
                for layer, bytes_BTE in states.items()
            }
        return dataclasses.replace(batch, states={layer: state_BTE.to(dtype) for layer, state_BTE in states.items()})


def read_batch(
    store: States, batch: Sequence[int], aux_layers: Sequence[int], packed: bool = False, width: int = 0
) -> ReadBatch:
    """Read conversations from the store, padded on the right, or packed into one row padded to at least `width` tokens.

    Positions and attention restart with each packed conversation, and its first token is not supervised: no draft
    crosses a boundary. Padding is one more conversation. Online stores compute the states of a batch together.
    """
    samples = store.samples(batch, aux_layers)
    lengths = [len(sample.tokens_T) for sample in samples]
    padding = max(0, width - sum(lengths))

    def join(rows: Sequence[Tensor]) -> Tensor:
        if not packed:
            return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        return torch.cat([*rows, rows[0].new_zeros(padding, *rows[0].shape[1:])])[None]

    supervised_BT = join([sample.supervised_T for sample in samples])
    starts_BT = None
    if packed:
        lengths_N = torch.tensor([*lengths, padding] if padding else lengths)
        starts_N = lengths_N.cumsum(0) - lengths_N
        supervised_BT[0, starts_N] = False
        starts_BT = starts_N.repeat_interleave(lengths_N)[None]
    dtype = samples[0].dtype
    stored = {layer: [sample.stored[layer] for sample in samples] for layer in aux_layers}
    code = None if dtype is None else stored[aux_layers[0]][0].dtype
    states = {
        layer: join(rows if dtype is None else [row_TE.view(torch.uint8) for row_TE in rows])
        for layer, rows in stored.items()
    }
    scales = {layer: join([sample.scales[layer] for sample in samples]) for layer in aux_layers if dtype is not None}
    tokens_BT = join([sample.tokens_T for sample in samples])
    return ReadBatch(HeadBatch(tokens_BT, supervised_BT, states, starts_BT=starts_BT), scales, code, dtype)


def subsample(batch: HeadBatch, fraction: float, seed: Sequence[int]) -> HeadBatch:
    """Sample a length for every draft: at each step, this fraction of the drafts continue. Reproducible by `seed`.

    The expected loss equals the loss of all drafts with step k weighted by `fraction ** k`, at less computation.
    """
    if fraction == 1:
        return batch
    uniform_BT = 1 - np.random.default_rng(seed).random(tuple(batch.tokens_BT.shape))  # in (0, 1]
    steps_BT = 1 + np.floor(np.log(uniform_BT) / np.log(fraction)).astype(np.int64)
    return dataclasses.replace(batch, subsampled_steps_BT=torch.from_numpy(steps_BT))


def sample_anchors(batch: HeadBatch, anchors: int, seed: Sequence[int]) -> HeadBatch:
    """Sample at most `anchors` supervised origins of each conversation, uniformly. Reproducible by `seed`."""
    origin_M, conversation_M = _origins_by_conversation(batch)
    key_M = np.random.default_rng([*seed, anchors]).random(len(origin_M))
    order_M = np.lexsort((key_M, conversation_M))  # by conversation, each in random order
    ordered_M = conversation_M[order_M]
    rank_M = np.arange(len(origin_M)) - np.searchsorted(ordered_M, ordered_M)
    chosen_X = torch.zeros(batch.tokens_BT.numel(), dtype=torch.bool)
    chosen_X[torch.from_numpy(origin_M[order_M[rank_M < anchors]])] = True
    chosen_BT, steps_BT = chosen_X.view(batch.tokens_BT.shape), batch.subsampled_steps_BT
    if steps_BT is None:
        steps_BT = torch.full(chosen_BT.shape, batch.tokens_BT.shape[1])
    return dataclasses.replace(batch, subsampled_steps_BT=torch.where(chosen_BT, steps_BT, 0))


def count_predictions(batch: HeadBatch, anchors: int | None = None) -> int:
    """Count the predictions of the first draft step: its `origins`, at most `anchors` per conversation."""
    if anchors is None:
        return len(host_origins(batch, 0))
    _, conversation_M = _origins_by_conversation(batch)
    return int(np.minimum(np.unique(conversation_M, return_counts=True)[1], anchors).sum())


def _origins_by_conversation(batch: HeadBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Flat `origins` of the first draft step, and an id of each one's conversation."""
    origin_M = host_origins(batch, 0).numpy()
    width = batch.tokens_BT.shape[1]
    if batch.starts_BT is None:
        return origin_M, origin_M // width
    return origin_M, origin_M // width * width + batch.starts_BT.flatten().numpy()[origin_M]


class BatchSchedule:
    """The batches of every step, epoch by epoch; `steps_per_epoch` steps make an epoch."""

    def __init__(self, store: States, section: TrainSection, rank: int, ranks: int) -> None:
        self._store, self._section, self._rank, self._ranks = store, section, rank, ranks
        self.steps_per_epoch = len(self._epoch(0))

    def batches(
        self,
        trainer_state: TrainerState,
        total: float,
        read: Callable[[States, Batch, bool], ReadBatch],
        device: torch.device,
        dtype: torch.dtype,
    ) -> Generator[tuple[list[Batch], list[HeadBatch]]]:
        """Yield (all ranks' batch indices, this rank's loaded batches) per remaining step up to `total`.

        Loaded batches are on `device`, with states in `dtype`. `read` reads conversations from a store, packed or not.
        """

        def read_own(group: list[Batch]) -> list[ReadBatch]:
            own, packing = rank_slice(group, self._rank, self._ranks), self._section.packing
            return [read(self._store, indices, packing) for indices in own]

        def move(batches: list[ReadBatch]) -> list[HeadBatch]:
            return [batch.on(device, dtype) for batch in batches]

        groups = self._groups(trainer_state, total)
        ahead = self._section.prefetch if self._store.stored else 0  # an online target computes on the training device
        if not ahead or device.type != "cuda":
            with closing(read_ahead(groups, lambda group: move(read_own(group)), ahead)) as steps:
                for group, batches, _ in steps:
                    yield group, batches
            return
        copies: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types

        def copy(batches: list[ReadBatch]) -> list[HeadBatch]:
            copies.wait_stream(torch.cuda.current_stream())  # it may still use the memory of freed batches
            with torch.cuda.stream(copies):
                return move(batches)

        def read_pinned(group: list[Batch]) -> list[ReadBatch]:
            return [batch.pinned() for batch in read_own(group)]

        copied: list[HeadBatch] = []
        with closing(read_ahead(groups, read_pinned, ahead)) as read_steps:
            for group, current, following in read_steps:
                batches = copied or copy(current)
                torch.cuda.current_stream().wait_stream(copies)
                copied = [] if following is None else copy(following)  # while this step computes
                yield group, batches

    def _groups(self, trainer_state: TrainerState, total: float) -> Iterator[list[Batch]]:
        step, index = trainer_state.step, trainer_state.index
        for epoch in count(trainer_state.epoch):
            for group in self._epoch(epoch)[index:]:
                if step >= total:
                    return
                yield group
                step += 1
            index = 0

    def _epoch(self, epoch: int) -> list[list[Batch]]:
        section = self._section
        batches = epoch_batches(self._store.lengths, section.batch_tokens, section.seed, epoch, packing=section.packing)
        return epoch_steps(batches, self._ranks, section.gradient_accumulation_steps)


Step = TypeVar("Step")
Data = TypeVar("Data")


def read_ahead(
    steps: Iterable[Step], read: Callable[[Step], Data], ahead: int
) -> Generator[tuple[Step, Data, Data | None]]:
    """Yield each step with its data, in order, and with the next step's data if ready. Raises a read error at its step.

    Each of the `ahead` prefetched steps has a thread; 0 reads synchronously. Closing waits for reads in progress.
    """
    if not ahead:
        for step in steps:
            yield step, read(step), None
        return
    remaining, waiting = iter(steps), deque[tuple[Step, Future[Data]]]()
    # Reading is mostly copying, so each reader gets one intra-op thread.
    with ThreadPoolExecutor(ahead, "headstart-batches", torch.set_num_threads, (1,)) as readers:
        try:
            while True:
                for step in islice(remaining, ahead + 1 - len(waiting)):
                    waiting.append((step, readers.submit(read, step)))
                if not waiting:
                    return
                step, reading = waiting.popleft()
                data, following = reading.result(), waiting[0][1] if waiting else None
                ready = following and following.done() and following.exception() is None
                yield step, data, following.result() if following and ready else None
        finally:
            readers.shutdown(wait=True, cancel_futures=True)
