"""Timing what a round is made of: a draft, a forward over a tree.

Whatever is compared takes turns, so that a slow moment of the machine hits all of it, and the lower quartile of the
times counts, of a few the least: neighbours make things slower, never faster.

Shape suffixes: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from headstart.decode.costs import Costs, Measured
from headstart.decode.verify import Verifier
from headstart.drafters.heads import HeadDrafter
from headstart.heads.base import DraftHead
from headstart.heads.int8_weights import drop_int8, to_int8
from headstart.target.model import Target
from headstart.tree.tree import Committed, RankPath, Request, Tree, TreeBatch, TreeShape

_CLEARLY = 0.9
"""Share of the milliseconds of a draft below which 8 bits are worth the little that they take from acceptance."""
_SHORT_WIDTHS, _SHORT_CONTEXT = (1, 2, 4, 8, 16, 32), 256
"""Of the short measurement."""
_SHORT_SECONDS = 1.5
"""After which each part of the short measurement ends, once it has seen enough."""
_MIN = 3
"""Rounds of a measurement that are enough."""
_STEADY = 1.25
"""Factor between two measurements of the same, some seconds apart, from which a machine is too busy to be measured."""
_FEW = 12
"""Times of which the least counts."""
_READ_TOKENS = 64
"""Text that the heads read at once, to see how long that takes."""


def measure_costs(
    target: Target,
    heads: DraftHead,
    paths: Sequence[RankPath],
    widths: Sequence[int] = _SHORT_WIDTHS,
    context: int = _SHORT_CONTEXT,
    seconds: float = _SHORT_SECONDS,
) -> Measured:
    """What decoding with these heads costs here and now, in some seconds. Heads are left without 8-bit weights.

    Args:
        target: the model.
        heads: in its dtype and on its device.
        paths: rank paths of a usual tree; the first 15 are drafted.
        widths: as of `measure_verify`.
        context: committed tokens in the cache while timing.
        seconds: after which each part ends, at the earliest.
    """
    drop_int8(heads)
    context = max(1, min(context, target.max_length - max(widths) - 1))
    widths = sorted({1, *(width for width in widths if context + width <= target.max_length)})
    verify_ms = measure_verify(target, widths, context, heads.aux_layers, 12, seconds)
    draft_ms, level_ms, read_ms, packed = draft_costs(target, heads, paths, context, 1, seconds)
    (again_ms,) = measure_verify(target, [1], context, heads.aux_layers, 4, seconds)
    costs = Costs(tuple(widths), tuple(verify_ms), draft_ms, level_ms, heads.draft_steps, read_ms)
    return Measured(costs, packed, steady=1 / _STEADY < again_ms / verify_ms[0] < _STEADY)


@torch.inference_mode()
def measure_verify(
    target: Target,
    widths: Sequence[int],
    context: int,
    aux_layers: Sequence[int],
    repeats: int = 30,
    seconds: float = float("inf"),
) -> list[float]:
    """Milliseconds of verifying each width at batch 1: tree forward, choice, commit.

    The result never falls with width: it lies half way between the envelopes from either side.
    """
    verifier = Verifier()
    prompt = [1 + i % (target.vocab_size - 1) for i in range(context)]
    cache = target.new_cache(1, context + max(widths) + 1)
    target.prefill(cache, [prompt])
    trees = []
    for width in widths:
        shape = TreeShape.from_paths([(i // 2,) + (0,) * (i % 2) for i in range(width - 1)])
        if target.chains_only:
            shape = TreeShape.chain(width - 1)
        trees.append(Tree([token % target.vocab_size for token in range(width)], shape.parents))
    times: list[list[float]] = [[] for _ in widths]
    begun, warm = perf_counter(), 2 if seconds == float("inf") else 1
    for number in range(repeats + warm):
        if _is_enough(number - warm, begun, seconds):
            break
        for spent, tree in zip(times, trees, strict=True):
            start = perf_counter()
            batch = TreeBatch.of([tree], target.device)
            verifier.accept(batch, target.forward_tree(cache, batch, aux_layers))
            cache.commit([[0]])
            spent.append(1e3 * (perf_counter() - start))
            cache.lengths[0] = context
    quartiles = [_quartile(spent[warm:]) for spent in times]
    above, below = np.maximum.accumulate(quartiles), np.minimum.accumulate(quartiles[::-1])[::-1]
    return [float(ms) for ms in (above + below) / 2]


def draft_costs(
    target: Target,
    heads: DraftHead,
    paths: Sequence[RankPath],
    context: int,
    turns: int = 2,
    seconds: float = float("inf"),
) -> tuple[float, float, float, bool]:
    """What `draft_ms` measures, and whether that is with the weights in 8 bits: where they are clearly faster."""
    full: list[tuple[float, float, float]] = []
    packed: list[tuple[float, float, float]] = []
    for _ in range(turns):  # in turns, so that a slow moment of the machine decides nothing
        full.append(draft_ms(target, heads, paths, context, seconds))
        if to_int8(heads):
            packed.append(draft_ms(target, heads, paths, context, seconds))
            drop_int8(heads)
    if packed and min(packed)[0] < _CLEARLY * min(full)[0]:
        return (*min(packed), True)
    return (*min(full), False)


@torch.inference_mode()
def draft_ms(
    target: Target, heads: DraftHead, paths: Sequence[RankPath], context: int, seconds: float = float("inf")
) -> tuple[float, float, float]:
    """Milliseconds of one draft and one commit with a tree of up to 16 of the best nodes, of a further level, and
    of reading another token of the text.

    Trees cut after their first level and complete ones take turns. The target runs in between, as it does in decoding:
    its weights push those of the heads out of the caches.
    """
    paths = list(paths)[:15] or [(0,)]
    shapes = [TreeShape.from_paths([path for path in paths if len(path) == 1]), TreeShape.from_paths(paths)]
    prompt = [1 + i % (target.vocab_size - 1) for i in range(max(2, min(context, _READ_TOKENS)))]
    cache = target.new_cache(1, len(prompt) + 1)
    states = target.prefill(cache, [prompt], heads.aux_layers).aux_hidden_states
    roots = TreeBatch.roots([1], target.device)
    last = {layer: state[:, -1:] for layer, state in states.items()}
    drafters = [HeadDrafter(heads, shape) for shape in shapes]
    times: list[list[float]] = [[], []]

    def timed(drafter: HeadDrafter, session: Any) -> float:
        target.forward_tree(cache, roots).logits_BTV.sum().item()  # waits for the device, too
        start = perf_counter()
        drafter.propose(session, roots, Request(drafter.max_nodes))
        drafter.commit(session, Committed.of([roots.root_tokens], last, target.device))
        return 1e3 * (perf_counter() - start)

    # A session's first draft reads the prompt; what follows read a token each.
    sessions = [drafter.prefill([prompt], states) for drafter in [drafters[0]] * _MIN + drafters]
    reading = [timed(drafters[0], session) for session in sessions[:-1]]
    timed(drafters[1], sessions[-1])
    begun = perf_counter()
    for number in range(18):
        if _is_enough(number - 2, begun, seconds):
            break
        for drafter, session, spent in zip(drafters, sessions[-2:], times, strict=True):
            spent.append(timed(drafter, session))
    first, whole = (_quartile(spent[2:]) for spent in times)
    level = max(0.0, whole - first) / max(1, shapes[1].depth - 1)
    read_ms = max(0.0, _quartile(reading[1:]) - first) / (len(prompt) - 1)
    return whole + level * (heads.draft_steps - shapes[1].depth), level, read_ms


def _is_enough(rounds: int, begun: float, seconds: float) -> bool:
    """Whether a part of a measurement may end: in time after a few rounds, far beyond it after one."""
    spent = perf_counter() - begun
    return (rounds >= _MIN and spent > seconds) or (rounds >= 1 and spent > 3 * seconds)


def _quartile(spent: Sequence[float]) -> float:
    return float(np.percentile(spent, 25)) if len(spent) > _FEW else min(spent)
