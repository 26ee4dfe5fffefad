"""Identify a target, exactly and up to rounding of its weights.

Stored states belong to exact weights, identified by `fingerprint`. Heads fit every rounding of their model, identified
by a `sketch`: a sample of the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import TypedDict

from headstart.model.lm_head import is_quantized, plain_weight

BUNDLED = "adapter"
"""Folder of an adapter bundled with its heads."""
_PER_PARAMETER = 64
"""Samples per parameter in a fingerprint."""
_PARAMETERS, _NUMBERS = 32, 16
"""Parameters in a sketch, spread over the model, and samples of each."""
_Numbers = Annotated[list[FiniteFloat], Field(min_length=_NUMBERS, max_length=_NUMBERS)]
_RELATIVE, _ABSOLUTE = 2**-7, 1e-6
"""Relative and absolute tolerance for rounding to bfloat16 or float16."""
_EQUAL_SHARE = 0.97
"""Required share of samples within that tolerance."""
_COSINE = 0.9
"""Required cosine of quantised weights and their originals: 0.99 in 4 bits, 0 for other weights."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of a target: folder or hub id, and hash of weights and settings."""

    spec: str
    hash: str

    @property
    def name(self) -> str:
        """Hub id or folder name; the hash of a bundled adapter."""
        path = Path(self.spec).expanduser()
        return self.spec if not path.is_dir() else self.hash[:8] if path.name == BUNDLED else path.resolve().name


