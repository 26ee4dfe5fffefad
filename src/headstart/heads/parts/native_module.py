"""The multi-token-prediction module of a target's checkpoint (DeepSeek-V3 and others), trainable as a draft head.

Its decoder layer is the target's own transformers class (latent attention, gates, experts), which holds every tensor of
the checkpoint. The layer computes queries, keys and values and calls the `attend` passed to it: over a text in
training, over a tree and the KV cache in drafting.

Shape suffixes: B rows, W entries, E hidden size, N key heads, G query heads per key head, d head size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headstart.errors import UserError
from headstart.heads.parts.layer import Angles
from headstart.model.frozen import FrozenModel
from headstart.model.shipped import ARRANGEMENTS, Arrangement, load_layer, shipped_files

_ATTENTION = "headstart-heads"
_LAYER = "layers.0."
_OF_THE_FILES = ("_name_or_path", "architectures", "auto_map", "quantization_config", "transformers_version")
"""Config fields that do not describe the layer."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries [B, N, G, W, d] over their own keys and values [B, N, W, d] and earlier ones."""


def _attention(
    module: nn.Module,
    query_BQWd: Tensor,
    key_BNWd: Tensor,
    value_BNWd: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attend: Attend,
    **others: Any,
) -> tuple[Tensor, None]:
    """Adapt `attend` to transformers' interface. Latent attention has shorter values than keys and its own scale: pad
    both to one head size and rescale queries."""
    size = max(key_BNWd.shape[-1], value_BNWd.shape[-1])
    parts = (query_BQWd * (scaling * size**0.5), key_BNWd, value_BNWd)
    query, key, value = (F.pad(part.to(value_BNWd.dtype), (0, size - part.shape[-1])) for part in parts)
    rows, kv_heads, width, _ = key.shape
    attention_output_BNGWd = attend(query.view(rows, kv_heads, -1, width, size), key, value)
    return attention_output_BNGWd.flatten(1, 2)[..., : value_BNWd.shape[-1]].transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


@dataclass(frozen=True)
class NativeSettings:
    """Architecture of a target's module.

    Attributes:
        arrangement: name in `ARRANGEMENTS`.
        head: prefix of its tensors in the checkpoint.
        state_layer: target layer it reads.
        layer: transformers config of a one-layer model with its layer.
    """

    arrangement: str
    head: str
    state_layer: int
    layer: dict[str, Any]

    @classmethod
    def of(cls, target: FrozenModel) -> NativeSettings:
        """Describe the target's first module. Raises a UserError if it has none."""
        files = shipped_files(target)
        config = files.layer_config(0)
        # Remote-code configs derive from one of transformers' classes: use that class's layer.
        names = [(getattr(kind, "model_type", ""), kind) for kind in type(config).__mro__]
        known = next((name for name, kind in names if name in CONFIG_MAPPING and CONFIG_MAPPING[name] is kind), None)
        if known is None:
            raise UserError(
                f"The module that {target.name} ships has a layer of type {names[0][0]!r}, which transformers lacks.",
                "Update transformers, or take another drafter.",
            )
        settings = json.loads(config.to_json_string(use_diff=False)) | {"model_type": known}
        layer = {name: value for name, value in settings.items() if name not in _OF_THE_FILES}
        return cls(files.arrangement.name, files.prefix(0), files.state_layer, layer)

    @property
    def arranged(self) -> Arrangement:
        return next(arrangement for arrangement in ARRANGEMENTS if arrangement.name == self.arrangement)

    def config(self) -> Any:
        return CONFIG_MAPPING[self.layer["model_type"]].from_dict(dict(self.layer))

    def model(self) -> Any:
        """Build a randomly initialised causal LM of this layer alone."""
        return AutoModelForCausalLM.from_config(
            self.config(), dtype=torch.float32, attn_implementation=_ATTENTION, experts_implementation="eager"
        )

    def rotary(self) -> nn.Module:
        """Rotary module of its layer."""
        with torch.device("meta"):
            kind = type(self.model().get_decoder().rotary_emb)
        rotary: nn.Module = kind(self.config())
        if hasattr(rotary, "mrope_section"):  # expects time, height and width positions, equal in text
            rotary.register_forward_pre_hook(lambda _, given: (given[0], given[1].expand(3, -1, -1)))
        return rotary

    def cache_shape(self) -> tuple[int, int]:
        """Return the number of key heads and the cached size per head, the larger of key and value."""
        rotary = self.rotary()(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))
        shapes: list[torch.Size] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            shapes.append(key.shape)
            return query

        with torch.device("meta"):
            module = NativeModule(self)
            module.layer.self_attn(
                torch.zeros(1, 1, module.norm.weight.shape[0]),
                position_embeddings=tuple(part.to("meta") for part in rotary),
                attention_mask=None,
                attend=attend,
            )
        return shapes[0][1], shapes[0][3]


