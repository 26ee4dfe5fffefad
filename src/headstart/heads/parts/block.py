"""Base of block drafters: one forward over a block, with the target's states as keys and values.

Every layer attends over a context and a block. The *context* is one vector per token that the target has read: outputs
of some target layers, fused by a linear map and a norm. Each layer maps it to keys and values without the input norm.
The *block* is the root (accepted, not yet read by the target) and copies of one mask token. Its slots see each other
and the whole context, unless layers are `causal` or have a `sliding_window`. The target's frozen LM head reads the
normed output. The layers are Qwen3's for every target, as in published heads.

A window ends at each slot's own position, as in engines. The speculators library trains all slots with the root's
window, which starts up to a block's length earlier.

Training runs one block per origin, or per sampled origin (`train.anchors`).

Shape suffixes: B rows, T tokens, A origins of a row, K slots of a block, S drafted slots (K, or one fewer), M origins,
E hidden size, X = A * K, P committed tokens, C cache slots, N key heads, G query heads per key head, R = G * K, d head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, StepPrediction, host_origins
from headstart.heads.exchange.published import LM_HEAD, Published, check_embeddings, nearly_equal
from headstart.heads.int8_weights import Linear
from headstart.heads.parts.block_layer import LAYERS, BlockConfig, BlockLayer
from headstart.heads.parts.cache import LayerCache, WriteKV, cached_attention
from headstart.heads.parts.graphed import GraphedHead, IntArray
from headstart.heads.parts.layer import Angles, Rotary, angles, aux_layers_error, rms_norm, start_from_last_layers
from headstart.heads.parts.text_attention import VisibleRange, attend_blocks, by_row, positions_of
from headstart.model.frozen import FrozenModel
from headstart.model.model import Target
from headstart.replay.attention import CHUNK
from headstart.replay.cache import KVMemory
from headstart.replay.cuda_graphs import bucket_slots
from headstart.support.uploads import upload
from headstart.tree.tree import Committed

_ORIGINS = 1024
"""Blocks per chunk without gradients."""


@dataclass
class BlockSession:
    """Keys and values of the context, and the round's LM head inputs and (by parent) products."""

    cache: LayerCache
    hidden_BSE: Tensor
    logits_BSD: Tensor | None = None
    memory: BlockMemory | None = None


class BlockMemory(KVMemory):
    """Keys and values of the context, rotary tables, and the block's output for later levels."""

    def __init__(self, heads: BlockHead, like: Tensor, rows: int, capacity: int) -> None:
        super().__init__(LayerCache.layers_like(heads.config, len(heads.layers), like), rows, capacity)
        self.rotary = heads._rotary.table(capacity, like.device, like.dtype)
        with torch.inference_mode(False):
            self.hidden_BSE = like.new_zeros(rows, heads.draft_steps, heads.config.hidden_size)
            self.logits_BSD = like.new_zeros(rows, heads.draft_steps, heads.config.draft_width)


