"""The contract of families with drafts captured as CUDA graphs, see `drafters.draft_graphs`.

A draft level is one graph. Its host inputs are uploaded once, as integers; everything else is at fixed addresses in
the session's memory. `draft_step` and `depth_logits` are the reference, with the same logits from tensors of exact
sizes, and the fallback.

Shape suffixes: B rows, W nodes of a level, X integers of a row, D draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.kernels.memory import Memory

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """Inputs of one level's graph.

    Attributes:
        numbers_BX: host inputs; no upload if X is 0. After the first level the nodes' tokens come first, and tokens
            sampled on the device are filled in there.
        width: number of real (unpadded) nodes, or depths.
        sizes: shape parameters besides the number of rows; each combination has its own graph.
    """

    numbers_BX: Numbers
    width: int
    sizes: tuple[int, ...]


class GraphedHead(DraftHead):
    """A family with capturable drafts. Its sessions have a `memory`, None until `move`."""

    def weights(self) -> Iterator[Tensor]:
        """All tensors that drafting reads outside the session."""
        yield from (*self.parameters(), *self.buffers())
        if self._embedding_VE is not None:
            yield self._embedding_VE

    @abstractmethod
    def new_memory(self, session: Any, rows: int, capacity: int) -> Memory:
        """Allocate memory for sessions like this one, of at most `rows` rows with `capacity` slots each."""

    @abstractmethod
    def slots(self, session: Any) -> int:
        """Slots needed by the next round's first level; each later node takes one more."""

    @abstractmethod
    def move(self, session: Any, memory: Any) -> None:
        """Continue in this memory, between two rounds."""

    def reading(self, session: Any) -> Iterator[Level]:
        """Yield the levels that read pending text before the first level; each updates the session after it has run.
        None by default."""
        return iter(())

    @abstractmethod
    def level(
        self, session: Any, root_B: Tensor, tokens_BW: Numbers, parents_BW: Numbers, depths: range
    ) -> Level | None:
        """Prepare a level of `draft_step`, or the `depths` of a `OneForwardHead`: update the session, and write the
        graph's device inputs to its memory. None if this level cannot be captured; `draft_step` then drafts it."""

    @abstractmethod
    def draft_level(self, memory: Any, numbers_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The captured function: logits [B, W, D] of a level for the rows of `numbers_BX`. It must not synchronise or
        upload, must not overwrite its inputs, and must be repeatable."""
