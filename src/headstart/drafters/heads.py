"""Trained heads as a drafter: grow a token tree level by level, with acceptance probabilities.

Static trees take the ranks of their shape. Dynamic trees take every child that pays for its verification, by the heads'
probabilities calibrated to acceptance (EAGLE-2's idea, arXiv 2406.16858, with measured calibration and costs). The
number of a node's children never depends on a sampled token, so sampling stays lossless.

If more paths pay than fit, the tree keeps the best, whatever their depth: nodes of a level replace worse ones above.
Probabilities fall along a path, so no better path goes through a replaced node. A best-first search would find the same
tree, but a level costs only one call of the heads. A sampled node is never replaced, since that could depend on its
token. Trees with such nodes leave room at each level for the nodes expected below (see `draft_sampling` for their
tokens).

Shape suffixes: B rows, W nodes of one level, D draft vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.decode.options import TreeKind
from headstart.drafters.draft_graphs import DraftGraphs, best_drafts
from headstart.drafters.draft_sampling import UNKNOWN, GrowingTree, Leaf, PendingChild, PendingSamples
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
    """Drafter with trained heads of any family.

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
        self._interpolated: dict[float, Calibration] = {}
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
            # Too little room, or a target that verifies only chains.
            shape = TreeShape.chain(min(shape.depth, nodes - 1))
        request = replace(request, max_nodes=nodes, calibration=self._calibration_at(request.temperature), shape=shape)
        if shape is None and not request.sample_drafts and len(roots.trees) == 1:
            tree = self.heads.draft_tree(session, roots.root_tokens[0], request, MAX_RANK)
            if tree is not None:
                return [tree]
        graphs = self._graphs if self._graphs and self._graphs.prepare(session, len(roots.trees), nodes) else None
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
        if share not in self._interpolated:
            self._interpolated[share] = self.calibration.towards(self._sampled, share)
        return self._interpolated[share]

    def commit(self, session: Any, committed: Committed) -> None:
        self.heads.commit(session, committed)

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        self.heads.reorder(session, rows)

    def join(self, session: Any, other: Any) -> Any:
        self.heads.join(session, other)
        return session