class BlockHead(GraphedHead):
    """Fusion, layers and norm; families define the logits.

    Attributes:
        first_slot: the first slot that drafts; 1 if the root's slot drafts nothing.
    """

    Layer: ClassVar[type[BlockLayer]] = BlockLayer
    first_slot: ClassVar[int] = 1
    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        if not config.aux_layers:
            raise aux_layers_error((), LAYERS)
        size, count = config.hidden_size, len(config.aux_layers)
        self.fc = Linear(count * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        layers = nn.ModuleList(self.Layer(config, number) for number in range(config.num_layers))
        self.layers = cast(list[BlockLayer], layers)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.register_buffer("lm_head_DE", torch.zeros(config.draft_width, size), persistent=False)
        self._rotary = Rotary(config)

    @property
    def draft_steps(self) -> int:
        return self.config.block_size - self.first_slot

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def bytes_per_token(self) -> int:
        return super().bytes_per_token + LayerCache.bytes_per_token(self.config, len(self.layers), self._dtype.itemsize)

    def bind(self, target: FrozenModel) -> None:
        if max(self.config.aux_layers) >= target.num_layers:
            raise aux_layers_error(self.config.aux_layers, LAYERS)
        super().bind(target)
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
        """Copy the target's last layers and final norm. The context starts as the deepest aux state."""
        self.bind(target)
        if self.config.init == "random":
            return
        start_from_last_layers(target, self.layers, self.fc, self.hidden_norm, self.norm)

    def fuse_states(self, states: Mapping[int, Tensor]) -> Tensor:
        """Return the context, [..., E]."""
        selected = torch.cat([states[aux_layer] for aux_layer in self.config.aux_layers], dim=-1)
        return rms_norm(self.hidden_norm, self.fc(selected))

    def block(self, roots: Tensor, like: Tensor) -> Tensor:
        """Return the first layer's input [..., K, E] for root tokens [...]: the target's raw embeddings."""
        tokens = torch.full((*roots.shape, self.config.block_size), self.config.mask_token_id, device=roots.device)
        tokens[..., 0] = roots
        return self.embed_tokens(tokens, like)

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        origin_M = host_origins(batch, 0)
        if not len(origin_M):
            return
        hidden_MSE = self.blocks(batch, origin_M)
        for step in range(self.draft_steps):
            step_M = host_origins(batch, step)
            rows_M, step_M = (upload(x_M, hidden_MSE.device) for x_M in (torch.searchsorted(origin_M, step_M), step_M))
            yield self.prediction(hidden_MSE[rows_M, step], self.lm_head_DE, step_M, step)

    def blocks(self, batch: HeadBatch, origin_M: Tensor) -> Tensor:
        """Return the LM head inputs of the blocks at these origins (ascending, on the host), [M, S, E]."""
        context_BTE = self.fuse_states(batch.states)
        rotary = self.context_rotary(batch, context_BTE)
        text = [self.run_region(layer.context, context_BTE, rotary) for layer in self.layers]
        outputs = []
        for part_M in [origin_M] if torch.is_grad_enabled() else torch.split(origin_M, _ORIGINS):
            blocks = Blocks(self, batch, part_M, context_BTE)
            for layer, kv in zip(self.layers, text, strict=True):
                blocks.stream_BXE = self.run_region(layer.write, blocks.stream_BXE, blocks.attend(layer, *kv))
            outputs.append(rms_norm(self.norm, blocks.drafting_slots(blocks.stream_BXE)))
        return torch.cat(outputs)

    def context_rotary(self, batch: HeadBatch, like: Tensor) -> Angles:
        """Return the rotary angles of all tokens of a batch."""
        tokens_BT, starts_BT = batch.tokens_BT, batch.starts_BT
        positions_BT = positions_of(tokens_BT, None if starts_BT is None else upload(starts_BT, tokens_BT.device))
        return self._rotary.at(positions_BT, like.dtype, tokens_BT.shape[1])

    def by_published_name(self) -> dict[str, Tensor]:
        tensors = {
            "fc.weight": self.fc.weight,
            "hidden_norm.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
        }
        for number, layer in enumerate(self.layers):
            tensors |= layer.by_published_name(number)
        return tensors

    @classmethod
    def from_published(cls, published: Published, target: Target) -> Self:
        check_embeddings(published, target.embedding_weight)
        if not nearly_equal(published.tensors.get(LM_HEAD), target.lm_head_weight):
            raise UserError(
                "The checkpoint has an LM head of its own, which is not the target's; block drafters of headstart "
                "draft through the target's.",
                "Name the target that they were trained on with --target, or take another checkpoint.",
            )
        return super().from_published(published, target)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> BlockSession:
        some_BPE = states[self.config.aux_layers[0]]
        cache = LayerCache(self.config, len(self.layers), len(prompts), prompt=some_BPE.shape[1], like=some_BPE)
        session = BlockSession(cache, some_BPE[:, :0])
        for start in range(0, some_BPE.shape[1], CHUNK):  # bounds memory
            piece = {layer: states[layer][:, start : start + CHUNK] for layer in self.config.aux_layers}
            self._append_context(session, piece, [min(max(len(prompt) - start, 0), CHUNK) for prompt in prompts])
        return session

    def commit(self, session: BlockSession, committed: Committed) -> None:
        self._append_context(session, committed.states, committed.counts)

    def reorder(self, session: BlockSession, rows: Sequence[int]) -> None:
        session.cache.reorder(rows)

    def join(self, session: BlockSession, other: BlockSession) -> None:
        if not session.cache.join(other.cache):
            self.leave_memory(session)

    def _append_context(self, session: BlockSession, states: Mapping[int, Tensor], counts: Sequence[int]) -> None:
        """Append keys and values of newly committed tokens. Later ones overwrite a row's padding."""
        cache, context_BPE = session.cache, self.fuse_states(states)
        width = context_BPE.shape[1]
        slots = max(cache.lengths) + width
        cache.reserve(slots)
        rotary = self._rotary.at(self._positions(cache, width, context_BPE.device), context_BPE.dtype, slots)
        for number, layer in enumerate(self.layers):
            cache.put(cache.lengths, number, *layer.context(context_BPE, rotary))
        cache.lengths = [length + count for length, count in zip(cache.lengths, counts, strict=True)]

    def run_block(self, session: BlockSession, root_B: Tensor) -> None:
        """Run each row's block, into `session.hidden_BSE`."""
        cache, slots = session.cache, self.config.block_size
        total = max(cache.lengths) + slots
        cache.reserve(total)
        stream_BKE = self.block(root_B, cache.kv[0][0])
        positions_BK = self._positions(cache, slots, stream_BKE.device)
        rotary = self._rotary.at(positions_BK, stream_BKE.dtype, total)
        alike = len(set(cache.lengths)) == 1
        masks = {
            (layer.window, layer.causal): self._visible_mask(layer, positions_BK, total)
            for layer in self.layers
            if layer.window or layer.causal or not alike
        }

        def attend_layer(number: int, queries: Tensor) -> Tensor:
            layer, count = self.layers[number], queries.shape[3]
            mask_BKC = masks.get((layer.window, layer.causal))
            if mask_BKC is None:
                return cached_attention(queries, cache.kv[number], total, None)
            first = max(0, min(cache.lengths) + 1 - layer.window) if layer.window else 0
            keys, values = (part[:, :, first:] for part in cache.kv[number])
            return cached_attention(queries, (keys, values), total - first, mask_BKC[:, -count:, first:])

        session.hidden_BSE = self._run_layers(stream_BKE, rotary, partial(cache.put, cache.lengths), attend_layer)

    @staticmethod
    def _visible_mask(layer: BlockLayer, positions_BK: Tensor, total: int) -> Tensor:
        """Return the mask of cache slots that each block slot sees in a layer, bool [B, K, C]."""
        slot_C = torch.arange(total, device=positions_BK.device)
        last_BK = positions_BK if layer.causal else positions_BK[:, -1:].expand_as(positions_BK)
        mask_BKC = slot_C <= last_BK[:, :, None]
        return mask_BKC & (slot_C > positions_BK[:, :, None] - layer.window) if layer.window else mask_BKC

    def _run_layers(
        self, stream_BKE: Tensor, rotary: Angles, put: WriteKV, attend_layer: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Return the LM head inputs of a block, [B, S, E]. `put` writes keys and values, `attend_layer` attends."""
        for number, layer in enumerate(self.layers):
            queries, keys, values = layer.read(stream_BKE, rotary)
            put(number, keys, values)
            # Slots that draft nothing only serve as keys and values.
            if number == len(self.layers) - 1 and not layer.mixes_slots:
                queries, stream_BKE = queries[:, :, :, self.first_slot :], stream_BKE[:, self.first_slot :]
            stream_BKE = layer.write(stream_BKE, attend_layer(number, queries))
        return rms_norm(self.norm, stream_BKE[:, -self.draft_steps :])

    def new_memory(self, session: BlockSession, rows: int, capacity: int) -> BlockMemory:
        return BlockMemory(self, session.cache.kv[0][0], rows, capacity)

    def slots(self, session: BlockSession) -> int:
        return max(session.cache.lengths) + self.config.block_size

    def move(self, session: BlockSession, memory: BlockMemory) -> None:
        session.cache.move(memory)
        session.memory = memory

    def first_level(self, session: BlockSession, tokens_BW: IntArray) -> tuple[IntArray, int]:
        assert session.memory is not None, "captured levels have memory"
        lengths = session.cache.lengths
        slots = bucket_slots(max(lengths) + self.config.block_size, session.memory)
        return np.stack([tokens_BW[:, 0], lengths], axis=1), slots

    def graph_block(self, memory: BlockMemory, inputs_BX: Tensor, slots: int) -> Tensor:
        """Run the block like `run_block`, in a CUDA graph; return its LM head inputs."""
        root_B, length_B = inputs_BX.unbind(1)
        device, size = inputs_BX.device, self.config.block_size
        rows_B1 = torch.arange(len(root_B), device=device)[:, None]
        slots_BK = length_B[:, None] + torch.arange(size, device=device)

        def put(number: int, keys: Tensor, values: Tensor) -> None:
            memory.write(number, rows_B1, slots_BK, keys, values)

        def attend_layer(number: int, queries: Tensor) -> Tensor:
            mask_BKC = self._visible_mask(self.layers[number], slots_BK, slots)[:, -queries.shape[3] :]
            return cached_attention(queries, memory.layer(number), slots, mask_BKC)

        stream_BKE = self.block(root_B, memory.logits_BSD)
        return self._run_layers(stream_BKE, angles(memory.rotary, slots_BK), put, attend_layer)

    @staticmethod
    def _positions(cache: LayerCache, width: int, device: torch.device) -> Tensor:
        return upload(cache.lengths, device)[:, None] + torch.arange(width, device=device)


class Blocks:
    """Blocks of some origins of a batch, with their residual stream."""

    def __init__(self, heads: BlockHead, batch: HeadBatch, origin_M: Tensor, like: Tensor) -> None:
        self.heads, tokens_BT, slots = heads, batch.tokens_BT, heads.config.block_size
        host_index_BA, real_BA = by_row(origin_M, tokens_BT.shape, tokens_BT.device.type, slots)
        self._real_M = upload(real_BA.flatten().nonzero()[:, 0], tokens_BT.device)
        self.visible = {
            layer.window: VisibleRange.of_origins(host_index_BA, batch, (layer.window, slots), heads.uses_flex)
            for layer in heads.layers
        }
        index_BA, starts_BA = next((visible.index_BA, visible.starts_BA) for visible in self.visible.values())
        first_BA = 1 + (index_BA if starts_BA is None else index_BA - starts_BA)
        positions_BAK = first_BA[:, :, None] + torch.arange(slots, device=first_BA.device)
        self.rotary = heads._rotary.at(positions_BAK.flatten(1), like.dtype, tokens_BT.shape[1] + slots)
        self.stream_BXE = heads.block(tokens_BT.gather(1, index_BA + 1), like).flatten(1, 2)

    def attend(self, layer: BlockLayer, keys_BNTd: Tensor, values_BNTd: Tensor) -> Tensor:
        """Return the attention output of every slot in a layer, [B, N, G, X, d]."""
        queries_BNGXd, *own = self.heads.run_region(layer.read, self.stream_BXE, self.rotary)
        slots, visible = self.heads.config.block_size, self.visible[layer.window]
        own_keys, own_values = (torch.unflatten(part_BNXd, 2, (-1, slots)) for part_BNXd in own)
        queries = torch.unflatten(queries_BNGXd, 3, (-1, slots))
        output = attend_blocks(queries, keys_BNTd, values_BNTd, visible, (own_keys, own_values), layer.causal)
        return output.flatten(3, 4)

    def drafting_slots(self, x_BXF: Tensor) -> Tensor:
        """Select the drafting slots of real (unpadded) origins, [M, S, F]."""
        x_YKF = x_BXF.view(-1, self.heads.config.block_size, x_BXF.shape[2])
        return x_YKF[:, self.heads.first_slot :][self._real_M]
