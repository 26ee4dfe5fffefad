"""Growing a token tree from draft heads, level by level: which children each node gets, and how probable each is.

Static trees take the ranks that their shape names. Dynamic trees take every child whose path pays for its verification,
by the heads' own probabilities turned into probabilities of acceptance (EAGLE-2's idea, arXiv 2406.16858, with measured
calibration and costs). How many children a node has never depends on which tokens were drawn for them, so sampling
stays lossless.

Where more paths pay than a tree may hold, it holds the best of them, whatever their depth: a level's nodes push out
worse ones above, which no better path can go through, since probabilities fall along a path. So a tree is the one that
a best-first search finds, at one call of the heads a level. A drawn node is never pushed out, for this could depend on
its token: trees with such nodes leave room at each level for what is expected below it.

Sampled children get their place in the tree first and their token later: those of all rows are drawn together, as soon
as anything depends on them.

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, R ranks, M nodes with sampled children, C sampled
children of a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from operator import mul
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headstart.support.rng import fall_on, in_parts
from headstart.tree.calibration import Calibration
from headstart.tree.proposal import Children, Proposal, Request, Root, SampledChildren
from headstart.tree.tree import TreeShape

MAX_RANK = 8
"""Children of a node at most, in a dynamic tree."""
_UNKNOWN = -1
"""Stands for the token of a child that is not drawn yet, or cannot be."""


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
Confidence = Callable[[Any, Tensor, int], Tensor | None]
"""See `DraftHead.confidence`."""
Draft = tuple[int, int, float, float, float]
"""A candidate child: its index in the draft vocabulary, its token, its probability of acceptance after its parent, the
probability of a child that is drawn instead of it, and its share of the heads' own distribution."""

_Found = tuple[float, int, int]
"""A candidate beside others: less its path's probability, its parent's index in the level, and its rank."""