class ShippedDrafter(HeadDrafter):
    """Drafter of chains with the multi-token-prediction module of the target's checkpoint, untrained."""

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
"""A possible child: index in the draft vocabulary, token, acceptance probability given its parent, and for sampling the
acceptance probability of a child sampled in its place and its probability under the heads."""


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

    The host waits for the device once a level, or once for a `OneForwardHead`; plus once if children are sampled.
    """
    shape, calibration = request.shape, request.calibration or Calibration()
    rows = [GrowingTree(Tree([token], accept_probs=[1.0]), [Leaf()]) for token in roots.root_tokens]
    ranks = min(shape.width if shape else 1 if request.chain else max_rank, heads.max_children)
    levels = min(shape.depth if shape else heads.draft_steps, request.max_nodes - 1)
    all_at_once, reading_is_free = isinstance(heads, OneForwardHead), roots.tokens_BN.is_cpu
    table: _Table | None = None
    first = drafted = 0
    children: list[PendingChild] = []
    samples: PendingSamples | None = None
    for depth in range(levels):
        if depth and shape is None and not _level_pays(rows, depth, calibration, request):
            break
        if table is None or not all_at_once or depth >= first + table.width:
            # If reading is free, the next depth waits until it is known to be worth its LM head.
            depths = range(depth, levels if all_at_once and not reading_is_free else depth + 1)
            table = _read_level(heads, session, roots, rows, depths, ranks, graphs, samples)
            first, samples = depth, None
        drafted += 1
        # The column of all nodes of the level, if they share one.
        shared = depth - first if all_at_once else 0 if table.width == 1 else None
        children += _add_level(rows, table, depth, shared, calibration, levels, request)
        # The next table needs the tokens, or replaces this one.
        if children and (not all_at_once or depth + 1 == first + table.width):
            samples = PendingSamples(rows, children, table.logits_BWD, heads.draft_to_target_D, request)
            children = []
            if reading_is_free or all_at_once:
                samples.assign()
                samples = None
        if not any(row.level for row in rows):
            break
    if children and table is not None:
        samples = PendingSamples(rows, children, table.logits_BWD, heads.draft_to_target_D, request)
    if samples is not None:
        samples.assign()
    for row in rows:
        row.tree.levels = drafted
        if shape:  # verified without pruning
            row.tree.accept_probs = None
    return [row.tree for row in rows]


def _level_pays(rows: Sequence[GrowingTree], depth: int, calibration: Calibration, request: Request) -> bool:
    """Whether the best children, less the cost of verifying them, are worth a further level."""
    children = (
        leaf.prob * calibration.child_acceptance(depth, leaf.off_best_prob) for row in rows for leaf in row.level
    )
    return sum(max(0.0, accept_prob - request.threshold) for accept_prob in children) >= request.level_threshold


class _Table:
    """The `best_drafts` of some levels on the host, and their logits on the device."""

    def __init__(self, logits_BWD: Tensor, best: Tensor, samples: PendingSamples | None) -> None:
        """Read `best_drafts`, along with tokens sampled on the device."""
        self.logits_BWD = logits_BWD
        self.width = best.shape[2]  # nodes of a level, or levels
        if samples is None:
            self.best_3BWR = best.cpu().numpy()
        else:
            numbers = torch.cat([best.flatten(), samples.tokens_M.int()]).cpu().numpy()
            samples.assign(numbers[best.numel() :].tolist())
            self.best_3BWR = numbers[: best.numel()].reshape(best.shape)

    def candidates(
        self, depth: int, column: int | None, calibration: Calibration, sampling: bool
    ) -> list[list[list[_Candidate]]]:
        """Candidates by row and node, best first; of one column if it serves a whole level."""
        best_3BWR = self.best_3BWR if column is None else self.best_3BWR[:, :, column : column + 1]
        log_probs, (indices, tokens) = best_3BWR[0].view(np.float32), best_3BWR[1:].tolist()
        probs = calibration.probs(depth, log_probs).tolist()
        sampled_probs = calibration.sampled_probs(depth, log_probs).tolist() if sampling else probs
        q_draft = np.exp(log_probs).tolist() if sampling else probs
        columns = (indices, tokens, probs, sampled_probs, q_draft)
        return [
            [list(zip(*node, strict=True)) for node in zip(*row, strict=True)] for row in zip(*columns, strict=True)
        ]


def _read_level(
    heads: DraftHead,
    session: Any,
    roots: TreeBatch,
    rows: Sequence[GrowingTree],
    depths: range,
    ranks: int,
    graphs: DraftGraphs | None,
    samples: PendingSamples | None,
) -> _Table:
    """Draft the next level, or these depths of a `OneForwardHead`, and read its best drafts and pending samples."""
    width = max(len(row.level) for row in rows)
    tokens, parents = list[list[int]](), list[list[int]]()  # tokens of the nodes and columns of their parents, [B, W]
    for row in rows:
        padding = width - len(row.level)
        tokens.append([*(row.tree.tokens[leaf.node] for leaf in row.level), *[row.tree.tokens[0]] * padding])
        parents.append([*(leaf.parent_column for leaf in row.level), *[0] * padding])
    if graphs is not None:
        write = upload_into if samples is None else samples.fill
        level = graphs.run_level(session, roots.root_B, (tokens, parents), depths, ranks, write)
        if level is not None:
            return _Table(*level, samples)
    if isinstance(heads, OneForwardHead):
        logits_BWD = heads.depth_logits(session, roots.root_B, depths)
    else:
        tokens_BW, parents_BW = roots.tokens_BN, torch.tensor(parents)
        if samples is not None:
            tokens_BW = torch.empty(parents_BW.shape, dtype=torch.long, device=tokens_BW.device)
            samples.fill(tokens_BW, torch.tensor(tokens))
        elif depths.start:
            tokens_BW = upload(tokens, tokens_BW.device)
        logits_BWD = heads.draft_step(session, tokens_BW, parents_BW, depths.start)
    return _Table(logits_BWD, best_drafts(logits_BWD, ranks, heads.draft_to_target_D), samples)


def _add_level(
    rows: Sequence[GrowingTree],
    table: _Table,
    depth: int,
    shared: int | None,
    calibration: Calibration,
    levels: int,
    request: Request,
) -> list[PendingChild]:
    """Add children to the nodes of a level; return those without a token. `shared` is the column of all nodes, if they
    share one."""
    shape, sampling = request.shape, request.sample_drafts
    shape_children = shape.children if shape else []
    curves = [calibration] if shape or calibration.off_best is None else [calibration, calibration.off_best]
    by_curve = [table.candidates(depth, shared, curve, sampling) for curve in curves]
    # Probabilities that a right node has a right child, a right grandchild and so on.
    below = list(accumulate((calibration.child_acceptance(lower) for lower in range(depth + 1, levels)), mul))
    pending: list[PendingChild] = []
    for number, row in enumerate(rows):
        candidates = [
            _interpolate([of_curve[number][leaf.column if shared is None else 0] for of_curve in by_curve], leaf)
            for leaf in row.level
        ]
        if shape:
            picks = [[shape.ranks[child] for child in shape_children[leaf.shape_node]] for leaf in row.level]
        else:
            picks = _pick_ranks(row, candidates, below, request)
        for leaf, node, siblings in _extend(row, candidates, picks, shape_children, sampling):
            pending.append(PendingChild(number, node, leaf.column if shared is None else shared, siblings))
        if not shape and row.tree.size > request.max_nodes:
            assert not sampling, "a sampled node is never removed"
            row.keep(row.tree.best(request.max_nodes))
    return pending


def _interpolate(by_curve: Sequence[list[_Candidate]], leaf: Leaf) -> list[_Candidate]:
    """Interpolate a node's candidates on and off the best path, by the probability that its path has left it."""
    off_best_prob = leaf.off_best_prob
    if len(by_curve) == 1 or off_best_prob in (0.0, 1.0):
        return by_curve[int(off_best_prob) if len(by_curve) > 1 else 0]
    return [
        (index, token, prob + off_best_prob * (off - prob), sampled + off_best_prob * (sampled_off - sampled), q_draft)
        for (index, token, prob, sampled, q_draft), (_, _, off, sampled_off, _) in zip(*by_curve, strict=True)
    ]


