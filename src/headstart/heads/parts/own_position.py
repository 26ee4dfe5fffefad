"""Own-position heads: attention heads that attend only to themselves and so apply a linear map to the layer's input.

The published EAGLE-3 layer has no linear map from its input to its output. A head that attends only to its own entry is
one of rank `head_dim`; enough of them can hold any linear map before training.

The score has two parts. The first, on quickly rotating pairs, is nearly the same for every token (embeddings share a
direction), and RoPE lowers it at any other distance. The second, on the other pairs, compares token codes and is about
zero for a different token. For a repeated token the codes match, and the first part decides.

Shape suffixes: E hidden size, I inputs of queries, keys and values (normed embedding first), P distances, R pairs of a
head, V vocabulary, C components, M tokens, O rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headstart.heads.parts.layer import DraftLayer

FAR = 4096
"""Largest distance considered."""
_ROUNDS, _RATE = 2000, 0.2
"""Search of `pair_shares`."""
_UNUSED = 0.01
"""Share below which a pair is left to the code."""
_MARGIN, _OTHERS = 20.0, 30.0
"""Score margin over repeats of the same token, and the mean extra margin over other tokens."""
ALONE = 0.999
"""Smallest mean self-attention weight of an own-position head."""
_RIDGE = 1e-4
"""Ridge of the shared-direction probe, relative to the mean square of an embedding's component."""


