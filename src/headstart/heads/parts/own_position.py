"""Own-position heads: attention heads that attend only to the current token, so that they apply a linear map to the
layer's input ("current-token heads" in the interpretability literature).

The published EAGLE-3 layer has no linear map from its input to its output. An own-position head is such a map of rank
`head_dim`; enough of them can hold any linear map before training.

The score has two parts. The first, on fast rotary pairs, is nearly the same for every token (embeddings share a
direction), and RoPE lowers it at any other distance. The second, on the other pairs, compares token codes and is about
zero for a different token. For a repeated token the codes match, and the first part decides.

Shape suffixes: E hidden size, I inputs of queries, keys and values (normalised embedding first), P distances, R pairs
of a head, C components, M tokens, O rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headstart.heads.parts.layer import DraftLayer
from headstart.heads.parts.residual import principal_outputs

FAR = 4096
"""Largest distance that the pair weights account for."""
_ROUNDS, _RATE = 2000, 0.2
"""Search of `pair_weights`."""
_UNUSED = 0.01
"""Weight below which a pair is left to the code."""
_MARGIN, _OTHERS = 20.0, 30.0
"""Score margin over repeats of the same token, and the mean extra margin over other tokens."""
MIN_SELF_WEIGHT = 0.999
"""Smallest mean self-attention weight of an own-position head."""
_RIDGE = 1e-4
"""Ridge of the constant probe, relative to the mean square of an embedding's component."""


