"""Trained heads as a drafter: grow a token tree level by level, with acceptance probabilities.

Static trees take the ranks of their shape. Dynamic trees take every child that pays for its verification, by the heads'
probabilities calibrated to acceptance (EAGLE-2's idea, arXiv 2406.16858, with measured calibration and costs). The
number of a node's children never depends on a drawn token, so sampling stays lossless.

If more paths pay than fit, the tree keeps the best, whatever their depth: nodes of a level replace worse ones above,
which no better path can go through, since probabilities fall along a path. So a best-first search would find the same
tree, and each level costs one call of the heads. A drawn node is never replaced, for this could depend on its token:
trees with such nodes leave room at each level for the nodes expected below. Drawn children get their places first and
their tokens later (see `drawing`).

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.decode.options import TreeKind
from headstart.drafters.captured import DraftGraphs, best_drafts
from headstart.drafters.drawing import UNKNOWN, Draws, Growing, Leaf, Undrawn
from headstart.heads.base import DraftHead, OneForwardHead
from headstart.heads.mtp import shipped_heads
from headstart.heads.parts.graphed import GraphedHead
from headstart.kernels import draft_kernels
from headstart.kernels.prepacked import refresh
from headstart.model.model import Target
from headstart.replay.cuda_graphs import WIDTHS
from headstart.support.uploads import upload, upload_into
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, TreeShape

SHIPPED_STEPS = 3
"""Default drafts of a target's own module: it was trained for the first, and each further one starts from a guess."""
MAX_RANK = 8
"""Most children of a node in a dynamic tree."""


class HeadDrafter:
    """Draft with trained heads of any family.

    Args:
        shape: the static tree, at most as deep as the heads and as wide as their draft vocabulary.
        tree: "static" drafts `shape`; "dynamic" chooses nodes each round; "chain" the best draft of each depth of
            `shape`.
        calibration: of the heads' probabilities, for dynamic trees.
        sampled: the same at temperature 1; interpolated between 0 and 1. None: `calibration`.
        max_nodes: most nodes of a dynamic tree, root included.
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
        device = heads.draft_to_target_D.device.type
        self._graphs = DraftGraphs(heads) if device == "cuda" and isinstance(heads, GraphedHead) else None
        # Compile now, so that no first answer is delayed.
        self._compiled = device == "cpu" and any(draft_kernels.compiled(weight.dtype) for weight in heads.parameters())
        self.aux_layers = heads.aux_layers
        self.bytes_per_token = heads.bytes_per_token
        self.max_nodes = max_nodes if self.shape is None else self.shape.size

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        refresh(self.heads.parameters())
        return self.heads.prefill(prompts, states)

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        self.heads.read_text(session, request.check)
        nodes, shape = min(request.max_nodes, self.max_nodes), self.shape
        if shape is not None and (nodes < shape.size or (request.chain and shape.width > 1)):
            # Too little room, or a target that verifies chains only.
            shape = TreeShape.chain(min(shape.depth, nodes - 1))
        request = replace(request, max_nodes=nodes, calibration=self._calibration_at(request.temperature), shape=shape)
        if shape is None and not request.draws and len(roots.trees) == 1:
            tree = self.heads.draft_tree(session, roots.root_tokens[0], request, MAX_RANK)
            if tree is not None:
                return [tree]
        graphs = self._graphs if self._graphs and self._graphs.ready(session, len(roots.trees), nodes) else None
        return grow(self.heads, session, roots, request, graphs=graphs)

    @property
    def forwards(self) -> str:
        """How its drafts run, for reports."""
        if self._graphs is None:
            if self.heads.draft_to_target_D.device.type == "cuda":
                return f"eager: {self.heads.family} heads are not captured"
            return "compiled" if self._compiled else "eager"
        if self.max_nodes > WIDTHS[-1]:
            return f"eager: a tree has up to {self.max_nodes} nodes, and graphs are for {WIDTHS[-1]} at most"
        return "CUDA graphs" if self._graphs.refused is None else f"eager, no CUDA graphs: {self._graphs.refused}"

    @property
    def spare_bytes(self) -> int:
        """Memory kept from the last text for the next one, which is released for a different one."""
        return 0 if self._graphs is None else self._graphs.spare_bytes

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


class ShippedDrafter(HeadDrafter):
    """Draft chains with the multi-token-prediction module of the target's checkpoint, untrained."""

    def __init__(self, target: Target, draft_steps: int = SHIPPED_STEPS) -> None:
        heads = shipped_heads(target, draft_steps)
        super().__init__(heads, TreeShape.chain(draft_steps), "dynamic", max_nodes=draft_steps + 1)
        self.draft_share = (
            draft_steps * (heads.trainable_parameters + target.lm_head_weight.numel()) / target.parameters
        )

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        return super().propose(session, roots, replace(request, chain=True))


