"""DSpark: a block drafter with a low-rank Markov head, whose slots predict the token after their position
(arXiv 2607.05147).

The block is [root, mask, mask, ...]. On tokens a b c d e (positions 0-4), from the state after `b` (origin t = 1), with
root `c` and a block of 2:

    context   a b                     states of the target
    block     c mask                  at positions 2 3
    drafts    d  e                    step 0 after c, step 1 after d: token t + k + 2, after token t + k + 1

The logits of a slot after a token are U + W2 W1[token], with U from the target's LM head (see `parts.block_levels`).

>>> import torch
>>> heads = DSparkHead(DSparkConfig(hidden_size=4, vocab_size=9, num_attention_heads=1, num_key_value_heads=1,
...     head_dim=4, intermediate_size=4, aux_layers=(1,), block_size=2, mask_token_id=8, markov_rank=1))
>>> heads._embedding_VE = torch.arange(9.0)[:, None].expand(9, 4)
>>> heads.block(torch.tensor([2]), torch.zeros(1))[0, :, 0].tolist(), heads.first_slot, heads.draft_steps
([2.0, 8.0], 0, 2)
>>> _ = heads.parents_VR.data.copy_(torch.arange(9.0)[:, None])
>>> for step in range(2):  # the preceding token (the last LM head input), and the drafted one
...     slots = heads.prediction(torch.zeros(1, 4), heads.lm_head_DE, torch.tensor([1]), step)
...     after = heads.correct(slots, heads.concat_lm_head(), heads.embed_parents(slots.teacher_M, torch.zeros(1)))
...     after.hidden_MH[:, -1].tolist(), (after.teacher_M + 1).tolist()
([2.0], [3])
([3.0], [4])

An optional confidence head predicts the acceptance probability of a sampled draft, from the slot and the preceding
token. It is for serving engines; headstart's decoding does not read it.

Shape suffixes: B rows, W nodes of a level, M origins, E hidden size, D draft vocabulary, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, HeadConfig, StepPrediction, register
from headstart.heads.exchange.published import MARKOV_EMBEDDING, MARKOV_LM_HEAD, Layout
from headstart.heads.int8_weights import linear
from headstart.heads.parts.block_layer import BlockConfig
from headstart.heads.parts.block_levels import LevelwiseBlockHead


class DSparkConfig(BlockConfig):
    family: str = "dspark"
    markov_rank: int = Field(64, ge=1, description="Rank of the Markov head; its two tables have a row for each token.")
    confidence: bool = Field(False, description="Also train a head that predicts how likely each draft is accepted.")


@register
class DSparkHead(LevelwiseBlockHead):
    """Block drafter with the target's LM head, plus a low-rank correction by the preceding token."""

    Config: ClassVar[type[HeadConfig]] = DSparkConfig
    publishes: ClassVar[Layout | None] = Layout.DSPARK
    tables: ClassVar[tuple[str, str]] = (MARKOV_EMBEDDING, MARKOV_LM_HEAD)
    first_slot: ClassVar[int] = 0
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config, config.markov_rank)
        self.confidence_head = nn.Linear(config.hidden_size + self.rank, 1) if config.confidence else None

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        lm_head_DH = self.concat_lm_head()
        for slots, parents_MR in self.slots_and_parents(batch):
            yield self.correct(slots, lm_head_DH, parents_MR)

    def correct(self, slots: StepPrediction, lm_head_DH: Tensor, parents_MR: Tensor) -> StepPrediction:
        """Correct a step's predictions by the conversation's preceding tokens."""
        hidden_MH, confidence_M = torch.cat([slots.hidden_MH, parents_MR], dim=-1), None
        if self.confidence_head is not None:  # detached: it must not change the drafts
            confidence_M = self.confidence_head(hidden_MH.detach())[..., 0]
        return replace(
            slots,
            hidden_MH=hidden_MH,
            lm_head_DH=lm_head_DH,
            frozen_columns=self.config.hidden_size,
            confidence_M=confidence_M,
        )

    def concat_lm_head(self) -> Tensor:
        return torch.cat([self.lm_head_DE, self.drafts_DR], dim=-1)

    def logits_after(self, product_BD: Tensor, hidden_BE: Tensor, parents_BWR: Tensor) -> Tensor:
        return self.transform_logits(product_BD[:, None] + linear(parents_BWR, self.drafts_DR))

    def by_published_name(self) -> dict[str, Tensor]:
        weights = self.confidence_head.named_parameters() if self.confidence_head is not None else ()
        return super().by_published_name() | {f"confidence_head.proj.{name}": weight for name, weight in weights}
