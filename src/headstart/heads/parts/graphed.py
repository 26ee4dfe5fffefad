"""What families promise whose drafts are captured as CUDA graphs, see `drafters.captured`.

A level of drafting is one graph. What it reads of the host goes to the device in one upload, as whole numbers; all else
lies at fixed addresses, in the memory of its session. `draft_step` and `depth_logits` stay the reference: they give the
same logits from tensors of the very sizes that are needed, and run where nothing is captured.

Shape suffixes: B rows, W nodes of a level, X numbers of a row, D draft vocabulary.
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
from headstart.target.memory import Memory

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """What a graph needs for one level.

    Attributes:
        numbers_BX: what it reads of the host; nothing is sent where X is 0. After the first level the nodes' tokens
            come first: those that are drawn on the device are filled in there.
        width: of its nodes, or depths, so many are real.
        sizes: what the shapes in the graph depend on, beside the number of rows: each has a graph of its own.
    """

    numbers_BX: Numbers
    width: int
    sizes: tuple[int, ...]


class GraphedHead(DraftHead):
    """A family whose drafts can be captured. Its sessions have a `memory`, None until they are given one."""

    def weights(self) -> Iterator[Tensor]:
        """All that drafting reads beside its session."""
        yield from (*self.parameters(), *self.buffers())
        if self._embedding_VE is not None:
            yield self._embedding_VE

    @abstractmethod
    def new_memory(self, session: Any, rows: int, capacity: int) -> Memory:
        """Memory for sessions like this one, of at most so many rows and slots of each."""

    @abstractmethod
    def slots(self, session: Any) -> int:
        """Slots that the first level of the next round needs; each node of the others takes one more."""

    @abstractmethod
    def move(self, session: Any, memory: Any) -> None:
        """Go on in this memory, between two rounds."""

    def reading(self, session: Any) -> Iterator[Level]:
        """What a session has to read before its first level can be captured, a level at a time: each is noted in the
        session once it was run. By default there is nothing."""
        return iter(())

    @abstractmethod
    def level(
        self, session: Any, root_B: Tensor, tokens_BW: Numbers, parents_BW: Numbers, depths: range
    ) -> Level | None:
        """Prepare a level, as `draft_step` is asked for it, or the `depths` of a `OneForwardHead`: note it in the
        session, and put into the memory what the graph reads of the device; the roots are there already. None where
        this level cannot be captured; it is then drafted by `draft_step`."""

    @abstractmethod
    def draft_level(self, memory: Any, numbers_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """What the graph holds: logits [B, W, D] of a level, of as many rows as there are numbers. It neither waits for
        the device nor sends it anything, writes over nothing that it reads, and gives the same when it runs again."""
