"""Measuring the costs of a round's parts: a draft, and the verification of a tree.

Compared variants take turns, so that a slow moment of the machine affects all. The lower quartile of the times counts,
or the minimum of a few: other processes only slow things down.

Shape suffixes: B rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from headstart.decode.costs import Costs, Measured
from headstart.decode.verify import GreedyVerifier
from headstart.drafters.heads import HeadDrafter
from headstart.heads.base import DraftHead
from headstart.heads.int8_weights import drop_int8, to_int8
from headstart.model.model import Target
from headstart.tree.tree import Committed, RankPath, Request, Tree, TreeBatch, TreeShape

_CLEARLY = 0.95
"""Relative draft time below which int8 weights are worth their small loss of acceptance."""
_MIN_TURNS = 3
"""Turns of a measurement before its time may end it."""
_STEADY = 1.25
"""Ratio of two equal measurements, seconds apart, that shows a busy machine."""
_FEW = 12
"""Up to this many times, the minimum counts instead of the quartile."""
_SHORT_TEXT, _LONG_TEXT = 2, 64
"""Tokens of two texts; the difference of their first drafts is the time of reading."""


@dataclass(frozen=True)
class Timing:
    """Extent of a measurement: forwards over `node_counts` tokens after `context` committed ones, `repeats` times each.

    Before and after them, drafts are timed `turns` times, with weights as they are and in int8. Each part runs at least
    `seconds` before it may end early.
    """

    node_counts: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 32)
    context: int = 256
    repeats: int = 30
    turns: int = 2
    seconds: float = inf

    def within(self, target: Target) -> Timing:
        """Limit context and node counts to the target's context length; a single node is always measured."""
        context = max(1, min(self.context, target.max_length - max(self.node_counts) - 1))
        fitting = (nodes for nodes in self.node_counts if context + nodes <= target.max_length)
        return replace(self, node_counts=tuple(sorted({1, *fitting})), context=context)


SHORT = Timing(repeats=12, turns=1, seconds=1.5)
"""A few seconds: enough for heads that were tuned elsewhere."""


def measure_costs(target: Target, heads: DraftHead, paths: Sequence[RankPath], timing: Timing = SHORT) -> Measured:
    """Measure the costs of decoding with these heads, and leave them without int8 weights.

    The heads are in the target's dtype and on its device. The first 15 of `paths` are drafted. A timing with limited
    seconds also checks whether the machine was steady.
    """
    drop_int8(heads)
    timing = timing.within(target)
    drafts = [_draft_both_ms(target, heads, paths, timing) for _ in range(timing.turns)]
    verify_ms = measure_verify(target, timing, heads.aux_layers)
    # Slow moments last for seconds, and overestimated drafts cost acceptance in every round.
    drafts += [_draft_both_ms(target, heads, paths, timing) for _ in range(timing.turns)]
    full, int8 = (min(filter(None, turns), default=None) for turns in zip(*drafts, strict=True))
    assert full is not None
    packed = int8 is not None and int8.draft_ms < _CLEARLY * full.draft_ms
    drafting = int8 if int8 is not None and packed else full
    again_ms = verify_ms[0]
    if timing.seconds < inf:
        (again_ms,) = measure_verify(target, replace(timing, node_counts=(1,), repeats=4), heads.aux_layers)
    costs = Costs(timing.node_counts, tuple(verify_ms), levels=heads.draft_steps, **drafting._asdict())
    return Measured(costs, packed, steady=1 / _STEADY < again_ms / verify_ms[0] < _STEADY)


