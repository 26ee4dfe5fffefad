"""Heads that fuse several target layers, as they are published; see `published` for the names.

Shape suffixes: E hidden size.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn

from headstart.errors import UserError
from headstart.heads.exchange.base import (
    detached,
    layer_settings,
    layer_sizes,
    own_embeddings,
    publish_layer,
    refuse_norm_before_fc,
    same_embeddings,
    take_layer,
)
from headstart.heads.exchange.published import Layout, Published
from headstart.heads.parts.fused import FusedHead
from headstart.target.fitting import FINAL
from headstart.target.model import Target

F = TypeVar("F", bound=FusedHead)


def publish_fused(heads: FusedHead, norm_before_residual: bool, norm_output: bool) -> Published:
    """Heads whose stream is the fused state, or that state normed.

    Raises:
        UserError: they read a state that no engine gives.
    """
    config = heads.config
    if FINAL in config.aux_layers:
        raise UserError(
            f"The heads read layers {list(config.aux_layers)} of the target; {FINAL}, the state after the final norm, "
            "is what no engine gives them.",
            "Train with the last layer itself or an earlier one in heads.aux_layers.",
        )
    tensors = {
        "fc.weight": heads.fc.weight,
        "layers.0.input_layernorm.weight": heads.embedding_norm.weight,
        "layers.0.hidden_norm.weight": heads.hidden_norm.weight,
        "norm.weight": heads.norm.weight,
        "lm_head.weight": heads.lm_head.weight,
    }
    for number, layer in enumerate(heads.stack):
        tensors |= publish_layer(layer, number)
    for number, norm in enumerate(heads.aux_norms):
        tensors[f"fc_norm.{number}.weight"] = cast(nn.RMSNorm, norm).weight
    return Published(
        layout=Layout.EAGLE3,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        steps=heads.draft_steps,
        tensors=detached(tensors),
        draft_ids_D=heads.draft_to_target_D.cpu().clone() if config.draft_vocab_size else None,
        layer=layer_sizes(config),
        num_layers=config.num_layers,
        aux_layers=config.aux_layers,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        aux_norms=config.aux_norms,
    )


def fused_settings(published: Published) -> dict[str, Any]:
    """Settings of heads that hold what was published, but for those that families name differently.

    Raises:
        UserError: a variant that heads of ours do not have.
    """
    refuse_norm_before_fc(published)
    return {
        **layer_settings(published),
        "hidden_size": published.hidden_size,
        "vocab_size": published.vocab_size,
        "draft_vocab_size": 0 if published.draft_ids_D is None else published.draft_width,
        "draft_steps": published.steps,
        "num_layers": published.num_layers,
        "aux_layers": published.aux_layers,
        "aux_norms": published.aux_norms,
    }


@torch.no_grad()
def fill_fused(heads: F, published: Published, target: Target) -> F:
    """Heads with the published weights, in float32 and bound to their target; the same heads.

    Raises:
        UserError: the checkpoint has embeddings of its own that are not the target's.
    """
    tensors = published.tensors
    if not same_embeddings(tensors.get("embed_tokens.weight"), target.embedding_weight):
        raise own_embeddings()
    heads.bind(target)
    heads.fc.weight.copy_(tensors["fc.weight"])
    heads.embedding_norm.weight.copy_(tensors["layers.0.input_layernorm.weight"])
    heads.hidden_norm.weight.copy_(tensors["layers.0.hidden_norm.weight"])
    heads.norm.weight.copy_(tensors["norm.weight"])
    heads.lm_head.weight.copy_(tensors["lm_head.weight"])
    for number, layer in enumerate(heads.stack):
        take_layer(layer, tensors, number)
    for number, norm in enumerate(heads.aux_norms):
        cast(nn.RMSNorm, norm).weight.copy_(tensors[f"fc_norm.{number}.weight"])
    if published.draft_ids_D is not None:
        heads.set_draft_vocabulary(published.draft_ids_D)
    return heads
