"""Heads that draft a block in one pass, with the target's states as keys and values: what DFlash and DSpark share.

Two kinds of inputs meet in every layer's attention. The *context* is one vector for each token that the target has
read: some of its layers' outputs, fused by a linear map and normed once for all layers. Each layer's own key and value
maps read it, without the layer's input norm. The *block* starts with the root (the anchor: decided, not read by the
target), and goes on with as many copies of one mask token as there is to draft; it goes through the layers as a stream
does, and all of its slots see each other and the whole context. The output is normed and read by the target's frozen LM
head. The layers are Qwen3's, for every target: published heads are.

Training runs one block for each origin. With origins all over a text that is many blocks: draw some of them
(`train.anchors`).

Shape suffixes: B rows, T tokens, A origins of a row, K slots of a block, S drafted slots (K, or one fewer), M origins,
E hidden size, X = A * K, P committed tokens, N key heads, G query heads that share a key head, R = G * K, d head size,
D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, StepPrediction, origins
from headstart.heads.parts.block_layer import BlockConfig, BlockLayer
from headstart.heads.parts.int8_weights import Linear
from headstart.heads.parts.layer import (
    LayerCache,
    Rotary,
    cached_attention,
    normed,
    refuse_start,
    start_from_last_layers,
)
from headstart.heads.parts.text_attention import Sight, attend_blocks, by_row, positions_of
from headstart.target.frozen import FrozenModel
from headstart.tree.tree import Committed

_ORIGINS = 1024
"""Blocks that run at a time where nothing is kept for gradients."""


@dataclass
class BlockState:
    """Drafting of a batch.

    Attributes:
        cache: keys and values of the context, one slot for each token that the target has read.
        hidden_BSE: what the LM head reads of this round's block.
        logits_BSD: what it makes of that, for families that go on from there.
    """

    cache: LayerCache
    hidden_BSE: Tensor
    logits_BSD: Tensor | None = None


@dataclass(frozen=True)
class Said:
    """What the predictions of all steps of a batch read, beside the slots' states.

    Attributes:
        lm_head_DH: of `BlockHead.joined_lm_head`.
        following_XR: what every token of the batch says about the one after it, of `BlockHead.follow`. Looked up
            once: each look-up has a gradient as large as its table.
    """

    lm_head_DH: Tensor
    following_XR: Tensor | None


class BlockHead(DraftHead):
    """Fusion, layers and norm; families say which slots draft, and what is added to their logits."""

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        config.check()
        if not config.aux_layers:
            raise config.refused_layers()
        size, count = config.hidden_size, len(config.aux_layers)
        self.fc = Linear(count * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.register_buffer("lm_head_DE", torch.zeros(config.draft_width, size), persistent=False)
        self._rotary = Rotary(config)
        self._embedding_VE: Tensor | None = None

    # -- what a family says --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def first_slot(self) -> int:
        """The first slot that drafts: 1 where the root's own is left out."""

    @abstractmethod
    def prediction(self, hidden_ME: Tensor, said: Said, origin_M: Tensor, step: int) -> StepPrediction:
        """Of one draft step, from what its slots say."""

    def follow(self, tokens: Tensor, like: Tensor) -> Tensor | None:
        """What tokens say about the one after them, [..., R], beside a slot's state; None where a family reads none."""
        return None

    def joined_lm_head(self) -> Tensor:
        """The LM head of all steps in training: the target's, and what a family reads beside a slot's state."""
        return self.lm_head_DE

    # -- shared --------------------------------------------------------------------------------------------------

    @property
    def draft_steps(self) -> int:
        return self.config.block_size - self.first_slot

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def stack(self) -> list[BlockLayer]:
        """The layers, first to last."""
        return cast(list[BlockLayer], list(self.layers))

    def learning_rows(self) -> dict[str, list[slice]]:
        return {
            f"layers.{number}.{name}": rows
            for number, layer in enumerate(self.stack)
            for name, rows in layer.learning_rows().items()
        }

    def bind(self, target: FrozenModel) -> None:
        """Take the target's embeddings and LM head."""
        if max(self.config.aux_layers) >= target.num_layers:
            raise self.config.refused_layers()
        self._embedding_VE = target.embedding_weight.detach()
        mask = self.config.mask_token_id
        if target.blank(mask):
            raise UserError(
                f"Token {mask}, heads.mask_token_id, has an embedding in the target that is all zeros or not finite: "
                "the slots of a block would read nothing.",
                "Name another token that no text has: heads.mask_token_id=<id>.",
            )
        self.lm_head_DE = self.frozen_lm_head(target, self.fc.weight)

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """The target's last layers and final norm; the context is the deepest state that is read."""
        refuse_start(self.config.num_layers, target)
        self.bind(target)
        if self.config.init == "random":
            return
        start_from_last_layers(target, self.stack, self.fc, self.hidden_norm, self.norm)

    def read_states(self, states: Mapping[int, Tensor]) -> Tensor:
        """The context [..., E]."""
        seen = torch.cat([states[aux_layer] for aux_layer in self.config.aux_layers], dim=-1)
        return normed(self.hidden_norm, self.fc(seen))

    def block(self, anchors: Tensor, like: Tensor) -> Tensor:
        """What goes into the first layer [..., K, E], for anchors [...]: embeddings as the target stores them."""
        assert self._embedding_VE is not None, "heads are bound to their target"
        shape = (*anchors.shape, self.config.block_size)
        tokens = torch.full(shape, self.config.mask_token_id, device=self._embedding_VE.device)
        tokens[..., 0] = anchors.to(tokens.device)
        return F.embedding(tokens, self._embedding_VE).to(like)

    # -- training ------------------------------------------------------------------------------------------------

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        origin_M = origins(batch, 0)
        if not len(origin_M):
            return
        hidden_MSE = self.blocks(batch, origin_M)
        said = Said(self.joined_lm_head(), self.follow(batch.tokens_BT.flatten(), hidden_MSE))
        for step in range(self.draft_steps):
            step_M = origins(batch, step)
            rows_M = torch.searchsorted(origin_M, step_M)
            yield self.prediction(hidden_MSE[rows_M, step], said, step_M, step)

    def blocks(self, batch: HeadBatch, origin_M: Tensor) -> Tensor:
        """What the LM head reads of the block of every origin, [M, S, E].

        Args:
            batch: of conversations.
            origin_M: flat indices, ascending.
        """
        context_BTE = self.read_states(batch.states)
        positions_BT = positions_of(batch.tokens_BT, batch.starts_BT)
        rotary = self._rotary.at(positions_BT, context_BTE.dtype, batch.tokens_BT.shape[1])
        text = [self.light(layer.context, context_BTE, rotary) for layer in self.stack]
        parts = [origin_M] if torch.is_grad_enabled() else torch.split(origin_M, _ORIGINS)
        return torch.cat([self._blocks(batch, part_M, text, context_BTE) for part_M in parts])

    def _blocks(
        self, batch: HeadBatch, origin_M: Tensor, text: Sequence[tuple[Tensor, Tensor]], like: Tensor
    ) -> Tensor:
        run = Blocks(self, batch, origin_M, like)
        for layer, (keys, values) in zip(self.stack, text, strict=True):
            run.stream_BXE = self.light(layer.write, run.stream_BXE, run.mix(layer, keys, values))
        return normed(self.norm, run.drafted(run.stream_BXE))

    # -- drafting ------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> BlockState:
        some_BPE = states[self.config.aux_layers[0]]
        cache = LayerCache(self.config, len(self.layers), len(prompts), some_BPE.shape[1], some_BPE)
        state = BlockState(cache, some_BPE[:, :0])
        self._remember(state, states, [len(prompt) for prompt in prompts])
        return state

    def commit(self, state: BlockState, committed: Committed) -> None:
        self._remember(state, committed.states, committed.counts)

    def reorder(self, state: BlockState, rows: Sequence[int]) -> None:
        state.cache.reorder(rows)
        state.hidden_BSE, state.logits_BSD = state.hidden_BSE[list(rows)], None

    def _remember(self, state: BlockState, states: Mapping[int, Tensor], counts: Sequence[int]) -> None:
        """Keys and values of newly committed tokens; what lies behind a row's own is written over later."""
        cache, context_BPE = state.cache, self.read_states(states)
        width = context_BPE.shape[1]
        slots = max(cache.lengths) + width
        cache.reserve(slots)
        rotary = self._rotary.at(self._positions(cache, width, context_BPE.device), context_BPE.dtype, slots)
        for number, layer in enumerate(self.stack):
            cache.put(number, cache.lengths, *layer.context(context_BPE, rotary))
        cache.lengths = [length + count for length, count in zip(cache.lengths, counts, strict=True)]

    def run_block(self, state: BlockState, root_B: Tensor) -> None:
        """Run the block after each row's root; what its slots say is then in the state."""
        cache, slots = state.cache, self.config.block_size
        total = max(cache.lengths) + slots
        cache.reserve(total)
        stream_BKE = self.block(root_B, cache.kv[0][0])
        rotary = self._rotary.at(self._positions(cache, slots, stream_BKE.device), stream_BKE.dtype, total)
        allowed_BKX = None
        if len(set(cache.lengths)) > 1:
            ends_B = torch.tensor(cache.lengths, device=stream_BKE.device) + slots
            allowed_BX = torch.arange(total, device=stream_BKE.device) < ends_B[:, None]
            allowed_BKX = allowed_BX[:, None].expand(-1, slots, -1)
        for number, layer in enumerate(self.stack):
            queries, keys, values = layer.read(stream_BKE, rotary)
            cache.put(number, cache.lengths, keys, values)
            if number == len(self.layers) - 1:  # slots that draft nothing are only seen by the others
                drop = self.first_slot
                queries, stream_BKE = queries[:, :, :, drop:], stream_BKE[:, drop:]
                allowed_BKX = None if allowed_BKX is None else allowed_BKX[:, drop:]
            stream_BKE = layer.write(stream_BKE, cached_attention(queries, cache.kv[number], total, allowed_BKX))
        state.hidden_BSE = normed(self.norm, stream_BKE)

    @staticmethod
    def _positions(cache: LayerCache, width: int, device: torch.device) -> Tensor:
        """Positions [B, width] of what comes after each row's committed slots."""
        return torch.tensor(cache.lengths, device=device)[:, None] + torch.arange(width, device=device)


