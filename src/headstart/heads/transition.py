"""Transition heads: every step goes from one final state of the target to the next, solved for before it is trained.

The parts are EAGLE-3's (see `fused`); what differs is the step. It reads a final state and the embedding of the token
that follows, and feeds back a guess of the next final state: always the same transition. The stream that the layer adds
to is a linear map of the two, as in EAGLE-1, so the linear part of the transition can be solved for; and so can an
attention that copies what followed the present token before (see `induction`). Both are ready before the first
gradient step, which is what little data needs. No serving engine knows this arrangement: `eagle3` is the one they read.

On tokens a b c d e (positions 0-4), the draft that starts from the state after `b` (origin 1):

    step 0   state(b), emb(c) -> guess of state(c), which drafts d
    step 1   that guess, emb(d) -> guess of state(d), which drafts e

Shape suffixes: E hidden size, M predictions, P positions, X = aux layers * E (final states: flat positions), J inputs
of the linear map that is solved for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, register, supervised_origins
from headstart.heads.parts.fused import FusedConfig, FusedHead
from headstart.heads.parts.int8_weights import Linear
from headstart.heads.parts.layer import LayerConfig, by_token, normed
from headstart.heads.parts.residual import LinearStart
from headstart.heads.parts.text_attention import causal_attention
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel


class TransitionConfig(FusedConfig):
    """Settings of transition heads."""

    family: str = "transition"
    init: Literal["target", "random"] = Field(
        "target", description="Start from the target's last layer, norm and LM head, or from random numbers."
    )

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().of_target(target, settings), "aux_layers": (2, target.num_layers // 2, FINAL)}

    def check(self) -> None:
        super().check()
        if self.aux_layers[-1:] not in ((), (FINAL,)):
            raise UserError(
                f"Transition heads go from final state to final state, and heads.aux_layers is "
                f"{list(self.aux_layers)}.",
                f"End heads.aux_layers with {FINAL}, for example [2,15,{FINAL}].",
            )


@register
class TransitionHead(FusedHead):
    """Fusion, a linear map of embedding and state, decoder layers, norm and LM head."""

    family: ClassVar[str] = "transition"
    Config: ClassVar[type[LayerConfig]] = TransitionConfig
    config: TransitionConfig

    def _add_inputs(self, size: int) -> None:
        super()._add_inputs(size)
        self.joined = Linear(2 * size, size, bias=False)

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """The target's last layer, norm and LM head; the layers add nothing and the state passes through."""
        super().warm_start(target)
        if self.config.init == "random":
            return
        for layer in self.stack:
            layer.zero_init()  # the fused state is a final one already
        self.joined.weight.zero_()
        self.joined.weight[:, self.config.hidden_size :] = torch.eye(self.config.hidden_size)

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Make the layer copy, then guess the next final state linearly from the final state, the next token's
        embedding and what the attention copies: ridge regression, undone by the target's norm."""
        if self.config.init == "random":
            return
        rest = iter(batches)
        first = self.first(rest)
        copies = self.copy(first, self.fc.weight.clone())
        size, layer = self.config.hidden_size, self.stack[0]

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_BTE, origin_M = batch.states[FINAL].float(), supervised_origins(batch.supervised_BT, 0)
            embedded_BTE = self._embed(F.pad(batch.tokens_BT[:, 1:], (0, 1)), final_BTE)
            feedback_BTE = self.project(self.select_states(batch.states).float())
            parts = [normed(self.embedding_norm, embedded_BTE), feedback_BTE]
            if copies:
                indices = torch.arange(feedback_BTE.shape[1], device=feedback_BTE.device).expand(feedback_BTE.shape[:2])
                rotary = self._rotary.at(indices, feedback_BTE.dtype, feedback_BTE.shape[1])
                parts.append(
                    by_token(causal_attention(*layer.read(self.layer_input(feedback_BTE, embedded_BTE)[0], rotary)))
                )
            read_MJ = torch.cat(parts, dim=-1).flatten(0, 1)[origin_M]
            return read_MJ, [final_BTE.flatten(0, 1)[origin_M + 1] / self.norm.weight.float()]

        start = LinearStart([2 * size + (layer.o.in_features if copies else 0)], size, self.device_of_target)
        for map_EJ in start.solve(chain(first, rest), read):
            self.joined.weight.copy_(map_EJ[:, : 2 * size])
            if copies:
                layer.o.weight.copy_(map_EJ[:, 2 * size :])

    def stream(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        joined: Tensor = self.joined(torch.cat([embedded, feedback], dim=-1))
        return joined

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        hidden = normed(self.norm, stream)
        return hidden, hidden
