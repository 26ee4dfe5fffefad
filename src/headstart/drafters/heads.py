"""Trained heads as a drafter: a token tree grown level by level, which children each node gets, how probable each is.

Static trees take the ranks that their shape names. Dynamic trees take every child whose path pays for its verification,
by the heads' own probabilities turned into probabilities of acceptance (EAGLE-2's idea, arXiv 2406.16858, with measured
calibration and costs). How many children a node has never depends on which token was drawn for one, so sampling stays
lossless.

Where more paths pay than a tree may hold, it holds the best of them, whatever their depth: a level's nodes push out
worse ones above, which no better path can go through, since probabilities fall along a path. So a tree is the one that
a best-first search finds, at one call of the heads a level. A drawn node is never pushed out, for this could depend on
its token: trees with such nodes leave room at each level for what is expected below it.

A drawn child gets its place in the tree first and its token later: those of all rows are drawn together, as soon as
anything depends on them.

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, R ranks, M nodes to be drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headstart.decode.options import TreeKind
from headstart.drafters.captured import DraftGraphs, best_drafts
from headstart.heads.base import DraftHead, OneForwardHead
from headstart.heads.parts.graphed import GraphedHead
from headstart.support.rng import fall_on, in_parts
from headstart.support.uploads import upload
from headstart.target.graphs import WIDTHS
from headstart.target.prepacked import refresh
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Committed, Drawn, Request, Tree, TreeBatch, TreeShape

MAX_RANK = 8
"""Children of a node at most, in a dynamic tree."""
_UNKNOWN = -1
"""Stands for the token of a child that is not drawn yet, or cannot be."""


class HeadDrafter:
    """Draft with trained heads of any family.

    Args:
        heads: what drafts.
        shape: the static tree; no deeper than the heads, and no wider than their draft vocabulary.
        tree: "static" drafts `shape`; "dynamic" chooses nodes each round; "chain" the best draft of each depth of
            `shape`.
        calibration: of the heads' probabilities, for dynamic trees.
        sampled: the same at temperature 1; between 0 and 1 what lies between the two is taken. None: `calibration`.
        max_nodes: nodes of a dynamic tree at most, root included.
    """

    def __init__(
        self,
        heads: DraftHead,
        shape: TreeShape,
        tree: TreeKind = "static",
        calibration: Calibration | None = None,
        max_nodes: int = 32,
        sampled: Calibration | None = None,
    ) -> None:
        heads.check_tree(shape)
        self.heads = heads.eval()
        self.tree = tree
        self.shape = {"dynamic": None, "static": shape, "chain": TreeShape.chain(shape.depth)}[tree]
        self.calibration = calibration or Calibration()
        self._sampled = sampled
        self._warm: dict[float, Calibration] = {}
        on_gpu = heads.draft_to_target_D.device.type == "cuda"
        self._graphs = DraftGraphs(heads) if on_gpu and isinstance(heads, GraphedHead) else None
        self.aux_layers = heads.aux_layers
        self.bytes_per_token = heads.bytes_per_token
        self.max_nodes = max_nodes if self.shape is None else self.shape.size

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        refresh(self.heads.parameters())
        return self.heads.prefill(prompts, states)

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        nodes, shape = min(request.max_nodes, self.max_nodes), self.shape
        if shape is not None and (nodes < shape.size or (request.chain and shape.width > 1)):
            # Memory is short, or the rule takes chains only.
            shape = TreeShape.chain(min(shape.depth, nodes - 1))
        calibration = self._calibration_at(request.temperature)
        request = replace(request, max_nodes=nodes, calibration=calibration, shape=shape)
        depth_logits = self.heads.depth_logits if isinstance(self.heads, OneForwardHead) else None
        graphs = self._graphs if self._graphs and self._graphs.ready(session, len(roots.trees), nodes) else None
        return grow(self.heads, session, roots, request, depth_logits=depth_logits, graphs=graphs)

    @property
    def forwards(self) -> str:
        """How its drafts run, for reports."""
        if self._graphs is None:
            family = self.heads.family
            on_gpu = self.heads.draft_to_target_D.device.type == "cuda"
            return f"eager: {family} heads are not captured" if on_gpu else "eager"
        if self.max_nodes > WIDTHS[-1]:
            return f"eager: a tree has up to {self.max_nodes} nodes, and graphs are for {WIDTHS[-1]} at most"
        return "CUDA graphs" if self._graphs.refused is None else f"eager, no CUDA graphs: {self._graphs.refused}"

    def _calibration_at(self, temperature: float) -> Calibration:
        share = min(1.0, temperature)
        if self._sampled is None or share == 0:
            return self.calibration
        if share not in self._warm:
            self._warm[share] = self.calibration.towards(self._sampled, share)
        return self._warm[share]

    def commit(self, session: Any, committed: Committed) -> None:
        self.heads.commit(session, committed)

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        self.heads.reorder(session, rows)


# -- growing ----------------------------------------------------------------------------------------------------------


class Levels(Protocol):
    """What `grow` takes of a `DraftHead`."""

    draft_to_target_D: Tensor

    @property
    def draft_steps(self) -> int: ...

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor: ...


DepthLogits = Callable[[Any, Tensor, range], Tensor]
"""See `OneForwardHead.depth_logits`."""


_Candidate = tuple[int, int, float, float, float]
"""What may become a child: its index in the draft vocabulary, its token, its probability of acceptance after its
parent, that of a child drawn instead of it, and its share of the heads' own distribution."""


