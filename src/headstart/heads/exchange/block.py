"""Block drafters as they are published; see `published` for the names.

Shape suffixes: E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.base import (
    detached,
    layer_settings,
    layer_sizes,
    own_embeddings,
    publish_layer,
    same_embeddings,
    take_layer,
)
from headstart.heads.exchange.published import EMBEDDINGS, LM_HEAD, Layout, Published
from headstart.heads.parts.block import BlockHead
from headstart.target.model import Target

B = TypeVar("B", bound=BlockHead)


def publish_block(
    heads: BlockHead, layout: Layout, beside: Mapping[str, Tensor] | None = None, **settings: Any
) -> Published:
    """A block drafter, which drafts from the target's whole vocabulary there.

    Args:
        heads: to publish.
        layout: that they are of.
        beside: tensors of the family's own, by their published names.
        settings: of `Published` that are the family's own.
    """
    config = heads.config
    tensors = {"fc.weight": heads.fc.weight, "hidden_norm.weight": heads.hidden_norm.weight}
    for number, layer in enumerate(heads.stack):
        tensors |= publish_layer(layer, number)
        tensors |= {
            f"layers.{number}.self_attn.q_norm.weight": layer.q_norm.weight,
            f"layers.{number}.self_attn.k_norm.weight": layer.k_norm.weight,
        }
    return Published(
        layout=layout,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        steps=heads.draft_steps,
        tensors=detached({**tensors, "norm.weight": heads.norm.weight, **(beside or {})}),
        layer=layer_sizes(config),
        num_layers=config.num_layers,
        aux_layers=config.aux_layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        **settings,
    )


def block_settings(published: Published) -> dict[str, Any]:
    """Settings of heads that hold what was published, but for those of one family."""
    return {
        **layer_settings(published),
        "hidden_size": published.hidden_size,
        "vocab_size": published.vocab_size,
        "num_layers": published.num_layers,
        "aux_layers": published.aux_layers,
        "block_size": published.block_size,
        "mask_token_id": published.mask_token_id,
    }


@torch.no_grad()
def fill_block(heads: B, published: Published, target: Target) -> B:
    """Heads with the published weights of the block, in float32 and bound to their target; the same heads.

    Raises:
        UserError: the checkpoint has embeddings or an LM head of its own that are not the target's.
    """
    tensors = published.tensors
    if not same_embeddings(tensors.get(EMBEDDINGS), target.embedding_weight):
        raise own_embeddings()
    if not same_embeddings(tensors.get(LM_HEAD), target.lm_head_weight):
        raise UserError(
            "The checkpoint has an LM head of its own, which is not the target's; block drafters of headstart draft "
            "through the target's.",
            "Name the target that they were trained on with --target, or take another checkpoint.",
        )
    heads.bind(target)
    heads.fc.weight.copy_(tensors["fc.weight"])
    heads.hidden_norm.weight.copy_(tensors["hidden_norm.weight"])
    heads.norm.weight.copy_(tensors["norm.weight"])
    for number, layer in enumerate(heads.stack):
        take_layer(layer, tensors, number)
        layer.q_norm.weight.copy_(tensors[f"layers.{number}.self_attn.q_norm.weight"])
        layer.k_norm.weight.copy_(tensors[f"layers.{number}.self_attn.k_norm.weight"])
    return heads
