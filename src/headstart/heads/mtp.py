"""Multi-token prediction: a module that reads a state and the embedding of the token after it (DeepSeek-V3, arXiv
2412.19437). These are trained here; `drafters/mtp.py` drafts with the modules that a target brings along.

The module norms the embedding of the next token and the state of this one, joins them by a linear map (`eh_proj`), runs
a decoder layer and norms what comes out, which the target's own frozen LM head reads. It takes all draft steps, as
engines use a module that a target ships: its output stands for the next final state and is fed back, see `recurrent`.
On tokens a b c d e (positions 0-4), the draft from the state after `b`:

    step 0   state(b), emb(c) -> d               sees the entries of a, b
    step 1   own output of step 0, emb(d) -> e   sees the entries of a, b, and its own of step 0

Shape suffixes: E hidden size, M predictions.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from headstart.heads.base import register
from headstart.heads.int8_weights import Linear
from headstart.heads.parts.final_state import FinalStateConfig, FinalStateHead
from headstart.heads.parts.layer import DraftLayer, LayerConfig, norm_scale, normed
from headstart.target.frozen import FrozenModel


class MtpConfig(FinalStateConfig):
    """Settings of MTP heads."""

    family: str = "mtp"


class MtpModule(DraftLayer):
    """A decoder layer, with what joins its inputs before it and the norm after it."""

    def __init__(self, config: LayerConfig) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, size)
        self.enorm = nn.RMSNorm(size, eps)
        self.hnorm = nn.RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.norm = nn.RMSNorm(size, eps)


@register
class MtpHead(FinalStateHead):
    """One module; embeddings and LM head are the target's."""

    family: ClassVar[str] = "mtp"
    Config: ClassVar[type[LayerConfig]] = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config, MtpModule(config))

    @property
    def module(self) -> MtpModule:
        return cast(MtpModule, self.stack[0])

    @property
    def joining_map(self) -> Linear:
        return self.module.eh_proj

    def joined_inputs(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat([normed(self.module.enorm, embedded), normed(self.module.hnorm, feedback)], dim=-1)

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        hidden = normed(self.module.norm, stream)
        return hidden, hidden

    def stream_for(self, final_ME: Tensor) -> Tensor:
        return final_ME / self.module.norm.weight.float()

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        super().warm_start(target)
        if self.config.init == "target":
            norm = self.module.norm
            norm.weight.copy_(norm_scale(getattr(target.decoder, "norm", None), norm.weight))
