"""DFlash 2: DFlash with convolutions over the slots and pairwise scores of its likely drafts (inco.ai/blog/dflash2,
August 2026).

Block and slots are DFlash's; the layers are of `parts.block_convolution`. A slot's candidates are its most likely
drafts. Candidate b after parent a scores U[b] + (A[a] * P h) . B[b], with U from the target's LM head and its input h.
The first slot's parent is the root. Other tokens are not drafted.

>>> import torch
>>> heads = DFlash2Head(DFlash2Config(hidden_size=4, vocab_size=20, num_attention_heads=1, num_key_value_heads=1,
...     head_dim=4, intermediate_size=4, aux_layers=(1,), block_size=3, mask_token_id=8, conv_group_size=2,
...     selector_rank=1, selector_top_k=8))
>>> _ = heads.predecessor_codebook_VR.data.copy_(torch.arange(20.0)[:, None])
>>> _ = heads.successor_codebook_DR.data[19].fill_(2.0), heads.hidden_projection_RE.data.fill_(0.5)
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
from headstart.heads.exchange.published import PREDECESSORS, SELECTOR, SUCCESSORS, Layout, Published
from headstart.heads.int8_weights import linear
from headstart.heads.parts.block_convolution import ConvolvedConfig, ConvolvedLayer
from headstart.heads.parts.block_layer import BlockLayer
from headstart.heads.parts.block_levels import LevelwiseBlockHead
from headstart.heads.parts.block_start import Ridge
from headstart.heads.parts.candidates import Candidates
from headstart.heads.parts.layer import rms_norm


class DFlash2Config(ConvolvedConfig):
    family: str = "dflash2"
    selector_rank: int = Field(
        64, ge=0, description="Rank of the pairwise scores; their two tables have a row for each token. 0: none."
    )
    selector_top_k: int = Field(16, ge=1, le=256, description="Candidates of a slot, its most likely drafts.")


@register
class DFlash2Head(LevelwiseBlockHead):
    """Block drafter with convolutions, the target's LM head, and pairwise scores."""

    Config: ClassVar[type[HeadConfig]] = DFlash2Config
    Layer: ClassVar[type[BlockLayer]] = ConvolvedLayer
    publishes: ClassVar[Layout | None] = Layout.DFLASH2
    continues: ClassVar[str] = "dflash"
    drafts_name: ClassVar[str] = SUCCESSORS
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        rank, size = config.selector_rank, config.hidden_size
        # Like LoRA, one factor starts at zero.
        self.predecessor_codebook_VR = nn.Parameter(0.01 * torch.randn(config.vocab_size, rank), rank > 0)
        self.successor_codebook_DR = nn.Parameter(torch.zeros(config.draft_width, rank), rank > 0)
        self.hidden_projection_RE = nn.Parameter(torch.randn(rank, size) * size**-0.5, rank > 0)

    @property
    def first_slot(self) -> int:
        return 1

    @property
    def markov_rank(self) -> int:
        return self.config.selector_rank

    @property
    def parents_VR(self) -> Tensor:
        return self.predecessor_codebook_VR

    @property
    def drafts_DR(self) -> Tensor:
        return self.successor_codebook_DR

    def start_markov(self, axes_ER: Tensor, map_RI: Tensor, stream_ME: Tensor) -> None:
        """Also set the projection of the slot to a constant, as far as a linear map of the LM head's input can."""
        super().start_markov(axes_ER, map_RI, stream_ME)
        ridge = Ridge()
        ridge.add(rms_norm(self.norm, stream_ME), torch.ones(len(stream_ME), 1))
        self.hidden_projection_RE[: len(map_RI)] = ridge.solve().to(self.hidden_projection_RE)

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        if not self.config.selector_rank:
            yield from super().unroll(batch)
            return
        for slots, parents_MR in self.slots_and_parents(batch):
            yield replace(slots, candidates=self.candidates(slots.hidden_MH, parents_MR[:, None]))

    def logits_after(self, product_BD: Tensor, hidden_BE: Tensor, parents_BWR: Tensor) -> Tensor:
        logits_BD = self.transform_logits(product_BD)
        if not self.config.selector_rank:
            return logits_BD[:, None]
        return self.candidates(hidden_BE, parents_BWR).select(logits_BD)

    def candidates(self, hidden_ME: Tensor, parents_MWR: Tensor) -> Candidates:
        slots_MR = linear(hidden_ME, self.hidden_projection_RE)
        return Candidates(slots_MR[:, None] * parents_MWR, self.successor_codebook_DR, self.config.selector_top_k)

    @property
    def max_children(self) -> int:
        most = super().max_children
        return min(self.config.selector_top_k, most) if self.config.selector_rank else most

    def by_published_name(self) -> dict[str, Tensor]:
        return {
            **super().by_published_name(),
            PREDECESSORS: self.predecessor_codebook_VR,
            SUCCESSORS: self.successor_codebook_DR,
            SELECTOR: self.hidden_projection_RE,
        }

    def publish(self) -> Published:
        if not self.config.selector_rank:
            raise UserError(
                "No serving engine loads dflash2 heads without pairwise scores (heads.selector_rank=0).",
                "Train them with a heads.selector_rank, or decode with headstart.",
            )
        return super().publish()
