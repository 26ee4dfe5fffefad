"""What every family inherits and none overrides: its draft vocabulary, the target's frozen weights, and how training
runs its layers.

Shape suffixes: D draft vocabulary, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.heads.int8_weights import drop_int8
from headstart.target.frozen import FrozenModel
from headstart.target.lm_head import Finish

R = TypeVar("R")


class HeadModule(nn.Module):
    """The module below `DraftHead`; its draft vocabulary is `chosen`, or the target's first tokens.

    Attributes:
        draft_to_target_D: the target's token id of each draft token (the identity without a draft vocabulary).
        lm_bias_D: bias of the target's LM head, for heads that read logits through it.
        finish: what the target does to its logits, likewise.
        gradient_checkpointing: whether what training computes inside of layers is computed again for the gradients.
    """

    gradient_checkpointing: bool = False
    draft_to_target_D: Tensor
    lm_bias_D: Tensor | None
    finish: Finish | None

    def __init__(self, draft_width: int, chosen: bool) -> None:
        super().__init__()
        self._chosen = chosen
        self._embedding_VE: Tensor | None = None
        self.register_buffer("draft_to_target_D", torch.arange(draft_width))
        self.register_buffer("lm_bias_D", None, persistent=False)
        self.finish = None

    def train(self, mode: bool = True) -> Self:
        """As torch's; training mode drops the weights in 8 bits, which would not learn."""
        if mode:
            drop_int8(self)
        return super().train(mode)

    @property
    def trainable_parameters(self) -> int:
        """How many numbers training changes."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def learning_rows(self) -> dict[str, list[slice]]:
        """By name, the rows of weights in which several matrices lie one below the other, for an optimiser that treats
        a matrix as a whole. `unroll` gives rows that are in none of them no gradient."""
        layers = [(path, module) for path, module in self.named_modules() if path and hasattr(module, "learning_rows")]
        return {f"{path}.{name}": rows for path, layer in layers for name, rows in layer.learning_rows().items()}

    def light(self, function: Callable[..., R], *inputs: Any) -> R:
        """What a function, which draws no random numbers, makes of its inputs; with `gradient_checkpointing` only these
        are kept for the gradients."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return function(*inputs)
        made: R = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return made

    @property
    def target_embeddings(self) -> Tensor:
        """The target's embeddings [V, E], for families that take them when they are bound."""
        assert self._embedding_VE is not None, "heads are bound to their target"
        return self._embedding_VE

    def frozen_lm_head(self, target: FrozenModel, like: Tensor) -> Tensor:
        """The target's LM head over the draft vocabulary, [D, E], for heads that read logits through it, in the dtype
        and on the device of `like`; sets `lm_bias_D` and `finish`, which belong to such logits."""
        bias_V = target.lm_head_bias
        self.lm_bias_D = None if bias_V is None else self._drafted(bias_V.detach()).to(like)
        self.finish = target.finish
        return self._drafted(target.lm_head_weight.detach()).to(like)

    def first_lm_head(self, target: FrozenModel) -> Tensor:
        """What an LM head of the heads' own starts from, [D, E]: the target's, with the scale of its logits. Such heads
        have no bias or cap, in training and in the engines that serve them."""
        weight_DE, scale = self._drafted(target.lm_head_weight.detach()), target.finish.scale
        return weight_DE if scale == 1 else weight_DE * scale

    def _drafted(self, rows_V: Tensor) -> Tensor:
        if not self._chosen:
            return rows_V[: len(self.draft_to_target_D)]
        return rows_V[self.draft_to_target_D.to(rows_V.device)]

    def finished(self, logits: Tensor) -> Tensor:
        """Draft logits from the output of the LM head."""
        return logits if self.finish is None else self.finish(logits)

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Draft only these tokens of the target (sorted int64 [D])."""
        assert token_ids.shape == self.draft_to_target_D.shape, "the vocabulary has the configured size"
        self.draft_to_target_D.copy_(token_ids)
