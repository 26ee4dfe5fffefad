"""Between a decoder layer of ours and the tensors and sizes that are published of one, see `published`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import LayerSizes, Published
from headstart.heads.parts.layer import DraftLayer, LayerConfig

_ROUNDED = 0.01
"""How far, as a share of their size, rounding to bfloat16 moves numbers at most."""


def layer_sizes(config: LayerConfig) -> LayerSizes:
    """What is published of a layer's settings."""
    return LayerSizes(**{name: getattr(config, name) for name in LayerSizes.__dataclass_fields__})


def layer_settings(published: Published) -> dict[str, Any]:
    """The settings of ours for published decoder layers."""
    assert published.layer is not None, "these heads have decoder layers"
    return asdict(published.layer)


def publish_layer(layer: DraftLayer, number: int) -> dict[str, Tensor]:
    """A layer's tensors by their published names."""
    config, of = layer.config, f"layers.{number}"
    sizes = [count * config.head_dim for count in _counts(config)]
    queries, keys, values = torch.split(layer.qkv.weight, sizes)
    gate, up = layer.gate_up.weight.chunk(2)
    found = {
        f"{of}.self_attn.q_proj.weight": queries,
        f"{of}.self_attn.k_proj.weight": keys,
        f"{of}.self_attn.v_proj.weight": values,
        f"{of}.self_attn.o_proj.weight": layer.o.weight,
        f"{of}.post_attention_layernorm.weight": layer.mlp_norm.weight,
        f"{of}.mlp.gate_proj.weight": gate,
        f"{of}.mlp.up_proj.weight": up,
        f"{of}.mlp.down_proj.weight": layer.down.weight,
    }
    if layer.input_norm is not None:
        found[f"{of}.input_layernorm.weight"] = layer.input_norm.weight
    return found


@torch.no_grad()
def take_layer(layer: DraftLayer, tensors: Mapping[str, Tensor], number: int) -> None:
    """Fill a layer from published tensors, in place."""
    of = f"layers.{number}"
    layer.qkv.weight.copy_(torch.cat([tensors[f"{of}.self_attn.{name}_proj.weight"] for name in "qkv"]))
    layer.o.weight.copy_(tensors[f"{of}.self_attn.o_proj.weight"])
    layer.mlp_norm.weight.copy_(tensors[f"{of}.post_attention_layernorm.weight"])
    layer.gate_up.weight.copy_(torch.cat([tensors[f"{of}.mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    layer.down.weight.copy_(tensors[f"{of}.mlp.down_proj.weight"])
    if layer.input_norm is not None:
        layer.input_norm.weight.copy_(tensors[f"{of}.input_layernorm.weight"])


def detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own on the CPU."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def same_embeddings(published_VE: Tensor | None, own_VE: Tensor) -> bool:
    """Whether embeddings, if a checkpoint has any, are those given but for rounding."""
    if published_VE is None:
        return True
    if published_VE.shape != own_VE.shape:
        return False
    off = (published_VE.float() - own_VE.detach().float().cpu()).abs().mean()
    return bool(off <= _ROUNDED * own_VE.detach().float().abs().mean().cpu())


def own_embeddings() -> UserError:
    """Why such a checkpoint cannot be read."""
    return UserError(
        "The checkpoint has token embeddings of its own, which are not the target's; heads of headstart read the "
        "target's.",
        "Name the target that they were trained on with --target, or take another checkpoint.",
    )


def refuse_norm_before_fc(published: Published) -> None:
    """Refuse the one published variant of the fusion that heads of ours do not have.

    Raises:
        UserError: the checkpoint norms all aux states together.
    """
    if published.norm_before_fc:
        raise UserError(
            "The checkpoint norms all aux states together before the fusion (norm_before_fc), and headstart norms "
            "each by itself.",
            "Take a checkpoint without norm_before_fc.",
        )


def _counts(config: LayerConfig) -> tuple[int, int, int]:
    return config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
