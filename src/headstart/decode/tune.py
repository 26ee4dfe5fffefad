"""Tuning: measured costs and measured acceptance give the tree with the most expected tokens per second.

Acceptance alone always asks for a wider tree; only the cost of verifying it on this machine says where to stop, and
"no speculation" is one of the choices (compare Sequoia, arXiv 2402.12374, and CaDDTree, arXiv 2606.01813). The best
static tree, the best chain, and what dynamic trees need (costs, and how far the heads' probabilities can be believed)
come out of the same two measurements; for sampling the second is made again on sampled answers.

Shape suffixes: B rows, T tokens, D draft vocabulary, M predictions, O origins, K steps, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from headstart.decode.budget import Costs
from headstart.decode.calibrate import Calibration, fit_calibration, replay_dynamic
from headstart.decode.drafters import Request, root_only
from headstart.decode.heads_drafter import HeadDrafter, Tree
from headstart.decode.measure import Supervised, measure_drafts, measure_sampling, sampled_answers
from headstart.decode.verify import GreedyVerifier
from headstart.errors import UserError
from headstart.heads import DraftHead
from headstart.heads.packed import pack, unpack
from headstart.target import DraftTree, Target, TreeShape
from headstart.target.tree import RankPath

_CLEARLY = 0.9
"""Share of the milliseconds of a draft below which 8 bits are worth the little that they take from acceptance."""


@dataclass
class Tuning:
    """A tree and the measurements it follows from; saved with the heads.

    Attributes:
        paths: rank paths of the chosen tree's nodes, root left out; empty means plain decoding is fastest.
        widths: tree widths (root included) whose verification was timed.
        verify_ms: for each width, milliseconds of a tree forward, choosing and committing, at batch 1.
        draft_ms: milliseconds of one draft with these heads, to their full depth with a tree of up to 16 nodes.
        level_ms: of which each level behind the first takes.
        packed: whether drafting with weights in 8 bits was clearly faster; the milliseconds are then its own.
        acceptance: for each depth and rank, how often that draft is right when the better choices above it were
            right (rank 0 at every depth above).
        predicted: `tokens_per_round` (τ, replayed on the calibration answers), `speedup` over plain decoding,
            `tokens_per_second`, of decoding with `tree`.
        curve: for each node count of a static tree tried, the predicted speed-up.
        tree: what decodes fastest by prediction: "dynamic" trees, or the "static" one.
        chain: length of the best chain.
        calibration: of the heads' probabilities, see `Calibration`: for greedy decoding, `sampled_` for temperature 1,
            `sampled_drawn_` for children that are drawn.
        settings: target, dtype, device, threads, context, positions measured on given and on sampled answers.
    """

    paths: tuple[RankPath, ...]
    widths: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float
    acceptance: list[list[float]]
    predicted: dict[str, float]
    curve: list[list[float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    tree: Tree = "static"
    chain: int = 0
    calibration: dict[str, list[list[float]]] = field(default_factory=dict)
    level_ms: float = 0.0
    packed: bool = False

    @property
    def costs(self) -> Costs:
        """What drafting and verifying cost on the machine that was measured."""
        return Costs(self.widths, self.verify_ms, self.draft_ms, self.level_ms, len(self.acceptance))

    def drafter(self, heads: DraftHead, tree: Tree | None = None) -> HeadDrafter | None:
        """These heads as a drafter, with the tree that was found best or another kind; None when none pays.

        The heads themselves are packed or unpacked, as was found faster.

        Raises:
            UserError: dynamic trees for heads that were tuned before there were any.
        """
        tree = tree or self.tree
        if tree == "dynamic" and not self.calibration:
            raise UserError("These heads have no calibration for dynamic trees.", "Tune them again: headstart tune.")
        if (tree == "chain" and not self.chain) or self.shape.size == 1:
            return None
        (pack if self.packed else unpack)(heads)
        if tree == "chain":
            return HeadDrafter(heads, TreeShape.chain(self.chain))
        calibration = Calibration.from_knots(self.calibration) or Calibration()
        if not calibration.reached:  # tuned by an older version; the table of the best path is close
            calibration = replace(calibration, reached=tuple(sum(best[:3]) for best in self.acceptance))
        sampled = Calibration.from_knots(self.calibration, "sampled_")
        return HeadDrafter(heads, self.shape, tree, calibration, sampled=sampled)

    @property
    def shape(self) -> TreeShape:
        """The chosen tree."""
        return TreeShape.from_paths(self.paths)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tuning:
        """The inverse of `to_json`."""
        return cls(
            **{
                **values,
                "paths": tuple(tuple(path) for path in values["paths"]),
                "widths": tuple(values["widths"]),
                "verify_ms": tuple(values["verify_ms"]),
            }
        )


def tune(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    *,
    widths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    context: int = 256,
    max_nodes: int = 64,
    max_rank: int = 10,
    console: Console | None = None,
) -> Tuning:
    """Measure costs and acceptance on this machine, and choose the tree.

    Args:
        target: the model.
        heads: trained heads, in the target's dtype and on its device.
        conversations: calibration conversations, kept out of training; the target answers some of them again at
            temperature 1.
        widths: tree widths to time; 1 is always among them.
        context: committed tokens in the cache while timing.
        max_nodes: widest tree considered, root included.
        max_rank: drafts of a depth considered.
        console: shows progress; None is silent.

    Raises:
        UserError: when the calibration conversations hold no position that reaches the last head.
    """
    unpack(heads)
    context = min(context, target.max_length - max(widths) - 1)
    widths = sorted({1, *(width for width in widths if context + width <= target.max_length)})
    ranks_OK, log_probs_OKR = measure_drafts(target, heads, conversations, max_rank, console)
    values = path_values(ranks_OK, max_rank)
    verify_ms = measure_verify(target, widths, context, heads.taps)
    draft_ms, level_ms, packed = _draft_costs(target, heads, values, context)
    costs = Costs(tuple(widths), tuple(verify_ms), draft_ms, level_ms, heads.steps)
    ordered = sorted(values, key=lambda path: (-values[path], len(path), path))
    largest = min(max_nodes, max(widths), len(ordered) + 1)
    # Not the mean over all positions: a long accepted run is one round, so rounds see fewer of the easy places.
    gains = [replay(ranks_OK, ordered[: nodes - 1]) for nodes in range(1, largest + 1)]
    depths = list(accumulate((len(path) for path in ordered), max, initial=0))
    best, curve = choose(gains, costs, depths)
    chains = range(heads.steps + 1)
    chain, _ = choose([replay(ranks_OK, TreeShape.chain(length).paths) for length in chains], costs, chains)
    chosen, gain = tuple(ordered[: best - 1]), gains[best - 1]
    round_ms = costs.verify(best) + costs.draft(depths[best - 1])
    calibration = fit_calibration(ranks_OK.numpy(), log_probs_OKR.numpy())
    texts = sampled_answers(target, conversations, heads.steps + 2, console)
    sampled_OK, *tables = measure_sampling(target, heads, texts, max_rank, console)
    sampled = fit_calibration(sampled_OK.numpy(), *(table.numpy() for table in tables))
    dynamic_gain, dynamic_ms = replay_dynamic(ranks_OK.numpy(), log_probs_OKR.numpy(), calibration, costs)
    dynamic = best > 1 and dynamic_gain / dynamic_ms > gain / round_ms
    if dynamic:
        gain, round_ms = dynamic_gain, dynamic_ms
    return Tuning(
        paths=tuple(TreeShape.from_paths(chosen).paths),
        widths=tuple(widths),
        verify_ms=tuple(verify_ms),
        draft_ms=draft_ms,
        acceptance=_acceptance(ranks_OK, max_rank),
        predicted={
            "tokens_per_round": gain,
            "speedup": gain * verify_ms[0] / round_ms,
            "tokens_per_second": 1e3 * gain / round_ms,
        },
        curve=curve,
        settings={
            "target": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "context": context,
            "positions": len(ranks_OK),
            "sampled_positions": len(sampled_OK),
        },
        tree="dynamic" if dynamic else "static",
        chain=chain - 1,
        calibration=calibration.knots() | sampled.knots("sampled_"),
        level_ms=level_ms,
        packed=packed,
    )


def replay(ranks_OK: Tensor, paths: Sequence[RankPath]) -> float:
    """τ of a tree when the origins are decoded one after the other: each round goes on behind what it accepted.

    Origins count as consecutive positions of one text; where conversations meet, a round may cross over, which changes
    one round in a conversation.

    >>> replay(torch.tensor([[0], [5], [5], [5]]), [(0,)])  # accepts one, skips its place, then twice nothing
    1.3333333333333333
    """
    tree, ranks, position, rounds, emitted = set(paths), ranks_OK.tolist(), 0, 0, 0
    while position < len(ranks):
        row = ranks[position]
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in tree:
            depth += 1
        rounds += 1
        emitted += depth + 1
        position += depth + 1
    return emitted / rounds


def choose(gains: Sequence[float], costs: Costs, depths: Sequence[int]) -> tuple[int, list[list[float]]]:
    """The node count (root included) with the most expected tokens per millisecond; 1 is plain decoding.

    Args:
        gains: τ of the best tree of 1, 2, 3, ... nodes; the first is plain decoding.
        costs: as measured.
        depths: of those trees, 0 for plain decoding.

    Returns:
        (best node count, [[node count, predicted speed-up], ...]).

    >>> choose([1.0, 1.5, 1.75], Costs((1, 4), (10.0, 10.0), 1.0), [0, 1, 1])[0]
    3
    >>> choose([1.0, 1.5, 1.75], Costs((1, 2), (10.0, 20.0), 1.0), [0, 1, 1])[0]
    1
    """
    curve = [
        [float(nodes), gain * costs.verify(1) / (costs.verify(nodes) + costs.draft(depth))]
        for nodes, (gain, depth) in enumerate(zip(gains, depths, strict=False), start=1)
    ]
    return max(range(len(curve)), key=lambda i: curve[i][1]) + 1, curve


def path_values(ranks_OK: Tensor, max_rank: int) -> dict[RankPath, float]:
    """How often each rank path is the true continuation: the share of origins whose ranks begin with it.

    Counting whole paths keeps the correlation between depths that a product of per-head accuracies loses.

    >>> path_values(torch.tensor([[0, 1], [0, 0], [2, 0], [9, 9]]), max_rank=3)[(0,)]
    0.5
    """
    counts: Counter[RankPath] = Counter()
    for row in ranks_OK.tolist():
        for depth in range(1, len(row) + 1):
            if row[depth - 1] >= max_rank:
                break
            counts[tuple(row[:depth])] += 1
    return {path: count / len(ranks_OK) for path, count in counts.items()}


@torch.inference_mode()
def measure_verify(
    target: Target, widths: Sequence[int], context: int, taps: Sequence[int], repeats: int = 30
) -> list[float]:
    """Milliseconds of verifying each width at batch 1: tree forward, choice, commit.

    Widths take turns so that a slow moment of the machine hits all of them, and the lower quartile of their times
    counts: neighbours make a forward slower, never faster. The result never falls with width: it lies half way between
    the envelopes from either side.
    """
    verifier = GreedyVerifier()
    prompt = [1 + i % (target.vocab_size - 1) for i in range(context)]
    cache = target.new_cache(1, context + max(widths) + 1)
    target.prefill(cache, [prompt])
    trees = [
        DraftTree.from_shape(
            torch.arange(width, device=target.device)[None] % target.vocab_size,
            TreeShape.from_paths([(i // 2,) + (0,) * (i % 2) for i in range(width - 1)]),
        )
        for width in widths
    ]
    times: list[list[float]] = [[] for _ in widths]
    for _ in range(repeats + 2):
        for spent, tree in zip(times, trees, strict=True):
            start = perf_counter()
            out = target.forward_tree(cache, tree, taps)
            verifier.accept(tree, out.logits_BTV)
            cache.commit([[0]])
            spent.append(1e3 * (perf_counter() - start))
            cache.lengths[0] = context
    quartiles = [float(np.percentile(spent[2:], 25)) for spent in times]
    above, below = np.maximum.accumulate(quartiles), np.minimum.accumulate(quartiles[::-1])[::-1]
    return [float(ms) for ms in (above + below) / 2]


def _draft_costs(
    target: Target, heads: DraftHead, values: dict[RankPath, float], context: int
) -> tuple[float, float, bool]:
    """What `_draft_ms` measures, and whether that is with the weights in 8 bits: where they are clearly faster."""
    full: list[tuple[float, float]] = []
    packed: list[tuple[float, float]] = []
    for _ in range(2):  # in turns, so that a slow moment of the machine decides nothing
        full.append(_draft_ms(target, heads, values, context))
        if pack(heads):
            packed.append(_draft_ms(target, heads, values, context))
            unpack(heads)
    if packed and min(packed)[0] < _CLEARLY * min(full)[0]:
        return (*min(packed), True)
    return (*min(full), False)


@torch.inference_mode()
def _draft_ms(target: Target, heads: DraftHead, values: dict[RankPath, float], context: int) -> tuple[float, float]:
    """Milliseconds of one draft and one observation with a tree of up to 16 of the best nodes, and of a further level.

    Trees cut behind their first level and whole ones take turns; the lower quartile of each counts. The target runs in
    between, as it does in decoding: its weights push those of the heads out of the caches.
    """
    paths = sorted(values, key=lambda path: (-values[path], len(path), path))[:15]
    shapes = [TreeShape.from_paths([path for path in paths if len(path) == 1]), TreeShape.from_paths(paths)]
    prompt = [1 + i % (target.vocab_size - 1) for i in range(min(context, 32))]
    cache = target.new_cache(1, len(prompt) + 1)
    states = target.prefill(cache, [prompt], heads.taps).taps
    root_B = torch.tensor([1], device=target.device)
    last = {tap: state[:, -1:] for tap, state in states.items()}
    drafters = [HeadDrafter(heads, shape) for shape in shapes]
    sessions = [drafter.open([prompt], states) for drafter in drafters]
    times: list[list[float]] = [[], []]
    for _ in range(18):
        for drafter, session, spent in zip(drafters, sessions, times, strict=True):
            target.forward_tree(cache, root_only(root_B)).logits_BTV.sum().item()  # waits for the device, too
            start = perf_counter()
            drafter.propose(session, root_B, Request(drafter.max_nodes)).tokens_BN.tolist()
            drafter.observe(session, root_B[:, None], last, [1])
            spent.append(1e3 * (perf_counter() - start))
    first, whole = (float(np.percentile(spent[3:], 25)) for spent in times)
    level = max(0.0, whole - first) / max(1, shapes[1].depth - 1)
    return whole + level * (heads.steps - shapes[1].depth), level


def _acceptance(ranks_OK: Tensor, max_rank: int) -> list[list[float]]:
    """Per depth, the share of each rank among origins whose shallower drafts of rank 0 were all right."""
    table = []
    alive_O = torch.ones(len(ranks_OK), dtype=torch.bool)
    for depth in range(ranks_OK.shape[1]):
        ranks = ranks_OK[alive_O, depth]
        counts = torch.bincount(ranks, minlength=max_rank + 1)[:max_rank]
        table.append((counts / max(1, len(ranks))).tolist())
        alive_O &= ranks_OK[:, depth] == 0
    return table