@dataclass(frozen=True)
class Origin:
    """The model before loading applied an adapter or quantization ("int8" or "int4")."""

    fingerprint: str
    sketch: Mapping[str, Any]
    adapter: Adapter | None = None
    quantization: str = "none"

    @property
    def changed_fingerprint(self) -> str:
        """Fingerprint of the changed model, equal in every dtype."""
        adapter = "" if self.adapter is None else f" adapter {self.adapter.hash}"
        packed = "" if self.quantization == "none" else f" {self.quantization}"
        return hashlib.sha256(f"{self.fingerprint}{adapter}{packed}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Identity:
    """Argument of `load_target`, display name, and a hash of the architecture and of weights sampled in bfloat16, equal
    in float32 and bfloat16."""

    spec: str
    name: str
    fingerprint: str


def unsharded(weight: Tensor) -> Tensor:
    """Gather a sharded weight, on all ranks."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def sample_indices(count: int) -> range:
    """Choose the flat indices of a parameter to sample for the fingerprint."""
    return range(0, count, max(1, count // _PER_PARAMETER))[:_PER_PARAMETER]


def _sample(_: str, parameter: Tensor) -> Tensor:
    values = unsharded(parameter).detach().reshape(-1)
    indices = sample_indices(values.numel())
    return values[indices.start : indices.stop : indices.step]


def fingerprint(model: nn.Module, architecture: str, sample: Callable[[str, Tensor], Tensor] = _sample) -> str:
    """Hash architecture and weights; call this on all ranks if sharded. `sample` reads a parameter's samples."""
    digest = hashlib.sha256(architecture.encode())
    for name, parameter in sorted(model.named_parameters()):
        values = sample(name, parameter).to("cpu", torch.bfloat16)
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


class SketchedWeight(TypedDict):
    """Samples of a weight."""

    shape: list[int]
    numbers: _Numbers


class Sketch(TypedDict):
    """Schema of a sketch in files."""

    architecture: Annotated[str, Field(pattern=r"^\S+( \d+){3}$")]
    vocabulary: str | None
    weights: dict[str, SketchedWeight]
    adapter: NotRequired[str]
    without_adapter: NotRequired[dict[str, _Numbers]]
    rounded: NotRequired[bool]


def sketch(
    model: nn.Module,
    tokenizer: Any,
    architecture: str,
    origin: Origin | None = None,
    sample: Callable[[str, Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """Sample a model for `differs`, as JSON: architecture, vocabulary hash, and samples of some unquantised weights.
    With an adapter, also its hash and the samples without it. `sample` replaces reading samples from the weights."""
    if origin is not None and origin.quantization != "none":
        return {**origin.sketch, **({} if origin.adapter is None else {"adapter": origin.adapter.hash})}
    plain = [(name, weight) for name, weight in sorted(model.named_parameters()) if _is_plain(weight)]
    chosen = [plain[len(plain) * index // _PARAMETERS] for index in range(_PARAMETERS)] if plain else []
    weights = {
        name: {"shape": list(weight.shape), "numbers": (sample(name, weight) if sample else _sampled(weight)).tolist()}
        for name, weight in dict(chosen).items()
    }
    sketched: dict[str, Any] = {
        "architecture": architecture,
        "vocabulary": vocabulary_hash(tokenizer),
        "weights": weights,
    }
    if origin is not None and origin.adapter is not None:
        before = origin.sketch["weights"]
        moved = {name for name, known in weights.items() if name in before and before[name] != known}
        sketched["adapter"] = origin.adapter.hash
        sketched["without_adapter"] = {name: before[name]["numbers"] for name in sorted(moved)}
    return sketched


def differs(
    sketched: Mapping[str, Any],
    model: nn.Module,
    tokenizer: Any,
    architecture: str,
    origin: Origin | None = None,
    rounded: bool = False,
) -> str | None:
    """Describe how a model differs from a sketched one, beyond rounding; None if it does not.

    Plain weights are compared sample by sample. Quantised layers are read through unit vectors and compared by cosine,
    as are all weights if either model comes from a GGUF file (`rounded`). An adapter changes weights too little for
    that: its hash identifies it, or else the distance of the samples from those with and without it.
    """
    rounded = rounded or bool(sketched.get("rounded"))
    if sketched.get("architecture") != architecture:
        return f"its architecture differs ({architecture}, not {sketched.get('architecture')})"
    theirs, ours = sketched.get("vocabulary"), vocabulary_hash(tokenizer)
    if theirs is not None and ours is not None and theirs != ours:
        return "its tokenizer has other tokens"
    if (problem := _differs_in_adapter(sketched, model, origin)) is not None:
        return problem
    equal: list[bool] = []
    cosines: list[float] = []
    parameters = dict(model.named_parameters())
    as_read = {} if origin is None else origin.sketch["weights"]
    for name, known in sketched.get("weights", {}).items():
        shape, expected, by_cosine = tuple(known["shape"]), torch.tensor(known["numbers"]), rounded
        weight, found = parameters.get(name), None
        if name in as_read:
            expected = torch.tensor(sketched.get("without_adapter", {}).get(name, known["numbers"]))
            found = torch.tensor(as_read[name]["numbers"])
        elif weight is not None and _is_plain(weight) and tuple(weight.shape) == shape:
            found = _sampled(weight)
        else:
            found, by_cosine = _through_layer(model, name, shape), True
        if found is not None and not by_cosine:
            equal += ((found - expected).abs() <= _RELATIVE * expected.abs() + _ABSOLUTE).tolist()
        elif found is not None and expected.norm() > 0:
            cosines.append(float(torch.cosine_similarity(found, expected, dim=0)))
    if not equal and not cosines:
        return "none of its weights can be compared"
    differ = (equal and sum(equal) < _EQUAL_SHARE * len(equal)) or (cosines and sum(cosines) < _COSINE * len(cosines))
    return "it has other weights" if differ else None


def _differs_in_adapter(sketched: Mapping[str, Any], model: nn.Module, origin: Origin | None) -> str | None:
    theirs, ours = sketched.get("adapter"), None if origin is None else origin.adapter
    if theirs is None:
        return None if ours is None else f"it has the adapter {ours.name}"
    if origin is None or ours is None:
        here = {name: _sampled(weight) for name, weight in model.named_parameters() if _is_plain(weight)}
        return None if _adapter_fraction(sketched, here) > 0.5 else "it lacks the adapter"
    if theirs != ours.hash:
        return f"its adapter {ours.name} is another one"
    before = {name: torch.tensor(known["numbers"]) for name, known in origin.sketch["weights"].items()}
    twice = _adapter_fraction(sketched, before) > 0.5
    return "the adapter was in its weights before, and is twice now" if twice else None


def _adapter_fraction(sketched: Mapping[str, Any], samples: Mapping[str, Tensor]) -> float:
    """Project samples on the step from without the adapter (0) to with it (1); 0 without samples."""
    along = size = 0.0
    for name, without in sketched.get("without_adapter", {}).items():
        if (here := samples.get(name)) is not None and len(here) == len(without):
            base = torch.tensor(without)
            step = torch.tensor(sketched["weights"][name]["numbers"]) - base
            along += float(((here - base) * step).sum())
            size += float(step.square().sum())
    return along / size if size else 0.0


def _is_plain(weight: Tensor) -> bool:
    wide = weight.is_floating_point() and weight.dtype.itemsize >= 2 and weight.numel() >= _NUMBERS
    return wide and not is_quantized(weight)


def sketch_indices(count: int) -> Tensor:
    """Choose the flat indices of a weight to sample for a sketch."""
    return (2 * torch.arange(_NUMBERS) + 1) * count // (2 * _NUMBERS + 1)


def _sampled(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[sketch_indices(flat.numel()).to(flat.device)].float().cpu()


@torch.no_grad()
def _through_layer(model: nn.Module, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Sample a quantised linear layer through unit vectors; None if there is no such layer."""
    path, _, kind = name.rpartition(".")
    if kind != "weight" or len(shape) != 2:
        return None
    try:
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Embedding) or plain_weight(layer, *shape) is not None:
            return None
        where = next(part for part in (*layer.parameters(), *layer.buffers(), *model.parameters())).device
        dtype = next((part.dtype for part in model.parameters() if _is_plain(part)), torch.float32)
        indices = sketch_indices(shape[0] * shape[1])
        units = torch.zeros(_NUMBERS + 1, shape[1], dtype=dtype, device=where)  # the last row gives the bias
        units[torch.arange(_NUMBERS), (indices % shape[1]).to(where)] = 1
        out: Tensor = layer(units).float().cpu()
        return (out[:-1] - out[-1])[torch.arange(_NUMBERS), indices // shape[1]]
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError, StopIteration):
        return None


_SETTINGS = (
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "sliding_window", "layer_types"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("hidden_act", "hidden_activation", "num_experts_per_tok", "rms_norm_eps", "layer_norm_eps"),
    *("final_logit_softcapping", "logit_scale", "logits_scaling"),
    *("attention_multiplier", "residual_multiplier", "embedding_multiplier"),
)
"""Config fields that affect outputs; an allow-list, since every transformers version adds fields that do not."""


def settings_hash(config: Any) -> str:
    known = {name: getattr(config, name, None) for name in _SETTINGS}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:12]


def vocabulary_hash(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that users type, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
