"""EAGLE-3: one decoder layer over fused states of several target layers (Li et al., arXiv 2503.01840).

A linear map fuses three aux hidden states. Attention reads the RMS-normalized embedding of the next token and the
normalized fused state, the residual stream starts from the fused state, and the layer's output is the next step's fused
state. The heads have their own final norm and LM head over the draft vocabulary. EAGLE-3.1 norms every aux hidden state
before the map and feeds back the output after the final norm. On tokens a b c d e, the draft from the states after `b`
(see `headstart.heads.parts.recurrent`):

    step 0   fused(b), emb(c) -> d                      attends to the entries of a and b; b's is the step itself
    step 1   its own output of step 0, emb(d) -> e      attends to the entries of a and b, and to itself

Serving engines read this layout. With `init: transition` two parts are solved before training: a linear prediction of
the next final state from a final state and the next token's embedding, stored in own-position heads (see
`own_position`; the published layer has no other place for it), and induction heads (see `induction`).

Shape suffixes: B rows, T tokens, E hidden size, M selected positions, S = B * T flat positions, N key heads, P
distances, R pairs of a head, X = aux layers * E, I attention inputs, J inputs of the solved map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, register, supervised_origins
from headstart.heads.exchange.published import Layout, Published, check_embeddings
from headstart.heads.int8_weights import Linear, in_panels
from headstart.heads.parts import induction, own_position
from headstart.heads.parts.layer import (
    DraftLayer,
    LayerConfig,
    aux_layers_error,
    concat_heads,
    norm_and_concat,
    rms_norm,
    start_from_last_layers,
)
from headstart.heads.parts.recurrent import RecurrentConfig, RecurrentHead
from headstart.heads.parts.residual import LinearStart, map_by_direction
from headstart.heads.parts.text_attention import causal_attention
from headstart.heads.settings import FromTarget
from headstart.kernels import draft_kernels
from headstart.model.frozen import FrozenModel
from headstart.model.model import Target
from headstart.replay.patch import FINAL

_FEW_ROWS, _ROWS, _MANY = 2, 6, 20_000
"""Tokens for the fits: `_ROWS` per input dimension, capped at the larger of `_MANY` and `_FEW_ROWS` per dimension."""
_BLOCK = 8192
"""Embeddings per chunk."""
_CHECK_LENGTH, _CHECK_TOKENS = 1024, 8192
"""Tokens per text and in total for the check of own-position heads before training."""
_RANDOM_TOKENS, _MIN_RANDOM_WEIGHT = 256, 0.99
"""The same check before decoding: number of random tokens, and the minimum mean self-attention weight of a head."""


class Eagle3Config(RecurrentConfig):
    family: str = "eagle3"
    num_layers: int = Field(1, ge=1, le=8, description="Decoder layers; engines expect one.")
    aux_layers: Annotated[tuple[int, ...], FromTarget()] = Field(
        (),
        description="Target layers to read: n is the output of layer n, before the final norm even for the last one, "
        "L. By default (2, L // 2, L - 3), and (2, L // 2, L - 1) with heads.init=transition.",
    )
    aux_norms: bool = Field(False, description="Normalise each aux hidden state before the fusion (EAGLE-3.1).")
    qk_norm: bool = Field(
        False, description="Norm queries and keys head by head, as Qwen3's layers; vLLM and speculators load it."
    )
    init: Literal["target", "transition", "random"] = Field(
        "target",
        description="target: start from the target's last layer, norm and LM head. transition: from a linear map to "
        "the next final state, fitted to the data and stored in added attention heads. random: from random numbers.",
    )
    feedback: Literal["pre_norm", "post_norm"] = Field(
        "pre_norm", description="Feed back the layer's output before or, as EAGLE-3.1 does, after the final norm."
    )
    norm_before_residual: bool = Field(
        False, description="Start the residual stream after the hidden norm; not supported by SGLang."
    )

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        values = super().of_target(target, settings)
        middle, last = target.num_layers // 2, target.num_layers
        if (layers := settings.get("aux_layers")) and max(layers) > last:
            raise aux_layers_error(layers, f"from 1 to {last}")
        if settings.get("init") != "transition":
            return {**values, "aux_layers": (2, middle, last - 3)}
        own_heads = own_position.heads_needed(target.hidden_size, settings.get("head_dim", values["head_dim"]))
        enough, size = own_heads + min(values["num_key_value_heads"], max(1, own_heads // 2)), target.hidden_size
        # Engines read configs with transformers: its Llama needs a number of heads that divides the hidden size.
        heads = next((count for count in range(enough, size + 1) if size % count == 0), enough)
        return {
            **values,
            "aux_layers": (2, middle, last - 1),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }

    @property
    def own_heads(self) -> int:
        """Number of own-position key heads, with `init: transition`."""
        return own_position.heads_needed(self.hidden_size, self.head_dim)

    @property
    def start_layers(self) -> int:
        return self.num_layers

    def check(self) -> None:
        layers = self.aux_layers
        if len(set(layers)) < len(layers) or any(layer < 1 for layer in layers):
            raise aux_layers_error(layers)
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
class Eagle3Head(RecurrentHead):
    """Fusion, decoder layers, norm and LM head."""

    Config: ClassVar[type[LayerConfig]] = Eagle3Config
    publishes: ClassVar[Layout | None] = Layout.EAGLE3
    has_own_embeddings: ClassVar[bool] = False
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        if not config.aux_layers:
            raise aux_layers_error(())
        size, eps, aux_layers = config.hidden_size, config.rms_norm_eps, len(config.aux_layers)
        first = DraftLayer(config, 2 * size, input_norm=False, qk_norm=config.qk_norm)
        later = (DraftLayer(config, size, qk_norm=config.qk_norm) for _ in range(config.num_layers - 1))
        super().__init__(config, [first, *later])
        # Keep this order: saved optimiser states are indexed by it.
        norms = nn.ModuleList(nn.RMSNorm(size, eps) for _ in range(aux_layers if config.aux_norms else 0))
        self.aux_norms = cast(list[nn.RMSNorm], norms)
        self.fc = Linear(aux_layers * size, size, bias=False)
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_width, bias=False)
        self._own_heads_cache: tuple[tuple[int, int], int] | None = None  # (int8 weights, their version), own heads

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def lm_head_DE(self) -> Tensor:
        return self.lm_head.weight

    def select_states(self, states: dict[int, Tensor]) -> Tensor:
        return torch.cat([states[aux_layer] for aux_layer in self.config.aux_layers], dim=-1)

    def norm_states(self, states: Tensor) -> Tensor:
        if not self.config.aux_norms:
            return states
        return norm_and_concat(self.aux_norms, states.chunk(len(self.aux_norms), dim=-1))

    def project(self, states: Tensor) -> Tensor:
        fused: Tensor = self.fc(self.norm_states(states))
        return fused

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        attention_input = norm_and_concat([self.embedding_norm, self.hidden_norm], [embedded, feedback])
        size = embedded.shape[-1]
        return attention_input, attention_input.narrow(-1, size, size) if self.config.norm_before_residual else feedback

    def embedding_input(self, like: Tensor) -> draft_kernels.EmbeddingInput | None:
        table_VE, config = self.target_embeddings, self.config
        plain = type(table_VE) in (Tensor, nn.Parameter) and table_VE.is_cpu and table_VE.is_contiguous()
        if not plain or table_VE.dtype != like.dtype:
            return None
        norms_E = self.embedding_norm.weight.to(like.dtype), self.hidden_norm.weight.to(like.dtype)
        fusion = None if config.aux_norms else in_panels(self.fc.weight, like)
        return draft_kernels.EmbeddingInput(table_VE, norms_E, config.norm_before_residual, fusion)

    def own_heads(self, layer: DraftLayer, like: Tensor) -> int:
        """Number of untrained own-position heads, verified on random tokens; cached until the weights change."""
        int8 = in_panels(layer.qkv.weight, like)
        if int8 is None or layer is not self.layers[0]:
            return 0
        key = int8.data.data_ptr(), int8.version
        if self._own_heads_cache is None or self._own_heads_cache[0] != key:
            self._own_heads_cache = key, self._count_own_heads(like)
        return self._own_heads_cache[1]

    def _count_own_heads(self, like: Tensor) -> int:
        count = own_position.count_intact(self.layers[0])
        if not count:
            return 0
        random = torch.Generator().manual_seed(0)
        length = min(_RANDOM_TOKENS, self.config.max_position_embeddings // 2)
        tokens_T = torch.randint(len(self.target_embeddings), (length,), generator=random)
        tokens_1T = torch.cat([tokens_T, tokens_T])[None]  # repeated tokens are the hard case
        read_1TE = rms_norm(self.embedding_norm, self.embed_tokens(tokens_1T, like))
        queries, keys, _ = self._read_layer(torch.cat([read_1TE, torch.zeros_like(read_1TE)], dim=-1))
        weight_N = own_position.self_weights(queries[:, :count].float(), keys[:, :count].float()).mean((0, 2, 3))
        return int((weight_N >= _MIN_RANDOM_WEIGHT).long().cumprod(0).sum())

    @property
    def output_norm(self) -> nn.RMSNorm:
        return self.norm

    @property
    def feeds_normed(self) -> bool:
        return self.config.feedback == "post_norm"

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """Copy the target's last layers (reading the deepest aux hidden state), final norm and LM head."""
        self.bind(target)
        if self.config.init == "random":
            return
        before = self.config.hidden_size  # the embedding comes first
        start_from_last_layers(target, self.layers, self.fc, self.hidden_norm, self.norm, before)
        self.lm_head.weight.copy_(self.first_lm_head(target))
        if self.config.init == "transition":  # `fit` sets the outputs
            self.layers[0].zero_init()
            self.hidden_norm.weight.fill_(1)
            self._set_own_heads([])

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Fit the fusion by ridge regression to the target's final state one token later, before the final norm and at
        the scale of the deepest aux hidden state."""
        if self.config.init == "transition":
            self._fit_transition(iter(batches))
        if self.config.init != "target":
            return
        size, scale, first = self.config.hidden_size, 0.0, list[HeadBatch]()

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            nonlocal scale
            if not first:
                first.append(batch)
            final_SE, origin_M = batch.states[FINAL].flatten(0, 1).float(), supervised_origins(batch.supervised_BT, 0)
            read_MX = self.norm_states(self.select_states(batch.states).flatten(0, 1)[origin_M].float())
            scale += float(read_MX[:, -size:].square().mean(-1).sqrt().sum())
            return read_MX, [final_SE[origin_M + 1] / self.norm.weight.float()]

        start = LinearStart([self.fc.in_features], self.fc.out_features, self.target_embeddings.device)
        for map_EX in start.solve(batches, read):
            self.fc.weight.copy_(scale / start.rows * map_EX)
        if first and self.config.qk_norm:
            self._match_qk_rms(first[0])

    def _match_qk_rms(self, batch: HeadBatch) -> None:
        """Set the scale of query and key norms that do not come from the target so that they preserve the RMS on a
        batch."""
        states_BTX = self.select_states(batch.states).float()
        embedded_BTE = self.embed_tokens(_next_tokens(batch), states_BTX)
        input_BTI, stream_BTE = self.layer_input(self.project(states_BTX), embedded_BTE)
        for number, layer in enumerate(self.layers):
            if not layer.has_target_norms:
                layer.match_qk_rms(input_BTI)
            queries, keys, values = self._read_layer(input_BTI, number)
            input_BTI = stream_BTE = layer.write(stream_BTE, causal_attention(queries, keys, values))

    @torch.no_grad()
    def before_training(self, batches: Iterable[HeadBatch]) -> None:
        """Freeze queries and keys of the own-position heads if they attend to their own position on this data."""
        if self.config.init != "transition":
            return
        layer, own = self.layers[0], self.config.own_heads
        layer.own_heads = 0
        # All heads share the q/k norms, which stay trainable.
        if own == self.config.num_key_value_heads or self.config.qk_norm:
            return
        minimum, tokens = 1.0, 0
        for batch in batches:
            states_BTX = self.select_states(batch.states)[:, :_CHECK_LENGTH]
            input_BTI = self._attention_input(states_BTX, _next_tokens(batch)[:, :_CHECK_LENGTH])
            queries, keys, _ = self._read_layer(input_BTI)
            weight_N = own_position.self_weights(queries[:, :own], keys[:, :own]).mean((0, 2, 3))
            minimum, tokens = min(minimum, float(weight_N.min())), tokens + input_BTI.shape[:2].numel()
            if tokens >= _CHECK_TOKENS:
                break
        layer.own_heads = own if minimum >= own_position.MIN_SELF_WEIGHT else 0

    def by_published_name(self) -> dict[str, Tensor]:
        tensors = {
            "fc.weight": self.fc.weight,
            "layers.0.input_layernorm.weight": self.embedding_norm.weight,
            "layers.0.hidden_norm.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        for number, layer in enumerate(self.layers):
            tensors |= layer.by_published_name(number)
        for number, norm in enumerate(self.aux_norms):
            tensors[f"fc_norm.{number}.weight"] = norm.weight
        return tensors

    def publish(self) -> Published:
        ids_D = self.draft_to_target_D.cpu().clone() if self.config.draft_vocab_size else None
        return replace(super().publish(), draft_ids_D=ids_D, norm_output=self.config.feedback == "post_norm")

    @classmethod
    def settings_of(cls, published: Published) -> dict[str, Any]:
        return {**super().settings_of(published), "feedback": "post_norm" if published.norm_output else "pre_norm"}

    @classmethod
    def from_published(cls, published: Published, target: Target) -> Self:
        if published.norm_before_fc:
            raise UserError(
                "The checkpoint norms all aux states together before the fusion (norm_before_fc), and headstart norms "
                "each by itself.",
                "Take a checkpoint without norm_before_fc.",
            )
        if not cls.has_own_embeddings:
            check_embeddings(published, target.embedding_weight)
        return super().from_published(published, target)

    def _fit_transition(self, batches: Iterator[HeadBatch]) -> None:
        """Fit the fusion to the final state, solve induction heads, and fit the layer's output by ridge regression to
        the next final state. Both are states before the final norm."""
        enough = min(_ROWS * self.fc.in_features, max(_FEW_ROWS * self.fc.in_features, _MANY))
        first: list[HeadBatch] = []
        while sum(batch.tokens_BT.numel() for batch in first) < enough and (batch := next(batches, None)) is not None:
            first.append(batch)
        if not first:
            return
        size, layer, own = self.config.hidden_size, self.layers[0], self.config.own_heads
        self._set_own_heads(first)
        self.fc.weight.copy_(self._fit_final_state_map(first))
        has_induction = self._solve_induction(first)

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_BTE, origin_M = batch.states[FINAL].float(), supervised_origins(batch.supervised_BT, 0)
            input_BTI = self._attention_input(self.select_states(batch.states).float(), _next_tokens(batch))
            parts = [input_BTI]
            if has_induction:
                queries, keys, values = self._read_layer(input_BTI)
                parts.append(concat_heads(causal_attention(queries[:, own:], keys[:, own:], values[:, own:])))
            read_MJ = torch.cat(parts, dim=-1).flatten(0, 1)[origin_M]
            return read_MJ, [final_BTE.flatten(0, 1)[origin_M + 1] / self.norm.weight.float()]

        own_width = layer.o.in_features // self.config.num_key_value_heads * own
        copied_width = layer.o.in_features - own_width if has_induction else 0
        start = LinearStart([2 * size + copied_width], size, self.target_embeddings.device)
        for map_EJ in start.solve(chain(first, batches), read):
            gram_JJ = start.gram_FF / start.rows
            residual = 1.0  # scale of the residual stream
            if not self.config.norm_before_residual:
                # The stream is the raw fused state: rescale it to the size of the predictions that are fed back.
                residual = float(((map_EJ @ gram_JJ) * map_EJ).sum() / size) ** 0.5
                fused_MX = torch.cat(
                    [self.project(self.select_states(batch.states).float()).flatten(0, 1) for batch in first]
                )
                self.fc.weight *= residual / float(fused_MX.square().mean(-1).sqrt().median())
            linear_EI = map_EJ[:, : 2 * size].clone()
            linear_EI[:, size:] -= residual * torch.eye(size).to(linear_EI)
            own_position.store_map(layer, own, linear_EI, gram_JJ[: 2 * size, : 2 * size])
            if has_induction:
                layer.o.weight[:, own_width:] = map_EJ[:, 2 * size :]

    def _attention_input(self, states_BTX: Tensor, next_BT: Tensor) -> Tensor:
        return self.layer_input(self.project(states_BTX), self.embed_tokens(next_BT, states_BTX))[0]

    def _read_layer(self, input_BTI: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a layer; each row is a text."""
        width = input_BTI.shape[1]
        index_BT = torch.arange(width, device=input_BTI.device).expand(input_BTI.shape[:2])
        return self.layers[number].read(input_BTI, self._rotary.at(index_BT, input_BTI.dtype, width))

    def _set_own_heads(self, batches: list[HeadBatch]) -> None:
        """Set up the own-position heads for the tokens of the vocabulary and of the batches."""
        like = self.embedding_norm.weight.float()

        def embeddings(tokens: Tensor) -> Iterator[Tensor]:
            return (
                rms_norm(self.embedding_norm, self.embed_tokens(part, like)) for part in torch.split(tokens, _BLOCK)
            )

        sources = [embeddings(torch.arange(len(self.target_embeddings)))]
        if batches:
            sources.append(embeddings(torch.cat([batch.tokens_BT.flatten() for batch in batches])))
        probe_E, mean_E = own_position.fit_constant_probe(*sources)
        cos_PR = self._cosines(own_position.FAR)[:, : self.config.head_dim // 2]
        cos_PR = cos_PR[1:] / cos_PR[0, 0]  # tables of long contexts may carry a factor
        own_position.set_own_heads(self.layers[0], self.config.own_heads, cos_PR, probe_E=probe_E, mean_E=mean_E)

    def _solve_induction(self, batches: list[HeadBatch]) -> bool:
        """Make the other heads induction heads and add their codes to the fusion; False if that is not possible."""
        fused_EX = self.fc.weight.clone()
        aux_MX = self._aux_states(batches)
        embedded_ME = torch.cat([self.embed_tokens(batch.tokens_BT.flatten(), aux_MX) for batch in batches])
        embedded_ME = rms_norm(self.embedding_norm, embedded_ME)
        slow = induction.slow_pairs(self.config, self._cosines(induction.FAR))
        final_ME, own = aux_MX @ fused_EX.T, self.config.own_heads
        code = induction.solve(self.layers[0], slow, aux_MX, final_ME, own_ME=embedded_ME, skip_heads=own)
        if code is None:
            return False
        self.hidden_norm.weight.fill_(1)
        self.fc.weight.copy_(code.add_to(fused_EX))
        return True

    def _cosines(self, far: int) -> Tensor:
        """Rotary cosines of each head component at distances 0 to `far`, [P, d]."""
        return self._rotary.at(torch.arange(far + 1)[None], torch.float32, far + 1)[0][0]

    def _aux_states(self, batches: list[HeadBatch]) -> Tensor:
        rows = (self.norm_states(self.select_states(batch.states)) for batch in batches)
        return torch.cat([states_BTX.flatten(0, 1).float() for states_BTX in rows])

    def _fit_final_state_map(self, batches: list[HeadBatch]) -> Tensor:
        """Return the map [E, X] of aux hidden states to the state before the final norm, at the scale of the deepest
        one: a ridge regression of the last layers' update to that state."""
        size = self.config.hidden_size
        aux_MX = self._aux_states(batches)
        final_ME = torch.cat([batch.states[FINAL].flatten(0, 1).float() for batch in batches])
        final_ME = final_ME / self.norm.weight.float()
        good_M = aux_MX.isfinite().all(-1) & final_ME.isfinite().all(-1) & (aux_MX != 0).any(-1)
        aux_MX, final_ME = aux_MX[good_M], final_ME[good_M]
        deepest_ME = aux_MX[:, -size:]
        added_ME = final_ME * deepest_ME.square().mean(-1, keepdim=True).sqrt() - deepest_ME
        map_EX = map_by_direction(aux_MX, added_ME)
        map_EX[:, -size:] += torch.eye(size).to(map_EX)
        return map_EX


def _next_tokens(batch: HeadBatch) -> Tensor:
    """Token after each position, [B, T]; arbitrary at the last one."""
    return F.pad(batch.tokens_BT[:, 1:], (0, 1))
