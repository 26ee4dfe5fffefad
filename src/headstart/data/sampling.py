"""Batched plain sampling from the target, for writing data. Decoding for users is `decode/`'s.

Shape suffixes: B rows, V vocabulary, R candidates kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headstart.data.conversations import alike
from headstart.target import DraftTree, Target, TreeShape

_CANDIDATES = 64


@torch.inference_mode()
def sample_rows(
    target: Target,
    rows: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    top_p: float,
    ends: frozenset[int],
    seed: int,
    check: Callable[[], None] | None = None,
) -> list[list[int]]:
    """Continue each row until an end token (kept) or `max_new_tokens`.

    Args:
        target: the model.
        rows: token ids; any lengths.
        max_new_tokens: most tokens to add to a row.
        temperatures: one per row; 0 is greedy.
        top_p: nucleus for rows with a temperature, taken among the 64 likeliest tokens.
        ends: tokens that end a row.
        seed: of the draws.
        check: called before each step; what it raises ends the work.

    Returns:
        The added tokens of each row.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    added: list[list[int]] = [[] for _ in rows]
    cache = target.new_cache(len(rows), max(map(len, rows)) + max_new_tokens)
    alive = list(range(len(rows)))
    shared = _shared(rows)
    if shared:  # what a chat template puts in front of every row is read once
        prefix = target.new_cache(1, shared)
        target.prefill(prefix, [rows[0][:shared]])
        cache.begin_with(prefix)
    logits_BV = target.prefill(cache, [row[shared:] for row in rows]).logits_BTV[:, 0]
    root = TreeShape.chain(0)
    ended = [False] * len(rows)
    for step in range(max_new_tokens):
        if check is not None:
            check()
        heat_B = torch.tensor([temperatures[row] for row in alive], device=target.device)
        picked = _pick(logits_BV, heat_B, top_p, generator).tolist()
        for row, token in zip(alive, picked, strict=True):
            if not ended[row]:
                added[row].append(token)
                ended[row] = token in ends
        going = [place for place, row in enumerate(alive) if not ended[row]]
        if not going or step == max_new_tokens - 1:
            break
        # Dropping rows copies the cache, so it waits until an eighth of them have ended.
        if len(going) <= 0.875 * len(alive):
            cache.select(going)
            alive, picked = [alive[place] for place in going], [picked[place] for place in going]
        tree = DraftTree.from_shape(torch.tensor(picked, device=target.device)[:, None], root)
        logits_BV = target.forward_tree(cache, tree).logits_BTV[:, 0]
        cache.commit([[0]] * len(alive))
    return added


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all of several rows begin with alike, at least one of each left over.

    >>> _shared([[1, 2, 3], [1, 2, 4, 5], [1, 2]]), _shared([[1, 2]])
    (1, 0)
    """
    if len(rows) < 2:
        return 0
    lists = [list(row) for row in rows]
    return min(alike(min(lists), max(lists)), min(map(len, rows)) - 1)  # in order, the first and last differ most


def _pick(logits_BV: Tensor, heat_B: Tensor, top_p: float, generator: torch.Generator) -> Tensor:
    """Next token of each row, int64 [B]: argmax at temperature 0, else a draw from the nucleus."""
    if not bool((heat_B > 0).any()):
        return logits_BV.max(-1).indices
    top_BR, ids_BR = logits_BV.topk(min(_CANDIDATES, logits_BV.shape[-1]), dim=-1)
    probs_BR = torch.softmax(top_BR.float() / heat_B.clamp(min=1e-4)[:, None], dim=-1)
    before_BR = probs_BR.cumsum(-1) - probs_BR
    probs_BR = probs_BR.masked_fill(before_BR >= top_p, 0.0)
    drawn_B1 = torch.multinomial(probs_BR, 1, generator=generator)
    drawn_B1 = torch.where(heat_B[:, None] > 0, drawn_B1, 0)
    return ids_BR.gather(1, drawn_B1)[:, 0]
