"""Interface of families that draft with CUDA graphs, see `drafters.draft_graphs`.

A draft level is one graph. Its host inputs are uploaded once, as integers; all other tensors have fixed addresses in
the session's memory. `draft_step` and `depth_logits` are the reference with unpadded tensors, and the fallback.

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

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """Inputs of one level's graph.

    Attributes:
        inputs_BX: host inputs; no upload if X is 0. After the first level the nodes' tokens come first: tokens sampled
            on the device overwrite them there.
        width: unpadded number of nodes, or of depths.
        sizes: shape parameters besides the number of rows; each combination has its own graph.
    """

    inputs_BX: IntArray
    width: int
    sizes: tuple[int, ...]


class GraphedHead(DraftHead):
    """Base class of families that draft with CUDA graphs. Their sessions have a `memory`, None until `move`."""

    def weights(self) -> Iterator[Tensor]:
        """Yield all tensors that drafting reads outside the session."""
        yield from (*self.parameters(), *self.buffers())
        if self._embedding_VE is not None:
            yield self._embedding_VE

    @abstractmethod
    def new_memory(self, session: Any, rows: int, capacity: int) -> Memory:
        """Allocate memory for sessions like this one, of at most `rows` rows with `capacity` slots each."""

    @abstractmethod
    def slots(self, session: Any) -> int:
        """Return the slots that the next round's first level needs; each later node takes one more."""

    @abstractmethod
    def move(self, session: Any, memory: Any) -> None:
        """Move the session to this memory, between two rounds."""

    def leave_memory(self, session: Any) -> None:
        """Free the session's memory once nothing reads it, if it has any: it is too small for later texts, too."""
        if session.memory is not None:
            session.memory.lent.detach()
            session.memory = None

    def pending_levels(self, session: Any) -> Iterator[Level]:
        """Yield the levels that read pending text before the first level, and update the session after each."""
        return iter(())

    @abstractmethod
    def level(
        self, session: Any, root_B: Tensor, tokens_BW: IntArray, parents_BW: IntArray, depths: range
    ) -> Level | None:
        """Prepare a level of `draft_step`, or the `depths` of a `OneForwardHead`: update the session and write the
        graph's device inputs to its memory. None leaves the level to `draft_step`."""

    @abstractmethod
    def draft_level(self, memory: Any, inputs_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the logits [B, W, D] of a level; runs under capture. It must be repeatable, must not synchronise or
        upload, and must not overwrite its inputs."""
