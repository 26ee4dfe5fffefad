"""Masked training attention over complete texts, with memory linear in their length.

Short texts materialise all scores at once. Longer ones are split into parts of a few queries: each part reads only the
positions visible to its queries and recomputes its scores in the backward pass.

Besides the text, an origin's queries see its own draft steps so far (`chain_attention`) or the slots of its block
(`block_attention`). On CPUs two products and a softmax are faster than torch's fused masked kernel. Elsewhere the
`_fused` variants run, which append the origins' own tokens to the text and mask them for other origins.

Shape suffixes: B rows, T tokens, A queries of a row (origins, of blocks), S visible positions, G query heads per key
head, N key heads, d head size, K slots of a block, R query rows of an origin (G * K), M origins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Kernel = Callable[..., Tensor]
"""Takes queries, keys and values of the text, the mask of hidden positions, and the queries' own tensors."""

_MAX_SCORES, _MAX_SCORES_GPU = 1 << 22, 1 << 25
"""Most scores to compute at once. Beyond, parts are also faster on a CPU, since they fit its cache."""
_PART_SCORES, _PART_SCORES_GPU = 1 << 22, 1 << 28
"""Most scores of a part."""
_MIN_ROWS, _MAX_ROWS, _MAX_ROWS_GPU = 32, 128, 512
"""Fewest and most query rows of a part; a part of the fewest may exceed `_PART_SCORES`."""
_MULTIPLE = 64
"""Multiple that queries and positions are rounded to for oneDNN, which compiles a kernel per shape in bfloat16."""


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
    included.
    """

    index_BA: Tensor
    length: int
    starts_BA: Tensor | None = None
    window: tuple[int, int] = (0, 0)
    _hidden_BAT: Tensor | None = None
    _parts: list[Part] = field(default_factory=list)

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

    def select(self, row_B1: Tensor, column_BA: Tensor) -> VisibleRange:
        starts_BA = None if self.starts_BA is None else self.starts_BA[row_B1, column_BA]
        hidden_BAT = None if self._hidden_BAT is None else self._hidden_BAT[row_B1, column_BA]
        return VisibleRange(self.index_BA[row_B1, column_BA], self.length, starts_BA, self.window, hidden_BAT)


def positions_of(tokens_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
    """Position of each token in its conversation, int64 [B, T]."""
    index_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    return index_BT if starts_BT is None else index_BT - starts_BT


def by_row(origin_M: Tensor, shape: torch.Size, each: int = 1) -> tuple[Tensor, Tensor]:
    """Group origins, of `each` queries, by row: positions [B, A], padded by the row's last one, and the mask of real
    ones.

    >>> [part.tolist() for part in by_row(torch.tensor([1, 2, 5]), torch.Size([2, 4]))]
    [[[1, 2], [1, 1]], [[True, True], [True, False]]]
    """
    valid_BT = torch.zeros(shape, dtype=torch.bool, device=origin_M.device)
    valid_BT.view(-1)[origin_M] = True
    counts_B = valid_BT.sum(1)
    width = min(shape[1], round_up(int(counts_B.max()), origin_M.device.type, each))
    index_BA = (~valid_BT).long().argsort(dim=1, stable=True)[:, :width]
    real_BA = torch.arange(width, device=origin_M.device) < counts_B[:, None]
    last_B1 = index_BA.gather(1, (counts_B[:, None] - 1).clamp(min=0))
    return torch.where(real_BA, index_BA, last_B1), real_BA


def round_up(count: int, kind: str, each: int = 1) -> int:
    """Round a number of origins of `each` queries up to the device's `_MULTIPLE`."""
    multiple = max(1, _multiple(kind) // each)
    return -(-count // multiple) * multiple


def _multiple(kind: str) -> int:
    return _MULTIPLE if kind == "cpu" and torch.is_autocast_enabled(kind) else 1


def causal_attention(
    queries_BNGTd: Tensor, keys_BNTd: Tensor, values_BNTd: Tensor, starts_BT: Tensor | None = None
) -> Tensor:
    """Causal attention over complete texts, [B, N, G, T, d]; for `starts_BT` see `HeadBatch`."""
    if starts_BT is not None:
        return attend(
            queries_BNGTd,
            keys_BNTd,
            values_BNTd,
            VisibleRange(positions_of(starts_BT, None), len(starts_BT[0]), starts_BT),
        )
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
    columns = [(queries_BNGAd, 3), *((tensor, 2) for step in chain for tensor in step)]
    scores = (queries_BNGAd.shape[1] * queries_BNGAd.shape[2], 1)
    return _attend((chain_attention, chain_attention_fused), visible, scores, (keys_BNTd, values_BNTd), columns=columns)


def attend_blocks(
    queries_BNARd: Tensor,
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    visible: VisibleRange,
    own: tuple[Tensor, Tensor],
    causal: bool = False,
) -> Tensor:
    """Attend from each query row of each origin's block to its visible text and its block, [B, N, A, R, d]. `own` are
    keys and values [B, N, A, K, d] of the block's slots, which see each other, except later ones if `causal`."""
    columns = [(tensor, 2) for tensor in (queries_BNARd, *own)]
    scores = (queries_BNARd.shape[1], queries_BNARd.shape[3])
    kernels = (partial(block_attention, causal=causal), partial(block_attention_fused, causal=causal))
    return _attend(kernels, visible, scores, (keys_BNTd, values_BNTd), columns=columns)


def _attend(
    kernels: tuple[Kernel, Kernel],
    visible: VisibleRange,
    scores: tuple[int, int],
    text: tuple[Tensor, Tensor],
    columns: Sequence[tuple[Tensor, int]],
) -> Tensor:
    """Attend with the first kernel on a CPU or for short texts, else with the second. `scores` are heads and score rows
    per column, `text` keys and values, `columns` the queries and other tensors with their dimension A."""
    (heads, rows), (queries, *own) = scores, (tensor for tensor, _ in columns)
    if visible.is_short(heads * rows):
        return kernels[0](queries, *text, visible.hidden_BAT, *own)
    apply: Kernel = _InParts.apply
    how = (kernels[queries.device.type != "cpu"], visible, visible.parts(heads, rows))
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
    weights = torch.cat([scores, *drafted], dim=-1).softmax(-1, dtype=torch.float32).to(values_BNSd.dtype)
    output = (weights[..., :text].flatten(2, 3) @ values_BNSd).view(queries_BNGAd.shape)
    for step, values_BNAd in enumerate(chain[1::2]):
        output = output + weights[..., text + step, None] * values_BNAd[:, :, None]
    return output


def chain_attention_fused(
    queries_BNGAd: Tensor, keys_BNSd: Tensor, values_BNSd: Tensor, hidden_BAS: Tensor, *chain: Tensor
) -> Tensor:
    """`chain_attention` by torch's kernel."""
    groups, origins = queries_BNGAd.shape[2:4]
    visible_BAS = ~hidden_BAS
    if chain:
        own_AA = torch.eye(origins, dtype=torch.bool, device=visible_BAS.device)
        visible_BAS = torch.cat(
            [visible_BAS, own_AA.repeat(1, len(chain) // 2).expand(len(visible_BAS), -1, -1)], dim=-1
        )
        keys_BNSd = torch.cat([keys_BNSd, *chain[::2]], dim=2)
        values_BNSd = torch.cat([values_BNSd, *chain[1::2]], dim=2)
    keys, values = (
        x_BNSd[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x_BNSd in (keys_BNSd, values_BNSd)
    )
    output = F.scaled_dot_product_attention(queries_BNGAd.flatten(1, 2), keys, values, attn_mask=visible_BAS[:, None])
    return output.view(queries_BNGAd.shape)


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
    weights = scores.softmax(-1, dtype=torch.float32).to(values_BNSd.dtype)
    output = (weights[..., :text].flatten(2, 3) @ values_BNSd).view(shape)
    out: Tensor = output + weights[..., text:] @ own_values_BNAKd
    return out


def _later(slots: int, like: Tensor) -> Tensor:
    """Mask of later slots of a block, bool [K, K]."""
    return torch.ones(slots, slots, dtype=torch.bool, device=like.device).triu(1)


def block_attention_fused(
    queries_BNARd: Tensor, keys_BNSd: Tensor, values_BNSd: Tensor, hidden: Tensor, *own: Tensor, causal: bool = False
) -> Tensor:
    """`block_attention` by torch's kernel."""
    (own_keys_BNAKd, own_values_BNAKd), (origins, rows) = own, queries_BNARd.shape[2:4]
    slots = own_keys_BNAKd.shape[3]
    visible_BAKS = ~hidden.view(*hidden.shape[:2], -1, hidden.shape[-1])
    own_AX = torch.eye(origins, dtype=torch.bool, device=hidden.device).repeat_interleave(slots, dim=1)
    own_AKX = own_AX[:, None]
    if causal:
        own_AKX = own_AKX & ~_later(slots, queries_BNARd).repeat(1, origins)
    each = max(visible_BAKS.shape[2], own_AKX.shape[1])  # 1 if all slots see the same
    parts = visible_BAKS.expand(-1, -1, each, -1), own_AKX.expand(len(hidden), -1, each, -1)
    visible_BAKX = torch.cat(parts, dim=-1)
    visible_BARX = visible_BAKX.expand(-1, -1, rows, -1) if each == 1 else visible_BAKX.repeat(1, 1, rows // slots, 1)
    output = F.scaled_dot_product_attention(
        queries_BNARd.flatten(2, 3),
        torch.cat([keys_BNSd, own_keys_BNAKd.flatten(2, 3)], dim=2),
        torch.cat([values_BNSd, own_values_BNAKd.flatten(2, 3)], dim=2),
        attn_mask=visible_BARX.flatten(1, 2)[:, None],
    )
    return output.view(queries_BNARd.shape)


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
