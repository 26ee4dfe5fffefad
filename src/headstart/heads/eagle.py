"""EAGLE-1: a decoder layer that drafts the target's next final states (Li et al., arXiv 2401.15077).

A linear map joins the state of token t and the embedding of token t + 1. A decoder layer without an input norm predicts
the final state of token t + 1 for the target's frozen LM head and the next draft step. With dynamic trees this is
EAGLE-2 (arXiv 2406.16858). `headstart.heads.parts.recurrent` shows the alignment of the steps.

Shape suffixes: E hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import register
from headstart.heads.exchange.published import (
    EMBEDDINGS,
    Layout,
    Published,
    copy_to_cpu,
    embeddings_error,
    nearly_equal,
)
from headstart.heads.int8_weights import Linear
from headstart.heads.parts.final_state import FinalStateHead
from headstart.heads.parts.layer import DraftLayer, LayerConfig
from headstart.heads.parts.recurrent import RecurrentConfig
from headstart.model.model import Target


class EagleConfig(RecurrentConfig):
    family: str = "eagle"
    init: Literal["target", "random"] = Field(
        "target", description="Start from the target's last layer and a fitted linear map, or from random numbers."
    )
    embedding_norm: bool = Field(
        True,
        description="Normalise the token's embedding, which is much smaller than a final state; false is EAGLE-1 as "
        "published, and as SGLang reads it.",
    )


@register
class EagleHead(FinalStateHead):
    """Joining map and one decoder layer under the target's LM head."""

    Config: ClassVar[type[LayerConfig]] = EagleConfig
    publishes: ClassVar[Layout | None] = Layout.EAGLE
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        size = config.hidden_size
        super().__init__(config, DraftLayer(config, size, input_norm=False))
        self.fc = Linear(2 * size, size)

    @property
    def joining_map(self) -> Linear:
        return self.fc

    def joining_inputs(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat([self._norm_embedding(embedded), feedback], dim=-1)

    def _norm_embedding(self, embedded: Tensor) -> Tensor:
        return F.rms_norm(embedded, embedded.shape[-1:]) if self.config.embedding_norm else embedded

    @property
    def publishing_reads_target(self) -> bool:
        return self.config.embedding_norm or bool(self.fc.bias.any())

    @torch.no_grad()
    def publish(self) -> Published:
        """Export normed embeddings as the heads' own. Engines use the target's LM head, hence its whole vocabulary."""
        if self.lm_bias_D is not None:
            raise UserError(
                "The target's LM head has a bias, and engines leave it out when they draft with EAGLE-1 heads.",
                "Train eagle3 heads, which have an LM head of their own.",
            )
        published = replace(super().publish(), normed_embeddings=self.config.embedding_norm)
        if not self.publishing_reads_target:
            return published
        embeddings = copy_to_cpu({EMBEDDINGS: self._norm_embedding(self.target_embeddings.float())})
        return published.with_tensors({**published.tensors, **embeddings})

    def by_published_name(self) -> dict[str, Tensor]:
        return {"fc.weight": self.fc.weight, "fc.bias": self.fc.bias, **self.layers[0].by_published_name(0)}

    @classmethod
    def settings_of(cls, published: Published) -> dict[str, Any]:
        return {**super().settings_of(published), "embedding_norm": published.normed_embeddings}

    @classmethod
    @torch.no_grad()
    def from_published(cls, published: Published, target: Target) -> Self:
        if published.num_layers > 1:
            raise UserError(
                f"The checkpoint has {published.num_layers} decoder layers, and EAGLE-1 heads of headstart have one.",
                "Take a checkpoint with one layer.",
            )
        is_normed, added_E = cls._embeddings_of(published, target.embedding_weight.detach().float().cpu())
        heads = super().from_published(replace(published, normed_embeddings=is_normed), target)
        heads.fc.bias.add_(heads.fc.weight[:, : published.hidden_size] @ added_E)
        return heads

    @classmethod
    def _embeddings_of(cls, published: Published, embedding_VE: Tensor) -> tuple[bool, Tensor]:
        """Return whether a checkpoint's embeddings are normalised, and the constant added to all of them, [E]."""
        own_VE = published.tensors.get(EMBEDDINGS)
        zero_E = torch.zeros(embedding_VE.shape[1])
        if own_VE is None:  # it reads the target's
            return False, zero_E
        normed_VE = F.rms_norm(embedding_VE, embedding_VE.shape[-1:])
        if own_VE.shape == embedding_VE.shape:
            for is_normed, base_VE in ((False, embedding_VE), (True, normed_VE)):
                added_E = zero_E if nearly_equal(own_VE, base_VE) else (own_VE.float() - base_VE).mean(0)
                if nearly_equal(own_VE.float() - added_E, base_VE):
                    return is_normed, added_E
        raise embeddings_error()
