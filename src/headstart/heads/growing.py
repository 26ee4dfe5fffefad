"""Growing a token tree from draft heads, level by level: which children each node gets, and how probable each is.

Static trees take the ranks that their shape names. Dynamic trees take every child whose path pays for its verification,
by the heads' own probabilities turned into probabilities of acceptance (EAGLE-2's idea, arXiv 2406.16858, with measured
calibration and costs). How many children a node has never depends on which tokens were drawn for them, so sampling
stays lossless.

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.calibration import Calibration
from headstart.proposal import Children, Proposal, Request, Root, SampledChildren
from headstart.rng import draw_each
from headstart.target import TreeShape

MAX_RANK = 8
"""Children of a node at most, in a dynamic tree."""


class Sizes(Protocol):
    """Of a config, what growing asks."""

    @property
    def draft_width(self) -> int: ...


class Levels(Protocol):
    """Where the logits of a tree's levels come from; see `DraftHead`."""

    draft_to_target_D: Tensor

    @property
    def config(self) -> Sizes: ...

    @property
    def draft_steps(self) -> int: ...

    def draft_step(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor: ...


DepthLogits = Callable[[Any, Tensor, range], Tensor]
"""See `OneForwardHead.depth_logits`."""
Draft = tuple[int, int, float, float]
"""A candidate child: its index in the draft vocabulary, its token, its probability of acceptance after its parent, and
the probability of a child that is drawn instead of it."""


@dataclass
class _Growing:
    """One row's tree while it grows; node 0 is the root.

    Attributes:
        shape_nodes: node of the static shape that each node fills; unused in a dynamic tree.
        level: nodes of the last level that may get children, each with its parent's index in the level before.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    accept_probs: list[float] = field(default_factory=lambda: [1.0])
    shape_nodes: list[int] = field(default_factory=lambda: [0])
    sampled: dict[int, SampledChildren] = field(default_factory=dict)
    level: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def add(self, parent: int, token: int, accept_prob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.accept_probs.append(accept_prob)
        self.shape_nodes.append(0)
        return len(self.tokens) - 1


@torch.no_grad()
def grow(
    heads: Levels,
    state: Any,
    root: Root,
    request: Request,
    max_rank: int = MAX_RANK,
    depth_logits: DepthLogits | None = None,
) -> Proposal:
    """Draft a tree after each row's root, level by level.

    The host waits for the device once a level; for heads that draft all depths in one forward, once in all.

    Args:
        heads: what drafts.
        state: of its `prefill`.
        root: each row's root.
        request: of the decode loop; its `shape` is filled where there is one.
        max_rank: children of a node at most, in a dynamic tree.
        depth_logits: of heads that draft all depths in one forward; None drafts level by level.
    """
    shape, calibration = request.shape, request.calibration or Calibration()
    rows = [_Growing([token]) for token in root.tokens]
    ranks = min(shape.width if shape else 1 if request.chain else max_rank, heads.config.draft_width)
    levels = min(shape.depth if shape else heads.draft_steps, request.max_nodes - 1)
    reading_is_free = root.tokens_B.device.type == "cpu"
    table, first, drafted = _Table.empty(), 0, 0
    for depth in range(levels):
        if depth and shape is None:
            best_child = calibration.best_child(depth)  # each node's best child, less what verifying it costs
            net = sum(
                max(0.0, row.accept_probs[node] * best_child - request.threshold)
                for row in rows
                for node, _ in row.level
            )
            if net < request.level_threshold:
                break
        if depth_logits is None:
            if depth:
                tokens_BW, parents_BW = _next_level(rows, root.tokens_B.device)
            else:
                tokens_BW = root.tokens_B[:, None]
                parents_BW = torch.zeros_like(tokens_BW)
            table = _Table.read(heads.draft_step(state, tokens_BW, parents_BW, depth), ranks, heads.draft_to_target_D)
        elif depth >= first + table.width:
            # Where reading is free, the next depth waits until it is known to be worth its LM head.
            depths, first = range(depth, depth + 1 if reading_is_free else levels), depth
            table = _Table.read(depth_logits(state, root.tokens_B, depths), ranks, heads.draft_to_target_D)
        drafted += 1
        only = depth - first if depth_logits else 0 if table.width == 1 else None
        drafts = table.drafts(depth, only, calibration)
        for number, row in enumerate(rows):
            columns = range(len(row.level)) if only is None else [only] * len(row.level)
            tables = [drafts[number][0 if only is not None else column] for column in columns]
            picks = _static(row, shape) if shape else _dynamic(row, tables, request)
            chosen = {above: [tables[above][rank] for rank in ranks] for above, ranks in enumerate(picks) if ranks}
            q_draft_WD = None
            if chosen and request.children is not Children.TOP_K:
                assert request.warp is not None, "drawing needs a distribution"
                q_draft_WD = request.warp(table.logits_BWD[number, [columns[above] for above in chosen]])
            grown = _add(row, chosen, q_draft_WD, heads.draft_to_target_D, request, number)
            if shape:
                _settle(row, [child for child, _ in grown], shape)
                grown = [pair for pair in grown if row.shape_nodes[pair[0]] in shape.inner]
            row.level = grown
        if not any(row.level for row in rows):
            break
    return Proposal(
        [row.tokens for row in rows],
        [row.parents for row in rows],
        None if shape else [row.accept_probs for row in rows],  # a static tree is verified as it is
        [row.sampled for row in rows] if any(row.sampled for row in rows) else None,
        drafted,
    )


@dataclass
class _Table:
    """The best drafts of some levels, on the host.

    Attributes:
        logits_BWD: on the device, for drawing.
        log_probs: [B, W, R].
        indices: in the draft vocabulary.
        tokens: of the target.
    """

    logits_BWD: Tensor
    log_probs: NDArray[Any]
    indices: NDArray[Any]
    tokens: NDArray[Any]

    @classmethod
    def empty(cls) -> _Table:
        none = np.zeros((0, 0, 0), dtype=np.int32)
        return cls(torch.zeros(0, 0, 0), none.astype(np.float32), none, none)

    @classmethod
    def read(cls, logits_BWD: Tensor, ranks: int, draft_to_target_D: Tensor) -> _Table:
        """In one copy, since each waits for the device: the bits of the floats travel among the integers."""
        logits_BWD = logits_BWD.float()
        top = logits_BWD.topk(ranks, dim=-1)
        log_probs_BWR = top.values - logits_BWD.logsumexp(-1, keepdim=True)
        parts = [log_probs_BWR.view(torch.int32), top.indices.int(), draft_to_target_D[top.indices].int()]
        log_probs, indices, tokens = torch.stack(parts).cpu().numpy()
        return cls(logits_BWD, log_probs.view(np.float32), indices, tokens)

    @property
    def width(self) -> int:
        """W: nodes of a level, or levels."""
        return int(self.log_probs.shape[1])

    def drafts(self, depth: int, column: int | None, calibration: Calibration) -> list[list[list[Draft]]]:
        """By row and node, the candidates from the best on; of one column alone where it serves a whole level."""
        part = slice(None) if column is None else slice(column, column + 1)
        log_probs = self.log_probs[:, part]
        probs = calibration.probs(depth, log_probs).tolist()
        draws = calibration.sampled.probs(depth, log_probs).tolist() if calibration.sampled else probs
        columns = (self.indices[:, part].tolist(), self.tokens[:, part].tolist(), probs, draws)
        return [
            [list(zip(*nodes, strict=True)) for nodes in zip(*row, strict=True)] for row in zip(*columns, strict=True)
        ]


def _static(row: _Growing, shape: TreeShape) -> list[list[int]]:
    """Ranks that the shape names, for each node of the level."""
    return [[shape.ranks[child] for child in shape.children[row.shape_nodes[node]]] for node, _ in row.level]


def _settle(row: _Growing, grown: Sequence[int], shape: TreeShape) -> None:
    """Note which node of the shape each new node fills; the children of a node come in the shape's order."""
    taken: dict[int, int] = {}
    for node in grown:
        parent = row.parents[node]
        row.shape_nodes[node] = shape.children[row.shape_nodes[parent]][taken.get(parent, 0)]
        taken[parent] = taken.get(parent, 0) + 1


def _dynamic(row: _Growing, tables: list[list[Draft]], request: Request) -> list[list[int]]:
    """For each node of the level, the ranks whose paths are worth verifying; the best of them when room is short."""
    found = []
    for above, (node, _) in enumerate(row.level):
        for rank, more in enumerate(_marginals(tables[above], request.children)):
            accept_prob = row.accept_probs[node] * more
            if accept_prob < request.threshold or accept_prob <= 0:
                break
            found.append((-accept_prob, above, rank))
    room = 1 if request.chain else request.max_nodes - len(row.tokens)
    if len(found) > room:
        found = sorted(found)[:room]
    picks: list[list[int]] = [[] for _ in row.level]
    for _, above, rank in sorted(found, key=lambda one: one[1:]):
        picks[above].append(rank)
    return picks


def _marginals(drafts: Sequence[Draft], children: Children) -> Iterator[float]:
    """What each further child adds to the probability that one of them is accepted; never more than the one before
    adds."""
    if children is Children.TOP_K:
        yield from (prob for _, _, prob, _ in drafts)
        return
    before, more = 0.0, 1.0
    for count in range(1, len(drafts) + 1):
        together = sum(_probs(drafts[:count], children))
        more = min(more, together - before)
        yield more
        before = together


def _probs(chosen: Sequence[Draft], children: Children) -> list[float]:
    """Each child's probability of acceptance, the top-k ones first."""
    fixed = _top_k_count(len(chosen), children)
    probs = [prob for _, _, prob, _ in chosen[:fixed]]
    rejected = 1.0
    for _, _, _, sampled in chosen[fixed:]:  # tried one after the other
        probs.append(rejected * sampled)
        rejected *= 1 - sampled
    return probs


def _top_k_count(count: int, children: Children) -> int:
    """How many of so many children are the most likely ones rather than sampled."""
    return {Children.TOP_K: count, Children.TOP_K_AND_SAMPLED: count - 1, Children.SAMPLED: 0}[children]


def _add(
    row: _Growing,
    chosen: dict[int, list[Draft]],
    q_draft_WD: Tensor | None,
    draft_to_target_D: Tensor,
    request: Request,
    number: int,
) -> list[tuple[int, int]]:
    """Give nodes of a level their children; how many is decided, and as many are drawn as the request asks for.

    Args:
        row: gets the children.
        chosen: the drafts that they replace, by the node's own index in the level.
        q_draft_WD: the heads' distribution after each of these nodes, in this order; None when nothing is drawn.
        draft_to_target_D: the target's token of each draft token.
        request: of the decode loop.
        number: of the row.

    Returns:
        The new nodes, each with its parent's index in the level.
    """
    fixed = [_top_k_count(len(drafts), request.children) for drafts in chosen.values()]
    sampled: list[list[int]] = [[] for _ in chosen]
    if q_draft_WD is not None:
        own = [[index for index, *_ in drafts[:known]] for drafts, known in zip(chosen.values(), fixed, strict=True)]
        positions = [position for position, indices in enumerate(own) for _ in indices]
        q_draft_WD[positions, [index for indices in own for index in indices]] = 0.0
        q_draft_WD /= q_draft_WD.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        counts = [len(drafts) - known for drafts, known in zip(chosen.values(), fixed, strict=True)]
        sampled = _draws(q_draft_WD, counts, request.streams[number])
    sampled_tokens = iter(draft_to_target_D[list(chain.from_iterable(sampled))].tolist() if any(sampled) else ())
    grown: list[tuple[int, int]] = []
    for position, (above, drafts) in enumerate(chosen.items()):
        node, _ = row.level[above]
        tokens = [token for _, token, _, _ in drafts[: fixed[position]]]
        tokens += islice(sampled_tokens, len(sampled[position]))
        probs = _probs(drafts, request.children)[: len(tokens)]
        children = [
            row.add(node, token, row.accept_probs[node] * prob) for token, prob in zip(tokens, probs, strict=True)
        ]
        grown += [(child, above) for child in children]
        if q_draft_WD is not None and sampled[position]:
            row.sampled[node] = SampledChildren(children[fixed[position] :], q_draft_WD[position], draft_to_target_D)
    return grown


def _draws(q_draft_WD: Tensor, counts: Sequence[int], stream: torch.Generator) -> list[list[int]]:
    """So many draws from each distribution, without replacement; fewer where it holds no further token."""
    found: list[list[int]] = [[] for _ in counts]
    for turn in range(max(counts)):
        index_W = draw_each(q_draft_WD, stream)
        for position, index in enumerate(index_W.tolist()):
            if turn < counts[position] and index < q_draft_WD.shape[1]:
                found[position].append(index)
        if turn + 1 < max(counts):
            q_draft_WD = q_draft_WD.scatter(1, index_W[:, None].clamp(max=q_draft_WD.shape[1] - 1), 0.0)
    return found


def _next_level(rows: Sequence[_Growing], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of the level's nodes and their parents' indices in the level before, [B, W], short rows padded."""
    width = max(len(row.level) for row in rows)
    tokens, parents = [], []
    for row in rows:
        padding = width - len(row.level)
        tokens.append([*(row.tokens[node] for node, _ in row.level), *[row.tokens[0]] * padding])
        parents.append([*(above for _, above in row.level), *[0] * padding])
    tokens_BW, parents_BW = torch.tensor([tokens, parents], device=device).unbind()
    return tokens_BW, parents_BW