@dataclass
class _Growing:
    """One row's tree while it grows; node 0 is the root.

    Attributes:
        left: of each node, how likely its path has left the best one, see `Calibration.left`; between 0 and 1 for
            drawn nodes alone.
        shape_nodes: node of the static shape that each node fills; unused in a dynamic tree.
        level: nodes of the last level that may get children, each with its parent's index in the level before.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    accept_probs: list[float] = field(default_factory=lambda: [1.0])
    left: list[float] = field(default_factory=lambda: [0.0])
    shape_nodes: list[int] = field(default_factory=lambda: [0])
    sampled: dict[int, SampledChildren] = field(default_factory=dict)
    level: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def add(self, parent: int, token: int, accept_prob: float, left: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.accept_probs.append(accept_prob)
        self.left.append(left)
        self.shape_nodes.append(0)
        return len(self.tokens) - 1

    def keep_best(self, count: int) -> None:
        """Take out all but so many nodes."""
        ranked = sorted(range(len(self.tokens)), key=lambda node: (-self.accept_probs[node], node))
        self.drop(set(ranked[count:]))

    def drop(self, gone: set[int]) -> None:
        """Take nodes out, and all that grew on them."""
        kept: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if node not in gone and (node == 0 or parent in kept):
                kept[node] = len(kept)
        self.parents = [kept.get(self.parents[node], -1) for node in kept]
        self.tokens = [self.tokens[node] for node in kept]
        self.accept_probs = [self.accept_probs[node] for node in kept]
        self.left = [self.left[node] for node in kept]
        self.shape_nodes = [self.shape_nodes[node] for node in kept]
        self.level = [(kept[node], above) for node, above in self.level if node in kept]
        self.sampled = {
            kept[node]: replace(own, children=[kept[child] for child in own.children])
            for node, own in self.sampled.items()
            if node in kept
        }


@dataclass
class _Wanted:
    """Children of one node that are still to be drawn.

    Attributes:
        row: number of the row.
        node: whose children they are.
        column: of the node's logits, in its table.
        top_k: indices in the draft vocabulary of the children that are not drawn.
        children: the nodes that wait for their tokens.
    """

    row: int
    node: int
    column: int
    top_k: list[int]
    children: list[int]


def _pays(rows: Sequence[_Growing], depth: int, calibration: Calibration, request: Request) -> bool:
    """Whether a further level of a dynamic tree is worth drafting: each node's best child, less what verifying costs,
    against what the level costs."""
    children = (
        row.accept_probs[node] * calibration.best_child(depth, row.left[node]) for row in rows for node, _ in row.level
    )
    return sum(max(0.0, accept_prob - request.threshold) for accept_prob in children) >= request.level_threshold


@torch.no_grad()
def grow(
    heads: Levels,
    state: Any,
    root: Root,
    request: Request,
    max_rank: int = MAX_RANK,
    depth_logits: DepthLogits | None = None,
    confidence: Confidence | None = None,
) -> Proposal:
    """Draft a tree after each row's root, level by level.

    The host waits for the device once a level, and once more where children are sampled; for heads that draft all
    depths in one forward, it is once in all, and once more.

    Args:
        heads: what drafts.
        state: of its `prefill`.
        root: each row's root.
        request: of the decode loop; its `shape` is filled where there is one.
        max_rank: children of a node at most, in a dynamic tree.
        depth_logits: of heads that draft all depths in one forward; None drafts level by level.
        confidence: of heads that draft level by level, where they say how good their drafts are.
    """
    shape, calibration = request.shape, request.calibration or Calibration()
    rows = [_Growing([token]) for token in root.tokens]
    ranks = min(shape.width if shape else 1 if request.chain else max_rank, heads.config.draft_width)
    levels = min(shape.depth if shape else heads.draft_steps, request.max_nodes - 1)
    reading_is_free = root.tokens_B.device.type == "cpu"
    sides = calibration.left is not None and not shape
    table, first, drafted = _Table.empty(), 0, 0
    wanted: list[_Wanted] = []
    for depth in range(levels):
        if depth and shape is None and not _pays(rows, depth, calibration, request):
            break
        if depth_logits is None:
            if depth:
                tokens_BW, parents_BW = _next_level(rows, root.tokens_B.device)
            else:
                tokens_BW = root.tokens_B[:, None]
                parents_BW = torch.zeros_like(tokens_BW)
            logits_BWD = heads.draft_step(state, tokens_BW, parents_BW, depth)
            said_BW = confidence(state, tokens_BW, depth) if confidence and calibration.trust and not shape else None
            table = _Table.read(logits_BWD, ranks, heads.draft_to_target_D, said_BW)
        elif depth >= first + table.width:
            # Where reading is free, the next depth waits until it is known to be worth its LM head.
            depths, first = range(depth, depth + 1 if reading_is_free else levels), depth
            table = _Table.read(depth_logits(state, root.tokens_B, depths), ranks, heads.draft_to_target_D)
        drafted += 1
        only = depth - first if depth_logits else 0 if table.width == 1 else None
        curves = [calibration.after(left) for left in (False, True)[: 1 + sides]]
        drafts = [table.drafts(depth, only, one, request.children is not Children.TOP_K) for one in curves]
        below = list(accumulate((calibration.best_child(lower) for lower in range(depth + 1, levels)), mul))
        for number, row in enumerate(rows):
            columns = range(len(row.level)) if only is None else [only] * len(row.level)
            tables = [
                _blend([side[number][0 if only is not None else column] for side in drafts], row.left[node])
                for column, (node, _) in zip(columns, row.level, strict=True)
            ]
            picks = _static(row, shape) if shape else _dynamic(row, tables, below, request)
            chosen = {above: [tables[above][rank] for rank in ranks] for above, ranks in enumerate(picks) if ranks}
            grown, sampled = _add(row, chosen, request.children)
            wanted += [
                _Wanted(number, row.level[above][0], columns[above], top_k, children)
                for above, (top_k, children) in sampled.items()
            ]
            if shape:
                _settle(row, [child for child, _ in grown], shape)
                grown = [pair for pair in grown if row.shape_nodes[pair[0]] in shape.inner]
            row.level = grown
            if not shape and len(row.tokens) > request.max_nodes:
                assert not sampled and not wanted, "a drawn node is never pushed out"
                row.keep_best(request.max_nodes)
        # The next table needs the tokens, or takes the place of this one.
        if depth_logits is None or depth + 1 == first + table.width:
            _draw(rows, wanted, table.logits_BWD, heads.draft_to_target_D, request)
            wanted = []
        if not any(row.level for row in rows):
            break
    _draw(rows, wanted, table.logits_BWD, heads.draft_to_target_D, request)
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
        confidence: [B, W], what the heads say of each node's children; None where nobody asks.
    """

    logits_BWD: Tensor
    log_probs: NDArray[Any]
    indices: NDArray[Any]
    tokens: NDArray[Any]
    confidence: NDArray[Any] | None = None

    @classmethod
    def empty(cls) -> _Table:
        none = np.zeros((0, 0, 0), dtype=np.int32)
        return cls(torch.zeros(0, 0, 0), none.astype(np.float32), none, none)

    @classmethod
    def read(
        cls, logits_BWD: Tensor, ranks: int, draft_to_target_D: Tensor, confidence_BW: Tensor | None = None
    ) -> _Table:
        """In one copy, since each waits for the device: the bits of the floats travel among the integers."""
        logits_BWD = logits_BWD.float()
        top = logits_BWD.topk(ranks, dim=-1)
        log_probs_BWR = top.values - logits_BWD.logsumexp(-1, keepdim=True)
        parts = [log_probs_BWR.view(torch.int32), top.indices.int(), draft_to_target_D[top.indices].int()]
        if confidence_BW is not None:
            said_BW1 = confidence_BW[:, : logits_BWD.shape[1], None].float()
            parts.append(said_BW1.expand(*top.indices.shape).contiguous().view(torch.int32))
        log_probs, indices, tokens, *said = torch.stack(parts).cpu().numpy()
        confidence = said[0].view(np.float32)[..., 0] if said else None
        return cls(logits_BWD, log_probs.view(np.float32), indices, tokens, confidence)

    @property
    def width(self) -> int:
        """W: nodes of a level, or levels."""
        return int(self.log_probs.shape[1])

    def drafts(self, depth: int, column: int | None, calibration: Calibration, drawn: bool) -> list[list[list[Draft]]]:
        """By row and node, the candidates from the best on; of one column alone where it serves a whole level. Where
        no child is `drawn`, candidates do not say how likely such a child would be."""
        part = slice(None) if column is None else slice(column, column + 1)
        log_probs = self.log_probs[:, part]
        said = None if self.confidence is None else self.confidence[:, part]
        probs = calibration.probs(depth, calibration.scores(log_probs, said)).tolist()
        draws = calibration.drawn(depth, log_probs, said).tolist() if drawn else probs
        own = np.exp(log_probs).tolist()
        columns = (self.indices[:, part].tolist(), self.tokens[:, part].tolist(), probs, draws, own)
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


