"""Tuning: choose the tree with the most expected tokens per second from measured costs and acceptance.

Acceptance alone always favours a larger tree; the cost of verifying it on this machine sets the limit, and plain
decoding is one of the choices (compare Sequoia, arXiv 2402.12374, and CaDDTree, arXiv 2606.01813). The best static
tree, the best chain, and costs and calibration of dynamic trees follow from the same two measurements. For sampling,
acceptance is measured again on sampled answers.

Shape suffixes: O origins, K steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError
from rich.console import Console
from torch import Tensor

from headstart.decode.costs import Conditions, Costs, Measured
from headstart.decode.options import TreeKind
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.int8_weights import drop_int8, to_int8
from headstart.model.model import Target
from headstart.recipes.sections import TuneSection
from headstart.tree.calibration import Calibration
from headstart.tree.tree import RankPath, TreeShape
from headstart.tuning.acceptance import Drafts, Supervised, measure_drafts, sampled_answers
from headstart.tuning.calibrate import fit_calibration
from headstart.tuning.stopwatch import Timing, measure_costs

_KIND = 100
"""Fewest positions of a kind in the report."""
TUNE = "headstart tune HEADS, outside of a run with --conversations FILE.jsonl"


@dataclass
class Tuning:
    """A tree and the measurements it follows from; saved with the heads.

    Attributes:
        paths: rank paths of the chosen tree without the root; empty if plain decoding is fastest.
        node_counts, verify_ms, draft_ms, level_ms, read_ms: see `Costs`; at batch 1, and drafts with up to 16 nodes.
        packed: whether int8 weights drafted clearly faster; the milliseconds are then theirs.
        acceptance: by depth and rank, how often that draft is right after right drafts of rank 0.
        predicted: `tokens_per_round` (τ, replayed on the validation answers), `speedup` over plain decoding and
            `tokens_per_second` of the static tree; dynamic trees do as well or better.
        curve: [node count, predicted speed-up] of static trees.
        tree: "dynamic", or "static" if nothing pays or the target takes chains only.
        chain: length of the best chain.
        calibration: see `Calibration.knots`; for greedy decoding, and with the prefix `sampled_` for temperature 1.
        kinds: acceptance on the validation answers by kind of prompt, see `by_kind`.
        settings: target, dtype, device, threads, context, positions measured on given and on sampled answers, and
            `conditions` of the costs, see `Conditions`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    paths: tuple[RankPath, ...]
    node_counts: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float
    acceptance: list[Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)]]
    predicted: dict[str, float]
    curve: list[Annotated[list[float], Field(min_length=2, max_length=2)]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    tree: TreeKind = "static"
    chain: NonNegativeInt = 0
    calibration: dict[str, list[list[float]]] = field(default_factory=dict)
    level_ms: float = 0.0
    packed: bool = False
    read_ms: float = 0.0
    kinds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def costs(self) -> Costs:
        return Costs(self.node_counts, self.verify_ms, self.draft_ms, self.level_ms, len(self.acceptance), self.read_ms)

    @property
    def conditions(self) -> Conditions | None:
        """The conditions of the costs; None for imported heads, which were not tuned."""
        return Conditions.from_json(self.settings.get("conditions"))

    def at_costs(self, measured: Measured) -> Tuning:
        """Choose static tree and chain again at other costs, for the same acceptance.

        The tokens per round of a static tree follow from `curve`, or else from `acceptance`. Dynamic trees follow the
        costs by themselves.
        """
        costs = measured.costs
        ranked = self.ranked_paths[: max(len(self.paths), len(self.curve) - 1) or None]
        accept_probs = list(accumulate((path_prob(path, self.acceptance) for path in ranked), initial=1.0))
        for index, ((nodes, speedup), depth) in enumerate(zip(self.curve, _depths(ranked), strict=False)):
            before_ms = self.costs.verify(int(nodes)) + self.costs.draft(depth)
            accept_probs[index] = speedup * before_ms / self.costs.verify(1)
        paths, predicted, curve = _best_static(ranked, accept_probs, costs)
        along_best = accumulate((ranks[0] for ranks in self.acceptance), mul, initial=1.0)
        same = len(self.paths) == len(paths)
        return replace(
            self,
            paths=self.paths if same else tuple(TreeShape.from_paths(paths).paths),
            **_cost_fields(measured),
            chain=_best_chain(list(accumulate(along_best)), costs),
            tree="dynamic" if self.calibration and not same else self.tree,
            curve=curve,
            predicted=predicted,
        )

    @property
    def ranked_paths(self) -> list[RankPath]:
        """Paths of the static tree, most likely first, then the next ones by `acceptance`."""
        own = sorted(self.paths, key=lambda path: (-path_prob(path, self.acceptance), len(path), path))
        count = max(len(own), len(self.curve) - 1, 15)
        return [*own, *(path for path in likely_paths(self.acceptance, count) if path not in own)][:count]

    def drafter(self, heads: DraftHead, tree: TreeKind | None = None) -> HeadDrafter | None:
        """Make a drafter of packed heads (see `pack`) with the best tree or another kind; None if none pays. Raises
        UserError for dynamic trees of imported heads that are not tuned yet."""
        tree = tree or self.tree
        if tree == "dynamic" and not self.calibration:
            raise UserError("These heads have no calibration for dynamic trees.", f"Tune them: {TUNE}.")
        if (tree == "chain" and not self.chain) or self.shape.size == 1:
            return None
        self.pack(heads)
        if tree == "chain":
            return HeadDrafter(heads, TreeShape.chain(self.chain))
        calibration = Calibration.from_knots(self.calibration)
        sampled = Calibration.from_knots(self.calibration, "sampled_")
        return HeadDrafter(heads, self.shape, tree, calibration, sampled=sampled)

    def pack(self, heads: DraftHead) -> None:
        """Convert the heads to int8 weights or back, whichever is faster."""
        (to_int8 if self.packed else drop_int8)(heads)

    @property
    def shape(self) -> TreeShape:
        return TreeShape.from_paths(self.paths)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Tuning:
        """Rebuild from `to_json`. Raises UserError with the field that is missing or out of range."""
        try:
            made: Tuning = TypeAdapter(cls).validate_python(values)
            _ = made.costs, made.conditions
            curves = {
                name
                for prefix in ("", "sampled_")
                if (known := Calibration.from_knots(made.calibration, prefix))
                for name in known.knots(prefix)
            }
            if unknown := sorted(made.calibration.keys() - curves):
                raise ValueError(f"calibration has no curve {unknown[0]}")
            if made.chain > len(made.acceptance):
                raise ValueError(
                    f"chain is {made.chain}, and acceptance was measured for {len(made.acceptance)} drafts"
                )
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, (error.title, *first['loc'])))}: {first['msg']}"
        except ValueError as error:
            problem = str(error)
        else:
            return made
        raise UserError(
            f"The calibration is damaged: {problem}.", f"Export or fetch the heads again, or tune them: {TUNE}."
        )