def _pick_ranks(
    row: GrowingTree, candidates: Sequence[list[_Candidate]], below: Sequence[float], request: Request
) -> list[list[int]]:
    """Pick the ranks worth verifying for each node of the level, or the best of them if room is short. `below` are the
    probabilities that a right node has a right child, a right grandchild and so on."""
    found: list[tuple[float, int, int]] = []  # (-path probability, parent's index, rank), best first
    for parent, (leaf, own) in enumerate(zip(row.level, candidates, strict=True)):
        gains = _marginal_gains(own) if request.sample_drafts else [prob for _, _, prob, _, _ in own]
        for rank, gain in enumerate(gains):
            accept_prob = leaf.prob * gain
            if accept_prob < request.threshold or accept_prob <= 0:
                break
            found.append((-accept_prob, parent, rank))
    found.sort()
    if request.chain:
        found = found[:1]
    elif request.sample_drafts:
        found = _leave_room(found, below, request.max_nodes - row.tree.size)
    else:
        found = found[: request.max_nodes - 1]
    picks: list[list[int]] = [[] for _ in row.level]
    for _, parent, rank in sorted(found, key=itemgetter(1, 2)):
        picks[parent].append(rank)
    return picks


def _leave_room(found: list[tuple[float, int, int]], below: Sequence[float], room: int) -> list[tuple[float, int, int]]:
    """Return the best children that fit, with room for the nodes expected below better ones.

    >>> found = [(-0.5, 0, 0), (-0.3, 0, 1), (-0.2, 0, 2)]  # the first one's child has 0.4
    >>> [len(_leave_room(found, [0.8], room)) for room in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """
    expected: list[float] = []  # probabilities of the nodes expected below those taken
    for count, (negated, _, _) in enumerate(found):
        if count + sum(accept_prob > -negated for accept_prob in expected) >= room:
            return found[:count]
        expected += [-negated * share for share in below]
    return found


def _marginal_gains(candidates: Sequence[_Candidate]) -> Iterator[float]:
    """Yield how much each further child adds to the probability that one is accepted if the last is sampled, never
    increasing."""
    fixed, before, gain = 0.0, 0.0, 1.0
    for _, _, prob, sampled_prob, _ in candidates:
        total = fixed + sampled_prob
        gain = min(gain, total - before)
        yield gain
        fixed, before = fixed + prob, total


def _extend(
    row: GrowingTree,
    candidates: Sequence[list[_Candidate]],
    picks: Sequence[list[int]],
    shape_children: Sequence[list[int]],
    sampling: bool,
) -> list[tuple[Leaf, int, list[int]]]:
    """Add children to the nodes of a level, which become the row's level; `picks` are the ranks of each node's
    children. With `sampling` the last child has no token yet: return its parent, its node, and its siblings' indices in
    the draft vocabulary."""
    level: list[Leaf] = []
    pending: list[tuple[Leaf, int, list[int]]] = []
    for leaf, own, ranks in zip(row.level, candidates, picks, strict=True):
        if not ranks:
            continue
        chosen = [own[rank] for rank in ranks]
        shape_nodes = shape_children[leaf.shape_node] if shape_children else [0] * len(chosen)
        # An only child that is sampled may differ from the best; of several children, the first is the best.
        first_is_best = (1 - leaf.off_best_prob) * (chosen[0][-1] if sampling and len(chosen) == 1 else 1.0)
        for rank, ((_, token, prob, sampled_prob, _), shape_node) in enumerate(zip(chosen, shape_nodes, strict=True)):
            sampled = sampling and rank == len(chosen) - 1
            accept_prob = leaf.prob * (sampled_prob if sampled else prob)
            node = row.tree.add(leaf.node, UNKNOWN if sampled else token, accept_prob)
            if not shape_children or shape_children[shape_node]:
                off_best_prob = 1.0 if rank else 1 - first_is_best
                level.append(Leaf(node, accept_prob, leaf.column, off_best_prob, shape_node, len(level)))
            if sampled:
                pending.append((leaf, node, [index for index, *_ in chosen[:-1]]))
    row.level = level
    return pending