def heads_needed(hidden_size: int, head_dim: int) -> int:
    """Number of key heads that can hold any linear map of the hidden size."""
    return -(-hidden_size // head_dim)


def play(gains: Callable[[Tensor], Tensor], count: int, rounds: int, rate: float) -> Tensor:
    """Solve a matrix game by multiplicative weights. `gains` returns each choice's payoff against the best response to
    a mixture; the result sums the mixtures [count] of the later half of the rounds, near the optimum up to scale."""
    logs, total = torch.zeros(count), torch.zeros(count)
    for played in range(rounds):
        shares = logs.softmax(0)
        if played >= rounds // 2:
            total += shares
        logs += rate * gains(shares)
    return total


def pair_shares(cos_PR: Tensor) -> tuple[Tensor, float]:
    """Distribute the score over pairs to minimise its maximum over distances, given the pairs' rotary cosines at
    distances from 1 on. Returns shares [R] that sum to 1, and that maximum (1 at distance 0).

    >>> quick = torch.cos(torch.arange(1, 9)[:, None] * torch.tensor([1.0, 1e-3]))
    >>> shares, worst = pair_shares(quick)
    >>> shares.tolist(), round(worst, 2)
    ([1.0, 0.0], 0.96)
    """
    total_R = play(lambda shares_R: -cos_PR[int((cos_PR @ shares_R).argmax())], cos_PR.shape[1], _ROUNDS, _RATE)
    shares_R = torch.where(total_R > _UNUSED * total_R.sum(), total_R, 0)
    shares_R /= shares_R.sum()
    return shares_R, float((cos_PR @ shares_R).max())


def number_of_all(*kinds: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Fit a probe [E] that gives about 1 for every normed embedding, and return it with their mean [E]. The `kinds` of
    embeddings, [M, E] in parts, have equal weight: few of the vocabulary's tokens are common in texts."""
    gram_EE, mean_E = torch.zeros(()), torch.zeros(())
    for kind in kinds:
        products_EE, sum_E, count = torch.zeros(()), torch.zeros(()), 0
        for part_ME in kind:
            products_EE = products_EE.to(part_ME) + part_ME.T @ part_ME
            sum_E, count = sum_E.to(part_ME) + part_ME.sum(0), count + len(part_ME)
        if count:
            gram_EE, mean_E = gram_EE.to(sum_E) + products_EE / count, mean_E.to(sum_E) + sum_E / count
    ridge_EE = _RIDGE * gram_EE.diagonal().mean() * torch.eye(len(mean_E)).to(mean_E)
    return torch.linalg.solve(gram_EE + ridge_EE, mean_E), mean_E / len(kinds)


@torch.no_grad()
def look_at_itself(layer: DraftLayer, heads: int, cos_PR: Tensor, number_E: Tensor, mean_E: Tensor) -> None:
    """Set queries and keys of a layer's first key heads so that each attends only to its own position. The layer reads
    [normed embedding, ...]; `number_E` and `mean_E` (removed from codes) come from `number_of_all`."""
    config, width, groups = layer.config, layer.config.head_dim, layer.groups
    shares_R, worst = pair_shares(cos_PR)
    first_R = (_MARGIN / max(1 - worst, 1e-2) * width**0.5 * shares_R).sqrt()
    others = [pair for pair in range(width // 2) if not shares_R[pair]]
    slots = [*others, *(pair + width // 2 for pair in others)]
    size = len(mean_E)
    components = min(len(slots), size - 1)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:  # preserve the scale set below
            norm.weight.fill_((float(first_R.square().sum()) / width + _OTHERS * width**-0.5) ** 0.5)
    random = torch.Generator().manual_seed(0)
    weight = layer.qkv.weight.view(-1, width, layer.qkv.in_features)
    keys = config.num_attention_heads
    for head in range(heads):
        spread_EC = torch.randn(size, components, generator=random).to(mean_E)
        code_EC = torch.linalg.qr(torch.cat([mean_E[:, None], spread_EC], dim=1))[0][:, 1:]
        # A normed embedding has squared norm E; a code takes its share of that.
        code_EC *= (_OTHERS * width**0.5 / components) ** 0.5
        rows_dI = torch.zeros_like(weight[0])
        rows_dI[: width // 2, :size] = (first_R[:, None].to(number_E) * number_E).to(weight)
        rows_dI[slots[:components], :size] = code_EC.T.to(weight)
        weight[head * groups : (head + 1) * groups] = rows_dI
        weight[keys + head] = rows_dI


@torch.no_grad()
def hold(layer: DraftLayer, heads: int, map_EI: Tensor, read_II: Tensor) -> None:
    """Store a linear map of the layer's input in the heads of `look_at_itself`, as far as their rank allows; the
    input's second moments rank the directions."""
    config, width = layer.config, layer.config.head_dim
    groups, rank = layer.groups, heads * width
    # Output directions, largest variance first.
    axes_EE = torch.linalg.eigh((map_EI @ read_II @ map_EI.T).double())[1].flip(1).to(map_EI)
    axes_EO = axes_EE[:, :rank]
    used = axes_EO.shape[1]
    first = (config.num_attention_heads + config.num_key_value_heads) * width
    layer.qkv.weight[first : first + used] = (axes_EO.T @ map_EI).to(layer.qkv.weight)
    back_EO = torch.zeros(len(map_EI), rank).to(layer.o.weight)
    back_EO[:, :used] = axes_EO.to(back_EO) / groups
    back_ENd = back_EO.view(len(map_EI), heads, 1, width).expand(-1, -1, groups, -1)
    layer.o.weight[:, : groups * rank] = back_ENd.reshape(len(map_EI), groups * rank)


def untouched(layer: DraftLayer) -> int:
    """Count the leading key heads that are still as `look_at_itself` made them: queries equal keys, from the embedding
    alone. Training changes heads that are not frozen."""
    size, width = layer.config.hidden_size, layer.config.head_dim
    queries, keys, _ = (part.view(-1, width, part.shape[1]) for part in layer.head_rows())
    if layer.q_norm is not None or layer.qkv.in_features == size:
        return 0
    alike_N = (queries.view(len(keys), -1, *keys.shape[1:]) == keys[:, None]).flatten(1).all(1)
    alike_N &= ~keys[..., size:].flatten(1).any(1)
    return int(alike_N.long().cumprod(0).sum())


def shares(queries_BNGTd: Tensor, keys_BNTd: Tensor) -> Tensor:
    """Self-attention weight of each position of complete texts, [B, N, G, T]."""
    width, size = keys_BNTd.shape[2:]
    scores = queries_BNGTd @ keys_BNTd[:, :, None].mT / size**0.5
    later_TT = torch.ones(width, width, dtype=torch.bool, device=scores.device).triu(1)
    share_BNGT: Tensor = scores.masked_fill(later_TT, float("-inf")).softmax(-1).diagonal(dim1=-2, dim2=-1)
    return share_BNGT