def _blend(sides: Sequence[list[Draft]], left: float) -> list[Draft]:
    """The drafts of a node by how likely its path has left the best one; the first side is for paths that have not."""
    if len(sides) == 1 or left in (0.0, 1.0):
        return sides[int(left) if len(sides) > 1 else 0]
    return [
        (index, token, prob + left * (far - prob), drawn + left * (far_drawn - drawn), own)
        for (index, token, prob, drawn, own), (_, _, far, far_drawn, _) in zip(*sides, strict=True)
    ]


def _dynamic(row: _Growing, tables: Sequence[list[Draft]], below: Sequence[float], request: Request) -> list[list[int]]:
    """For each node of the level, the ranks whose paths are worth verifying; the best of them when room is short.

    Args:
        row: with the level.
        tables: of each of its nodes, the candidates.
        below: how likely a new node has a right child, a right grandchild and so on, when it is right itself.
        request: of the round.
    """
    found: list[_Found] = []
    for above, (node, _) in enumerate(row.level):
        for rank, more in enumerate(_marginals(tables[above], request.children)):
            accept_prob = row.accept_probs[node] * more
            if accept_prob < request.threshold or accept_prob <= 0:
                break
            found.append((-accept_prob, above, rank))
    if request.chain:
        found = sorted(found)[:1]
    elif request.children is Children.TOP_K:
        found = sorted(found)[: request.max_nodes - 1]
    else:
        found = _in_room(sorted(found), below, request.max_nodes - len(row.tokens))
    picks: list[list[int]] = [[] for _ in row.level]
    for _, above, rank in sorted(found, key=lambda one: one[1:]):
        picks[above].append(rank)
    return picks


def _in_room(found: list[_Found], below: Sequence[float], room: int) -> list[_Found]:
    """The best children for which there is room beside what is expected below better ones.

    >>> found = [(-0.5, 0, 0), (-0.3, 0, 1), (-0.2, 0, 2)]  # less their probabilities; the first one's child has 0.4
    >>> [len(_in_room(found, [0.8], room)) for room in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """
    better: list[float] = []  # expected nodes below those taken, falling ones last
    for count, (less, _, _) in enumerate(found):
        if count + sum(accept_prob > -less for accept_prob in better) >= room:
            return found[:count]
        better += [-less * share for share in below]
    return found


def _marginals(drafts: Sequence[Draft], children: Children) -> Iterator[float]:
    """What each further child adds to the probability that one of them is accepted; never more than the one before
    adds."""
    if children is Children.TOP_K:
        yield from (prob for _, _, prob, _, _ in drafts)
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
    probs = [prob for _, _, prob, _, _ in chosen[:fixed]]
    rejected = 1.0
    for _, _, _, sampled, _ in chosen[fixed:]:  # tried one after the other
        probs.append(rejected * sampled)
        rejected *= 1 - sampled
    return probs


def _top_k_count(count: int, children: Children) -> int:
    """How many of so many children are the most likely ones rather than sampled."""
    return {Children.TOP_K: count, Children.TOP_K_AND_SAMPLED: count - 1, Children.SAMPLED: 0}[children]


