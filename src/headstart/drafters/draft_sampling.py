"""Sampled children: their nodes are added to the trees first, and their tokens later, for all rows together.

On a CPU their tokens are sampled as soon as a level has its nodes. On a device the next level is drafted from tokens
that the host has not read yet. It reads them with that level's drafts, so a level with sampled nodes also takes one
upload and one read.

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, X integers, M sampled nodes, K those of the last
level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.support.rng import fall_on, in_parts
from headstart.support.uploads import upload
from headstart.tree.tree import DraftDistribution, Request, Tree

UNKNOWN = -1
"""Token of a child that is not sampled yet, or cannot be."""


class Leaf(NamedTuple):
    """A node of the last level, which may get children."""

    node: int = 0
    prob: float = 1.0
    """Acceptance probability of its path."""
    parent_column: int = 0
    off_best_prob: float = 0.0
    """Probability that its path has left the best one, see `Calibration.off_best`; fractional only after sampling."""
    shape_node: int = 0
    """Its node in the static shape; 0 in a dynamic tree."""
    column: int = 0
    """Its index in its level when that is drafted from."""


class PendingChild(NamedTuple):
    """A child to sample from the logits of its parent's column, excluding its siblings' tokens."""

    row: int
    node: int
    column: int
    siblings: list[int]


@dataclass
class GrowingTree:
    """A row's tree, and the nodes of its last level that may get children."""

    tree: Tree
    level: list[Leaf]

    def keep(self, nodes: Sequence[int], drafted: bool = False) -> None:
        """Remove all other nodes, see `Tree.keep`. Columns stay if the level was already `drafted` from."""
        renumbered = self.tree.keep(nodes)
        level = [leaf._replace(node=renumbered[leaf.node]) for leaf in self.level if leaf.node in renumbered]
        self.level = level if drafted else [leaf._replace(column=column) for column, leaf in enumerate(level)]


@dataclass(eq=False)
class PendingSamples:
    """Children of all rows that wait for their tokens, each sampled with its row's random numbers; `tokens_M` are the
    sampled tokens, on the device."""

    rows: Sequence[GrowingTree]
    children: Sequence[PendingChild]
    logits_BWD: Tensor
    draft_to_target_D: Tensor
    request: Request
    tokens_M: Tensor = field(init=False)
    _q_draft: list[Tensor] = field(default_factory=list)
    _drafted: bool = False

    def fill(self, buffer_BX: Tensor, numbers_BX: Tensor) -> None:
        """Sample, and write the inputs of the next level to a buffer, in one upload. Each row begins with the level's
        tokens, sampled ones included."""
        columns = {(number, leaf.node): leaf.column for number, row in enumerate(self.rows) for leaf in row.level}
        width = numbers_BX.shape[1]
        places = [
            (index, child.row * width + columns[child.row, child.node])
            for index, child in enumerate(self.children)
            if (child.row, child.node) in columns
        ]
        known = numbers_BX.flatten().clamp(min=0).tolist()  # padding rows hold UNKNOWN as well
        rest_X = self._sample([*chain.from_iterable(places), *known])
        which_K, place_K = rest_X[: 2 * len(places)].view(-1, 2).unbind(1)
        buffer_BX.copy_(rest_X[2 * len(places) :].view(buffer_BX.shape))
        # The host removes a node without a token after reading it.
        tokens_K = self.tokens_M if len(places) == len(self.children) else self.tokens_M[which_K]
        buffer_BX.view(-1).index_copy_(0, place_K, tokens_K.clamp(min=0))
        self._drafted = True

    def assign(self, tokens: Sequence[int] | None = None) -> None:
        """Give the children these tokens, or sample them now. Remove a node if its distribution has no token left."""
        if tokens is None:
            self._sample()
            tokens = self.tokens_M.tolist()
        for child, q_draft_D, token in zip(self.children, self._q_draft, tokens, strict=True):
            tree = self.rows[child.row].tree
            tree.tokens[child.node] = token
            tree.sampled[child.node] = DraftDistribution(q_draft_D, self.draft_to_target_D)
        for row in self.rows:
            if UNKNOWN in row.tree.tokens:
                row.keep(_without_unknown(row.tree), self._drafted)

    def _sample(self, extra: Sequence[int] = ()) -> Tensor:
        """Sample on the device; return `extra` as a tensor, sent in the same upload."""
        request, children, logits_BWD = self.request, self.children, self.logits_BWD
        assert request.warp is not None, "sampling needs a distribution"
        device, (_, width, size) = logits_BWD.device, logits_BWD.shape
        logits_XD = logits_BWD.flatten(0, 1)
        tokens_D1 = F.pad(self.draft_to_target_D, (0, 1), value=UNKNOWN)
        parts = in_parts(len(children), size, device)
        columns = [child.row * width + child.column for child in children]
        siblings = [
            [number * size + index for number, child in enumerate(children[part]) for index in child.siblings]
            for part in parts
        ]
        numbers = [*_uniform_numbers(children, request.generators), *columns, *chain.from_iterable(siblings), *extra]
        packed = upload(numbers, device, torch.float64)  # represents every index exactly
        number_M, index_X = packed[: len(children)], packed[len(children) :].long()
        tokens: list[Tensor] = []
        start = len(children)
        for part, flat in zip(parts, siblings, strict=True):
            q_draft_MD = request.warp(logits_XD.index_select(0, index_X[part]).float())
            if flat:
                q_draft_MD.view(-1).index_fill_(0, index_X[start : start + len(flat)], 0.0)
            start += len(flat)
            q_draft_MD /= q_draft_MD.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            self._q_draft += q_draft_MD.unbind()
            tokens.append(tokens_D1[fall_on(q_draft_MD, number_M[part])])
        self.tokens_M = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        return index_X[start:]


def _uniform_numbers(children: Sequence[PendingChild], generators: Sequence[torch.Generator]) -> list[float]:
    """A random number for each child, from its row's own generator."""
    counts = Counter(child.row for child in children)
    numbers = {
        row: iter(torch.rand(count, generator=generators[row], dtype=torch.float64).tolist())
        for row, count in counts.items()
    }
    return [next(numbers[child.row]) for child in children]


def _without_unknown(tree: Tree) -> list[int]:
    """Nodes with a known token at every step of their path."""
    known: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if token != UNKNOWN and (node == 0 or parent in known):
            known.append(node)
    return known
