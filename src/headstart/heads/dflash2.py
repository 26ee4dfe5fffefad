"""DFlash 2: DFlash with convolutions over the slots and pairwise scores of the most likely drafts
(inco.ai/blog/dflash2, August 2026).

Block and slots are as in DFlash; see `parts.block_layer` for the layers. Each slot drafts only its candidates, the most
likely tokens. Candidate b after parent a scores U[b] + (A[a] * P h) . B[b], where h is the input of the target's LM
head and U its logits. The first slot's parent is the root.

>>> import torch
>>> heads = DFlash2Head(DFlash2Config(hidden_size=4, vocab_size=20, num_attention_heads=1, num_key_value_heads=1,
...     head_dim=4, intermediate_size=4, aux_layers=(1,), block_size=3, mask_token_id=8, conv_group_size=2,
...     selector_rank=1, selector_top_k=8))
>>> _ = heads.parents_VR.data.copy_(torch.arange(20.0)[:, None])
>>> _ = heads.drafts_DR.data[19].fill_(2.0), heads.slot_map_RE.data.fill_(0.5)
>>> parents_BWR = heads.embed_parents(torch.tensor([[3, 10]]), torch.zeros(1))
>>> logits_BWD = heads.logits_after(torch.arange(20.0)[None], torch.ones(1, 4), parents_BWR)
>>> logits_BWD[0, :, [11, 12, 18, 19]].tolist()  # the second child's score is 19 + 2 * 0.5 * 4 * parent
[[-inf, 12.0, 18.0, 31.0], [-inf, 12.0, 18.0, 59.0]]

Training adds the loss over the candidates to the loss over all drafts.

Shape suffixes: B rows, W nodes of a level, M origins, E hidden size, D draft vocabulary, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, HeadConfig, StepPrediction, register
from headstart.heads.candidates import Candidates
from headstart.heads.exchange.published import PREDECESSORS, SELECTOR, SUCCESSORS, Layout, Published
from headstart.heads.int8_weights import linear
from headstart.heads.parts.block_layer import BlockLayer, ConvolvedConfig, ConvolvedLayer
from headstart.heads.parts.block_levels import LevelwiseBlockHead
from headstart.heads.parts.block_start import Ridge
from headstart.heads.parts.layer import rms_norm


class DFlash2Config(ConvolvedConfig):
    family: str = "dflash2"
    selector_rank: int = Field(
        64, ge=0, description="Rank of the pairwise scores and their two tables (a row per token); 0 disables them."
    )
    selector_top_k: int = Field(16, ge=1, le=256, description="Candidates per slot: its most likely drafts.")


@register
class DFlash2Head(LevelwiseBlockHead):
    """Block drafter with convolutions, the target's LM head, and pairwise scores."""

    Config: ClassVar[type[HeadConfig]] = DFlash2Config
    Layer: ClassVar[type[BlockLayer]] = ConvolvedLayer
    publishes: ClassVar[Layout | None] = Layout.DFLASH2
    starts_from: ClassVar[str] = "dflash"
    fits_new_parts: ClassVar[bool] = False  # they start without effect
    tables: ClassVar[tuple[str, str]] = (PREDECESSORS, SUCCESSORS)
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config, config.selector_rank)
        size = config.hidden_size
        self.slot_map_RE = nn.Parameter(torch.randn(self.rank, size) * size**-0.5, self.rank > 0)

    @property
    def max_children(self) -> int:
        return min(super().max_children, self.config.selector_top_k if self.rank else self.config.vocab_size)

    def start_markov(self, axes_ER: Tensor, map_RI: Tensor, stream_ME: Tensor) -> None:
        """Also fit `slot_map_RE` by ridge regression, so that it maps LM head inputs to vectors near ones."""
        super().start_markov(axes_ER, map_RI, stream_ME)
        ridge = Ridge()
        ridge.add(rms_norm(self.norm, stream_ME), torch.ones(len(stream_ME), 1))
        self.slot_map_RE[: len(map_RI)] = ridge.solve().to(self.slot_map_RE)

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        for slots, parents_MR in self.slots_and_parents(batch):
            yield replace(slots, candidates=self.candidates(slots.hidden_MH, parents_MR[:, None]))

    def logits_after(self, product_BD: Tensor, hidden_BE: Tensor, parents_BWR: Tensor) -> Tensor:
        logits_BD, candidates = self.transform_logits(product_BD), self.candidates(hidden_BE, parents_BWR)
        return logits_BD[:, None] if candidates is None else candidates.select(logits_BD)

    def candidates(self, hidden_ME: Tensor, parents_MWR: Tensor) -> Candidates | None:
        if not self.rank:
            return None
        slots_M1R = linear(hidden_ME, self.slot_map_RE)[:, None]
        return Candidates(slots_M1R * parents_MWR, self.drafts_DR, self.config.selector_top_k)

    def by_published_name(self) -> dict[str, Tensor]:
        return super().by_published_name() | {SELECTOR: self.slot_map_RE}

    def publish(self) -> Published:
        if not self.rank:
            problem = "No serving engine loads dflash2 heads without pairwise scores (heads.selector_rank=0)."
            raise UserError(problem, "Train with heads.selector_rank above 0, or decode with headstart.")
        return super().publish()
