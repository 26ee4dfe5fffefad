"""Stores that differ from another one in what is supervised."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from headstart.data.store import Sample, StateStore


class _Wrapped:
    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)


class Unsupervised(_Wrapped):
    """A store in which no assistant ever spoke."""

    def supervised_counts(self, vocab_size: int) -> torch.Tensor:
        return torch.zeros(vocab_size, dtype=torch.long)


class Masked(_Wrapped):
    """A store in which each answer is its conversation's last `count` tokens."""

    def __init__(self, store: StateStore, count: int) -> None:
        super().__init__(store)
        self._count = count

    def get(self, index: int) -> Sample:
        sample = self._store.get(index)
        supervised_T = torch.arange(len(sample.tokens_T)) >= len(sample.tokens_T) - self._count
        return dataclasses.replace(sample, supervised_T=supervised_T)


class Silent(Masked):
    """A store in which some conversations have no answer."""

    def __init__(self, store: StateStore, silent: set[int]) -> None:
        super().__init__(store, 0)
        self._silent = silent

    def get(self, index: int) -> Sample:
        return super().get(index) if index in self._silent else self._store.get(index)
