"""Growing a token tree from draft heads, level by level: which children each node gets, and what they promise.

Static trees take the ranks that their shape names. Dynamic trees take every child whose path is worth its verification,
by the heads' own probabilities turned into probabilities of acceptance (EAGLE-2's idea, arXiv 2406.16858, with measured
calibration and costs). How many children a node has never depends on which tokens were drawn for them, so sampling
stays lossless.

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.decode.calibrate import Calibration
from headstart.decode.drafters import Children, Request
from headstart.decode.verify import draw
from headstart.heads import DraftHead
from headstart.target import DraftTree, TreeShape
from headstart.target.tree import Drawn

_DRAWN_SHARE = 0.5
"""Assumed acceptance of a drawn child, as a share of the probability that its more likely siblings leave."""


Draft = tuple[int, int, float]
"""A candidate child: its place in the draft vocabulary, its token, its chance of acceptance behind its parent."""


@dataclass
class _Growing:
    """One row's tree while it grows; node 0 is the root.

    Attributes:
        places: node of the static shape that each node fills; unused in a dynamic tree.
        level: nodes of the last level that may get children, each with its parent's place in the level before.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    gains: list[float] = field(default_factory=lambda: [1.0])
    places: list[int] = field(default_factory=lambda: [0])
    drawn: dict[int, Drawn] = field(default_factory=dict)
    level: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def add(self, parent: int, token: int, gain: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.gains.append(gain)
        self.places.append(0)
        return len(self.tokens) - 1


@torch.no_grad()
def grow(
    heads: DraftHead,
    state: Any,
    root_B: Tensor,
    request: Request,
    calibration: Calibration,
    shape: TreeShape | None = None,
    max_rank: int = 8,
) -> DraftTree:
    """Draft a tree behind each row's root.

    Args:
        heads: what drafts.
        state: of its `open`.
        root_B: each row's root token.
        request: of the decode loop.
        calibration: of the heads' probabilities.
        shape: a static tree; None grows a dynamic one.
        max_rank: children of a node at most, in a dynamic tree.
    """
    rows = [_Growing([token]) for token in root_B.tolist()]
    ranks = min(shape.width if shape else 1 if request.chain else max_rank, heads.config.draft_width)
    levels = min(shape.depth if shape else heads.steps, request.max_nodes - 1)
    tokens_BW, parents_BW = root_B[:, None], torch.zeros_like(root_B)[:, None]
    drafted = 0
    for depth in range(levels):
        if depth and shape is None:
            reach = calibration.reach(depth)  # each node's best child, less what verifying it costs
            net = sum(max(0.0, row.gains[node] * reach - request.worth) for row in rows for node, _ in row.level)
            if net < request.level_worth:
                break
        logits_BWD = heads.expand(state, tokens_BW, parents_BW, depth).float()
        drafted += 1
        top = logits_BWD.topk(ranks, dim=-1)
        log_probs_BWR = top.values - logits_BWD.logsumexp(-1, keepdim=True)
        # One copy to the host, since each waits for the device: the bits of the floats travel among the integers.
        parts = [log_probs_BWR.view(torch.int32), top.indices.int(), heads.draft_to_target_D[top.indices].int()]
        log_probs, indices, drafts = torch.stack(parts).cpu().numpy()
        chances = calibration.chances(depth, log_probs.view(np.float32)).tolist()
        indices, drafts = indices.tolist(), drafts.tolist()
        for number, row in enumerate(rows):
            columns = [0] * len(row.level) if len(drafts[number]) == 1 else range(len(row.level))
            tables = [
                list(zip(indices[number][column], drafts[number][column], chances[number][column], strict=True))
                for column in columns
            ]
            picks = _static(row, shape) if shape else _dynamic(row, tables, request)
            grown: list[tuple[int, int]] = []
            for above, (node, _) in enumerate(row.level):
                if picks[above]:
                    chosen = [tables[above][rank] for rank in picks[above]]
                    logits_D = logits_BWD[number, columns[above]]
                    children = _add(row, node, chosen, logits_D, heads.draft_to_target_D, request, number)
                    grown += [(child, above) for child in children]
            if shape:
                _settle(row, [child for child, _ in grown], shape)
                grown = [pair for pair in grown if row.places[pair[0]] in shape.inner]
            row.level = grown
        if depth + 1 == levels or not any(row.level for row in rows):
            break
        tokens_BW, parents_BW = _next_level(rows, root_B.device)
    return DraftTree.from_rows(
        [row.tokens for row in rows],
        [row.parents for row in rows],
        root_B.device,
        [row.gains for row in rows],
        [row.drawn for row in rows] if any(row.drawn for row in rows) else None,
        drafted,
    )


def _static(row: _Growing, shape: TreeShape) -> list[list[int]]:
    """Ranks that the shape names, for each node of the level."""
    return [[shape.ranks[child] for child in shape.children[row.places[node]]] for node, _ in row.level]


def _settle(row: _Growing, grown: Sequence[int], shape: TreeShape) -> None:
    """Note which node of the shape each new node fills; the children of a node come in the shape's order."""
    taken: dict[int, int] = {}
    for node in grown:
        parent = row.parents[node]
        row.places[node] = shape.children[row.places[parent]][taken.get(parent, 0)]
        taken[parent] = taken.get(parent, 0) + 1


def _dynamic(row: _Growing, tables: list[list[Draft]], request: Request) -> list[list[int]]:
    """For each node of the level, the ranks whose paths are worth verifying; the best of them when room is short."""
    found = []
    for above, (node, _) in enumerate(row.level):
        for rank, (_, _, chance) in enumerate(tables[above]):
            gain = row.gains[node] * chance
            if gain < request.worth or gain <= 0:
                break
            found.append((-gain, above, rank))
    room = 1 if request.chain else request.max_nodes - len(row.tokens)
    if len(found) > room:
        found = sorted(found)[:room]
    picks: list[list[int]] = [[] for _ in row.level]
    for _, above, rank in sorted(found, key=lambda one: one[1:]):
        picks[above].append(rank)
    return picks


def _add(
    row: _Growing,
    node: int,
    chosen: list[Draft],
    logits_D: Tensor,
    draft_to_target_D: Tensor,
    request: Request,
    number: int,
) -> list[int]:
    """Give a node its children; the count is decided, and as many of them are drawn as the request asks for."""
    fixed = {Children.TOP: len(chosen), Children.TOP_AND_DRAWN: len(chosen) - 1, Children.DRAWN: 0}[request.children]
    gain = row.gains[node]
    left = 1.0 - sum(chance for _, _, chance in chosen[:fixed])
    children = [row.add(node, token, gain * chance) for _, token, chance in chosen[:fixed]]
    if fixed == len(chosen):
        return children
    assert request.warp is not None, "drawing needs a distribution"
    q_draft_D = request.warp(logits_D)
    q_draft_D[[index for index, _, _ in chosen[:fixed]]] = 0.0
    drawn: list[int] = []
    rest_D = q_draft_D.clone()
    for _, _, chance in chosen[fixed:]:
        if not rest_D.sum() > 0:  # top-k or top-p leave no further token
            break
        index = draw(rest_D, request.streams[number])
        rest_D[index] = 0.0
        drawn.append(row.add(node, int(draft_to_target_D[index]), gain * max(chance, _DRAWN_SHARE * left)))
    if drawn:
        row.drawn[node] = Drawn(drawn, q_draft_D / q_draft_D.sum(), draft_to_target_D)
    return children + drawn


def _next_level(rows: Sequence[_Growing], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of the level's nodes and their parents' places in the level before, [B, W], short rows padded."""
    width = max(len(row.level) for row in rows)
    tokens, parents = [], []
    for row in rows:
        padding = width - len(row.level)
        tokens.append([*(row.tokens[node] for node, _ in row.level), *[row.tokens[0]] * padding])
        parents.append([*(above for _, above in row.level), *[0] * padding])
    tokens_BW, parents_BW = torch.tensor([tokens, parents], device=device).unbind()
    return tokens_BW, parents_BW