# -- growing ----------------------------------------------------------------------------------------------------------


_Candidate = tuple[int, int, float, float, float]
"""A possible child: index in the draft vocabulary, token, and acceptance probability given its parent; for drawing also
the acceptance probability of a child drawn in its place, and its probability under the heads."""


@torch.no_grad()
def grow(
    heads: DraftHead,
    session: Any,
    roots: TreeBatch,
    request: Request,
    max_rank: int = MAX_RANK,
    graphs: DraftGraphs | None = None,
) -> list[Tree]:
    """Draft a tree after each row's root, level by level, of the request's `shape` or with at most `max_rank` children
    a node. `graphs` replay the levels, if given.

    The host waits for the device once a level, or once for a `OneForwardHead`; plus once where children are drawn.
    """
    shape, calibration = request.shape, request.calibration or Calibration()
    depth_logits = heads.depth_logits if isinstance(heads, OneForwardHead) else None
    rows = [Growing(Tree([token], accept_probs=[1.0]), [Leaf(0)]) for token in roots.root_tokens]
    ranks = min(shape.width if shape else 1 if request.chain else max_rank, heads.draft_to_target_D.numel())
    levels = min(shape.depth if shape else heads.draft_steps, request.max_nodes - 1)
    shape_children = shape.children if shape else []
    device, reading_is_free = roots.tokens_BN.device, roots.tokens_BN.is_cpu
    curves = [calibration] if shape or calibration.off_best is None else [calibration, calibration.off_best]
    table: _Table | None = None
    first = drafted = 0
    undrawn: list[Undrawn] = []
    draws: Draws | None = None

    def read(depths: range) -> _Table:
        """Read the best drafts of the next level or of the given depths, along with pending draws."""
        put = upload_into if draws is None else draws.put
        level = None if graphs is None else graphs.level(session, roots.root_B, _level(rows), depths, ranks, put)
        if level is not None:
            return _Table.of(*level, draws)
        if depth_logits is not None:
            logits_BWD = depth_logits(session, roots.root_B, depths)
        else:
            tokens, parents = _level(rows)
            tokens_BW, parents_BW = roots.tokens_BN, torch.tensor(parents)
            if draws is not None:
                tokens_BW = torch.empty(parents_BW.shape, dtype=torch.long, device=device)
                draws.put(tokens_BW, torch.tensor(tokens))
            elif depths.start:
                tokens_BW = upload(tokens, device)
            logits_BWD = heads.draft_step(session, tokens_BW, parents_BW, depths.start)
        return _Table.of(logits_BWD, best_drafts(logits_BWD, ranks, heads.draft_to_target_D), draws)

    for depth in range(levels):
        if depth and shape is None and not _pays(rows, depth, calibration, request):
            break
        if depth_logits is None or table is None or depth >= first + table.width:
            # If reading is free, the next depth waits until it is known to be worth its LM head.
            last = depth + 1 if depth_logits is None or reading_is_free else levels
            table, first, draws = read(range(depth, last)), depth, None
        drafted += 1
        shared = depth - first if depth_logits else 0 if table.width == 1 else None  # column of all nodes of the level
        sides = [table.candidates(depth, shared, curve, request.draws) for curve in curves]
        below = list(accumulate((calibration.best_child(lower) for lower in range(depth + 1, levels)), mul))
        for number, row in enumerate(rows):
            columns = [leaf.column if shared is None else shared for leaf in row.level]
            tables = [
                _blend([side[number][leaf.column if shared is None else 0] for side in sides], leaf.off_best)
                for leaf in row.level
            ]
            if shape:
                picks = [[shape.ranks[child] for child in shape_children[leaf.place]] for leaf in row.level]
            else:
                picks = _worth_it(row, tables, below, request)
            for above, node, siblings in _extend(row, tables, picks, shape_children, request.draws):
                undrawn.append(Undrawn(number, node, columns[above], siblings))
            if not shape and row.tree.size > request.max_nodes:
                assert not request.draws, "a drawn node is never pushed out"
                row.keep(row.tree.best(request.max_nodes))
        # The next table needs the tokens, or replaces this one.
        if undrawn and (depth_logits is None or depth + 1 == first + table.width):
            draws, undrawn = Draws(rows, undrawn, table.logits_BWD, heads.draft_to_target_D, request), []
            if reading_is_free or depth_logits is not None:
                draws.take()
                draws = None
        if not any(row.level for row in rows):
            break
    if undrawn and table is not None:
        draws = Draws(rows, undrawn, table.logits_BWD, heads.draft_to_target_D, request)
    if draws is not None:
        draws.take()
    for row in rows:
        row.tree.levels = drafted
        if shape:  # verified without pruning
            row.tree.accept_probs = None
    return [row.tree for row in rows]


