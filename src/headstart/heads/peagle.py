"""P-EAGLE: EAGLE-3's layers, drafting all depths in one pass (Hui et al., arXiv 2602.01469).

Text entries are EAGLE-3's. K - 1 mask entries follow the newest one. Each mask entry combines a learned state
(`mask_hidden`, fused like the target's states) with the embedding of the mask token. Attention is causal. The newest
text entry and each mask entry output one draft, so no draft depends on another. On tokens a b c d e (positions 0-4),
from the states after `b` (origin 1):

    step 0   fused(b), emb(c) -> d              at position 1, attends to the entries of a and b
    step 1   fused(mask_hidden), emb(mask) -> e at position 2, also attends to itself

>>> heads = PEagleHead(PEagleConfig(hidden_size=4, vocab_size=9, num_attention_heads=1, num_key_value_heads=1,
...     head_dim=4, intermediate_size=4, aux_layers=(1,), draft_steps=3, mask_token_id=8))
>>> tokens, _ = heads.with_masks(torch.tensor([[1, 2], [3, 0]]), torch.zeros(2, 2, 4), torch.tensor([[2], [1]]))
>>> tokens.tolist()  # two pending entries, then two masks; one entry in the second row, padded with masks
[[1, 2, 8, 8], [3, 8, 8, 8]]

Training runs step k for all its origins at once, as for EAGLE-3. `train.position_weight=subsampled` is the paper's
conditional drop-token sampling: step k keeps a fraction `train.step_weight ** k` of the origins.

Shape suffixes: B rows, P pending entries, W entries with masks, K draft steps, E hidden size, X = aux layers * E, V
vocabulary, S cache slots, D draft vocabulary, M origins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, OneForwardHead, register, supervised_origins
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.exchange.published import EMBEDDINGS, MASK_HIDDEN, Layout, Published, nearly_equal
from headstart.heads.int8_weights import linear
from headstart.heads.parts.cache import Entries, cached_attention
from headstart.heads.parts.graphed import IntArray, Level
from headstart.heads.parts.layer import LayerConfig, angles, check_mask_token, mask_token
from headstart.heads.parts.recurrent_session import RecurrentMemory, RecurrentSession
from headstart.heads.settings import FromTarget
from headstart.model.frozen import FrozenModel
from headstart.model.model import Target
from headstart.replay.cuda_graphs import bucket_slots
from headstart.support.uploads import upload


class PEagleConfig(Eagle3Config):
    family: str = "peagle"
    num_layers: int = Field(1, ge=1, le=8, description="Decoder layers; published heads have four.")
    feedback: Annotated[Literal["pre_norm"], FromTarget(settable=False)] = "pre_norm"  # nothing is fed back
    mask_token_id: Annotated[int, FromTarget()] = Field(
        -1, ge=0, description="Token of the mask entries; must not occur in any text."
    )
    train_embeddings: bool = Field(
        False,
        description="Train a copy of the target's token embeddings, as published heads do; engines then load it too.",
    )

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().of_target(target, settings), **mask_token(target, settings)}

    def check(self) -> None:
        super().check()
        check_mask_token(self.mask_token_id, self.vocab_size)


@register
class PEagleHead(OneForwardHead, Eagle3Head):
    """EAGLE-3 heads that draft all depths in one pass."""

    Config: ClassVar[type[LayerConfig]] = PEagleConfig
    publishes: ClassVar[Layout | None] = Layout.PEAGLE
    starts_from: ClassVar[str] = "eagle3"
    has_own_embeddings: ClassVar[bool] = True
    config: PEagleConfig
    own_embedding: nn.Parameter | None

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))
        own_VE = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size)) if config.train_embeddings else None
        self.register_parameter("own_embedding", own_VE)

    @property
    def target_embeddings(self) -> Tensor:
        return super().target_embeddings if self.own_embedding is None else self.own_embedding

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        if self.own_embedding is not None:
            self.own_embedding.copy_(target.embedding_weight)
        super().warm_start(target)

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Also initialise `mask_hidden` to the mean of the target's states."""
        batches = iter(batches)
        if self.config.init == "random" or (first := next(batches, None)) is None:
            return
        origin_M = supervised_origins(first.supervised_BT, 0)
        if len(origin_M):
            self.mask_hidden.copy_(self.select_states(first.states).flatten(0, 1)[origin_M].float().mean(0))
        super().fit(chain([first], batches))

    # -- entries ---------------------------------------------------------------------------------------------------

    def later_inputs(self, tokens: Tensor, feedback: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(tokens, self.config.mask_token_id), self._mask_state(feedback).expand_as(feedback)

    def _mask_state(self, like: Tensor) -> Tensor:
        """Return the fused `mask_hidden`, [1, 1, E]."""
        return self.project(self.mask_hidden.to(like.dtype).view(1, 1, -1))

    def with_masks(self, tokens_BP: Tensor, states_BPX: Tensor, counts_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [B, W] and fused states [B, W, E] of each row's pending entries, followed by masks."""
        fused_BPE, more = self.project(states_BPX), self.draft_steps - 1
        is_text_BW = torch.arange(tokens_BP.shape[1] + more, device=tokens_BP.device) < counts_B1
        fused_BWE = torch.where(is_text_BW[..., None], F.pad(fused_BPE, (0, 0, 0, more)), self._mask_state(fused_BPE))
        return F.pad(tokens_BP, (0, more)).where(is_text_BW, self.config.mask_token_id), fused_BWE

    def _drafting(self, stream_BWE: Tensor, counts_B1: Tensor) -> Tensor:
        """Return the LM head inputs of each row's newest text entry and its masks, [B, K, E]."""
        at_BK = counts_B1 - 1 + torch.arange(self.draft_steps, device=stream_BWE.device)
        return self.layer_output(stream_BWE.gather(1, at_BK[..., None].expand(-1, -1, stream_BWE.shape[2])))[0]

    def _logits(self, hidden_BKE: Tensor) -> Tensor:
        return self.transform_logits(linear(hidden_BKE, self.lm_head_DE, self.lm_bias_D))

    # -- drafting --------------------------------------------------------------------------------------------------

    def _kernel_heads(self, like: Tensor) -> None:
        """Return None: the C kernels for whole levels feed outputs back, and these heads do not."""

    def depth_logits(self, session: RecurrentSession, root_B: Tensor, depths: range) -> Tensor:
        if depths.start == 0:
            pending, device = max(session.counts), root_B.device
            session.begin_round()
            counts_B1 = upload(session.counts, device)[:, None]
            tokens_BP = upload(session.pending_tokens([0] * len(root_B), pending), device)
            tokens_BP.scatter_(1, counts_B1 - 1, root_B[:, None])
            tokens_BW, fused_BWE = self.with_masks(tokens_BP, session.pending_BPX.narrow(1, 0, pending), counts_B1)
            entries = Entries.of_text(session.cache.lengths, tokens_BW.shape[1])
            session.cache.reserve(entries.stop)
            session.feedback_BWE = self._drafting(self._run(session, fused_BWE, tokens_BW, entries), counts_B1)
        return self._logits(session.feedback_BWE[:, depths.start : depths.stop])

    def level(
        self, session: RecurrentSession, root_B: Tensor, tokens_BW: IntArray, parents_BW: IntArray, depths: range
    ) -> Level | None:
        first, memory = self._first_level(session, tokens_BW), session.memory
        if first is None or memory is None:
            return None
        _, pending, _ = first.sizes
        slots = bucket_slots(max(session.cache.lengths) + pending + self.draft_steps - 1, memory)
        return replace(first, width=len(depths), sizes=(depths.stop, pending, slots))

    def draft_level(self, memory: RecurrentMemory, inputs_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        stop, pending, slots = sizes
        if not stop:  # a chunk of pending text; see `pending_levels`
            return super().draft_level(memory, inputs_BX, sizes)
        rows, device = len(inputs_BX), inputs_BX.device
        tokens_BP, counts_B1, lengths_B1 = torch.split(inputs_BX, [pending, 1, 1], dim=1)
        tokens_BW, fused_BWE = self.with_masks(tokens_BP, memory.pending_BPX[:rows, :pending], counts_B1)
        slots_BW = lengths_B1 + torch.arange(tokens_BW.shape[1], device=device)
        allowed_BWS = torch.arange(slots, device=device) <= slots_BW[:, :, None]
        rows_B1 = torch.arange(rows, device=device)[:, None]

        def put(number: int, keys: Tensor, values: Tensor) -> None:
            memory.write(number, rows_B1, slots_BW, keys, values)

        def attend_layer(number: int, queries: Tensor, _: Tensor | None) -> Tensor:
            return cached_attention(queries, memory.layer(number), slots, allowed_BWS)

        rotary = angles(memory.rotary, slots_BW)
        stream_BWE = self._run_layers(fused_BWE, tokens_BW, rotary, put, attend_layer, None)
        return self._logits(self._drafting(stream_BWE, counts_B1)[:, :stop])

    # -- exchange --------------------------------------------------------------------------------------------------

    def by_published_name(self) -> dict[str, Tensor]:
        own = {} if self.own_embedding is None else {EMBEDDINGS: self.own_embedding}
        return {**super().by_published_name(), MASK_HIDDEN: self.mask_hidden.view(1, 1, -1), **own}

    @classmethod
    def settings_of(cls, published: Published) -> dict[str, Any]:
        settings = super().settings_of(replace(published, norm_output=False))  # nothing is fed back
        return {**settings, "train_embeddings": EMBEDDINGS in published.tensors}

    @classmethod
    def from_published(cls, published: Published, target: Target) -> Self:
        if nearly_equal(published.tensors.get(EMBEDDINGS), target.embedding_weight):
            tensors = {name: tensor for name, tensor in published.tensors.items() if name != EMBEDDINGS}
            published = published.with_tensors(tensors)
        return super().from_published(published, target)