def heads_needed(hidden_size: int, head_dim: int) -> int:
    """Number of key heads that can hold any linear map of the hidden size."""
    return -(-hidden_size // head_dim)


def solve_matrix_game(payoff: Callable[[Tensor], Tensor], count: int, rounds: int, rate: float) -> Tensor:
    """Solve a matrix game by multiplicative weights. `payoff` returns each choice's payoff against the best response to
    a mixture. Returns the sum of the mixtures [count] of the later half of the rounds, near the optimum up to scale."""
    logits, total = torch.zeros(count), torch.zeros(count)
    for number in range(rounds):
        mixture = logits.softmax(0)
        if number >= rounds // 2:
            total += mixture
        logits += rate * payoff(mixture)
    return total


def pair_weights(cos_PR: Tensor) -> tuple[Tensor, float]:
    """Distribute the score over pairs to minimise its maximum over distances, given the pairs' rotary cosines at
    distances from 1 on. Returns weights [R] that sum to 1, and that maximum (1 at distance 0).

    >>> cosines = torch.cos(torch.arange(1, 9)[:, None] * torch.tensor([1.0, 1e-3]))
    >>> weights, worst = pair_weights(cosines)
    >>> weights.tolist(), round(worst, 2)
    ([1.0, 0.0], 0.96)
    """

    def payoff(weights_R: Tensor) -> Tensor:
        return -cos_PR[int((cos_PR @ weights_R).argmax())]

    total_R = solve_matrix_game(payoff, cos_PR.shape[1], _ROUNDS, _RATE)
    weights_R = torch.where(total_R > _UNUSED * total_R.sum(), total_R, 0)
    weights_R /= weights_R.sum()
    return weights_R, float((cos_PR @ weights_R).max())


def fit_constant_probe(*sources: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Fit a probe [E] that gives about 1 for every normalised embedding, and return it with their mean [E]. Sources
    (chunks [M, E]) have equal weight: few of the vocabulary's tokens are common in texts."""
    gram_EE, mean_E = torch.zeros(()), torch.zeros(())
    for source in sources:
        products_EE, sum_E, count = torch.zeros(()), torch.zeros(()), 0
        for part_ME in source:
            products_EE = products_EE.to(part_ME) + part_ME.T @ part_ME
            sum_E, count = sum_E.to(part_ME) + part_ME.sum(0), count + len(part_ME)
        if count:
            gram_EE, mean_E = gram_EE.to(sum_E) + products_EE / count, mean_E.to(sum_E) + sum_E / count
    ridge_EE = _RIDGE * gram_EE.diagonal().mean() * torch.eye(len(mean_E)).to(mean_E)
    return torch.linalg.solve(gram_EE + ridge_EE, mean_E), mean_E / len(sources)


@torch.no_grad()
def set_own_heads(layer: DraftLayer, heads: int, cos_PR: Tensor, probe_E: Tensor, mean_E: Tensor) -> None:
    """Set queries and keys of a layer's first key heads so that each attends only to its own position. The layer reads
    [normalised embedding, ...]. `probe_E` and `mean_E` (removed from codes) are from `fit_constant_probe`."""
    config, width, groups = layer.config, layer.config.head_dim, layer.groups
    weights_R, worst = pair_weights(cos_PR)
    first_R = (_MARGIN / max(1 - worst, 1e-2) * width**0.5 * weights_R).sqrt()
    others = [pair for pair in range(width // 2) if not weights_R[pair]]
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
        random_EC = torch.randn(size, components, generator=random).to(mean_E)
        code_EC = torch.linalg.qr(torch.cat([mean_E[:, None], random_EC], dim=1))[0][:, 1:]
        # A normalised embedding has squared norm E; its projection to a code has C.
        code_EC *= (_OTHERS * width**0.5 / components) ** 0.5
        rows_dI = torch.zeros_like(weight[0])
        rows_dI[: width // 2, :size] = (first_R[:, None].to(probe_E) * probe_E).to(weight)
        rows_dI[slots[:components], :size] = code_EC.T.to(weight)
        weight[head * groups : (head + 1) * groups] = rows_dI
        weight[keys + head] = rows_dI


@torch.no_grad()
def store_map(layer: DraftLayer, heads: int, map_EI: Tensor, gram_II: Tensor) -> None:
    """Store a linear map of the layer's input in its own-position heads, as far as their rank allows. The input's
    second moments rank the output directions."""
    config, width = layer.config, layer.config.head_dim
    groups, rank = layer.groups, heads * width
    axes_EO = principal_outputs(map_EI, gram_II, rank)
    used = axes_EO.shape[1]
    first = (config.num_attention_heads + config.num_key_value_heads) * width
    layer.qkv.weight[first : first + used] = (axes_EO.T @ map_EI).to(layer.qkv.weight)
    back_EO = torch.zeros(len(map_EI), rank).to(layer.o.weight)
    back_EO[:, :used] = axes_EO.to(back_EO) / groups
    back_ENd = back_EO.view(len(map_EI), heads, 1, width).expand(-1, -1, groups, -1)
    layer.o.weight[:, : groups * rank] = back_ENd.reshape(len(map_EI), groups * rank)


def count_intact(layer: DraftLayer) -> int:
    """Count the leading key heads that are still as `set_own_heads` made them: queries equal keys, from the embedding
    alone. Training changes heads that are not frozen."""
    size, width = layer.config.hidden_size, layer.config.head_dim
    queries, keys, _ = (part.view(-1, width, part.shape[1]) for part in layer.head_rows())
    if layer.q_norm is not None or layer.qkv.in_features == size:
        return 0
    intact_N = (queries.view(len(keys), -1, *keys.shape[1:]) == keys[:, None]).flatten(1).all(1)
    intact_N &= ~keys[..., size:].flatten(1).any(1)
    return int(intact_N.long().cumprod(0).sum())


def self_weights(queries_BNGTd: Tensor, keys_BNTd: Tensor) -> Tensor:
    """Attention weight that each position of complete texts gives to itself, [B, N, G, T]."""
    width, size = keys_BNTd.shape[2:]
    scores = queries_BNGTd @ keys_BNTd[:, :, None].mT / size**0.5
    later_TT = torch.ones(width, width, dtype=torch.bool, device=scores.device).triu(1)
    weights_BNGT: Tensor = scores.masked_fill(later_TT, float("-inf")).softmax(-1).diagonal(dim1=-2, dim2=-1)
    return weights_BNGT