class _Leaf(NamedTuple):
    """A node of the last level, which may get children."""

    node: int
    above: int = 0
    """Its parent's index in the level before."""
    off_best: float = 0.0
    """How likely its path has left the best one, see `Calibration.off_best`; between 0 and 1 for drawn nodes alone."""
    place: int = 0
    """The node of the static shape that it fills; 0 in a dynamic tree."""


class _Undrawn(NamedTuple):
    """A child that is still to be drawn, from the logits of its parent's column, without its siblings' tokens."""

    row: int
    node: int
    column: int
    siblings: list[int]


@dataclass
class _Growing:
    """One row's tree while it grows, and the nodes of its last level that may get children."""

    tree: Tree
    level: list[_Leaf]

    def keep(self, nodes: Sequence[int]) -> None:
        """See `Tree.keep`."""
        renumbered = self.tree.keep(nodes)
        self.level = [leaf._replace(node=renumbered[leaf.node]) for leaf in self.level if leaf.node in renumbered]


@torch.no_grad()
def grow(
    heads: Levels,
    session: Any,
    roots: TreeBatch,
    request: Request,
    max_rank: int = MAX_RANK,
    depth_logits: DepthLogits | None = None,
    graphs: DraftGraphs | None = None,
) -> list[Tree]:
    """Draft a tree after each row's root, level by level; `depth_logits` are of heads that draft all depths in one
    forward, `graphs` of heads whose levels are captured. Fills the request's `shape` where there is one, else nodes
    have `max_rank` children at most.

    The host waits for the device once a level, and once more where children are drawn; for heads that draft all depths
    in one forward, once in all, and once more.
    """
    shape, calibration = request.shape, request.calibration or Calibration()
    rows = [_Growing(Tree([token], accept_probs=[1.0]), [_Leaf(0)]) for token in roots.root_tokens]
    ranks = min(shape.width if shape else 1 if request.chain else max_rank, len(heads.draft_to_target_D))
    levels = min(shape.depth if shape else heads.draft_steps, request.max_nodes - 1)
    shape_children = shape.children if shape else []
    reading_is_free = roots.root_B.device.type == "cpu"
    curves = [calibration] if shape or calibration.off_best is None else [calibration, calibration.off_best]
    table: _Table | None = None
    first = drafted = 0
    undrawn: list[_Undrawn] = []

    def read(depths: range) -> _Table:
        """The best drafts of the next level, or of these depths."""
        level = None if graphs is None else graphs.level(session, roots.root_B, _level(rows), depths, ranks)
        if level is not None:
            return _Table.of(*level)
        if depth_logits is not None:
            return _Table.read(depth_logits(session, roots.root_B, depths), ranks, heads.draft_to_target_D)
        tokens_BW, parents_BW = roots.tokens_BN, torch.zeros_like(roots.tokens_BN)
        if depths.start:
            tokens_BW, parents_BW = upload(_level(rows), roots.root_B.device).unbind()
        logits_BWD = heads.draft_step(session, tokens_BW, parents_BW, depths.start)
        return _Table.read(logits_BWD, ranks, heads.draft_to_target_D)

    for depth in range(levels):
        if depth and shape is None and not _pays(rows, depth, calibration, request):
            break
        if depth_logits is None or table is None or depth >= first + table.width:
            # Where reading is free, the next depth waits until it is known to be worth its LM head.
            last = depth + 1 if depth_logits is None or reading_is_free else levels
            table, first = read(range(depth, last)), depth
        drafted += 1
        shared = depth - first if depth_logits else 0 if table.width == 1 else None  # column of all nodes of the level
        sides = [table.candidates(depth, shared, curve, request.draws) for curve in curves]
        below = list(accumulate((calibration.best_child(lower) for lower in range(depth + 1, levels)), mul))
        for number, row in enumerate(rows):
            columns = [index if shared is None else shared for index in range(len(row.level))]
            tables = [
                _blend([side[number][index if shared is None else 0] for side in sides], leaf.off_best)
                for index, leaf in enumerate(row.level)
            ]
            if shape:
                picks = [[shape.ranks[child] for child in shape_children[leaf.place]] for leaf in row.level]
            else:
                picks = _worth_it(row, tables, below, request)
            for above, node, siblings in _extend(row, tables, picks, shape_children, request.draws):
                undrawn.append(_Undrawn(number, node, columns[above], siblings))
            if not shape and row.tree.size > request.max_nodes:
                assert not request.draws, "a drawn node is never pushed out"
                row.keep(row.tree.best(request.max_nodes))
        # The next table needs the tokens, or takes the place of this one.
        if depth_logits is None or depth + 1 == first + table.width:
            _draw(rows, undrawn, table, heads.draft_to_target_D, request)
            undrawn = []
        if not any(row.level for row in rows):
            break
    _draw(rows, undrawn, table, heads.draft_to_target_D, request)
    # A static tree is verified as it is.
    return [replace(row.tree, accept_probs=None if shape else row.tree.accept_probs, levels=drafted) for row in rows]


