"""Training state of recurrent heads (see `recurrent`): a batch of texts and the draft steps of all its origins.

Shape suffixes: B rows, T tokens, A origins of a row, M predictions, X = B * T flat positions, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import HeadBatch
from headstart.heads.parts.layer import DraftLayer
from headstart.heads.parts.text_attention import VisibleRange, by_row, positions_of, round_up
from headstart.support.uploads import upload

_WORTH_A_COPY = 0.9
"""Origins are compacted if at most this fraction of the columns continues and the padded size shrinks."""


class UnrolledText:
    """State of `unroll` over a batch: keys and values of the text's entries (`kv`) and of each origin's later steps
    (`chains`). `feedback_BAE` is the previous step's; at step 0, the text's states. `flex` selects flex attention, see
    `VisibleRange`."""

    def __init__(
        self,
        layers: Sequence[DraftLayer],
        feedback_BTE: Tensor,
        batch: HeadBatch,
        origin_M: Tensor,
        flex: bool = False,
    ) -> None:
        self.tokens_BT, self.feedback_BAE, self._device = batch.tokens_BT, feedback_BTE, batch.tokens_BT.device
        self._batch, self._flex = batch, flex
        self._index_BA, self._real_BA = by_row(origin_M, self.tokens_BT.shape, self._device.type)
        self.kv: list[tuple[Tensor, Tensor]] = []
        self.chains: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        self.trained_qkv = [layer.trained_qkv() for layer in layers]
        self.complete = VisibleRange.of_text(batch, flex)
        self.visible = VisibleRange.of_origins(self._index_BA, batch, flex=flex)

    def select(self, origin_M: Tensor) -> None:
        """Continue with these origins only. Others stay as padding unless a copy without them is much smaller."""
        index_BA = self._index_BA
        rows, maximum = index_BA.shape
        kept_X = torch.zeros(self.tokens_BT.numel(), dtype=torch.bool)
        kept_X[origin_M] = True
        kept_BA = kept_X[index_BA + self.tokens_BT.shape[1] * torch.arange(rows)[:, None]] & self._real_BA
        count = int(kept_BA.sum(1).max())
        if count > _WORTH_A_COPY * maximum or round_up(count, self._device.type) >= maximum:
            self._real_BA = kept_BA
            return
        chosen_BA, self._real_BA = by_row(kept_BA.flatten().nonzero()[:, 0], index_BA.shape, self._device.type)
        self._index_BA = index_BA.gather(1, chosen_BA)
        column_BA, row_B1 = upload(chosen_BA, self._device), torch.arange(rows, device=self._device)[:, None]
        self.visible = VisibleRange.of_origins(self._index_BA, self._batch, flex=self._flex)
        self.feedback_BAE = self.feedback_BAE[row_B1, column_BA]
        heads_N1 = torch.arange(self.kv[0][0].shape[1], device=self._device)[:, None]
        at = row_B1[:, None], heads_N1, column_BA[:, None]
        self.chains = [[(keys[at], values[at]) for keys, values in chain] for chain in self.chains]

    def gather_origins(self, stream_BTE: Tensor) -> Tensor:
        """Gather the text's entries at the origins, [B, A, E]."""
        return stream_BTE.gather(1, self.visible.index_BA[:, :, None].expand(-1, -1, stream_BTE.shape[2]))

    def without_padding(self, x_BAE: Tensor) -> Tensor:
        """Drop the padding of rows; returns [M, E]."""
        return x_BAE.flatten(0, 1)[upload(self._real_BA.flatten().nonzero()[:, 0], self._device)]

    def entries(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and positions of a step's entries: token t + step + 1 and position t + step of origins t; at
        step 0, of all tokens."""
        if step == 0:
            return F.pad(self.tokens_BT[:, 1:], (0, 1)), positions_of(self.tokens_BT, self.complete.starts_BA)
        index_BA, starts_BA = self.visible.index_BA, self.visible.starts_BA
        tokens_BA = self.tokens_BT.gather(1, (index_BA + step + 1).clamp(max=self.tokens_BT.shape[1] - 1))
        return tokens_BA, (index_BA if starts_BA is None else index_BA - starts_BA) + step
