"""Stores that wrap another one and change its supervision mask, and a batch of two texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from headstart.data.states.store import Sample, States
from headstart.heads.base import HeadBatch
from headstart.model.model import Target
from headstart.replay.patch import FINAL


class _Wrapped:
    def __init__(self, store: States) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)

    def get(self, index: int) -> Sample:
        return self.samples([index])[0]

    def samples(self, indices: Sequence[int], layers: Sequence[int] | None = None) -> list[Sample]:
        found = zip(indices, self._store.samples(indices, layers), strict=True)
        return [dataclasses.replace(one, supervised_T=self._mask(index, one.supervised_T)) for index, one in found]

    def supervised(self) -> Iterable[torch.Tensor]:
        return (self._mask(index, supervised_T) for index, supervised_T in enumerate(self._store.supervised()))

    def _mask(self, index: int, supervised_T: torch.Tensor) -> torch.Tensor:
        return supervised_T


class Unsupervised(_Wrapped):
    """A store without any supervised token."""

    def supervised_counts(self, vocab_size: int) -> torch.Tensor:
        return torch.zeros(vocab_size, dtype=torch.long)


class Masked(_Wrapped):
    """A store that supervises only the last `count` tokens of each conversation."""

    def __init__(self, store: States, count: int) -> None:
        super().__init__(store)
        self._count = count

    def _mask(self, index: int, supervised_T: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(supervised_T)) >= len(supervised_T) - self._count


class Silent(Masked):
    """A store without the answers of some conversations."""

    def __init__(self, store: States, silent: set[int]) -> None:
        super().__init__(store, 0)
        self._silent = silent

    def _mask(self, index: int, supervised_T: torch.Tensor) -> torch.Tensor:
        return super()._mask(index, supervised_T) if index in self._silent else supervised_T


def two_texts(target: Target) -> tuple[list[list[int]], HeadBatch]:
    """Return two texts and their batch, with the second one padded."""
    tokens = [[5, 9, 30, 7, 8], [11, 4, 2]]
    final_BTE = pad_sequence([row[FINAL] for row in target.hidden_states(tokens, [FINAL])], batch_first=True)
    supervised_BT = torch.tensor([[False, False, False, True, True], [False, True, True, False, False]])
    return tokens, HeadBatch(torch.zeros(2, 5).long(), supervised_BT, {FINAL: final_BTE})
