"""Attention of training over whole texts, in memory that grows with their length and not with its square.

Short texts attend in one piece, with a table of all scores (`layer.chain_attention`). Longer ones attend a few queries
at a time: each part sees only the stretch of the text that its queries may see, and its scores are computed again in
the backward pass instead of being kept. Several conversations in one row are a mask like any other; parts then leave
out what lies in other conversations.

Where drafts are blocks (`attend_blocks`), each origin has several queries, one for each slot of its block: they see the
same stretch of the text, and all slots of their own block.

Shape suffixes: B rows, T tokens, A queries of a row (origins, of blocks), C queries of a part, S positions that a part
sees, G query heads that share a key head, N key heads, H query heads (G * N), d head size, K slots of a block, R query
rows of an origin (G * K), M origins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.heads.parts.layer import chain_attention

Chain = Sequence[tuple[Tensor, Tensor]]

_IN_ONE = {"cpu": 1 << 22}
"""Scores up to which queries attend in one piece; above, parts are faster as well, since they fit the cache."""
_IN_ONE_ELSEWHERE = 1 << 25
_PART = {"cpu": 1 << 22}
"""Scores of a part at most."""
_PART_ELSEWHERE = 1 << 28
_QUERIES, _FEWEST = 128, 32
"""Queries of a part, and how few of them there are before a part has more scores."""
_QUERIES_ELSEWHERE = 512


@dataclass(frozen=True)
class Part:
    """Neighbouring queries of all rows, and the positions that at least one of them may see."""

    queries: slice
    seen: slice


class Sight:
    """What each query of a batch sees: the entries of its own conversation up to a position.

    Args:
        index_BA: int64, the last position that each sees, ascending in a row up to what pads it.
        length: T.
        starts_BA: int64, the first one; None is the first of the row.
    """

    def __init__(self, index_BA: Tensor, length: int, starts_BA: Tensor | None = None) -> None:
        self.index_BA, self.length, self.starts_BA = index_BA, length, starts_BA
        self._hidden_BAT: Tensor | None = None
        self._parts: list[Part] = []

    def hidden(self, part: Part) -> Tensor:
        """Positions that each query of a part must not see, bool [B, C, S]."""
        seen_S = torch.arange(part.seen.start, part.seen.stop, device=self.index_BA.device)
        hidden_BCS = seen_S > self.index_BA[:, part.queries, None]
        if self.starts_BA is not None:
            hidden_BCS |= seen_S < self.starts_BA[:, part.queries, None]
        return hidden_BCS

    @property
    def hidden_BAT(self) -> Tensor:
        """The same of all queries and positions, kept."""
        if self._hidden_BAT is None:
            self._hidden_BAT = self.hidden(Part(slice(0, self.index_BA.shape[1]), slice(0, self.length)))
        return self._hidden_BAT

    def is_short(self, heads: int) -> bool:
        """Whether the scores of so many query heads may all exist at once."""
        return self.index_BA.numel() * heads * self.length <= _IN_ONE.get(self.index_BA.device.type, _IN_ONE_ELSEWHERE)

    def parts(self, heads: int, slots: int = 1) -> list[Part]:
        """The queries in parts, each with what it sees. The host waits for the device once in the life of a sight.

        Args:
            heads: query heads.
            slots: rows of scores that each query has for each head.
        """
        if not self._parts:
            (rows, width), kind = self.index_BA.shape, self.index_BA.device.type
            fitting = _PART.get(kind, _PART_ELSEWHERE) // max(1, rows * heads * slots * self.length)
            most = (_QUERIES if kind == "cpu" else _QUERIES_ELSEWHERE) // slots
            size = max(1, _FEWEST // slots, min(most, fitting))
            queries = [slice(first, min(first + size, width)) for first in range(0, width, size)]
            stops = [self.index_BA[:, one].max() + 1 for one in queries]
            starts = [
                torch.zeros_like(stop) if self.starts_BA is None else self.starts_BA[:, one].min()
                for one, stop in zip(queries, stops, strict=True)
            ]
            bounds = torch.stack([*starts, *stops]).view(2, -1).T.tolist()
            self._parts = [Part(one, slice(*bound)) for one, bound in zip(queries, bounds, strict=True)]
        return self._parts

    def columns(self, row_B1: Tensor, column_BA: Tensor) -> Sight:
        """The sight of these of the queries."""
        starts_BA = None if self.starts_BA is None else self.starts_BA[row_B1, column_BA]
        sight = Sight(self.index_BA[row_B1, column_BA], self.length, starts_BA)
        if self._hidden_BAT is not None:
            sight._hidden_BAT = self._hidden_BAT[row_B1, column_BA]
        return sight


def positions_of(tokens_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
    """Position of each token in its conversation, int64 [B, T]."""
    index_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    return index_BT if starts_BT is None else index_BT - starts_BT


def by_row(origin_M: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Origins by row: positions [B, A], short rows padded with 0, and which of them are real.

    >>> [part.tolist() for part in by_row(torch.tensor([1, 2, 5]), torch.Size([2, 4]))]
    [[[1, 2], [1, 0]], [[True, True], [True, False]]]
    """
    valid_BT = torch.zeros(shape, dtype=torch.bool, device=origin_M.device)
    valid_BT.view(-1)[origin_M] = True
    counts_B = valid_BT.sum(1)
    maximum = int(counts_B.max())
    index_BA = (~valid_BT).long().argsort(dim=1, stable=True)[:, :maximum]
    real_BA = torch.arange(maximum, device=origin_M.device) < counts_B[:, None]
    return index_BA.masked_fill(~real_BA, 0), real_BA


