"""Diagnosis of stored or imported hidden states by comparison with the target's own.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headstart.model.model import Target
from headstart.replay.patch import FINAL

_EXACT, _COARSE = 1e-3, 0.1
"""Maximum relative distance of equal states, in float32 and in fewer bits. Another summation order moves float32 states
by 1e-6, TF32 by 1e-3. bfloat16 rounding accumulates to some percent over the layers; adjacent layers differ by tens of
percent."""


def every_layer(target: Target) -> list[int]:
    return [*range(target.num_layers + 1), FINAL]


def identify(
    aux_layer: int, given_TE: Tensor, fresh: Mapping[int, Tensor], target: Target, rounded: bool = False
) -> tuple[float, str]:
    """Return the distance of states from the target's own at this layer, and a diagnosis ("" if they match).

    `fresh` are the target's states of the same tokens at `every_layer`; `rounded` states were stored in fewer bits.
    """
    exact = not rounded and given_TE.dtype == fresh[aux_layer].dtype == torch.float32
    limit = _EXACT if exact else _COARSE
    off = distance(given_TE, fresh[aux_layer])
    name = "FINAL" if aux_layer == FINAL else f"layer {aux_layer}"
    if not given_TE.isfinite().all():
        return off, f"{name} holds numbers that are not finite"
    others = {other: distance(given_TE, state_TE) for other, state_TE in fresh.items() if other != aux_layer}
    nearest = min(others, key=lambda other: others[other])
    # Adjacent layers of a deep bfloat16 target can differ by less than rounding, so the nearest layer decides.
    last = target.num_layers
    if off <= limit and off <= 2 * others[nearest] + _EXACT:
        return off, ""
    if others[nearest] <= limit:
        if (aux_layer, nearest) == (FINAL, last):
            return off, "FINAL holds the state before the final norm: the norm is missing"
        if (aux_layer, nearest) == (last, FINAL):
            return off, f"layer {last} holds the state after the final norm: a norm too many"
        side = ": off by one" if FINAL not in (aux_layer, nearest) and abs(aux_layer - nearest) == 1 else ""
        return off, f"{name} holds {layer_name(nearest)}{side}"
    for late, word in ((1, "late"), (-1, "early")):
        if distance(given_TE[max(late, 0) :][: len(given_TE) - 1], fresh[aux_layer][max(-late, 0) :]) <= limit:
            return off, f"{name} is one token {word}: state t stands at token {'t + 1' if late > 0 else 't - 1'}"
    for other, state_TE in fresh.items():
        if distance(given_TE, _rms_norm(state_TE)) <= limit:
            return off, f"{name} holds {layer_name(other)} with a norm that the target does not apply there"
    if distance(_rms_norm(given_TE), _rms_norm(fresh[aux_layer])) <= limit:
        return off, f"{name} holds {layer_name(aux_layer)} in another scale"
    return off, f"{name} holds no state that {target.name} has on these tokens ({off:.0%} off)"


def layer_name(aux_layer: int) -> str:
    if aux_layer == FINAL:
        return "the final state"
    return "the embeddings" if aux_layer == 0 else f"layer {aux_layer}"


def distance(a_TE: Tensor, b_TE: Tensor) -> float:
    """Return the median over tokens of |a - b| / |b|, as a few tokens have states a thousand times larger."""
    tokens = min(len(a_TE), len(b_TE))
    a_TE, b_TE = a_TE[:tokens].double().cpu(), b_TE[:tokens].double().cpu()
    distances_T = (a_TE - b_TE).norm(dim=-1) / b_TE.norm(dim=-1).clamp_min(1e-30)
    return float(distances_T.nan_to_num(nan=torch.inf).median())


def _rms_norm(state_TE: Tensor) -> Tensor:
    state_TE = state_TE.double()
    return state_TE / state_TE.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
