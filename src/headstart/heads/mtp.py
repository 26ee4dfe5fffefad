"""Multi-token prediction: modules that read a state and the embedding of the token after it (DeepSeek-V3, 2412.19437).

A module norms the embedding of the next token and the state of this one, joins them by a linear map (`eh_proj`), runs
a decoder layer and norms what comes out, which the target's own frozen LM head reads. Drafts further ahead take more
such steps. One shared module takes them all, as engines do with a target that ships one: its output stands for the
next final state and is fed back, see `recurrent`. Or each step has a module of its own, see `cascade`: module k reads
what module k - 1 made of the same position. On tokens a b c d e (positions 0-4), the draft from the state after `b`:

    step   one shared module                        a module for each step
    0      state(b), emb(c) -> d                    module 0: state(b), emb(c) -> d
    1      own output of step 0, emb(d) -> e        module 1: output of module 0, emb(d) -> e
           sees the text up to b and step 0         sees what module 1 made of the text up to b

Shape suffixes: E hidden size, D draft vocabulary, M predictions, J inputs of the joining map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, StepPrediction, register, supervised_origins
from headstart.heads.exchange.published import Published
from headstart.heads.parts.cascade import Cascade, CascadeState, MtpModule
from headstart.heads.parts.int8_weights import linear
from headstart.heads.parts.layer import LayerConfig, norm_scale
from headstart.heads.parts.recurrent import RecurrentHead, RecurrentState
from headstart.heads.parts.residual import LinearStart
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel
from headstart.tree.tree import Committed


class MtpConfig(LayerConfig):
    """Settings of MTP heads."""

    family: str = "mtp"
    draft_steps: int = Field(5, ge=1, le=16, description="Drafts in a row, in training and in drafting.")
    shared_module: bool = Field(
        True,
        description="One module for all draft steps; false gives each step a module with weights and a cache of its "
        "own (DeepSeek-V3).",
    )
    init: Literal["target", "random"] = Field(
        "target", description="Start from the target's last layer and norm and a linear guess, or from random numbers."
    )


@register
class MtpHead(RecurrentHead):
    """One module or one for each step; embeddings and LM head are the target's."""

    family: ClassVar[str] = "mtp"
    Config: ClassVar[type[LayerConfig]] = MtpConfig
    drafts_features: ClassVar[bool] = True
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        count = 1 if config.shared_module else config.draft_steps
        super().__init__(config, config.draft_steps, [MtpModule(config) for _ in range(count)])
        self.register_buffer("_frozen_DE", torch.zeros(config.draft_width, config.hidden_size), persistent=False)

    @property
    def steps(self) -> list[MtpModule]:
        """The modules, first to last."""
        return cast(list[MtpModule], list(self.layers))

    @property
    def lm_head_DE(self) -> Tensor:
        return self._frozen_DE

    def bind(self, target: FrozenModel) -> None:
        """Take the target's embeddings, and its LM head over the draft vocabulary."""
        super().bind(target)
        self._frozen_DE = self.frozen_lm_head(target, self.steps[0].eh_proj.weight)

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """The target's last layer and final norm; the layer adds nothing yet and the state passes through."""
        self.bind(target)
        if self.config.init == "random":
            return
        size = self.config.hidden_size
        for module in self.steps:
            module.warm_start(target)
            module.zero_init()  # what is joined is a final state already
            module.norm.weight.copy_(norm_scale(getattr(target.decoder, "norm", None), module.norm.weight))
            module.eh_proj.weight.zero_()
            module.eh_proj.weight[:, size:] = torch.eye(size)

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Join state and embedding into the best linear guess of the next final state: ridge regression, undone by the
        target's norm. Every module starts with this guess, since each goes on from that of the one before."""
        if self.config.init == "random":
            return
        first = self.steps[0]

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_XE, tokens_X = batch.states[FINAL].flatten(0, 1).float(), batch.tokens_BT.flatten()
            origin_M = supervised_origins(batch.supervised_BT, 0)
            joined_MJ = first.normed_inputs(final_XE[origin_M], self._embed(tokens_X[origin_M + 1], final_XE))
            return joined_MJ, [final_XE[origin_M + 1] / first.norm.weight.float()]

        start = LinearStart([first.eh_proj.in_features], first.eh_proj.out_features, self.device_of_target)
        for map_EJ in start.solve(batches, read):
            for module in self.steps:
                module.eh_proj.weight.copy_(map_EJ)

    # -- what `recurrent` asks of a shared module ------------------------------------------------------------------

    def select_states(self, states: dict[int, Tensor]) -> Tensor:
        return states[FINAL]

    def project(self, seen: Tensor) -> Tensor:
        return seen

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.steps[0].join(feedback, embedded)
        return stream, stream

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.steps[0].close(stream)
        return hidden, hidden

    def feature(self, feedback_ME: Tensor) -> Tensor:
        return feedback_ME

    # -- a module for each step --------------------------------------------------------------------------------------

    @property
    def _cascade(self) -> Cascade:
        return Cascade(self.config, self.steps, self._embed, self._rotary)

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        if self.config.shared_module:
            yield from super().unroll(batch)
            return
        made = self._cascade.unroll(batch, self.select_states(batch.states), self.light)
        for step, (hidden_ME, origin_M) in enumerate(made):
            own = (hidden_ME, self.lm_bias_D, self.finish)
            yield StepPrediction(hidden_ME, self.lm_head_DE, origin_M + step + 1, origin_M, *own)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        if self.config.shared_module:
            return super().prefill(prompts, states)
        return self._cascade.prefill(prompts, states[FINAL])

    def draft_step(
        self, state: RecurrentState | CascadeState, tokens_BW: Tensor, parents_BW: Tensor, depth: int
    ) -> Tensor:
        if isinstance(state, RecurrentState):
            return super().draft_step(state, tokens_BW, parents_BW, depth)
        hidden_BWE = self._cascade.level(state, tokens_BW, parents_BW, depth)
        return self.finished(linear(hidden_BWE, self.lm_head_DE, self.lm_bias_D))

    def commit(self, state: RecurrentState | CascadeState, committed: Committed) -> None:
        if isinstance(state, RecurrentState):
            super().commit(state, committed)
        else:
            state.commit(committed.states[FINAL], committed.tokens_BP, committed.counts)

    def reorder(self, state: RecurrentState | CascadeState, rows: Sequence[int]) -> None:
        if isinstance(state, RecurrentState):
            super().reorder(state, rows)
        else:
            state.reorder(rows)

    # -- exchange ----------------------------------------------------------------------------------------------------

    def publish(self) -> Published:
        raise UserError(
            "Engines load MTP modules only as part of the checkpoint of a target that was trained with them "
            "(DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo), never beside another target.",
            "headstart and transformers decode with these heads (--format headstart); for vLLM, SGLang and llama.cpp "
            "train eagle3 heads, or for vLLM and SGLang eagle heads with heads.embedding_norm=false, which are built "
            "alike.",
        )