def causal_attention(
    queries_BNGTd: Tensor, keys_BNTd: Tensor, values_BNTd: Tensor, starts_BT: Tensor | None = None
) -> Tensor:
    """What the tokens of whole texts find in the tokens up to themselves, [B, N, G, T, d].

    Args:
        queries_BNGTd: one for each token.
        keys_BNTd: of the text.
        values_BNTd: of the text.
        starts_BT: as in `HeadBatch`.
    """
    if starts_BT is not None:
        return attend(
            queries_BNGTd, keys_BNTd, values_BNTd, Sight(positions_of(starts_BT, None), len(starts_BT[0]), starts_BT)
        )
    keys, values = (part[:, :, None].expand_as(queries_BNGTd).flatten(1, 2) for part in (keys_BNTd, values_BNTd))
    mixed = F.scaled_dot_product_attention(queries_BNGTd.flatten(1, 2), keys, values, is_causal=True)
    return mixed.view(queries_BNGTd.shape)


def attend(queries_BNGAd: Tensor, keys_BNTd: Tensor, values_BNTd: Tensor, sight: Sight, chain: Chain = ()) -> Tensor:
    """What each query finds in the text that it sees and in its own draft so far, [B, N, G, A, d].

    Args:
        queries_BNGAd: one for each column of the sight.
        keys_BNTd: of the text.
        values_BNTd: of the text.
        sight: what each sees of the text.
        chain: as `chain_attention` takes it.
    """
    heads = queries_BNGAd.shape[1] * queries_BNGAd.shape[2]
    if sight.is_short(heads):
        return chain_attention(queries_BNGAd, keys_BNTd, values_BNTd, sight.hidden_BAT, chain)
    part_of = attend_part if queries_BNGAd.device.type == "cpu" else attend_part_fused
    own = [pair for step in chain for pair in step]
    found: Tensor = _in_parts(
        lambda queries, keys, values, part, *own: part_of(
            queries, keys, values, sight, part, list(zip(own[::2], own[1::2], strict=True))
        ),
        sight.parts(heads),
        keys_BNTd,
        values_BNTd,
        [(queries_BNGAd, 3), *((one, 2) for one in own)],
    )
    return found


def attend_part(
    queries_BNGCd: Tensor, keys_BNSd: Tensor, values_BNSd: Tensor, sight: Sight, part: Part, chain: Chain
) -> Tensor:
    """`attend` of one part."""
    return chain_attention(queries_BNGCd, keys_BNSd, values_BNSd, sight.hidden(part), chain)


