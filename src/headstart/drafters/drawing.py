"""Sampled children: they get their places in the trees first and their tokens later, for all rows together.

On a CPU they are drawn as soon as a level has them. On a device the next level is drafted from tokens that the host has
not seen: it reads them with the drafts of that level, so that a level with drawn nodes also takes one upload and read.

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, X integers, M nodes to draw, K those drafted from.
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
from headstart.tree.tree import Drawn, Request, Tree

UNKNOWN = -1
"""Token of a child that is not drawn yet, or cannot be."""


class Leaf(NamedTuple):
    """A node of the last level, which may get children."""

    node: int
    above: int = 0
    """Its parent's column."""
    off_best: float = 0.0
    """Probability that its path has left the best one, see `Calibration.off_best`; fractional only for drawn nodes."""
    place: int = 0
    """Its node in the static shape; 0 in a dynamic tree."""
    column: int = 0
    """Its index in its level when that is drafted from."""


class Undrawn(NamedTuple):
    """A child to be drawn from the logits of its parent's column, excluding its siblings' tokens."""

    row: int
    node: int
    column: int
    siblings: list[int]


@dataclass
class Growing:
    """A row's growing tree, and the nodes of its last level that may get children."""

    tree: Tree
    level: list[Leaf]

    def keep(self, nodes: Sequence[int], drafted: bool = False) -> None:
        """See `Tree.keep`. Columns stay if the level was already `drafted` from."""
        renumbered = self.tree.keep(nodes)
        level = [leaf._replace(node=renumbered[leaf.node]) for leaf in self.level if leaf.node in renumbered]
        self.level = level if drafted else [leaf._replace(column=column) for column, leaf in enumerate(level)]


@dataclass(eq=False)
class Draws:
    """Children of all rows that wait for their tokens, each drawn with its row's random numbers; `tokens_M` are the
    drawn tokens, on the device."""

    rows: Sequence[Growing]
    children: Sequence[Undrawn]
    logits_BWD: Tensor
    draft_to_target_D: Tensor
    request: Request
    tokens_M: Tensor = field(init=False)
    _q_draft: list[Tensor] = field(default_factory=list)
    _drafted: bool = False

    def put(self, buffer_BX: Tensor, numbers_BX: Tensor) -> None:
        """Draw, then overwrite a buffer with integers, each row's first ones being the level's tokens, drawn ones
        included; one upload."""
        columns = {(number, leaf.node): leaf.column for number, row in enumerate(self.rows) for leaf in row.level}
        width = numbers_BX.shape[1]
        places = [
            (index, child.row * width + columns[child.row, child.node])
            for index, child in enumerate(self.children)
            if (child.row, child.node) in columns
        ]
        known = numbers_BX.flatten().clamp(min=0).tolist()  # padding rows hold UNKNOWN as well
        rest_X = self._draw([*chain.from_iterable(places), *known])
        which_K, place_K = rest_X[: 2 * len(places)].view(-1, 2).unbind(1)
        buffer_BX.copy_(rest_X[2 * len(places) :].view(buffer_BX.shape))
        # The host removes a node without a token once it knows.
        tokens_K = self.tokens_M if len(places) == len(self.children) else self.tokens_M[which_K]
        buffer_BX.view(-1).index_copy_(0, place_K, tokens_K.clamp(min=0))
        self._drafted = True

    def take(self, tokens: Sequence[int] | None = None) -> None:
        """Give the children these tokens, or draw them now. A node is removed if its distribution has no token left."""
        if tokens is None:
            self._draw()
            tokens = self.tokens_M.tolist()
        for child, q_draft_D, token in zip(self.children, self._q_draft, tokens, strict=True):
            tree = self.rows[child.row].tree
            tree.tokens[child.node] = token
            tree.drawn[child.node] = Drawn(q_draft_D, self.draft_to_target_D)
        for row in self.rows:
            if UNKNOWN in row.tree.tokens:
                row.keep(_without_unknown(row.tree), self._drafted)

    def _draw(self, beside: Sequence[int] = ()) -> Tensor:
        """Draw on the device; return `beside` as a tensor, sent in the same upload."""
        request, children, logits_BWD = self.request, self.children, self.logits_BWD
        assert request.warp is not None, "drawing needs a distribution"
        device, (_, width, size) = logits_BWD.device, logits_BWD.shape
        logits_XD = logits_BWD.flatten(0, 1)
        tokens_D1 = F.pad(self.draft_to_target_D, (0, 1), value=UNKNOWN)
        parts = in_parts(len(children), size, device)
        at = [child.row * width + child.column for child in children]
        siblings = [
            [number * size + index for number, child in enumerate(children[part]) for index in child.siblings]
            for part in parts
        ]
        numbers = [*_numbers(children, request.streams), *at, *chain.from_iterable(siblings), *beside]
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


def _numbers(undrawn: Sequence[Undrawn], streams: Sequence[torch.Generator]) -> list[float]:
    """A random number for each child, from its row's own stream."""
    counts = Counter(child.row for child in undrawn)
    drawn = {row: torch.rand(n, generator=streams[row], dtype=torch.float64).tolist() for row, n in counts.items()}
    rest = {row: iter(numbers) for row, numbers in drawn.items()}
    return [next(rest[child.row]) for child in undrawn]


def _without_unknown(tree: Tree) -> list[int]:
    """Nodes with a known token at every step of their path."""
    known: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if token != UNKNOWN and (node == 0 or parent in known):
            known.append(node)
    return known