class Blocks:
    """The blocks of some origins of a batch, on their way through the layers.

    Attributes:
        stream_BXE: what goes into the next layer; at first the embeddings.
    """

    def __init__(self, heads: BlockHead, batch: HeadBatch, origin_M: Tensor, like: Tensor) -> None:
        self.heads, tokens_BT, slots = heads, batch.tokens_BT, heads.config.block_size
        self.index_BA, self.real_BA = by_row(origin_M, tokens_BT.shape)
        starts_BA = None if batch.starts_BT is None else batch.starts_BT.gather(1, self.index_BA)
        self.sight = Sight(self.index_BA, tokens_BT.shape[1], starts_BA)
        first_BA = 1 + (self.index_BA if starts_BA is None else self.index_BA - starts_BA)
        positions_BAK = first_BA[:, :, None] + torch.arange(slots, device=first_BA.device)
        self.rotary = heads._rotary.at(positions_BAK.flatten(1), like.dtype, tokens_BT.shape[1] + slots)
        self.stream_BXE = heads.block(tokens_BT.gather(1, self.index_BA + 1), like).flatten(1, 2)

    def mix(self, layer: BlockLayer, keys_BNTd: Tensor, values_BNTd: Tensor) -> Tensor:
        """What every slot finds in a layer, [B, N, G, X, d]."""
        queries, own_keys, own_values = self.heads.light(layer.read, self.stream_BXE, self.rotary)
        slots, (rows, kv_heads, groups, _, size) = self.heads.config.block_size, queries.shape
        queries_BNGAKd = queries.view(rows, kv_heads, groups, -1, slots, size)
        own = [x_BNXd.reshape(rows, kv_heads, -1, slots, size) for x_BNXd in (own_keys, own_values)]
        mixed_BNARd = attend_blocks(
            queries_BNGAKd.transpose(2, 3).flatten(3, 4), keys_BNTd, values_BNTd, self.sight, own[0], own[1]
        )
        mixed_BNAGKd = mixed_BNARd.view(rows, kv_heads, -1, groups, slots, size)
        return mixed_BNAGKd.transpose(2, 3).flatten(3, 4)

    def drafted(self, x_BXF: Tensor) -> Tensor:
        """Of all slots of all origins, those that draft and are real, [M, S, F]."""
        x_BAKF = x_BXF.view(*self.index_BA.shape, self.heads.config.block_size, -1)
        return x_BAKF[:, :, self.heads.first_slot :][self.real_BA]