def attend_part_fused(
    queries_BNGCd: Tensor, keys_BNSd: Tensor, values_BNSd: Tensor, sight: Sight, part: Part, chain: Chain
) -> Tensor:
    """The same by a fused kernel: drafted tokens are further positions, each seen by its own query alone.

    On CPUs torch's kernel for masks is slower than two products and a softmax.
    """
    groups, columns = queries_BNGCd.shape[2:4]
    seen_BCS = ~sight.hidden(part)
    if chain:
        own_CC = torch.eye(columns, dtype=torch.bool, device=seen_BCS.device)
        seen_BCS = torch.cat([seen_BCS, own_CC.repeat(1, len(chain)).expand(len(seen_BCS), -1, -1)], dim=-1)
        keys_BNSd = torch.cat([keys_BNSd, *(keys for keys, _ in chain)], dim=2)
        values_BNSd = torch.cat([values_BNSd, *(values for _, values in chain)], dim=2)
    keys, values = (
        x_BNSd[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x_BNSd in (keys_BNSd, values_BNSd)
    )
    mixed = F.scaled_dot_product_attention(queries_BNGCd.flatten(1, 2), keys, values, attn_mask=seen_BCS[:, None])
    return mixed.view(queries_BNGCd.shape)


def attend_blocks(
    queries_BNARd: Tensor,
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    sight: Sight,
    own_keys_BNAKd: Tensor,
    own_values_BNAKd: Tensor,
) -> Tensor:
    """What each row of each origin's block finds in the text up to the origin and in its own block, [B, N, A, R, d].

    Args:
        queries_BNARd: of the slots, for each query head that shares the key head.
        keys_BNTd: of the text.
        values_BNTd: of the text.
        sight: what each origin sees of the text.
        own_keys_BNAKd: of the slots of each origin's block, all of which see each other.
        own_values_BNAKd: likewise.
    """
    rows = queries_BNARd.shape[3]
    heads = queries_BNARd.shape[1] * rows
    own = own_keys_BNAKd, own_values_BNAKd
    if sight.is_short(heads):
        return block_attention(queries_BNARd, keys_BNTd, values_BNTd, sight.hidden_BAT, *own)
    part_of = attend_blocks_part if queries_BNARd.device.type == "cpu" else attend_blocks_part_fused
    found: Tensor = _in_parts(
        lambda queries, keys, values, part, *own: part_of(queries, keys, values, sight, part, *own),
        sight.parts(queries_BNARd.shape[1], rows),
        keys_BNTd,
        values_BNTd,
        [(queries_BNARd, 2), (own_keys_BNAKd, 2), (own_values_BNAKd, 2)],
    )
    return found


def block_attention(
    queries_BNARd: Tensor,
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    hidden_BAT: Tensor,
    own_keys_BNAKd: Tensor,
    own_values_BNAKd: Tensor,
) -> Tensor:
    """`attend_blocks` in one piece: no origin sees the positions that are `hidden_BAT` from it."""
    shape, text = queries_BNARd.shape, keys_BNTd.shape[2]
    queries_BNARd = queries_BNARd * shape[-1] ** -0.5
    scores_BNART = (queries_BNARd.flatten(2, 3) @ keys_BNTd.mT).view(*shape[:4], text)
    scores_BNART = scores_BNART.masked_fill(hidden_BAT[:, None, :, None], float("-inf"))
    scores = torch.cat([scores_BNART, queries_BNARd @ own_keys_BNAKd.mT], dim=-1)
    shares = scores.softmax(-1, dtype=torch.float32).to(values_BNTd.dtype)
    mixed = (shares[..., :text].flatten(2, 3) @ values_BNTd).view(shape)
    found: Tensor = mixed + shares[..., text:] @ own_values_BNAKd
    return found


def attend_blocks_part(
    queries_BNCRd: Tensor,
    keys_BNSd: Tensor,
    values_BNSd: Tensor,
    sight: Sight,
    part: Part,
    own_keys_BNCKd: Tensor,
    own_values_BNCKd: Tensor,
) -> Tensor:
    """`attend_blocks` of one part."""
    return block_attention(queries_BNCRd, keys_BNSd, values_BNSd, sight.hidden(part), own_keys_BNCKd, own_values_BNCKd)


def attend_blocks_part_fused(
    queries_BNCRd: Tensor,
    keys_BNSd: Tensor,
    values_BNSd: Tensor,
    sight: Sight,
    part: Part,
    own_keys_BNCKd: Tensor,
    own_values_BNCKd: Tensor,
) -> Tensor:
    """The same by a fused kernel: blocks are further positions, each seen by its own rows alone."""
    columns, rows = queries_BNCRd.shape[2:4]
    slots = own_keys_BNCKd.shape[3]
    seen_BCS = ~sight.hidden(part)
    own_CX = torch.eye(columns, dtype=torch.bool, device=seen_BCS.device).repeat_interleave(slots, dim=1)
    seen_BCX = torch.cat([seen_BCS, own_CX.expand(len(seen_BCS), -1, -1)], dim=-1)
    mixed = F.scaled_dot_product_attention(
        queries_BNCRd.flatten(2, 3),
        torch.cat([keys_BNSd, own_keys_BNCKd.flatten(2, 3)], dim=2),
        torch.cat([values_BNSd, own_values_BNCKd.flatten(2, 3)], dim=2),
        attn_mask=seen_BCX.repeat_interleave(rows, dim=1)[:, None],
    )
    return mixed.view(queries_BNCRd.shape)


def _in_parts(
    part_of: Callable[..., Tensor],
    parts: Sequence[Part],
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    cut: Sequence[tuple[Tensor, int]],
) -> Tensor:
    """What all parts find, each computed by `part_of(queries, keys, values, part, *own)`.

    Args:
        part_of: computes one part; draws no random numbers.
        parts: of the queries.
        keys_BNTd: of the text; a part sees a stretch of them.
        values_BNTd: likewise.
        cut: the queries, and what else has as many columns, each with the dimension of those.
    """
    apply: Callable[..., Tensor] = _InParts.apply
    return apply(part_of, parts, [dim for _, dim in cut], keys_BNTd, values_BNTd, *(one for one, _ in cut))


class _InParts(torch.autograd.Function):
    """Parts one after the other, forward and backward.

    Nothing of a part is kept, and the gradients of keys and values are added up in place: left to autograd, those of a
    stretch wait until all parts are done, which takes memory that grows with the square of the text.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part_of: Callable[..., Tensor],
        parts: Sequence[Part],
        dims: Sequence[int],
        keys_BNTd: Tensor,
        values_BNTd: Tensor,
        *cut: Tensor,
    ) -> Tensor:
        ctx.part_of, ctx.parts, ctx.dims = part_of, parts, dims
        kind = keys_BNTd.device.type
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        ctx.save_for_backward(keys_BNTd, values_BNTd, *cut)
        found = [
            part_of(
                _columns(cut[0], dims[0], part), *_seen(keys_BNTd, values_BNTd, part), part, *_others(cut, dims, part)
            )
            # The last part first: it sees most, and the memory of its scores serves all others.
            for part in reversed(parts)
        ]
        return torch.cat(found[::-1], dim=dims[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (keys_BNTd, values_BNTd, *cut), dims = ctx.saved_tensors, ctx.dims
        text = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (keys_BNTd, values_BNTd)
        ]
        gradients = [torch.empty_like(x) for x in cut]
        for part in reversed(ctx.parts):
            pieces = [*_seen(keys_BNTd, values_BNTd, part)]
            pieces += [_columns(x, dim, part) for x, dim in zip(cut, dims, strict=True)]
            keys, values, queries, *own = (piece.detach().requires_grad_() for piece in pieces)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                made = ctx.part_of(queries, keys, values, part, *own)
            found = torch.autograd.grad(made, (keys, values, queries, *own), _columns(upstream, dims[0], part))
            for whole, gradient in zip(text, found[:2], strict=True):
                whole[:, :, part.seen] += gradient
            for whole, dim, gradient in zip(gradients, dims, found[2:], strict=True):
                _columns(whole, dim, part).copy_(gradient)
        own_text = (whole.to(x.dtype) for whole, x in zip(text, (keys_BNTd, values_BNTd), strict=True))
        return None, None, None, *own_text, *gradients


def _columns(x: Tensor, dim: int, part: Part) -> Tensor:
    return x.narrow(dim, part.queries.start, part.queries.stop - part.queries.start)


def _seen(keys_BNTd: Tensor, values_BNTd: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    return keys_BNTd[:, :, part.seen], values_BNTd[:, :, part.seen]


def _others(cut: Sequence[Tensor], dims: Sequence[int], part: Part) -> list[Tensor]:
    return [_columns(x, dim, part) for x, dim in zip(cut[1:], dims[1:], strict=True)]
