"""Which model a target is: exactly, and as far as rounding its weights leaves it the same model.

What is made of a target's states belongs to these weights in this rounding, and goes by `fingerprint`. Heads fit every
rounding of the model that they were trained on: float16 and bfloat16 copies, and those with layers in 8 or 4 bits. For
them there is a `sketch`, some numbers of the weights themselves, to compare with what another copy has in their place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart.target.lm_head import plain_weight

_PARAMETERS, _NUMBERS = 32, 16
"""Of a sketch: parameters, spread over the model, and numbers of each."""
_NEAR, _TINY = 2**-7, 1e-6
"""How far, relatively and absolutely, rounding to bfloat16 or float16 moves a number."""
_EQUAL_SHARE = 0.97
"""Of the numbers that nothing but such rounding may have moved."""
_ALIKE = 0.9
"""Cosine of packed weights and those they were made of: 0.99 in 4 bits; 0 for other weights."""


@dataclass(frozen=True)
class Identity:
    """Which model this is.

    Attributes:
        spec: what to pass to `load_target` to get it again (a short name, a hub id or a folder).
        name: what people call it.
        fingerprint: hash of the architecture and of sampled weights rounded to bfloat16; equal for the same weights
            in float32 and bfloat16.
    """

    spec: str
    name: str
    fingerprint: str


def fingerprint(model: nn.Module, architecture: str) -> str:
    """See `Identity`."""
    digest = hashlib.sha256()
    digest.update(architecture.encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def sketch(model: nn.Module, tokenizer: Any, architecture: str) -> dict[str, Any]:
    """What `differs` compares, for JSON: architecture, a hash of the vocabulary, and some numbers of some weights.

    Packed weights are left out: what they stand for is not what the model was trained to.
    """
    complete = [(name, weight) for name, weight in sorted(model.named_parameters()) if _is_plain(weight)]
    chosen = [complete[len(complete) * index // _PARAMETERS] for index in range(_PARAMETERS)] if complete else []
    weights = {
        name: {"shape": list(weight.shape), "numbers": [float(number) for number in _sampled(weight)]}
        for name, weight in dict(chosen).items()
    }
    return {"architecture": architecture, "vocabulary": vocabulary_hash(tokenizer), "weights": weights}


def differs(drawn: Mapping[str, Any], model: nn.Module, tokenizer: Any, architecture: str) -> str | None:
    """In what a model differs from the one that was sketched, but for rounding; None in nothing that shows.

    Numbers that the model keeps as such are compared one by one. Of packed layers it is asked what the layer makes of
    unit vectors, and that is compared as a whole.
    """
    if drawn.get("architecture") != architecture:
        return f"it is built otherwise ({architecture}, not {drawn.get('architecture')})"
    theirs, ours = drawn.get("vocabulary"), vocabulary_hash(tokenizer)
    if theirs is not None and ours is not None and theirs != ours:
        return "its tokenizer has other tokens"
    equal: list[bool] = []
    alike: list[float] = []
    parameters = dict(model.named_parameters())
    for name, known in drawn.get("weights", {}).items():
        shape, numbers = tuple(known["shape"]), torch.tensor(known["numbers"])
        weight = parameters.get(name)
        if weight is not None and _is_plain(weight) and tuple(weight.shape) == shape:
            near = (_sampled(weight) - numbers).abs() <= _NEAR * numbers.abs() + _TINY
            equal += near.tolist()
        elif (read := _through_layer(model, name, shape)) is not None and numbers.norm() > 0:
            alike.append(float(torch.cosine_similarity(read, numbers, dim=0)))
    if not equal and not alike:
        return "none of its weights can be compared"
    if equal and sum(equal) < _EQUAL_SHARE * len(equal):
        return "it has other weights"
    if alike and sum(alike) < _ALIKE * len(alike):
        return "it has other weights"
    return None


def _is_plain(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.dtype.itemsize >= 2 and weight.numel() >= _NUMBERS


def _indices(count: int) -> Tensor:
    """Indices of some numbers of a weight, spread evenly over its columns."""
    return (2 * torch.arange(_NUMBERS) + 1) * count // (2 * _NUMBERS + 1)


def _sampled(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[_indices(flat.numel()).to(flat.device)].float().cpu()


@torch.no_grad()
def _through_layer(model: nn.Module, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The sampled numbers of a linear layer whose weights are packed; None when it is not one, or not there."""
    path, _, kind = name.rpartition(".")
    if kind != "weight" or len(shape) != 2:
        return None
    try:
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Embedding) or plain_weight(layer, *shape) is not None:
            return None
        where = next(part for part in (*layer.parameters(), *layer.buffers(), *model.parameters())).device
        dtype = next((part.dtype for part in model.parameters() if _is_plain(part)), torch.float32)
        indices = _indices(shape[0] * shape[1])
        units = torch.zeros(_NUMBERS + 1, shape[1], dtype=dtype, device=where)  # the last row gives the bias
        units[torch.arange(_NUMBERS), (indices % shape[1]).to(where)] = 1
        out: Tensor = layer(units).float().cpu()
        return (out[:-1] - out[-1])[torch.arange(_NUMBERS), indices // shape[1]]
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError, StopIteration):
        return None


_SETTINGS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "layer_norm_eps",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "attention_multiplier",
    "residual_multiplier",
    "embedding_multiplier",
    "num_experts_per_tok",
)
"""Of a model's config; named one by one, since transformers adds settings that change nothing with every version."""


def settings_hash(config: Any) -> str:
    """Hash of the settings of a config that change what a model computes."""
    known = {name: getattr(config, name, None) for name in _SETTINGS}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:12]


def vocabulary_hash(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]
