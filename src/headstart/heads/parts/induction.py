"""Closed-form induction heads: attention that copies the token after an earlier occurrence of the current one
(Olsson et al., arXiv 2209.11895).

One layer is enough, because entry s reads the target's state after token s and the embedding of token s + 1 (see
`recurrent`). Its query is token s + 1, its key token s, and its value token s + 1. Each is a linear map of the layer's
input, so all three are solved instead of trained.

The key needs a code of token s, a random projection of its embedding. Ridge regression predicts the code from all aux
layers: early ones represent the token, late ones the next token. The code is written to the directions in which final
states have the least energy, so that one vector holds both. Heads match codes on their slowly rotating pairs only:
rotary positions must not hide a match.

Shape suffixes: E hidden size, X aux inputs, C components of a code, N key heads, H query heads, d head size, I inputs
of queries, keys and values, P positions, M tokens to fit on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.parts.layer import DraftLayer, LayerConfig
from headstart.heads.parts.residual import map_by_direction

FAR = 512
"""Distance over which a slow pair rotates by at most half a radian."""
_MIN = 16
"""Fewest components per head that distinguish codes."""
_CODE_ENERGY = 0.2
"""Code's fraction of a fused state's squared norm."""
_SHARPNESS = (0.5, 1.0, 2.0)
"""Sharpness of the query heads that share a key head, in turn."""
_MATCH = 12.0
"""Attention score of an exact match at sharpness 1."""


@dataclass(frozen=True)
class Induction:
    """Map from aux hidden states to the last token's code, and the code's orthonormal directions and scale in a fused
    state."""

    map_CX: Tensor
    axes_EC: Tensor
    scale: float

    def add_to(self, fusion_EX: Tensor) -> Tensor:
        """Replace the code's directions of a fusion map by the code."""
        fusion_EX = fusion_EX - self.axes_EC @ (self.axes_EC.T @ fusion_EX)
        return fusion_EX + self.scale * self.axes_EC @ self.map_CX


def slow_pairs(config: LayerConfig, cos_Pd: Tensor) -> list[int]:
    """Return the pairs of a head that rotate little over `FAR` tokens."""
    half = config.head_dim // 2
    index = min(FAR, len(cos_Pd) - 1)
    # Only the trailing run of slow pairs counts: earlier ones may have come full circle.
    cos_Pd = cos_Pd / cos_Pd[0, 0]  # tables of long contexts may carry a factor
    is_slow = [float(cos_Pd[index // 4, pair]) > 0.99 and float(cos_Pd[index, pair]) > 0.87 for pair in range(half)]
    first = next((pair for pair in range(half) if all(is_slow[pair:])), half)
    return list(range(first, half))


@torch.no_grad()
def solve(
    layer: DraftLayer, slow: list[int], aux_MX: Tensor, final_ME: Tensor, own_ME: Tensor, skip_heads: int = 0
) -> Induction | None:
    """Set queries, keys and values of a layer so that it copies. The layer reads [embedding, fused state], each
    normalised without weights.

    Args:
        slow: see `slow_pairs`.
        aux_MX: aux hidden states.
        final_ME: final states, or their reconstruction from `aux_MX`.
        own_ME: normalised embeddings of the last token of each state.
        skip_heads: number of leading key heads that stay as they are, with their query heads.

    Returns:
        None if there are too few slow pairs or tokens; the layer is unchanged.
    """
    config, size = layer.config, own_ME.shape[1]
    groups, width = layer.groups, config.head_dim
    kv_heads = config.num_key_value_heads - skip_heads
    if not kv_heads:
        return None
    slow = slow[-max(1, size // 2 // (2 * kv_heads)) :]  # codes take half of a state at most
    components = 2 * len(slow)
    codes = kv_heads * components
    good_M = torch.cat([aux_MX, own_ME], dim=-1).isfinite().all(-1) & (aux_MX != 0).any(-1)
    aux_MX, final_ME, own_ME = aux_MX[good_M], final_ME[good_M], own_ME[good_M]
    if components < _MIN or len(aux_MX) < 2 * aux_MX.shape[1]:
        return None
    random = torch.Generator().manual_seed(0)
    project_CE = torch.linalg.qr(torch.randn(size, codes, generator=random))[0].T.to(own_ME)
    code_MC = own_ME @ project_CE.T
    map_CX = map_by_direction(aux_MX, code_MC)
    predicted_MC = aux_MX @ map_CX.T

    _, directions_EE = torch.linalg.eigh(final_ME.T @ final_ME)
    axes_EC = directions_EE[:, :codes]  # ascending: the least energy
    final_size, code_size = (float(x.square().sum(-1).mean()) for x in (final_ME, predicted_MC))
    scale = (_CODE_ENERGY / (1 - _CODE_ENERGY) * final_size / max(code_size, 1e-12)) ** 0.5
    norm = (size / (final_size / (1 - _CODE_ENERGY))) ** 0.5  # scale of the layer's input norm
    # An exact code gives the score _MATCH at any scale.
    sharp = _MATCH * width**0.5 * kv_heads / max(float(code_MC.square().sum(-1).mean()), 1e-12)

    # Queries start with the code alone. Keys keep their other components: zero keys would leave queries no gradient.
    slots = [*slow, *(pair + width // 2 for pair in slow)]
    qkv = layer.qkv.weight.clone()
    sizes = [count * width for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    queries_HdI, keys_NdI, values_NdI = (
        part.view(-1, width, qkv.shape[1])[first:]
        for part, first in zip(torch.split(qkv, sizes), (groups * skip_heads, skip_heads, skip_heads), strict=True)
    )
    queries_HdI.zero_()
    for number in range(kv_heads):
        part = slice(number * components, (number + 1) * components)
        keys_NdI[number, slots] = 0
        keys_NdI[number, slots, size:] = (axes_EC[:, part].T / (scale * norm)).to(qkv)
        for member in range(groups):
            factor = sharp * (_SHARPNESS[member % len(_SHARPNESS)] if groups > 1 else 1.0)
            queries_HdI[number * groups + member, slots, :size] = (factor * project_CE[part]).to(qkv)
    centred_ME = own_ME - own_ME.mean(0)
    axes_EE = torch.linalg.eigh(centred_ME.T @ centred_ME)[1].flip(1).T  # largest variance first
    for index in range(min(kv_heads * width, size)):
        values_NdI[index % kv_heads, index // kv_heads] = F.pad(axes_EE[index], (0, size)).to(qkv)
    layer.qkv.weight.copy_(qkv)
    return Induction(map_CX, axes_EC, scale)
