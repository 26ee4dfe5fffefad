"""Multi-token prediction: one module over a state and the next token's embedding (DeepSeek-V3, arXiv 2412.19437).

The module norms the next token's embedding and the current state, joins them by a linear map (`eh_proj`), runs a
decoder layer and norms its output for the target's frozen LM head. One module serves all draft steps, as in serving
engines: its output is the next step's state, see `headstart.heads.parts.recurrent`. On tokens a b c d e (positions
0-4), the draft from the state after `b`:

    step 0   state(b), emb(c) -> d               sees the entries of a, b (b's is step 0)
    step 1   own output of step 0, emb(d) -> e   sees the entries of a, b, and itself

With `heads.init=native` it is the target's own module, with the target's layer type. Untrained, it is the drafter
"mtp"; `headstart export --format checkpoint` writes the trained module to a copy of the checkpoint.

Shape suffixes: B rows, W entries, E hidden size, M predictions, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import make_config, register
from headstart.heads.exchange.published import Published
from headstart.heads.int8_weights import Linear
from headstart.heads.parts.cache import WriteKV
from headstart.heads.parts.final_state import FinalStateHead
from headstart.heads.parts.layer import Angles, DraftLayer, LayerConfig, Rotary, norm_and_concat, norm_scale
from headstart.heads.parts.native_module import Attend, NativeModule, NativeSettings, native_fields
from headstart.heads.parts.recurrent import AttendLayer, RecurrentConfig
from headstart.heads.parts.text_attention import attend, causal_attention
from headstart.heads.parts.unrolled_text import UnrolledText
from headstart.heads.settings import FromTarget
from headstart.model.frozen import FrozenModel
from headstart.model.shipped import shipped_files
from headstart.replay.patch import FINAL


class MtpConfig(RecurrentConfig):
    family: str = "mtp"
    init: Literal["target", "random", "native"] = Field(
        "target",
        description="target: start from the target's last layer and a fitted linear map. random: from random numbers. "
        "native: train the target's own multi-token-prediction module, with its own layer type.",
    )
    native: Annotated[NativeSettings | None, FromTarget(settable=False)] = Field(
        None, description="With init=native, the architecture of the target's module."
    )

    @property
    def start_layers(self) -> int:
        return 0 if self.init == "native" else super().start_layers

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        values = super().of_target(target, settings)
        if settings.get("init") != "native":
            return values
        if (count := len(shipped_files(target).joins)) > 1:
            raise UserError(
                f"{target.name} ships {count} multi-token-prediction modules, one per draft step, and only a single "
                "module for all steps can be trained.",
                "Decode with the first as it is (--drafter mtp), or leave out heads.init=native.",
            )
        return values | native_fields(target)

    def check(self) -> None:
        super().check()
        if self.init == "native" and self.draft_vocab_size:
            raise UserError(
                "The module that a target ships drafts from the whole vocabulary, and heads.draft_vocab_size is "
                f"{self.draft_vocab_size}.",
                "Set heads.draft_vocab_size=0.",
            )


class MtpModule(DraftLayer):
    """A decoder layer with input norms, joining map and output norm."""

    def __init__(self, config: LayerConfig) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, size)
        self.enorm = nn.RMSNorm(size, eps)
        self.hnorm = nn.RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.norm = nn.RMSNorm(size, eps)


def shipped_heads(target: FrozenModel, draft_steps: int) -> MtpHead:
    """Wrap a target's own module as untrained heads, in its dtype and on its device. The first of several modules (one
    per draft step) serves all steps."""
    config = cast(MtpConfig, make_config({"family": "mtp", "draft_steps": draft_steps}, target))
    heads = MtpHead(config.model_copy(update={"init": "native", **native_fields(target)})).to(target.dtype)
    cast(NativeModule, heads.native).load(target)  # keeps transformers' float32 parameters
    heads.to(target.device).bind(target)
    return heads


@register
class MtpHead(FinalStateHead):
    """One module, with the target's embeddings and LM head or its own."""

    Config: ClassVar[type[LayerConfig]] = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        if config.native is None:
            super().__init__(config, MtpModule(config))
        else:
            super().__init__(config, cast(DraftLayer, NativeModule(config.native)))
            self._rotary = Rotary(config, config.native.rotary)

    @property
    def module(self) -> MtpModule:
        return cast(MtpModule, self.layers[0])

    @property
    def native(self) -> NativeModule | None:
        """The target's own module, with init=native."""
        module: nn.Module = self.layers[0]
        return module if isinstance(module, NativeModule) else None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (FINAL if self.config.native is None else self.config.native.state_layer,)

    @property
    def joining_map(self) -> Linear:
        return self.module.eh_proj

    def joining_inputs(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        return norm_and_concat([self.module.enorm, self.module.hnorm], [embedded, feedback])

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().layer_input(feedback, embedded)
        stream = self.native.join(feedback, embedded)
        return stream, stream

    @property
    def output_norm(self) -> nn.RMSNorm:
        return self.module.norm

    @property
    def feeds_normed(self) -> bool:
        return True

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().layer_output(stream)
        hidden = self.native.norm(stream)
        return hidden, hidden

    def bind(self, target: FrozenModel) -> None:
        super().bind(target)
        if self.native is None:
            return
        try:
            lm_head_VE, embedding_VE = shipped_files(target).other_weights()
        except UserError:  # no files: an in-memory target, or only sizes are needed
            return
        if lm_head_VE is not None:
            self._frozen_DE = lm_head_VE.to(self._frozen_DE)
        if embedding_VE is not None:
            self._embedding_VE = embedding_VE

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        if self.native is not None:
            self.bind(target)
            self.native.load(target)
            return
        super().warm_start(target)
        if self.config.init == "target":
            norm = self.module.norm
            norm.weight.copy_(norm_scale(getattr(target.decoder, "norm", None), norm.weight))

    def run_text(self, text: UnrolledText, tokens: Tensor, rotary: Angles) -> Tensor:
        if self.native is None:
            return super().run_text(text, tokens, rotary)
        first = not text.kv

        def attend_text(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if first:
                return causal_attention(queries, keys, values, text.complete)
            return attend(queries, *text.kv[0], text.visible, [*text.chains[0], (keys, values)])

        inputs = text.feedback_BAE, tokens, rotary, attend_text
        stream, keys, values = self.run_region(self._run_native, *inputs, compiles=False)
        (text.kv if first else text.chains[0]).append((keys, values))
        return text.gather_origins(stream) if first else stream

    def _run_layers(
        self,
        feedback_BWE: Tensor,
        tokens_BW: Tensor,
        rotary: Angles,
        put: WriteKV,
        attend_layer: AttendLayer,
        last_B: Tensor | None,
    ) -> Tensor:
        if self.native is None:
            return super()._run_layers(feedback_BWE, tokens_BW, rotary, put, attend_layer, last_B)

        def attend_cached(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            put(0, keys, values)
            return attend_layer(0, queries, None)

        stream_BWE, _, _ = self._run_native(feedback_BWE, tokens_BW, rotary, attend_cached)
        if last_B is None:
            return stream_BWE
        return stream_BWE[torch.arange(len(last_B), device=last_B.device), last_B][:, None]

    def _run_native(
        self, feedback: Tensor, tokens: Tensor, rotary: Angles, attend: Attend
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the target's own module; return its stream, keys and values."""
        assert self.native is not None, "the module is the target's"
        joined, _ = self.layer_input(feedback, self.embed_tokens(tokens, feedback))
        kv: list[tuple[Tensor, Tensor]] = []

        def record(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            kv.append((keys, values))
            return attend(queries, keys, values)

        return self.native.run(joined, rotary, record), *kv[0]

    def publish(self) -> Published:
        if self.native is None:
            return super().publish()
        raise UserError(
            "Engines read the module that a target ships from the target's own checkpoint.",
            "Write a copy of it with the trained module: headstart export HEADS --format checkpoint --out FOLDER",
        )

    def in_checkpoint(self) -> dict[str, Tensor]:
        return super().in_checkpoint() if self.native is None else self.native.by_checkpoint_name()
