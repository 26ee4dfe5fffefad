"""In which order a training reads its conversations: a pure function of where the run stands."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from headstart.heads.base import HeadBatch
from headstart.recipes.sections import TrainSection
from headstart.train.batches import Batch, epoch_batches, epoch_steps, packed_batches, share
from headstart.train.checkpoint import TrainerState
from headstart.train.loader import pinned, read_ahead, sent

if TYPE_CHECKING:
    from headstart.data.states.online import States

    Read = Callable[[States, Batch, torch.device, bool], HeadBatch]


class Order:
    """The batches of every step, epoch by epoch.

    Args:
        store: conversations to learn from.
        section: how large batches are, and how many make a step.
        rank: of this process.
        ranks: processes in all.

    Attributes:
        per_epoch: steps of an epoch.
    """

    def __init__(self, store: States, section: TrainSection, rank: int, ranks: int) -> None:
        self._store, self._section, self._rank, self._ranks = store, section, rank, ranks
        self.per_epoch = len(self._epoch(0))

    def batches(
        self, standing: TrainerState, total: float, read: Read, device: torch.device
    ) -> Generator[tuple[list[Batch], list[HeadBatch]]]:
        """The batches of each step still to do, and those of this process as they are read.

        Args:
            standing: where the run stands when the first is asked for.
            total: steps of the whole run.
            read: makes a batch of conversations on a device, packed or not.
            device: where batches are used.
        """
        ahead = self._section.prefetch if self._store.stored else 0  # the target computes where training does
        on_host = ahead > 0 and device.type == "cuda"
        where = torch.device("cpu") if on_host else device

        def own(group: list[Batch]) -> list[HeadBatch]:
            found = [
                read(self._store, batch, where, self._section.packing)
                for batch in share(group, self._rank, self._ranks)
            ]
            return [pinned(batch) for batch in found] if on_host else found

        with closing(read_ahead(self._groups(standing, total), own, ahead)) as steps:
            for group, batches in steps:
                yield group, [sent(batch, device) for batch in batches] if on_host else batches

    def _groups(self, standing: TrainerState, total: float) -> Iterator[list[Batch]]:
        plan_of, plan = -1, list[list[Batch]]()
        step, epoch, index = standing.step, standing.epoch, standing.index
        while step < total:
            if plan_of != epoch:
                plan_of, plan = epoch, self._epoch(epoch)
            yield plan[index]
            step, index = step + 1, index + 1
            if index == self.per_epoch:
                epoch, index = epoch + 1, 0

    def _epoch(self, epoch: int) -> list[list[Batch]]:
        section = self._section
        plan = packed_batches if section.packing else epoch_batches
        batches = plan(self._store.lengths, section.batch_tokens, section.seed, epoch)
        return epoch_steps(batches, self._ranks, section.gradient_accumulation_steps)