def _add(
    row: _Growing, chosen: dict[int, list[Draft]], children: Children
) -> tuple[list[tuple[int, int]], dict[int, tuple[list[int], list[int]]]]:
    """Give nodes of a level their children.

    Args:
        row: gets the children; sampled ones have no token yet.
        chosen: the drafts that they replace, by the node's own index in the level.
        children: how they are chosen.

    Returns:
        The new nodes, each with its parent's index in the level; and by that index, where children are to be drawn, the
        indices of the others in the draft vocabulary and the nodes of those that are drawn.
    """
    grown: list[tuple[int, int]] = []
    sampled: dict[int, tuple[list[int], list[int]]] = {}
    for above, drafts in chosen.items():
        node, _ = row.level[above]
        fixed = _top_k_count(len(drafts), children)
        accept_prob, left = row.accept_probs[node], row.left[node]
        stays = (1 - left) * (1.0 if fixed else drafts[0][-1])  # drawn, the first child may be another than the best
        nodes = [
            row.add(node, token if rank < fixed else _UNKNOWN, accept_prob * prob, 1.0 if rank else 1 - stays)
            for rank, ((_, token, *_), prob) in enumerate(zip(drafts, _probs(drafts, children), strict=True))
        ]
        grown += [(child, above) for child in nodes]
        if fixed < len(nodes):
            sampled[above] = [index for index, *_ in drafts[:fixed]], nodes[fixed:]
    return grown, sampled


def _draw(
    rows: Sequence[_Growing],
    wanted: Sequence[_Wanted],
    logits_BWD: Tensor,
    draft_to_target_D: Tensor,
    request: Request,
) -> None:
    """Draw the children that wait for it: those of all rows together, each row's with its own random numbers.

    The host waits for the device once. Where a distribution holds no further token, the nodes that should hold one are
    taken out again.
    """
    if not wanted:
        return
    assert request.warp is not None, "drawing needs a distribution"
    (_, width, size), maximum = logits_BWD.shape, max(len(one.children) for one in wanted)
    logits_ND = logits_BWD.flatten(0, 1)
    tokens_D1 = F.pad(draft_to_target_D, (0, 1), value=_UNKNOWN)
    numbers = _numbers(wanted, maximum, request.streams)
    q_draft: list[Tensor] = []
    found: list[Tensor] = []
    for part in in_parts(len(wanted), size, logits_BWD.device):
        own = wanted[part]
        # One upload: float64 holds every index.
        at = [one.row * width + one.column for one in own]
        known = [number * size + index for number, one in enumerate(own) for index in one.top_k]
        packed = [*chain.from_iterable(numbers[part]), *at, *known]
        packed_X = torch.tensor(packed, dtype=torch.float64, device=logits_BWD.device)
        number_MC, index_X = packed_X[: len(own) * maximum].view(-1, maximum), packed_X[len(own) * maximum :].long()
        q_draft_MD = request.warp(logits_ND.index_select(0, index_X[: len(own)]))
        if known:
            q_draft_MD.view(-1).index_fill_(0, index_X[len(own) :], 0.0)
        q_draft_MD /= q_draft_MD.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        q_draft += q_draft_MD.unbind()
        found.append(tokens_D1[draws(q_draft_MD, number_MC)])
    gone: list[set[int]] = [set() for _ in rows]
    tokens_MC = torch.cat(found) if len(found) > 1 else found[0]
    for one, q_draft_D, tokens in zip(wanted, q_draft, tokens_MC.tolist(), strict=True):
        row = rows[one.row]
        drawn: list[int] = []
        for child, token in zip(one.children, tokens, strict=False):
            row.tokens[child] = token
            (gone[one.row].add if token == _UNKNOWN else drawn.append)(child)
        if drawn:
            row.sampled[one.node] = SampledChildren(drawn, q_draft_D, draft_to_target_D)
    for row, missing in zip(rows, gone, strict=True):
        if missing:
            row.drop(missing)


def _numbers(wanted: Sequence[_Wanted], maximum: int, streams: Sequence[torch.Generator]) -> list[list[float]]:
    """A random number for each child to be drawn, each row's from its own stream; lists are filled up to `maximum`."""
    counts = Counter[int]()
    for one in wanted:
        counts[one.row] += len(one.children)
    drawn = {
        row: iter(torch.rand(count, generator=streams[row], dtype=torch.float64).tolist())
        for row, count in counts.items()
    }
    return [[*islice(drawn[one.row], len(one.children)), *[0.0] * (maximum - len(one.children))] for one in wanted]


def draws(q_draft_MD: Tensor, number_MC: Tensor) -> Tensor:
    """C draws from each distribution, without replacement, int64 [M, C]; D where it holds no further token."""
    found: list[Tensor] = []
    for number_M in number_MC.unbind(1):
        if found:
            last_M1 = found[-1][:, None].clamp(max=q_draft_MD.shape[1] - 1)
            q_draft_MD = q_draft_MD.scatter(1, last_M1, 0.0)
        found.append(fall_on(q_draft_MD, number_M))
    return torch.stack(found, dim=1) if len(found) > 1 else found[0][:, None]


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
