"""Tuning: measured costs and measured acceptance give the tree with the most expected tokens per second.

Acceptance alone always asks for a wider tree; only the cost of verifying it on this machine says where to stop, and
"no speculation" is one of the choices (compare Sequoia, arXiv 2402.12374, and CaDDTree, arXiv 2606.01813). The best
static tree, the best chain, and what dynamic trees need (costs, and how far the heads' probabilities can be believed)
come out of the same two measurements.

Shape suffixes: B rows, T tokens, D draft vocabulary, M predictions, O origins, K steps, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from headstart.decode.budget import Costs
from headstart.decode.calibrate import Calibration, fit_calibration, replay_dynamic
from headstart.decode.drafters import Request, root_only
from headstart.decode.heads_drafter import HeadDrafter, Tree
from headstart.decode.loop import DecodeOptions, Engine
from headstart.decode.verify import GreedyVerifier
from headstart.errors import UserError
from headstart.heads import DraftHead, HeadBatch
from headstart.heads.packed import pack, unpack
from headstart.target import FINAL, DraftTree, Target, TreeShape
from headstart.target.tree import RankPath

_CLEARLY = 0.9
"""Share of the milliseconds of a draft below which 8 bits are worth the little that they take from acceptance."""
_TEXTS, _ROWS, _LONGEST = 32, 16, 96
"""Prompts answered again at temperature 1, so many at a time, and tokens of these answers at most."""
_DRAWN = 4
"""Ranks in whose place drawing a child is measured; a node seldom has more children."""


class Supervised(Protocol):
    """What tuning needs of a conversation."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def supervised(self) -> list[bool]: ...


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
        settings: target, dtype, device, threads, context, positions measured.
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
        conversations: calibration conversations, kept out of training.
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
    sampled = _sampled_calibration(target, heads, conversations, max_rank, console)
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


def measure_ranks(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    max_rank: int,
    console: Console | None = None,
) -> Tensor:
    """The ranks of `measure_drafts` alone."""
    return measure_drafts(target, heads, conversations, max_rank, console)[0]