def _pays(rows: Sequence[_Growing], depth: int, calibration: Calibration, request: Request) -> bool:
    """Whether each node's best child, less what verifying costs, is worth what a further level costs."""
    children = (
        _prob(row.tree, leaf.node) * calibration.best_child(depth, leaf.off_best) for row in rows for leaf in row.level
    )
    return sum(max(0.0, accept_prob - request.threshold) for accept_prob in children) >= request.level_threshold


def _prob(tree: Tree, node: int) -> float:
    assert tree.accept_probs is not None, "a growing tree knows its probabilities"
    return tree.accept_probs[node]


def _level(rows: Sequence[_Growing]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the level's nodes and their parents' indices in the level before, [B, W], short rows padded."""
    width = max(len(row.level) for row in rows)
    tokens, parents = [], []
    for row in rows:
        padding = width - len(row.level)
        tokens.append([*(row.tree.tokens[leaf.node] for leaf in row.level), *[row.tree.tokens[0]] * padding])
        parents.append([*(leaf.above for leaf in row.level), *[0] * padding])
    return tokens, parents


@dataclass
class _Table:
    """The best drafts of some levels, on the host, [B, W, R]: log-probabilities, indices in the draft vocabulary and
    tokens of the target; and on the device the logits, for drawing."""

    logits_BWD: Tensor
    log_probs: NDArray[Any]
    indices: NDArray[Any]
    tokens: NDArray[Any]

    @classmethod
    def read(cls, logits_BWD: Tensor, ranks: int, draft_to_target_D: Tensor) -> _Table:
        logits_BWD = logits_BWD.float()
        return cls.of(logits_BWD, best_drafts(logits_BWD, ranks, draft_to_target_D))

    @classmethod
    def of(cls, logits_BWD: Tensor, best: Tensor) -> _Table:
        """From what `best_drafts` gives."""
        log_probs, indices, tokens = best.cpu().numpy()
        return cls(logits_BWD, log_probs.view(np.float32), indices, tokens)

    @property
    def width(self) -> int:
        """W: nodes of a level, or levels."""
        return int(self.log_probs.shape[1])

    def candidates(
        self, depth: int, column: int | None, calibration: Calibration, draws: bool
    ) -> list[list[list[_Candidate]]]:
        """By row and node, the candidates from the best on; of one column alone where it serves a whole level."""
        part = slice(None) if column is None else slice(column, column + 1)
        log_probs = self.log_probs[:, part]
        probs = calibration.probs(depth, log_probs).tolist()
        drawn_probs = calibration.drawn(depth, log_probs).tolist() if draws else probs
        q_draft = np.exp(log_probs).tolist()
        columns = (self.indices[:, part].tolist(), self.tokens[:, part].tolist(), probs, drawn_probs, q_draft)
        return [
            [list(zip(*node, strict=True)) for node in zip(*row, strict=True)] for row in zip(*columns, strict=True)
        ]


def _blend(sides: Sequence[list[_Candidate]], off_best: float) -> list[_Candidate]:
    """A node's candidates by how likely its path has left the best one; the first side is for paths that have not."""
    if len(sides) == 1 or off_best in (0.0, 1.0):
        return sides[int(off_best) if len(sides) > 1 else 0]
    return [
        (index, token, prob + off_best * (far - prob), drawn_prob + off_best * (far_drawn - drawn_prob), q_draft)
        for (index, token, prob, drawn_prob, q_draft), (_, _, far, far_drawn, _) in zip(*sides, strict=True)
    ]


def _worth_it(
    row: _Growing, tables: Sequence[list[_Candidate]], below: Sequence[float], request: Request
) -> list[list[int]]:
    """For each node of the level, the ranks whose paths are worth verifying; the best of them when room is short.
    `below` says how likely a new node has a right child, a right grandchild and so on, when it is right itself."""
    grown: list[tuple[float, int, int]] = []  # less the path's probability, the parent's index, the rank: best first
    for above, leaf in enumerate(row.level):
        for rank, marginal in enumerate(_marginals(tables[above], request.draws)):
            accept_prob = _prob(row.tree, leaf.node) * marginal
            if accept_prob < request.threshold or accept_prob <= 0:
                break
            grown.append((-accept_prob, above, rank))
    grown.sort()
    if request.chain:
        grown = grown[:1]
    elif request.draws:
        grown = _in_room(grown, below, request.max_nodes - row.tree.size)
    else:
        grown = grown[: request.max_nodes - 1]
    picks: list[list[int]] = [[] for _ in row.level]
    for _, above, rank in sorted(grown, key=lambda child: child[1:]):
        picks[above].append(rank)
    return picks


def _in_room(grown: list[tuple[float, int, int]], below: Sequence[float], room: int) -> list[tuple[float, int, int]]:
    """The best children for which there is room beside what is expected below better ones.

    >>> grown = [(-0.5, 0, 0), (-0.3, 0, 1), (-0.2, 0, 2)]  # the first one's child has 0.4
    >>> [len(_in_room(grown, [0.8], room)) for room in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """
    better: list[float] = []  # probabilities of the nodes expected below those taken
    for count, (less, _, _) in enumerate(grown):
        if count + sum(accept_prob > -less for accept_prob in better) >= room:
            return grown[:count]
        better += [-less * share for share in below]
    return grown


def _marginals(candidates: Sequence[_Candidate], draws: bool) -> Iterator[float]:
    """What each further child adds to the probability that one of them is accepted; never more than the one before
    adds."""
    if not draws:
        yield from (prob for _, _, prob, _, _ in candidates)
        return
    before, marginal = 0.0, 1.0
    for count in range(1, len(candidates) + 1):
        together = sum(_probs(candidates[:count], draws))
        marginal = min(marginal, together - before)
        yield marginal
        before = together


def _probs(chosen: Sequence[_Candidate], draws: bool) -> list[float]:
    """Each child's probability of acceptance. With `draws` the last child is the drawn one."""
    fixed = len(chosen) - draws
    return [drawn_prob if rank == fixed else prob for rank, (_, _, prob, drawn_prob, _) in enumerate(chosen)]


def _extend(
    row: _Growing,
    tables: Sequence[list[_Candidate]],
    picks: Sequence[list[int]],
    shape_children: Sequence[list[int]],
    draws: bool,
) -> list[tuple[int, int, list[int]]]:
    """Give the nodes of a level their children, which become the row's level: `picks` are of each node the ranks that
    become children. With `draws` the last one has no token yet: returns its parent's index in the level, its node,
    and its siblings' indices in the draft vocabulary."""
    level: list[_Leaf] = []
    undrawn: list[tuple[int, int, list[int]]] = []
    for above, (leaf, candidates, ranks) in enumerate(zip(row.level, tables, picks, strict=True)):
        chosen = [candidates[rank] for rank in ranks]
        places = shape_children[leaf.place] if shape_children else [0] * len(chosen)
        details = zip(chosen, _probs(chosen, draws), _have_left(leaf, chosen, draws), places, strict=True)
        for rank, ((_, token, *_), prob, off_best, place) in enumerate(details):
            drawn = draws and rank == len(chosen) - 1
            node = row.tree.add(leaf.node, _UNKNOWN if drawn else token, _prob(row.tree, leaf.node) * prob)
            if not shape_children or shape_children[place]:
                level.append(_Leaf(node, above, off_best, place))
            if drawn:
                undrawn.append((above, node, [index for index, *_ in chosen[:-1]]))
    row.level = level
    return undrawn


def _have_left(leaf: _Leaf, chosen: Sequence[_Candidate], draws: bool) -> list[float]:
    """How likely the path to each of a node's children has left the best one: an only child that is drawn may be
    another than the best; of several, the first is the best."""
    stays = (1 - leaf.off_best) * (chosen[0][-1] if draws and len(chosen) == 1 else 1.0)
    return [1.0 if rank else 1 - stays for rank in range(len(chosen))]


def _draw(
    rows: Sequence[_Growing],
    undrawn: Sequence[_Undrawn],
    table: _Table | None,
    draft_to_target_D: Tensor,
    request: Request,
) -> None:
    """Draw the children that wait for it, of all rows together, each row's with its own random numbers. Where a
    distribution holds no further token, the node that should hold one is taken out again."""
    if not undrawn or table is None:
        return
    assert request.warp is not None, "drawing needs a distribution"
    device, (_, width, size) = table.logits_BWD.device, table.logits_BWD.shape
    logits_XD = table.logits_BWD.flatten(0, 1)
    tokens_D1 = F.pad(draft_to_target_D, (0, 1), value=_UNKNOWN)
    numbers = _numbers(undrawn, request.streams)
    q_draft: list[Tensor] = []
    tokens: list[Tensor] = []
    for part in in_parts(len(undrawn), size, device):
        children = undrawn[part]
        # One upload: float64 holds every index.
        at = [child.row * width + child.column for child in children]
        siblings = [number * size + index for number, child in enumerate(children) for index in child.siblings]
        packed = upload([*numbers[part], *at, *siblings], device, torch.float64)
        number_M, index_X = packed[: len(children)], packed[len(children) :].long()
        q_draft_MD = request.warp(logits_XD.index_select(0, index_X[: len(children)]))
        if siblings:
            q_draft_MD.view(-1).index_fill_(0, index_X[len(children) :], 0.0)
        q_draft_MD /= q_draft_MD.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        q_draft += q_draft_MD.unbind()
        tokens.append(tokens_D1[fall_on(q_draft_MD, number_M)])
    for child, q_draft_D, token in zip(undrawn, q_draft, torch.cat(tokens).tolist(), strict=True):
        tree = rows[child.row].tree
        tree.tokens[child.node] = token
        tree.drawn[child.node] = Drawn(q_draft_D, draft_to_target_D)
    for row in rows:
        if _UNKNOWN in row.tree.tokens:
            row.keep(_without_unknown(row.tree))


def _numbers(undrawn: Sequence[_Undrawn], streams: Sequence[torch.Generator]) -> list[float]:
    """A random number for each child to be drawn, each row's from its own stream."""
    counts = Counter(child.row for child in undrawn)
    drawn = {
        row: iter(torch.rand(count, generator=streams[row], dtype=torch.float64).tolist())
        for row, count in counts.items()
    }
    return [next(drawn[child.row]) for child in undrawn]


def _without_unknown(tree: Tree) -> list[int]:
    """Nodes whose token is known, as are all on their path."""
    known: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if token != _UNKNOWN and (node == 0 or parent in known):
            known.append(node)
    return known