def tune(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    options: TuneSection | None = None,
    console: Console | None = None,
    before: Tuning | None = None,
) -> Tuning:
    """Measure costs and acceptance on this machine, and choose the tree.

    Heads are in the target's dtype and on its device. The conversations were held out from training; the target answers
    some of them again at temperature 1. Costs of `before`, the tuning of heads with the same config, are used if given.
    Raises UserError if no conversation holds a position that reaches the last head.
    """
    drop_int8(heads)
    options = options or TuneSection()
    max_rank = min(options.max_rank, heads.max_children)
    timing = Timing(options.widths, options.context).within(target)
    drafts = measure_drafts(target, heads, conversations, max_rank, console)
    ranks_OK = drafts.ranks_OK
    values = path_values(ranks_OK, max_rank)
    ordered = sorted(values, key=lambda path: (-values[path], len(path), path))
    if target.chains_only:
        ordered = [path for path in ordered if not any(path)]
    if before is not None and before.conditions is not None:
        measured, conditions = Measured(before.costs, before.packed), before.settings["conditions"]
    else:
        measured = measure_costs(target, heads, ordered, timing)
        conditions = Conditions.of(target).to_json() | {"context": timing.context, "rows": 1}
    costs = measured.costs
    # Replayed, not averaged over positions: a long accepted path is one round, so rounds meet fewer easy positions.
    ordered = ordered[: min(options.max_nodes, max(timing.node_counts)) - 1]
    accept_probs = [replay(ranks_OK, ordered[:count]) for count in range(len(ordered) + 1)]
    paths, predicted, curve = _best_static(ordered, accept_probs, costs)
    chain = _best_chain([replay(ranks_OK, TreeShape.chain(length).paths) for length in range(costs.levels + 1)], costs)
    texts = sampled_answers(target, conversations, heads.draft_steps + 2, console)
    drawn = measure_drafts(target, heads, texts, max_rank, console, sampling=True)
    return Tuning(
        paths=tuple(TreeShape.from_paths(paths).paths),
        **_cost_fields(measured),
        acceptance=_acceptance(ranks_OK, max_rank),
        predicted=predicted,
        curve=curve,
        settings={
            "target": target.name,
            "dtype": target.dtype_name,
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "context": timing.context,
            "conditions": conditions,
            "positions": len(ranks_OK),
            "sampled_positions": len(drawn.ranks_OK),
        },
        tree="dynamic" if paths and not target.chains_only else "static",
        chain=chain,
        calibration=fit_calibration(*drafts.arrays).knots() | fit_calibration(*drawn.arrays).knots("sampled_"),
        kinds=by_kind(drafts, [getattr(text, "category", "") for text in conversations]),
    )


