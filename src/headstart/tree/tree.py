"""Token trees: their shape, and what one forward over them needs.

Node 0 is the root: the last token that is already decided but not yet in the KV cache. Every other node is a
draft. Nodes are listed parents first, so `parents[i] < i`.

Shape suffixes: B rows, N nodes (root included), K depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RankPath = tuple[int, ...]
"""A node named by the rank of the draft chosen at each depth: (0, 2) is the third-best child of the best child."""


@dataclass(frozen=True)
class TreeShape:
    """A static tree, without tokens.

    Attributes:
        parents: parent index of each node, -1 for the root.
        ranks: rank of each node's token among the drafts of its depth (0 = most likely); 0 for the root.

    >>> shape = TreeShape.from_paths([(0,), (1,), (0, 0)])
    >>> shape.parents, shape.ranks, shape.depths
    ((-1, 0, 0, 1), (0, 0, 1, 0), (0, 1, 1, 2))
    >>> TreeShape.chain(2).paths
    ((0,), (0, 0))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.ranks) >= 1, "a tree has a root"
        assert self.parents[0] == -1, "node 0 is the root"
        assert all(0 <= parent < i for i, parent in enumerate(self.parents) if i), "parents come first"

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TreeShape:
        """Build a shape from rank paths; a path's missing parents are added. Nodes are ordered by depth, then rank."""
        known: set[RankPath] = set()
        for path in paths:
            known.update(tuple(path[: depth + 1]) for depth in range(len(path)))
        ordered: list[RankPath] = [(), *sorted(known, key=lambda path: (len(path), path))]
        index = {path: i for i, path in enumerate(ordered)}
        return cls(
            parents=tuple(-1 if not path else index[path[:-1]] for path in ordered),
            ranks=tuple(0 if not path else path[-1] for path in ordered),
        )

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """`length` drafts, each the best continuation of the one before; 0 is plain decoding."""
        return cls.from_paths([(0,) * length] if length else [])

    @property
    def size(self) -> int:
        """Number of nodes, root included: the width of the forward that verifies this tree."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        return tuple(depths_of(self.parents))

    @property
    def depth(self) -> int:
        """Depth of the deepest node: how many heads (or draft steps) the tree uses."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """How many ranks of a depth the tree uses at most."""
        return max(self.ranks) + 1 if self.size > 1 else 0

    @cached_property
    def paths(self) -> tuple[RankPath, ...]:
        """Rank path of each node but the root, in node order."""
        paths: list[RankPath] = []
        for i, parent in enumerate(self.parents):
            paths.append(() if parent < 0 else (*paths[parent], self.ranks[i]))
        return tuple(paths[1:])

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Child nodes of each node, in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def inner(self) -> frozenset[int]:
        """Nodes that have children."""
        return frozenset(self.parents[1:])

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Parents [1, N], ancestors [1, N, N] and depths [1, N] on a device; uploaded once."""
        if device not in self._uploaded:
            parents_N = torch.tensor(self.parents)
            parts = parents_N[None], self.ancestors_NN[None], self.depths_N[None]
            self._uploaded[device] = parts[0].to(device), parts[1].to(device), parts[2].to(device)
        return self._uploaded[device]

    @cached_property
    def _uploaded(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}

    @cached_property
    def ancestors_NN(self) -> Tensor:
        """Bool [N, N]: entry (i, j) is true when node i may see node j, that is j is i or an ancestor of i."""
        return ancestors([self.parents])[0]

    @cached_property
    def depths_N(self) -> Tensor:
        """Depths as an int64 tensor [N]."""
        return torch.tensor(self.depths)