@torch.inference_mode()
def measure_drafts(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    max_rank: int,
    console: Console | None = None,
) -> tuple[Tensor, Tensor]:
    """What the heads would have drafted on texts, and how well.

    Only origins from which every step is supervised count; they come in the order of the text.

    Returns:
        Rank of the true token among each step's drafts, int64 [O, K], where `max_rank` stands for anything worse; and
        the log-probabilities of the best drafts of each step, float32 [O, K, R] with R at most `max_rank`.

    Raises:
        UserError: when there is no such origin.
    """

    def compare(logits_MD: Tensor, truth_M: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return _rank(logits_MD, truth_M, max_rank), _best(logits_MD, max_rank)[0]

    ranks_OK, log_probs_OKR = _measure(target, heads, conversations, compare, False, console)
    return ranks_OK, log_probs_OKR


@torch.inference_mode()
def measure_sampling(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    max_rank: int,
    console: Console | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What sampling at temperature 1 would accept of the drafts behind a text.

    Returns:
        Ranks and log-probabilities as of `measure_drafts`; the target's own probabilities of these drafts, [O, K, R];
        and how likely a child drawn in place of each of the first drafts, beside those above it, is to be accepted,
        [O, K, R] with a smaller R: the mass that the target's distribution shares with the one it is drawn from.

    Raises:
        UserError: when there is no origin from which every step is supervised.
    """

    def compare(logits_MD: Tensor, truth_M: Tensor, own_MD: Tensor) -> tuple[Tensor, ...]:
        log_probs_MR, best_MR = _best(logits_MD, max_rank)
        q_draft_MD = logits_MD.softmax(-1)
        drawn = []
        for rank in range(min(_DRAWN, best_MR.shape[1])):
            rest_M1 = q_draft_MD.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            drawn.append(torch.minimum(own_MD, q_draft_MD / rest_M1).sum(-1))
            q_draft_MD.scatter_(1, best_MR[:, rank, None], 0.0)
        return _rank(logits_MD, truth_M, max_rank), log_probs_MR, own_MD.gather(1, best_MR), torch.stack(drawn, 1)

    ranks_OK, log_probs_OKR, likely_OKR, drawn_OKR = _measure(target, heads, conversations, compare, True, console)
    return ranks_OK, log_probs_OKR, likely_OKR, drawn_OKR


def _rank(logits_MD: Tensor, truth_M: Tensor, max_rank: int) -> Tensor:
    """Rank [M] of the true token, `max_rank` for anything worse and for tokens that cannot be drafted (below 0)."""
    truth_M1 = logits_MD.gather(1, truth_M.clamp(min=0)[:, None])
    return torch.where(truth_M < 0, max_rank, (logits_MD > truth_M1).sum(-1).clamp(max=max_rank))


def _best(logits_MD: Tensor, max_rank: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and places of the best drafts, [M, R]."""
    best = logits_MD.topk(min(max_rank, logits_MD.shape[1]), dim=-1)
    return best.values - logits_MD.logsumexp(-1, keepdim=True), best.indices


def _measure(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    compare: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    own: bool,
    console: Console | None,
) -> list[Tensor]:
    """Tables [O, K, ...] of what `compare` finds, over the origins from which every step is supervised.

    Args:
        compare: of one step: draft logits [M, D], the true token's place among them or -1 [M], the target's own
            probabilities of the draft vocabulary [M, D] (empty without `own`) to tables [M, ...].
        own: whether `compare` reads the target's probabilities.
    """
    to_draft_V = torch.full((target.vocab_size,), -1, device=target.device)
    to_draft_V[heads.draft_to_target_D] = torch.arange(len(heads.draft_to_target_D), device=target.device)
    found: list[list[Tensor]] = []
    for conversation in track(
        conversations, "measuring acceptance", console=console, disable=console is None, transient=True
    ):
        states = target.hidden_states([conversation.tokens], sorted({*heads.taps, FINAL}))[0]
        tokens_BT = torch.tensor([conversation.tokens], device=target.device)
        batch = HeadBatch(
            tokens_BT,
            torch.tensor([conversation.supervised], device=target.device),
            {tap: state[None] for tap, state in states.items()},
        )
        steps: list[dict[int, int]] = []
        tables: list[tuple[Tensor, ...]] = []
        for step in heads.unroll(batch):
            own_MD = torch.empty(0, device=target.device)
            if own:
                own_MD = target.lm_head(states[FINAL][step.source_M]).float().softmax(-1)[:, heads.draft_to_target_D]
            truth_M = to_draft_V[tokens_BT.flatten()[step.source_M + 1]]
            tables.append(tuple(part.cpu() for part in compare(step.logits_MD.float(), truth_M, own_MD)))
            steps.append({origin: place for place, origin in enumerate(step.origin_M.tolist())})
        if len(steps) < heads.steps:  # too short: families may end before a step that has no origin
            continue
        whole = sorted(set.intersection(*map(set, steps)))
        places = [[place[origin] for origin in whole] for place in steps]
        found.append(
            [
                torch.stack([one[at] for one, at in zip(table, places, strict=True)], 1)
                for table in zip(*tables, strict=True)
            ]
        )
    if not sum(len(tables[0]) for tables in found):
        raise UserError(
            f"No calibration answer is longer than the {heads.steps + 1} tokens that the heads look ahead.",
            "Write longer answers (data.max_new_tokens), or more of them (data.calibration).",
        )
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@dataclass
class _Text:
    """A conversation with another answer."""

    tokens: list[int]
    supervised: list[bool]


def _sampled_calibration(
    target: Target,
    heads: DraftHead,
    conversations: Sequence[Supervised],
    max_rank: int,
    console: Console | None,
) -> Calibration:
    """Calibration for temperature 1: on answers that the target draws there and then to some of the prompts.

    Sampled texts are harder to draft than greedy ones, and the heads more sure of themselves than they should be.
    """
    some = [one for one in conversations[:_TEXTS] if True in one.supervised]
    batches = [some[start : start + _ROWS] for start in range(0, len(some), _ROWS)]
    texts: list[Supervised] = []
    for number, rows in enumerate(
        track(batches, "sampling answers", console=console, disable=console is None, transient=True)
    ):
        prompts = [one.tokens[: one.supervised.index(True)] for one in rows]
        longest = min(_LONGEST, max(sum(one.supervised) for one in rows), target.max_length - max(map(len, prompts)))
        answers = Engine(target).generate(prompts, DecodeOptions(longest, temperature=1.0, seed=_ROWS * number))
        texts += [
            _Text(prompt + answer.tokens, [False] * len(prompt) + [True] * len(answer.tokens))
            for prompt, answer in zip(prompts, answers, strict=True)
            if len(answer.tokens) > heads.steps + 1
        ]
    ranks_OK, *tables = measure_sampling(target, heads, texts or conversations, max_rank, console)
    return fit_calibration(ranks_OK.numpy(), *(table.numpy() for table in tables))


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
