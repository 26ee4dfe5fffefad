"""How hidden states are stored: as they are, or in one byte a number with a scale for each token.

    auto   the target's dtype
    int8   codes -127 to 127, evenly spaced: numbers far below a token's largest are lost
    fp8    codes of float8_e4m3fn: each number keeps 4 bits, down to a 200,000th of a token's largest

Shape suffixes: S tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

AUTO = "auto"
_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
SCALE_BYTES = 4


def encode(layer: int, states_SE: Tensor, states_dtype: str = AUTO) -> dict[str, Tensor]:
    """What a shard holds of the states of a layer, by name."""
    if states_dtype == AUTO:
        return {f"states.{layer}": states_SE}
    kind, largest = _CODES[states_dtype]
    exact_SE = states_SE.float()
    scales_S = (exact_SE.abs().amax(-1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    codes_SE = exact_SE / scales_S[:, None]
    codes_SE = codes_SE.round().to(kind) if kind == torch.int8 else codes_SE.to(kind)
    return {f"states.{layer}": codes_SE, f"scales.{layer}": scales_S}


def decode(codes_SE: Tensor, scales_S: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes_SE.float() * scales_S[:, None]).to(dtype)