def _cost_fields(measured: Measured) -> dict[str, Any]:
    """Convert to fields of `Tuning`."""
    fields = asdict(measured.costs) | {"packed": measured.packed}
    del fields["levels"]  # the length of `acceptance`
    return fields


def by_kind(drafts: Drafts, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return acceptance by kind of text, worst first, after a row for all texts (`kind` is empty).

    A row has `texts`, `positions`, `tau` (tokens per round of a greedy chain of all steps, see `replay`) and the
    target's mean `entropy` in nats, which measures how hard the text is to predict. `names` are the kinds of the texts,
    in their order; "" counts in the first row only. Kinds with few positions, where τ is noise, are left out.
    """
    assert drafts.text_O is not None and drafts.entropy_O is not None, "greedy drafts have both"
    chain = TreeShape.chain(drafts.ranks_OK.shape[1]).paths
    rows: list[dict[str, Any]] = []
    for kind in ("", *sorted({*names} - {""})):
        texts = torch.tensor([number for number, name in enumerate(names) if kind in ("", name)], dtype=torch.long)
        within_O = torch.isin(drafts.text_O, texts)
        positions = int(within_O.sum())
        if kind and positions < _KIND:
            continue
        row: dict[str, Any] = {
            "kind": kind,
            "texts": len({*drafts.text_O[within_O].tolist()}),
            "positions": positions,
            "tau": round(replay(drafts.ranks_OK[within_O], chain), 4),
            "entropy": round(float(drafts.entropy_O[within_O].mean()), 4),
        }
        rows.append(row)
    return [rows[0], *sorted(rows[1:], key=lambda row: row["tau"])]


def _best_static(
    ranked: Sequence[RankPath], accept_probs: Sequence[float], costs: Costs
) -> tuple[tuple[RankPath, ...], dict[str, float], list[list[float]]]:
    """Choose the best static tree of a prefix of `ranked`, given τ of each prefix; return its paths, and `predicted`
    and `curve` of `Tuning`."""
    depths = _depths(ranked)
    best, curve = choose(accept_probs, costs, depths)
    tokens_per_round, round_ms = accept_probs[best - 1], costs.verify(best) + costs.draft(depths[best - 1])
    predicted = {
        "tokens_per_round": tokens_per_round,
        "speedup": tokens_per_round * costs.verify(1) / round_ms,
        "tokens_per_second": 1e3 * tokens_per_round / round_ms,
    }
    return tuple(ranked[: best - 1]), predicted, curve


def _best_chain(accept_probs: Sequence[float], costs: Costs) -> int:
    """Choose the length of the best chain, given τ of each length from 0."""
    return choose(accept_probs, costs, range(len(accept_probs)))[0] - 1


def _depths(ranked: Sequence[RankPath]) -> list[int]:
    """Return the depths of the trees of the first 0, 1, 2, ... paths."""
    return list(accumulate(map(len, ranked), max, initial=0))


def replay(ranks_OK: Tensor, paths: Sequence[RankPath]) -> float:
    """Compute τ of a tree by decoding the origins in order: each round continues after its accepted tokens.

    Origins count as consecutive positions of one text. A round that crosses into the next conversation changes at most
    one round of each.

    >>> replay(torch.tensor([[0], [5], [5], [5]]), [(0,)])  # accepts one and skips its position, then nothing, twice
    1.3333333333333333
    """
    emitted, rounds = replay_rounds(ranks_OK, paths)
    return emitted / rounds


def replay_rounds(ranks_OK: Tensor, paths: Sequence[RankPath]) -> tuple[int, int]:
    """Tokens and rounds of `replay`."""
    tree, ranks, position, rounds, emitted = set(paths), ranks_OK.tolist(), 0, 0, 0
    while position < len(ranks):
        row, depth = ranks[position], 0
        while depth < len(row) and tuple(row[: depth + 1]) in tree:
            depth += 1
        rounds += 1
        emitted += depth + 1
        position += depth + 1
    return emitted, rounds


def choose(accept_probs: Sequence[float], costs: Costs, depths: Sequence[int]) -> tuple[int, list[list[float]]]:
    """Choose the node count (root included) with the most expected tokens per millisecond; 1 is plain decoding.

    Arguments are τ and depth of the best tree of 1, 2, 3, ... nodes. Also returns a curve of [node count, predicted
    speed-up].

    >>> choose([1.0, 1.5, 1.75], Costs((1, 4), (10.0, 10.0), 1.0), [0, 1, 1])[0]
    3
    >>> choose([1.0, 1.5, 1.75], Costs((1, 2), (10.0, 20.0), 1.0), [0, 1, 1])[0]
    1
    """
    curve = [
        [float(nodes), accept_prob * costs.verify(1) / (costs.verify(nodes) + costs.draft(depth))]
        for nodes, (accept_prob, depth) in enumerate(zip(accept_probs, depths, strict=False), start=1)
    ]
    return max(range(len(curve)), key=lambda i: curve[i][1]) + 1, curve


def path_values(ranks_OK: Tensor, max_rank: int) -> dict[RankPath, float]:
    """Return the fraction of origins at which each rank path is the true continuation. Whole paths keep the correlation
    between depths, which a product of per-head accuracies loses.

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


def likely_paths(acceptance: Sequence[Sequence[float]], count: int) -> list[RankPath]:
    """Return the most likely rank paths by a table of `Tuning.acceptance`, as if depths were independent.

    >>> likely_paths([[0.5, 0.3], [0.4, 0.1]], 4)
    [(0,), (1,), (0, 0), (1, 0)]
    """
    found: list[RankPath] = []
    open_: list[RankPath] = [(rank,) for rank in range(len(acceptance[0]))] if acceptance else []
    while open_ and len(found) < count:
        best = min(open_, key=lambda path: (-path_prob(path, acceptance), len(path), path))
        open_.remove(best)
        found.append(best)
        if len(best) < len(acceptance):
            open_ += [(*best, rank) for rank in range(len(acceptance[len(best)]))]
    return found


def path_prob(path: RankPath, acceptance: Sequence[Sequence[float]]) -> float:
    """Return the probability of a rank path as if its depths were independent."""
    return prod(ranks[rank] if rank < len(ranks) else 0.0 for rank, ranks in zip(path, acceptance, strict=False))


def _acceptance(ranks_OK: Tensor, max_rank: int) -> list[list[float]]:
    """Return the fraction of each rank per depth, among origins with right shallower drafts of rank 0."""
    table = []
    alive_O = torch.ones(len(ranks_OK), dtype=torch.bool)
    for depth in range(ranks_OK.shape[1]):
        ranks = ranks_OK[alive_O, depth]
        counts = torch.bincount(ranks, minlength=max_rank + 1)[:max_rank]
        table.append((counts / max(1, len(ranks))).tolist())
        alive_O &= ranks_OK[:, depth] == 0
    return table
