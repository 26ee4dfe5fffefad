"""EAGLE-3: one decoder layer over fused states of several target layers (Li et al., arXiv 2503.01840).

Three aux hidden states are fused by a linear map; attention reads the normed embedding of the next token beside the
normed fused state, the stream is the fused state itself, and the layer's output is fed back. The heads have a final
norm and an LM head of their own over the draft vocabulary. EAGLE-3.1 normalises every aux hidden state before the map
and feeds back the normed output. See `recurrent` for what each step reads and drafts.

This is the arrangement that serving engines read. With `init: transition` it begins as a solved step from one final
state of the target to the next, see `transition_start`.

Shape suffixes: E hidden size, M predictions, X = aux layers * E (of final states: flat positions).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, register, supervised_origins
from headstart.heads.exchange.published import Layout, Published, check_embeddings, detached, fill
from headstart.heads.int8_weights import Linear
from headstart.heads.parts.layer import (
    DraftLayer,
    LayerConfig,
    normed,
    refused_layers,
    start_from_last_layers,
)
from headstart.heads.parts.own_position import heads_needed
from headstart.heads.parts.residual import LinearStart
from headstart.heads.parts.transition_start import TransitionConfig, TransitionStart
from headstart.recipes.sections import FromTarget
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel
from headstart.target.model import Target


class Eagle3Config(TransitionConfig):
    """Settings of EAGLE-3 heads."""

    family: str = "eagle3"
    num_layers: int = Field(1, ge=1, le=8, description="Decoder layers; engines expect one.")
    aux_layers: Annotated[tuple[int, ...], FromTarget()] = Field(
        (),
        description="Target layers whose outputs are read, as transformers' hidden_states; (2, L // 2, L - 3), and "
        "(2, L // 2, L - 1) with heads.init=transition.",
    )
    aux_norms: bool = Field(False, description="Normalise each aux hidden state before the fusion (EAGLE-3.1).")
    init: Literal["target", "transition", "random"] = Field(
        "target",
        description="Start from the target's last layer, norm and LM head; from a step to the next final state that is "
        "solved for, with attention heads enough to hold its linear map; or from random numbers.",
    )
    feedback: Literal["pre_norm", "post_norm"] = Field(
        "pre_norm", description="Feed back the layer's output as it is, or normed (EAGLE-3.1)."
    )
    norm_before_residual: bool = Field(
        False, description="Add to the normed fused state instead of the fused state; SGLang does not know it."
    )

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        values = super().of_target(target, settings)
        middle, last = target.num_layers // 2, target.num_layers
        if settings.get("init") != "transition":
            return {**values, "aux_layers": (2, middle, last - 3)}
        own_heads = heads_needed(target.hidden_size, settings.get("head_dim", values["head_dim"]))
        heads = own_heads + min(values["num_key_value_heads"], max(1, own_heads // 2))
        return {
            **values,
            "aux_layers": (2, middle, last - 1),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }

    @property
    def start_layers(self) -> int:
        return self.num_layers

    def check(self) -> None:
        layers = self.aux_layers
        if len(set(layers)) < len(layers) or any(layer < 1 for layer in layers):
            raise refused_layers(layers)
        if self.init != "transition" or not self.hidden_size:
            return
        if self.num_layers > 1:
            raise UserError(
                f"heads.num_layers is {self.num_layers}, and heads.init=transition solves for one layer.",
                "Set heads.num_layers=1, or heads.init=target.",
            )
        if self.num_key_value_heads < self.own_heads:
            raise UserError(
                f"heads.num_key_value_heads is {self.num_key_value_heads}, and {self.own_heads} heads of "
                f"{self.head_dim} are needed to hold a linear map of the hidden size {self.hidden_size}.",
                "Leave out heads.num_key_value_heads and heads.num_attention_heads, or raise them.",
            )


@register
class Eagle3Head(TransitionStart):
    """Fusion, decoder layers, norm and LM head."""

    family: ClassVar[str] = "eagle3"
    Config: ClassVar[type[LayerConfig]] = Eagle3Config
    publishes: ClassVar[Layout | None] = Layout.EAGLE3
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        config.check()
        if not config.aux_layers:
            raise refused_layers(())
        size, eps, aux_layers = config.hidden_size, config.rms_norm_eps, len(config.aux_layers)
        first = DraftLayer(config, 2 * size, input_norm=False)
        later = (DraftLayer(config, size) for _ in range(config.num_layers - 1))
        super().__init__(config, [first, *later])
        # In this order: saved optimisers know parameters by it.
        self.aux_norms = nn.ModuleList(nn.RMSNorm(size, eps) for _ in range(aux_layers if config.aux_norms else 0))
        self.fc = Linear(aux_layers * size, size, bias=False)
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_width, bias=False)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def lm_head_DE(self) -> Tensor:
        return self.lm_head.weight

    def select_states(self, states: dict[int, Tensor]) -> Tensor:
        return torch.cat([states[aux_layer] for aux_layer in self.config.aux_layers], dim=-1)

    def normed_states(self, seen: Tensor) -> Tensor:
        if not self.config.aux_norms:
            return seen
        parts = seen.chunk(len(self.config.aux_layers), dim=-1)
        return torch.cat([normed(norm, part) for norm, part in zip(self.aux_norms, parts, strict=True)], dim=-1)

    def project(self, seen: Tensor) -> Tensor:
        fused: Tensor = self.fc(self.normed_states(seen))
        return fused

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        normed_feedback = normed(self.hidden_norm, feedback)
        attended = torch.cat([normed(self.embedding_norm, embedded), normed_feedback], dim=-1)
        return attended, normed_feedback if self.config.norm_before_residual else feedback

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        hidden = normed(self.norm, stream)
        return hidden, stream if self.config.feedback == "pre_norm" else hidden

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """The target's last layers on the deepest aux hidden state, then its final norm and LM head."""
        self.bind(target)
        if self.config.init == "random":
            return
        before = self.config.hidden_size  # the embedding comes first
        start_from_last_layers(target, self.stack, self.fc, hidden_norm=self.hidden_norm, norm=self.norm, before=before)
        self.lm_head.weight.copy_(self.first_lm_head(target))
        if self.config.init == "transition":
            self.warm_start_transition()

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Fuse to a linear guess of where the next token's stream will end: ridge regression on what the target's own
        LM head reads one token later, undone by its norm, in the scale of the deepest aux hidden state."""
        if self.config.init == "transition":
            self.fit_transition(iter(batches), self.config.norm_before_residual)
        if self.config.init != "target":
            return
        size, scale = self.config.hidden_size, 0.0

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            nonlocal scale
            final_XE, origin_M = batch.states[FINAL].flatten(0, 1).float(), supervised_origins(batch.supervised_BT, 0)
            read_MX = self.normed_states(self.select_states(batch.states).flatten(0, 1)[origin_M].float())
            scale += float(read_MX[:, -size:].square().mean(-1).sqrt().sum())
            return read_MX, [final_XE[origin_M + 1] / self.norm.weight.float()]

        start = LinearStart([self.fc.in_features], self.fc.out_features, self.target_embeddings.device)
        for map_EX in start.solve(batches, read):
            self.fc.weight.copy_(scale / start.rows * map_EX)

    @torch.no_grad()
    def before_training(self, batches: Iterable[HeadBatch]) -> None:
        """Keep heads that look at their own position as they are, where they really do."""
        if self.config.init == "transition":
            self.keep_own_heads(batches)

    def _by_published_name(self) -> dict[str, Tensor]:
        tensors = {
            "fc.weight": self.fc.weight,
            "layers.0.input_layernorm.weight": self.embedding_norm.weight,
            "layers.0.hidden_norm.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        for number, layer in enumerate(self.stack):
            tensors |= layer.by_published_name(number)
        for number, norm in enumerate(self.aux_norms):
            tensors[f"fc_norm.{number}.weight"] = cast(nn.RMSNorm, norm).weight
        return tensors

    def publish(self) -> Published:
        config = self.config
        return Published(
            layout=Layout.EAGLE3,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            steps=self.draft_steps,
            tensors=detached(self._by_published_name()),
            draft_ids_D=self.draft_to_target_D.cpu().clone() if config.draft_vocab_size else None,
            layer=config.published_sizes,
            num_layers=config.num_layers,
            aux_layers=config.aux_layers,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.feedback == "post_norm",
            aux_norms=config.aux_norms,
        )

    @classmethod
    def from_published(cls, published: Published, target: Target) -> Self:
        if published.norm_before_fc:
            raise UserError(
                "The checkpoint norms all aux states together before the fusion (norm_before_fc), and headstart norms "
                "each by itself.",
                "Take a checkpoint without norm_before_fc.",
            )
        settings = {
            **published.head_settings,
            "family": cls.family,
            "draft_steps": published.steps,
            "num_layers": published.num_layers,
            "aux_layers": published.aux_layers,
            "aux_norms": published.aux_norms,
            "feedback": "post_norm" if published.norm_output else "pre_norm",
            "norm_before_residual": published.norm_before_residual,
        }
        heads = cls(Eagle3Config.model_validate(settings))
        check_embeddings(published, target.embedding_weight)
        heads.bind(target)
        fill(heads._by_published_name(), published.tensors)
        if published.draft_ids_D is not None:
            heads.set_draft_vocabulary(published.draft_ids_D)
        return heads