def _pays(rows: Sequence[Growing], depth: int, calibration: Calibration, request: Request) -> bool:
    """Whether the best children, less the cost of verifying them, are worth a further level."""
    children = (
        _prob(row.tree, leaf.node) * calibration.best_child(depth, leaf.off_best) for row in rows for leaf in row.level
    )
    return sum(max(0.0, accept_prob - request.threshold) for accept_prob in children) >= request.level_threshold


def _prob(tree: Tree, node: int) -> float:
    assert tree.accept_probs is not None, "a growing tree knows its probabilities"
    return tree.accept_probs[node]


def _level(rows: Sequence[Growing]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the level's nodes and their parents' columns, [B, W], short rows padded."""
    width = max(len(row.level) for row in rows)
    tokens, parents = [], []
    for row in rows:
        padding = width - len(row.level)
        tokens.append([*(row.tree.tokens[leaf.node] for leaf in row.level), *[row.tree.tokens[0]] * padding])
        parents.append([*(leaf.above for leaf in row.level), *[0] * padding])
    return tokens, parents


@dataclass
class _Table:
    """The `best_drafts` of some levels on the host, and their logits on the device, for drawing."""

    logits_BWD: Tensor
    best_3BWR: NDArray[np.int32]

    @classmethod
    def of(cls, logits_BWD: Tensor, best: Tensor, draws: Draws | None = None) -> _Table:
        """Read `best_drafts`, along with tokens drawn on the device."""
        if draws is None:
            return cls(logits_BWD, best.cpu().numpy())
        numbers = torch.cat([best.flatten(), draws.tokens_M.int()]).cpu().numpy()
        draws.take(numbers[best.numel() :].tolist())
        return cls(logits_BWD, numbers[: best.numel()].reshape(best.shape))

    @property
    def width(self) -> int:
        """W: nodes of a level, or levels."""
        return int(self.best_3BWR.shape[2])

    def candidates(
        self, depth: int, column: int | None, calibration: Calibration, draws: bool
    ) -> list[list[list[_Candidate]]]:
        """Candidates by row and node, best first; of one column if it serves a whole level."""
        best_3BWR = self.best_3BWR if column is None else self.best_3BWR[:, :, column : column + 1]
        log_probs, (indices, tokens) = best_3BWR[0].view(np.float32), best_3BWR[1:].tolist()
        probs = calibration.probs(depth, log_probs).tolist()
        drawn_probs = calibration.drawn(depth, log_probs).tolist() if draws else probs
        q_draft = np.exp(log_probs).tolist() if draws else probs
        columns = (indices, tokens, probs, drawn_probs, q_draft)
        return [
            [list(zip(*node, strict=True)) for node in zip(*row, strict=True)] for row in zip(*columns, strict=True)
        ]


def _blend(sides: Sequence[list[_Candidate]], off_best: float) -> list[_Candidate]:
    """Interpolate a node's candidates by the probability that its path has left the best one."""
    if len(sides) == 1 or off_best in (0.0, 1.0):
        return sides[int(off_best) if len(sides) > 1 else 0]
    return [
        (index, token, prob + off_best * (far - prob), drawn_prob + off_best * (far_drawn - drawn_prob), q_draft)
        for (index, token, prob, drawn_prob, q_draft), (_, _, far, far_drawn, _) in zip(*sides, strict=True)
    ]


def _worth_it(
    row: Growing, tables: Sequence[list[_Candidate]], below: Sequence[float], request: Request
) -> list[list[int]]:
    """For each node of the level, the ranks worth verifying, or the best of them if room is short. `below` are the
    probabilities that a right node has a right child, a right grandchild and so on."""
    grown: list[tuple[float, int, int]] = []  # (-path probability, parent's index, rank), best first
    for above, leaf in enumerate(row.level):
        path_prob = _prob(row.tree, leaf.node)
        candidates = tables[above]
        marginals = _marginals(candidates) if request.draws else [prob for _, _, prob, _, _ in candidates]
        for rank, marginal in enumerate(marginals):
            accept_prob = path_prob * marginal
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
    for _, above, rank in sorted(grown, key=itemgetter(1, 2)):
        picks[above].append(rank)
    return picks


def _in_room(grown: list[tuple[float, int, int]], below: Sequence[float], room: int) -> list[tuple[float, int, int]]:
    """The best children that fit, with room for the nodes expected below better ones.

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


def _marginals(candidates: Sequence[_Candidate]) -> Iterator[float]:
    """Yield how much each further child adds to the probability that one is accepted if the last is drawn, never
    increasing."""
    before, marginal = 0.0, 1.0
    for count in range(1, len(candidates) + 1):
        together = sum(_probs(candidates[:count], True))
        marginal = min(marginal, together - before)
        yield marginal
        before = together


def _probs(chosen: Sequence[_Candidate], draws: bool) -> list[float]:
    """Each child's acceptance probability. With `draws` the last child is the drawn one."""
    fixed = len(chosen) - draws
    return [drawn_prob if rank == fixed else prob for rank, (_, _, prob, drawn_prob, _) in enumerate(chosen)]


def _extend(
    row: Growing,
    tables: Sequence[list[_Candidate]],
    picks: Sequence[list[int]],
    shape_children: Sequence[list[int]],
    draws: bool,
) -> list[tuple[int, int, list[int]]]:
    """Add children to the nodes of a level, which become the row's level; `picks` are the ranks of each node's
    children. With `draws` the last child has no token yet: returns its parent's index in the level, its node, and its
    siblings' indices in the draft vocabulary."""
    level: list[Leaf] = []
    undrawn: list[tuple[int, int, list[int]]] = []
    for above, (leaf, candidates, ranks) in enumerate(zip(row.level, tables, picks, strict=True)):
        if not ranks:
            continue
        path_prob, chosen = _prob(row.tree, leaf.node), [candidates[rank] for rank in ranks]
        places = shape_children[leaf.place] if shape_children else [0] * len(chosen)
        details = zip(chosen, _probs(chosen, draws), _have_left(leaf, chosen, draws), places, strict=True)
        for rank, ((_, token, *_), prob, off_best, place) in enumerate(details):
            drawn = draws and rank == len(chosen) - 1
            node = row.tree.add(leaf.node, UNKNOWN if drawn else token, path_prob * prob)
            if not shape_children or shape_children[place]:
                level.append(Leaf(node, leaf.column, off_best, place, len(level)))
            if drawn:
                undrawn.append((above, node, [index for index, *_ in chosen[:-1]]))
    row.level = level
    return undrawn


def _have_left(leaf: Leaf, chosen: Sequence[_Candidate], draws: bool) -> list[float]:
    """Probability for each child that its path has left the best one: an only child that is drawn may differ from the
    best; of several children, the first is the best."""
    stays = (1 - leaf.off_best) * (chosen[0][-1] if draws and len(chosen) == 1 else 1.0)
    return [1.0 if rank else 1 - stays for rank in range(len(chosen))]