@dataclass
class DraftTree:
    """Drafted tokens for every row of a batch, ready to be verified.

    A row that drafts fewer nodes than others is padded with copies of its root as further children of the root
    (`padding`); verifiers never follow those.

    Attributes:
        tokens_BN: int64 [B, N]; column 0 is each row's root token.
        parents: for each row the parent of each node, -1 for the root. One tuple when all rows share a shape.
        parents_BN: the same on the device, int64 [B or 1, N], with -1 for padding, too.
        visible_BNN: bool [B or 1, N, N], which nodes each node may see (itself and its ancestors).
        depths_BN: int64 [B or 1, N].
        counts: how many nodes of each row are real, root included; None when all are.
    """

    tokens_BN: Tensor
    parents: tuple[tuple[int, ...], ...]
    parents_BN: Tensor
    visible_BNN: Tensor
    depths_BN: Tensor
    counts: tuple[int, ...] | None = None

    @classmethod
    def from_shape(cls, tokens_BN: Tensor, shape: TreeShape) -> DraftTree:
        """Every row has the same shape."""
        return cls(tokens_BN, (shape.parents,), *shape.on(tokens_BN.device))

    @classmethod
    def chain(cls, tokens_BN: Tensor) -> DraftTree:
        """Texts as trees without branches: each token's parent is the one before it."""
        size = tokens_BN.shape[1]
        visible_1NN = torch.ones(1, size, size, dtype=torch.bool, device=tokens_BN.device).tril()
        depths_1N = torch.arange(size, device=tokens_BN.device)[None]
        return cls(tokens_BN, (tuple(range(-1, size - 1)),), depths_1N - 1, visible_1NN, depths_1N)

    @classmethod
    def from_rows(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> DraftTree:
        """Each row has a tree of its own, given as lists: tokens with the root first, and each node's parent.

        All of it goes to the device in one copy.

        >>> tree = DraftTree.from_rows([[5, 6, 7], [8]], [[-1, 0, 1], [-1]])
        >>> tree.tokens_BN.tolist(), tree.parents, tree.counts
        ([[5, 6, 7], [8, 8, 8]], ((-1, 0, 1), (-1, 0, 0)), (3, 1))
        """
        rows, width = len(tokens), max(map(len, tokens))
        padded = tuple((*row, *(0,) * (width - len(row))) for row in parents)
        visible_BNN = _ancestors(padded)
        tokens_BN = np.array([[*row, *(row[0],) * (width - len(row))] for row in tokens], dtype=np.int64)
        depths_BN = visible_BNN.sum(-1, dtype=np.int64) - 1
        parents_BN = np.array([[*row, *(-1,) * (width - len(row))] for row in parents], dtype=np.int64)
        numbers_3BN, size = np.stack([tokens_BN, parents_BN, depths_BN]), 3 * 8 * rows * width
        packed = np.concatenate([part.reshape(-1).view(np.uint8) for part in (numbers_3BN, visible_BNN)])
        there = torch.from_numpy(packed).to(device)
        tokens_t, parents_t, depths_t = there[:size].view(torch.int64).view(3, rows, width).unbind()
        visible_t = there[size:].view(torch.bool).view(rows, width, width)
        return cls(tokens_t, padded, parents_t, visible_t, depths_t, tuple(map(len, tokens)))

    @property
    def size(self) -> int:
        """Number of nodes, root included."""
        return self.tokens_BN.shape[1]

    @property
    def depth(self) -> int:
        """Depth of the deepest node of any row, found without asking the device.

        >>> DraftTree.from_rows([[5, 6, 7], [8]], [[-1, 0, 1], [-1]]).depth
        2
        """
        return max(max(depths_of(parents)) for parents in self.parents)

    def parents_of(self, row: int) -> tuple[int, ...]:
        """Parent of each real node of one row."""
        parents = self.parents[row] if len(self.parents) > 1 else self.parents[0]
        return parents if self.counts is None else parents[: self.counts[row]]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Distance of each node from the root.

    >>> depths_of([-1, 0, 1, 0])
    [0, 1, 2, 1]
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def ancestors(parents: Sequence[Sequence[int]]) -> Tensor:
    """Which nodes each node may see: itself and its ancestors.

    Args:
        parents: of each row, equally many: the parent of each node, -1 for the root, parents before children.

    Returns:
        bool [B, N, N].

    >>> ancestors([[-1, 0, 0, 1]])[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    return torch.from_numpy(_ancestors(parents))


def _ancestors(parents: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    visible_BNN = np.tile(np.eye(len(parents[0]), dtype=bool), (len(parents), 1, 1))
    for visible_NN, row in zip(visible_BNN, parents, strict=True):
        for node, parent in enumerate(row[1:], start=1):
            visible_NN[node] |= visible_NN[parent]
    return visible_BNN
