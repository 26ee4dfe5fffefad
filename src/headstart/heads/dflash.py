"""DFlash: a block drafter; each slot predicts the token at its own position (arXiv 2602.06036).

The block is [root, mask, mask, ...]; the root's slot drafts nothing. On tokens a b c d e (positions 0-4), from the
state after `b` (origin t = 1), with root `c` and a block of 3:

    context   a b                     states of the target
    block     c mask mask             at positions 2 3 4
    drafts    -   d    e              step 0, step 1: token t + k + 2

>>> import torch
>>> from headstart.heads.base import HeadBatch, origins
>>> supervised = torch.tensor([[False, False, True, True, True]])
>>> batch = HeadBatch(torch.arange(5)[None], supervised, {})
>>> [(origins(batch, step) + 1).tolist() for step in range(2)]  # root positions of each step
[[2, 3], [2]]
>>> heads = DFlashHead(DFlashConfig(hidden_size=4, vocab_size=9, num_attention_heads=1, num_key_value_heads=1,
...     head_dim=4, intermediate_size=4, aux_layers=(1,), block_size=3, mask_token_id=8))
>>> heads._embedding_VE = torch.arange(9.0)[:, None].expand(9, 4)
>>> heads.block(torch.tensor([2]), torch.zeros(1))[0, :, 0].tolist(), heads.first_slot, heads.draft_steps
([2.0, 8.0, 8.0], 1, 2)

Shape suffixes: B rows, M origins, S drafted slots, E hidden size, D draft vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from headstart.heads.base import HeadConfig, OneForwardHead, register
from headstart.heads.exchange.published import Layout
from headstart.heads.int8_weights import linear
from headstart.heads.parts.block import BlockMemory, BlockSession
from headstart.heads.parts.block_layer import BlockConfig
from headstart.heads.parts.block_start import SolvedBlockHead
from headstart.heads.parts.graphed import IntArray, Level


class DFlashConfig(BlockConfig):
    family: str = "dflash"


@register
class DFlashHead(SolvedBlockHead, OneForwardHead):
    """Block drafter with the target's LM head; see `parts.block`."""

    Config: ClassVar[type[HeadConfig]] = DFlashConfig
    publishes: ClassVar[Layout | None] = Layout.DFLASH
    config: DFlashConfig

    def depth_logits(self, session: BlockSession, root_B: Tensor, depths: range) -> Tensor:
        if depths.start == 0:
            self.run_block(session, root_B)
        return self._logits(session.hidden_BSE[:, depths.start : depths.stop])

    def level(
        self, session: BlockSession, root_B: Tensor, tokens_BW: IntArray, parents_BW: IntArray, depths: range
    ) -> Level:
        inputs_BX, slots = self.first_level(session, tokens_BW)
        return Level(inputs_BX, len(depths), (depths.stop, slots))

    def draft_level(self, memory: BlockMemory, inputs_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        stop, slots = sizes
        return self._logits(self.graph_block(memory, inputs_BX, slots)[:, :stop])

    def _logits(self, hidden_BSE: Tensor) -> Tensor:
        return self.transform_logits(linear(hidden_BSE, self.lm_head_DE, self.lm_bias_D))