class NativeModule(nn.Module):
    """Norms of embedding and state, joining map, decoder layer and output norm."""

    def __init__(self, settings: NativeSettings) -> None:
        super().__init__()
        self.settings = settings
        decoder = settings.model().get_decoder()
        size = decoder.norm.weight.shape[0]
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(decoder.norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = decoder.layers[0]

    def trained_qkv(self) -> None:
        """See `DraftLayer.trained_qkv`: all rows are trained."""

    def join(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        parts = [self.enorm(embedded), self.hnorm(feedback)]
        joined: Tensor = self.eh_proj(torch.cat(parts[::-1] if self.settings.arranged.state_first else parts, dim=-1))
        return joined

    def run(self, joined_BWE: Tensor, rotary: Angles, attend: Attend) -> Tensor:
        """Run the layer; returns its stream, [B, W, E]."""
        output = self.layer(joined_BWE, position_embeddings=rotary, attention_mask=None, attend=attend)
        stream: Tensor = output[0] if isinstance(output, tuple) else output
        return stream

    @torch.no_grad()
    def load(self, target: FrozenModel) -> None:
        """Load the target's checkpoint in the module's dtype."""
        files = shipped_files(target)
        with torch.device("meta"):
            kind = type(self.settings.model())
        model = load_layer(files, 0, kind, self.settings.config(), self.norm.weight.dtype)
        loaded = model.get_decoder().layers[0].state_dict()
        device = self.norm.weight.device
        self.layer.load_state_dict({name: value.to(device) for name, value in loaded.items()}, assign=True)
        parts = (self.enorm, self.hnorm, self.eh_proj, self.norm)
        for part, weight in zip(parts, files.parts(0), strict=True):
            part.weight.copy_(weight)

    def by_checkpoint_name(self) -> dict[str, Tensor]:
        """Return the trained tensors by their checkpoint names, with experts unstacked."""
        arranged = self.settings.arranged
        parts = (self.enorm, self.hnorm, self.eh_proj, self.norm)
        tensors = {
            f"{self.settings.head}{name}.weight": part.weight.detach()
            for name, part in zip(arranged.parts, parts, strict=True)
        }
        with torch.device("meta"):
            model = self.settings.model()
        prefix = f"{model.base_model_prefix}.{_LAYER}"
        weights = {prefix + name: weight.detach() for name, weight in self.layer.named_parameters()}
        checkpoint_prefix = self.settings.head + arranged.layer.format(number=0)
        split = revert_weight_conversion(model, weights)
        return tensors | {checkpoint_prefix + name.removeprefix(prefix): weight for name, weight in split.items()}


def native_fields(target: FrozenModel) -> dict[str, Any]:
    """Return the head settings for the target's module."""
    settings = NativeSettings.of(target)
    heads, size = settings.cache_shape()
    return {"native": settings, "num_key_value_heads": heads, "head_dim": size}
