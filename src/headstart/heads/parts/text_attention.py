"""Masked training attention over complete texts, with memory linear in their length.

Besides the text, an origin's queries see its own tokens: its draft steps so far, or the slots of its block.

Compiled training on a GPU (`VisibleRange.flex`) attends to the text with torch's flex attention and a block mask, and
merges in the own tokens by log-sum-exp. Otherwise short texts materialise all scores at once. Longer ones are split
into parts of a few queries: each part reads only the positions visible to its queries and recomputes its scores in the
backward pass. On CPUs two products and a softmax are faster than torch's fused masked kernel.

Shape suffixes: B rows, T tokens, A queries of a row (for blocks: origins), S visible positions, G query heads per key
head, N key heads, d head size, K slots of a block, Q = A * K queries of a row, R query rows of an origin (G * K), X own
tokens of an origin, M origins, I and J blocks of queries and of positions in flex attention's mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from headstart.heads.base import HeadBatch
from headstart.support.regions import call_compiled
from headstart.support.uploads import upload

Kernel = Callable[..., Tensor]
"""Attention of queries, given keys and values of the text, the mask of hidden positions, and own tensors."""

_MAX_SCORES, _MAX_SCORES_GPU = 1 << 22, 1 << 25
"""Most scores to compute at once. Above that, parts are also faster on a CPU, since they fit its cache."""
_PART_SCORES, _PART_SCORES_GPU = 1 << 22, 1 << 28
"""Most scores of a part."""
_MIN_ROWS, _MAX_ROWS, _MAX_ROWS_GPU = 32, 128, 512
"""Fewest and most query rows of a part; a part of the fewest may exceed `_PART_SCORES`."""
_MULTIPLE = 64
"""Multiple to round queries and positions up to on a CPU in bfloat16, where oneDNN compiles a kernel per shape."""
_FLEX_BLOCK = 128
"""Queries and positions in a block of flex attention's masks. On a GPU origins are padded to this multiple, so that
compiled code sees few shapes."""


@dataclass(frozen=True)
class Part:
    """Neighbouring queries of all rows, and the range of positions that any of them sees."""

    queries: slice
    positions: slice


@dataclass(eq=False)
class VisibleRange:
    """Visible range of each query in a row of `length` T: positions `starts_BA` (default 0) to `index_BA`, ascending
    up to the row's padding.

    With a `window` (size, slots of a block) of size > 0, each slot sees only that many tokens, itself and other slots
    included. `flex` selects flex attention.
    """

    index_BA: Tensor
    length: int
    starts_BA: Tensor | None = None
    window: tuple[int, int] = (0, 1)
    flex: bool = False
    _hidden_BAT: Tensor | None = None
    _parts: list[Part] = field(default_factory=list)
    _block_mask: BlockMask | None = None

    @classmethod
    def of_text(cls, batch: HeadBatch, flex: bool) -> VisibleRange:
        """Causal attention of all tokens of a batch."""
        index_BT = torch.arange(batch.tokens_BT.shape[1]).expand(batch.tokens_BT.shape)
        return cls.of_origins(index_BT, batch, flex=flex)

    @classmethod
    def of_origins(
        cls, index_BA: Tensor, batch: HeadBatch, window: tuple[int, int] = (0, 1), flex: bool = False
    ) -> VisibleRange:
        """Each origin's conversation up to its position; `index_BA` is on the host."""
        device, starts_BT = batch.tokens_BT.device, batch.starts_BT
        starts_BA = None if starts_BT is None else upload(starts_BT.gather(1, index_BA), device)
        return cls(upload(index_BA, device), batch.tokens_BT.shape[1], starts_BA, window, flex)

    def hidden(self, part: Part) -> Tensor:
        """Mask of positions hidden from each query of a part, bool [B, C, S]; with a window, per slot [B, C, K, S]."""
        position_S = torch.arange(part.positions.start, part.positions.stop, device=self.index_BA.device)
        hidden_BCS = position_S > self.index_BA[:, part.queries, None]
        if self.starts_BA is not None:
            hidden_BCS |= position_S < self.starts_BA[:, part.queries, None]
        width, slots = self.window
        if not width:
            return hidden_BCS
        first_BCK = self.index_BA[:, part.queries, None] + torch.arange(2, 2 + slots, device=position_S.device) - width
        return hidden_BCS[:, :, None] | (position_S < first_BCK[..., None])

    @property
    def hidden_BAT(self) -> Tensor:
        """`hidden` of all queries and positions, cached."""
        if self._hidden_BAT is None:
            self._hidden_BAT = self.hidden(Part(slice(0, self.index_BA.shape[1]), slice(0, self.length)))
        return self._hidden_BAT

    def is_short(self, heads: int) -> bool:
        """Whether the scores of this many query heads may all exist at once."""
        most = _MAX_SCORES if self.index_BA.device.type == "cpu" else _MAX_SCORES_GPU
        return self.index_BA.numel() * heads * self.length <= most

    def parts(self, heads: int, slots: int = 1) -> list[Part]:
        """Split the queries into parts, with `slots` score rows per query and head. Synchronises on the first call."""
        if not self._parts:
            (rows, width), kind = self.index_BA.shape, self.index_BA.device.type
            most_scores, most_rows = (_PART_SCORES, _MAX_ROWS) if kind == "cpu" else (_PART_SCORES_GPU, _MAX_ROWS_GPU)
            fitting = most_scores // max(1, rows * heads * slots * self.length)
            size = max(1, _MIN_ROWS // slots, min(most_rows // slots, fitting))
            queries = [slice(first, min(first + size, width)) for first in range(0, width, size)]
            stops = [self.index_BA[:, columns].max() + 1 for columns in queries]
            first_BA = torch.zeros_like(self.index_BA) if self.starts_BA is None else self.starts_BA
            if self.window[0]:
                first_BA = torch.maximum(first_BA, self.index_BA + 2 - self.window[0])
            starts = [first_BA[:, columns].min() for columns in queries]
            bounds, multiple = torch.stack([*starts, *stops]).view(2, -1).T.tolist(), _multiple(kind)
            self._parts = [
                Part(columns, slice(start // multiple * multiple, min(self.length, round_up(stop, kind))))
                for columns, (start, stop) in zip(queries, bounds, strict=True)
            ]
        return self._parts

    @property
    def block_mask(self) -> BlockMask:
        """Flex attention's mask for the queries [B, Q], cached. Built from the ends of each query's range, without a
        table of all positions or a device synchronisation."""
        if self._block_mask is None:
            (width, slots), size = self.window, _FLEX_BLOCK
            last_BQ = self.index_BA.repeat_interleave(slots, 1)
            first_BQ = torch.zeros_like(last_BQ)
            if self.starts_BA is not None:
                first_BQ = self.starts_BA.repeat_interleave(slots, 1)
            if width:
                slot_Q = torch.arange(slots, device=last_BQ.device).repeat(self.index_BA.shape[1])
                first_BQ = torch.maximum(first_BQ, last_BQ + slot_Q + 2 - width)

            def sees(row: Tensor, head: Tensor, query: Tensor, position: Tensor) -> Tensor:
                return (position >= first_BQ[row, query]) & (position <= last_BQ[row, query])

            queries = last_BQ.shape[1]
            # Padding queries see nothing, so a block with padding is never complete.
            first_BIi, last_BIi = (
                F.pad(end_BQ, (0, -queries % size), value=beyond).view(len(end_BQ), -1, size)
                for end_BQ, beyond in ((first_BQ, self.length), (last_BQ, -1))
            )
            start_J = torch.arange(0, self.length, size, device=last_BQ.device)
            stop_J = start_J + size - 1
            some_BIJ = (stop_J >= first_BIi.amin(2, keepdim=True)) & (start_J <= last_BIi.amax(2, keepdim=True))
            every_BIJ = (start_J >= first_BIi.amax(2, keepdim=True)) & (stop_J <= last_BIi.amin(2, keepdim=True))
            (counts, order), (full_counts, full_order) = (
                (blocks_BIJ.sum(2), blocks_BIJ.int().argsort(dim=2, descending=True, stable=True))
                for blocks_BIJ in (some_BIJ & ~every_BIJ, every_BIJ)
            )
            self._block_mask = BlockMask.from_kv_blocks(
                counts[:, None].int(),
                order[:, None].int(),
                full_counts[:, None].int(),
                full_order[:, None].int(),
                BLOCK_SIZE=size,
                mask_mod=sees,
                seq_lengths=(queries, self.length),
            )
        return self._block_mask


def positions_of(tokens_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
    """Position of each token in its conversation, int64 [B, T]."""
    index_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    return index_BT if starts_BT is None else index_BT - starts_BT


def by_row(origin_M: Tensor, shape: torch.Size, kind: str, each: int = 1) -> tuple[Tensor, Tensor]:
    """Group origins by row; return positions [B, A], padded with the row's last one, and the mask of real ones.

    All tensors are on the host. The padding fits `each` queries per origin on a device of type `kind`.

    >>> [part.tolist() for part in by_row(torch.tensor([1, 2, 5]), torch.Size([2, 4]), "cpu")]
    [[[1, 2], [1, 1]], [[True, True], [True, False]]]
    """
    valid_BT = torch.zeros(shape, dtype=torch.bool)
    valid_BT.view(-1)[origin_M] = True
    counts_B = valid_BT.sum(1)
    width = min(shape[1], round_up(int(counts_B.max()), kind, each))
    index_BA = (~valid_BT).long().argsort(dim=1, stable=True)[:, :width]
    real_BA = torch.arange(width) < counts_B[:, None]
    last_B1 = index_BA.gather(1, (counts_B[:, None] - 1).clamp(min=0))
    return torch.where(real_BA, index_BA, last_B1), real_BA


def round_up(count: int, kind: str, each: int = 1) -> int:
    """Round a number of origins with `each` queries up to the multiple for this type of device."""
    multiple = max(1, _multiple(kind) // each)
    return -(-count // multiple) * multiple


def _multiple(kind: str) -> int:
    if kind != "cpu":
        return _FLEX_BLOCK
    return _MULTIPLE if torch.is_autocast_enabled(kind) else 1


def causal_attention(
    queries_BNGTd: Tensor, keys_BNTd: Tensor, values_BNTd: Tensor, complete: VisibleRange | None = None
) -> Tensor:
    """Causal attention over complete texts, [B, N, G, T, d]. Packed rows need `complete`, the batch's
    `VisibleRange.of_text`."""
    if complete is not None and complete.starts_BA is not None:
        return attend(queries_BNGTd, keys_BNTd, values_BNTd, complete)
    keys, values = (part[:, :, None].expand_as(queries_BNGTd).flatten(1, 2) for part in (keys_BNTd, values_BNTd))
    output = F.scaled_dot_product_attention(queries_BNGTd.flatten(1, 2), keys, values, is_causal=True)
    return output.view(queries_BNGTd.shape)


def attend(
    queries_BNGAd: Tensor,
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    visible: VisibleRange,
    chain: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Attend from each query to its visible text and its draft, [B, N, G, A, d]. `chain` has keys and values
    [B, N, A, d] of the draft steps so far, the query's own included."""
    text = keys_BNTd, values_BNTd
    if visible.flex:
        own = [torch.stack(parts, dim=3) for parts in zip(*chain, strict=True)]
        return call_compiled(attend_flex, queries_BNGAd[:, :, :, :, None], *text, visible.block_mask, *own).squeeze(4)
    columns = [(queries_BNGAd, 3), *((tensor, 2) for step in chain for tensor in step)]
    return _attend(chain_attention, visible, queries_BNGAd.shape[1] * queries_BNGAd.shape[2], 1, text, columns)


def attend_blocks(
    queries_BNGAKd: Tensor,
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    visible: VisibleRange,
    own: tuple[Tensor, Tensor],
    causal: bool = False,
) -> Tensor:
    """Attend from each slot of each origin's block to its visible text and its block, [B, N, G, A, K, d]. `own` are
    keys and values [B, N, A, K, d] of the block's slots, which see each other, except later ones if `causal`."""
    text = keys_BNTd, values_BNTd
    if visible.flex:
        return call_compiled(attend_flex, queries_BNGAKd, *text, visible.block_mask, *own, causal)
    groups, slots = queries_BNGAKd.shape[2], queries_BNGAKd.shape[4]
    queries_BNARd = queries_BNGAKd.transpose(2, 3).flatten(3, 4)
    columns = [(tensor, 2) for tensor in (queries_BNARd, *own)]
    kernel = partial(block_attention, causal=causal)
    output_BNARd = _attend(kernel, visible, queries_BNARd.shape[1], groups * slots, text, columns)
    return torch.unflatten(output_BNARd, 3, (groups, slots)).transpose(2, 3)


def attend_flex(
    queries_BNGAKd: Tensor,
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    mask: BlockMask,
    own_keys_BNAXd: Tensor | None = None,
    own_values_BNAXd: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend to the text, under the mask of the queries [B, Q], and to the origins' own tokens, [B, N, G, A, K, d].

    Merges the two outputs in proportion to their sums of exp(score). Call it compiled: uncompiled flex attention
    materialises all scores.
    """
    shape, queries_BHQd = queries_BNGAKd.shape, queries_BNGAKd.flatten(3, 4).flatten(1, 2)
    text_BHQd, aux = flex_attention(
        queries_BHQd, keys_BNTd, values_BNTd, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    text, lse = text_BHQd.view(shape), cast(Tensor, aux.lse)
    if own_keys_BNAXd is None or own_values_BNAXd is None:
        return text
    scores = torch.einsum("bngakd,bnaxd->bngakx", queries_BNGAKd * shape[-1] ** -0.5, own_keys_BNAXd)
    scores = scores.to(lse.dtype)
    if causal:
        scores = scores.masked_fill(_later(shape[4], scores), float("-inf"))
    own = torch.einsum("bngakx,bnaxd->bngakd", scores.softmax(-1).to(own_values_BNAXd.dtype), own_values_BNAXd)
    text_share = torch.sigmoid(lse.view(shape[:-1]) - scores.logsumexp(-1))[..., None]
    return (own + text_share * (text - own)).to(text.dtype)


def _attend(
    kernel: Kernel,
    visible: VisibleRange,
    heads: int,
    rows: int,
    text: tuple[Tensor, Tensor],
    columns: Sequence[tuple[Tensor, int]],
) -> Tensor:
    """Attend at once or in parts, with `rows` score rows per head and column. `text` is keys and values, `columns` the
    queries and other tensors with their dimension A."""
    queries, *own = (tensor for tensor, _ in columns)
    if visible.is_short(heads * rows):
        return kernel(queries, *text, visible.hidden_BAT, *own)
    apply: Kernel = _InParts.apply
    how = (kernel, visible, visible.parts(heads, rows))
    return apply(how, [dim for _, dim in columns], *text, queries, *own)


def chain_attention(
    queries_BNGAd: Tensor, keys_BNSd: Tensor, values_BNSd: Tensor, hidden_BAS: Tensor, *chain: Tensor
) -> Tensor:
    """Attention of one draft step of all origins, [B, N, G, A, d]. `hidden_BAS` masks the text. `chain` alternates keys
    and values [B, N, A, d] of the origins' draft steps."""
    rows, kv_heads, groups, origins, size = queries_BNGAd.shape
    queries_BNGAd = queries_BNGAd * size**-0.5
    scores = (queries_BNGAd.flatten(2, 3) @ keys_BNSd.transpose(2, 3)).view(rows, kv_heads, groups, origins, -1)
    scores = scores.masked_fill(hidden_BAS[:, None, None], float("-inf"))
    drafted = [(queries_BNGAd * keys_BNAd[:, :, None]).sum(-1, keepdim=True) for keys_BNAd in chain[::2]]
    text = keys_BNSd.shape[2]
    scores = torch.cat([scores, *drafted], dim=-1)
    weights = _softmax(scores).to(values_BNSd.dtype)
    output = (weights[..., :text].flatten(2, 3) @ values_BNSd).view(queries_BNGAd.shape)
    for step, values_BNAd in enumerate(chain[1::2]):
        output = output + weights[..., text + step, None] * values_BNAd[:, :, None]
    return output


def block_attention(
    queries_BNARd: Tensor, keys_BNSd: Tensor, values_BNSd: Tensor, hidden: Tensor, *own: Tensor, causal: bool = False
) -> Tensor:
    """Attention of the blocks of all origins, [B, N, A, R, d]. `own` are keys and values [B, N, A, K, d]. `hidden`
    masks the text by origin, [B, A, S], or slot, [B, A, K, S]."""
    (own_keys_BNAKd, own_values_BNAKd), shape, text = own, queries_BNARd.shape, keys_BNSd.shape[2]
    slots = own_keys_BNAKd.shape[3]
    queries_BNARd = queries_BNARd * shape[-1] ** -0.5
    scores_BNAGKS = (queries_BNARd.flatten(2, 3) @ keys_BNSd.mT).view(*shape[:3], -1, slots, text)
    hidden_BAKS = hidden.view(*hidden.shape[:2], -1, text)  # K is 1 if all slots see the same
    scores_BNAGKS = scores_BNAGKS.masked_fill(hidden_BAKS[:, None, :, None], float("-inf"))
    of_block_BNARK = queries_BNARd @ own_keys_BNAKd.mT
    if causal:
        later_RK = _later(slots, queries_BNARd).repeat(shape[3] // slots, 1)
        of_block_BNARK = of_block_BNARK.masked_fill(later_RK, float("-inf"))
    scores = torch.cat([scores_BNAGKS.view(*shape[:4], text), of_block_BNARK], dim=-1)
    weights = _softmax(scores).to(values_BNSd.dtype)
    output = (weights[..., :text].flatten(2, 3) @ values_BNSd).view(shape)
    out: Tensor = output + weights[..., text:] @ own_values_BNAKd
    return out


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _later(slots: int, like: Tensor) -> Tensor:
    """Mask of later slots of a block, bool [K, K]."""
    return torch.ones(slots, slots, dtype=torch.bool, device=like.device).triu(1)


class _InParts(torch.autograd.Function):
    """Attention in parts. The backward pass recomputes each part and accumulates gradients of keys and values in place:
    autograd would hold them for all parts, with memory quadratic in the text."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Kernel, VisibleRange, Sequence[Part]],
        dims: Sequence[int],
        keys_BNTd: Tensor,
        values_BNTd: Tensor,
        *columns: Tensor,
    ) -> Tensor:
        kernel, visible, parts = ctx.how = how
        ctx.dims, kind = dims, keys_BNTd.device.type
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        ctx.save_for_backward(keys_BNTd, values_BNTd, *columns)
        outputs = []
        for part in reversed(parts):  # largest first: the smaller ones reuse its memory
            queries, *own = (_columns(x, dim, part) for x, dim in zip(columns, dims, strict=True))
            keys, values = keys_BNTd[:, :, part.positions], values_BNTd[:, :, part.positions]
            outputs.append(kernel(queries, keys, values, visible.hidden(part), *own))
        return torch.cat(outputs[::-1], dim=dims[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (keys_BNTd, values_BNTd, *columns), dims = ctx.saved_tensors, ctx.dims
        kernel, visible, parts = ctx.how
        text = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (keys_BNTd, values_BNTd)
        ]
        gradients = [torch.empty_like(x) for x in columns]
        for part in reversed(parts):
            pieces = [keys_BNTd[:, :, part.positions], values_BNTd[:, :, part.positions]]
            pieces += [_columns(x, dim, part) for x, dim in zip(columns, dims, strict=True)]
            keys, values, queries, *own = (piece.detach().requires_grad_() for piece in pieces)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                output = kernel(queries, keys, values, visible.hidden(part), *own)
            of_part = torch.autograd.grad(output, (keys, values, queries, *own), _columns(upstream, dims[0], part))
            for total, gradient in zip(text, of_part[:2], strict=True):
                total[:, :, part.positions] += gradient
            for total, dim, gradient in zip(gradients, dims, of_part[2:], strict=True):
                _columns(total, dim, part).copy_(gradient)
        of_text = (total.to(x.dtype) for total, x in zip(text, (keys_BNTd, values_BNTd), strict=True))
        return None, None, *of_text, *gradients


def _columns(x: Tensor, dim: int, part: Part) -> Tensor:
    return x.narrow(dim, part.queries.start, part.queries.stop - part.queries.start)