@torch.inference_mode()
def measure_verify(target: Target, timing: Timing, aux_layers: Sequence[int]) -> list[float]:
    """Measure milliseconds of tree forward, acceptance and commit for each node count at batch 1.

    The result never falls with the node count: it is the mean of the monotone envelopes from above and below.
    """
    verifier, context = GreedyVerifier(), timing.context
    cache = target.new_cache(1, context + max(timing.node_counts) + 1)
    target.prefill(cache, [_prompt(target, context)])
    trees = []
    for nodes in timing.node_counts:
        shape = TreeShape.from_paths([(i // 2,) + (0,) * (i % 2) for i in range(nodes - 1)])
        if target.chains_only:
            shape = TreeShape.chain(nodes - 1)
        trees.append(Tree([token % target.vocab_size for token in range(nodes)], shape.parents))
    times: list[list[float]] = [[] for _ in trees]
    warm_up = 2 if timing.seconds == inf else 1
    for _ in _turns(timing.repeats, warm_up, timing.seconds):
        for spent, tree in zip(times, trees, strict=True):
            start = perf_counter()
            batch = TreeBatch.of([tree], target.device)
            verifier.accept(batch, target.forward_tree(cache, batch, aux_layers))
            cache.commit([[0]])
            spent.append(1e3 * (perf_counter() - start))
            cache.lengths[0] = context
    quartiles = [_quartile(spent[warm_up:]) for spent in times]
    above, below = np.maximum.accumulate(quartiles), np.minimum.accumulate(quartiles[::-1])[::-1]
    return [float(ms) for ms in (above + below) / 2]


class Drafting(NamedTuple):
    """Milliseconds of a draft to the full depth, of each level after its first, and of reading another token."""

    draft_ms: float
    level_ms: float
    read_ms: float


def _draft_both_ms(
    target: Target, heads: DraftHead, paths: Sequence[RankPath], timing: Timing
) -> tuple[Drafting, Drafting | None]:
    """Time drafts with the weights as they are, and in int8 if the heads support it."""
    full = draft_ms(target, heads, paths, timing)
    int8 = draft_ms(target, heads, paths, timing) if to_int8(heads) else None
    drop_int8(heads)
    return full, int8


@torch.inference_mode()
def draft_ms(target: Target, heads: DraftHead, paths: Sequence[RankPath], timing: Timing) -> Drafting:
    """Time drafts and commits with a tree of up to 16 of the best nodes.

    Complete trees and their first levels take turns. The target runs in between, as in decoding: its weights evict the
    heads' from the CPU caches.
    """
    paths = list(paths)[:15] or [(0,)]
    shapes = [TreeShape.from_paths([path for path in paths if len(path) == 1]), TreeShape.from_paths(paths)]
    prompt = _prompt(target, max(_SHORT_TEXT, min(timing.context, _LONG_TEXT)))
    cache = target.new_cache(1, len(prompt) + 1)
    states = target.prefill(cache, [prompt], heads.aux_layers).aux_hidden_states
    roots = TreeBatch.roots([1], target.device)
    last = {layer: state[:, -1:] for layer, state in states.items()}
    drafters = [HeadDrafter(heads, shape) for shape in shapes]

    def timed(drafter: HeadDrafter, session: Any) -> float:
        target.forward_tree(cache, roots).logits_BTV.sum().item()  # synchronises with the device, too
        start = perf_counter()
        drafter.propose(session, roots, Request(drafter.max_nodes))
        drafter.commit(session, Committed.of([roots.root_tokens], last, target.device))
        return 1e3 * (perf_counter() - start)

    # A session's first draft reads the prompt; later ones read a token each. On a GPU each text takes over the memory
    # and graphs of the previous one, which is released by then.
    begin = {layer: state[:, :_SHORT_TEXT] for layer, state in states.items()}
    texts = (prompt, states), (prompt[:_SHORT_TEXT], begin)
    long_ms, short_ms = (
        _quartile([timed(drafters[0], drafters[0].prefill([text], of_text)) for _ in range(_MIN_TURNS + 1)][1:])
        for text, of_text in texts
    )
    sessions = [drafter.prefill([prompt], states) for drafter in drafters]
    for drafter, session in zip(drafters, sessions, strict=True):
        timed(drafter, session)
    times: list[list[float]] = [[], []]
    for _ in _turns(16, 2, timing.seconds):
        for drafter, session, spent in zip(drafters, sessions, times, strict=True):
            spent.append(timed(drafter, session))
    first_ms, whole_ms = (_quartile(spent[2:]) for spent in times)
    depth = shapes[1].depth
    level_ms = max(0.0, whole_ms - first_ms) / max(1, depth - 1)
    read_ms = max(0.0, long_ms - short_ms) / max(1, len(prompt) - _SHORT_TEXT)
    return Drafting(whole_ms + level_ms * (heads.draft_steps - depth), level_ms, read_ms)


def _prompt(target: Target, length: int) -> list[int]:
    return [1 + i % (target.vocab_size - 1) for i in range(length)]


def _turns(count: int, warm_up: int, seconds: float) -> Iterator[None]:
    """Yield for each turn; end early after `seconds` and a few turns, or after three times that and one turn."""
    begun = perf_counter()
    for done in range(-warm_up, count):
        spent = perf_counter() - begun
        if (done >= _MIN_TURNS and spent > seconds) or (done >= 1 and spent > 3 * seconds):
            return
        yield


def _quartile(spent: Sequence[float]) -> float:
    return float(np.percentile(spent, 25)) if len(spent) > _FEW else min(spent)
