"""Attention of headstart's forwards, registered with transformers as "headstart".

Takes a layer's queries, and the keys and values of all visible slots; gives the attention output. Masks, the window
and batch invariance come from the thread's `ForwardContext`, a layer's scaling, soft cap and sink from its call.
Differences from transformers' sdpa path:

- Prefill uses causal attention without a T x T mask, in chunks.
- Trees and single tokens fold the query heads of a key-value head into the query length instead of repeating keys and
  values (5-7x faster for one token in a batch of 16-64 on a CPU).
- A few tokens per row on a CPU run in C, bit-exact with single steps (see `cpu_attention`).

Shape suffixes: B rows, Q query heads, H key-value heads, G = Q / H, T new tokens, S visible slots, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from headstart.kernels.cpu_attention import few_tokens_attention

NAME = "headstart"
CHUNK = 1024
"""Prefill chunk size in tokens; no causal mask has more rows."""


class TreeMask:
    """Additive masks of one forward: 0 where visible, else -inf. `sliding_B1TS` is for layers with a sliding window; it
    covers the slots from `sliding_start` on, as no window reaches further back."""

    def __init__(self, full_B1TS: Tensor, sliding_B1TS: Tensor | None, sliding_start: int = 0) -> None:
        self.full_B1TS = full_B1TS
        self.sliding_B1TS = sliding_B1TS
        self.sliding_start = sliding_start
        self._folded: dict[tuple[bool, int, torch.device, torch.dtype], Tensor] = {}

    def folded(self, sliding: bool, groups: int, like: Tensor) -> Tensor:
        """Return the mask for folded query heads, [B, 1, groups * T, S], in the dtype and on the device of `like`:
        layers may differ in both."""
        key = (sliding and self.sliding_B1TS is not None, groups, like.device, like.dtype)
        if key not in self._folded:
            mask = self.sliding_B1TS if key[0] else self.full_B1TS
            assert mask is not None
            self._folded[key] = mask.to(like.device, like.dtype).repeat(1, 1, groups, 1)
        return self._folded[key]


def tree_mask(
    lengths_B1: Tensor,
    visible_BTT: Tensor,
    positions_BT: Tensor,
    window: int | None,
    dtype: torch.dtype,
    seen: int,
    padded_slots: bool = False,
) -> TreeMask | None:
    """Build the masks of a tree: the committed prefix, then the tree's visibility. None if a single token sees all.

    An input's B is 1 if all rows share it. `seen` counts the visible slots, tree included; with `padded_slots`, unused
    ones follow the tree.
    """
    width, device = positions_BT.shape[1], positions_BT.device
    one_length = lengths_B1.shape[0] == 1 and not padded_slots
    windowed = window is not None and seen > window
    if width == 1 and one_length and not windowed:
        return None
    rows = max(lengths_B1.shape[0], visible_BTT.shape[0])
    if one_length and not windowed:
        mask_BTS = torch.zeros(rows, width, seen, dtype=dtype, device=device)
        mask_BTS[:, :, seen - width :].masked_fill_(~visible_BTT, float("-inf"))
        return TreeMask(mask_BTS[:, None], None)
    slots_S = torch.arange(seen, device=device)
    allowed_BTS = (slots_S < lengths_B1)[:, None].expand(rows, width, seen).clone()
    if one_length:
        allowed_BTS[:, :, seen - width :] = visible_BTT
    else:
        index_BTT = (lengths_B1[:, None] + torch.arange(width, device=device)).expand(rows, width, width)
        allowed_BTS.scatter_(2, index_BTT, visible_BTT.expand(rows, width, width))
    sliding, start = None, 0
    if window is not None and windowed:
        slot_positions_BS = slots_S.expand(positions_BT.shape[0], seen).clone()
        index_BT = (lengths_B1 + torch.arange(width, device=device)).expand(positions_BT.shape)
        slot_positions_BS.scatter_(1, index_BT, positions_BT)
        in_window_BTS = positions_BT[:, :, None] - slot_positions_BS[:, None] < window
        # The root's window starts earliest. With unequal lengths or padded slots its start is known on the device only,
        # so all slots stay.
        start = max(0, seen - width - window + 1) if one_length else 0
        sliding = _additive((allowed_BTS & in_window_BTS)[:, :, start:], dtype)
    return TreeMask(_additive(allowed_BTS, dtype), sliding, start)


def _additive(allowed_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(allowed_BTS.shape, dtype=dtype, device=allowed_BTS.device)
    return mask.masked_fill_(~allowed_BTS, float("-inf"))[:, None]


@dataclass
class ForwardContext:
    """Context of one forward, read by the model's modules.

    Attributes:
        mask: None for a causal forward, or a single token that sees everything.
        aux_layers: layers to capture; their hidden states go to `states`.
        text_lengths_BT: for each token, the length of the text at the moment plain decoding would read it: the length
            of the whole prompt for a prompt token, position + 1 for a tree node. None if unused.
        text_length_range: lower and upper bound of `text_lengths_BT`.
        causal: whether the tokens are the last of each row's text, so that a causal mask suffices.
        window: sliding window, in tokens, of the layers that have one; None if none has.
        batch_invariant: whether rows must be batch-invariant (see `Target.exact`).
        int8: whether products are in 8 bits (see `Target.in_int8`).
        slots_B: visible slots per row, new tokens included, if `cpu_attention` serves the forward.
        logits_at: rows and token indices [2, R] to compute logits for; None for all tokens.
        row: the row being read, for targets with linear attention (see `chains`).
        cache: KV cache of a replay.
        weights: weights of a replay's grouped steps (see `steps`).
        recording: set while this forward is recorded (see `recorded`).
    """

    mask: TreeMask | None = None
    aux_layers: frozenset[int] = frozenset()
    text_lengths_BT: Tensor | None = None
    text_length_range: tuple[int, int] = (0, 0)
    causal: bool = False
    window: int | None = None
    batch_invariant: bool = False
    int8: bool = False
    slots_B: Tensor | None = None
    logits_at: Tensor | None = None
    row: Any = None
    cache: Any = None
    weights: Any = None
    recording: Any = None
    states: dict[int, Tensor] = field(default_factory=dict)


_THREAD = threading.local()


def current_forward() -> ForwardContext | None:
    """Return this thread's forward; None outside headstart's forwards."""
    return getattr(_THREAD, "forward", None)


@contextmanager
def activate(forward: ForwardContext) -> Iterator[ForwardContext]:
    """Make this the thread's forward for a block."""
    before = current_forward()
    _THREAD.forward = forward
    try:
        yield forward
    finally:
        _THREAD.forward = before


def disable_cudnn_attention() -> None:
    """Disable cuDNN attention, which replans for every new length (23 to 37 ms). The setting is process-wide, so it is
    never restored: forwards of several threads overlap."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class ScoreOptions:
    """Options of a layer's attention scores: scaling (None: 1 / sqrt(D)), soft cap (Gemma 2), and a sink per query head
    (gpt-oss)."""

    scaling: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    @property
    def fits_sdpa(self) -> bool:
        """Whether torch's sdpa supports them."""
        return self.softcap is None and self.sink is None

    def scale(self, size: int) -> float:
        """Resolve the default of `scaling` for a head size."""
        return size**-0.5 if self.scaling is None else self.scaling


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of new tokens [B, Q, T, D] over slots [B, H, S, D]; returns ([B, T, Q, D_v], None)."""
    forward, scores = current_forward(), ScoreOptions(scaling, softcap, s_aux)
    assert forward is not None, "selected by `patch.Config` in our forwards only"
    if forward.recording is not None:
        return forward.recording.attend(query, key, value, scores, sliding_window is not None), None
    expected = None if forward.mask is None else forward.mask.full_B1TS.shape
    if expected != (None if attention_mask is None else attention_mask.shape):
        raise RuntimeError("this model changes the attention mask before its layers")
    return attend(forward, query, key, value, scores, sliding_window is not None), None


def attend(
    forward: ForwardContext, query: Tensor, key: Tensor, value: Tensor, scores: ScoreOptions, sliding: bool
) -> Tensor:
    """Run a layer's attention in a headstart forward: [B, T, Q, D_v]."""
    rows, query_heads, new_tokens, size = query.shape
    heads = key.shape[1]
    groups = query_heads // heads
    window = forward.window if sliding else None
    if forward.mask is None and forward.causal:
        return causal_attention(query, key, value, scores, window=window).transpose(1, 2).contiguous()
    if forward.slots_B is not None and scores.fits_sdpa:
        visible = visible_range(forward, query, new_tokens, sliding)
        attended = few_tokens_attention(query, key, value, forward.slots_B, scores.scale(size), *visible)
        if attended is not None:
            return attended
    assert not forward.batch_invariant, "batch-invariant forwards require the C attention kernel"
    mask = None if forward.mask is None else forward.mask.folded(sliding, groups, query)
    if forward.mask is not None and sliding and forward.mask.sliding_start:
        key, value = (part[:, :, forward.mask.sliding_start :] for part in (key, value))
    query = query.reshape(rows, heads, groups * new_tokens, size)
    out = _masked_attention(query, key, value, mask, scores).reshape(rows, query_heads, new_tokens, value.shape[-1])
    return out.transpose(1, 2).contiguous()


def visible_range(
    forward: ForwardContext, like: Tensor, new_tokens: int, sliding: bool
) -> tuple[Tensor | None, int, int | None]:
    """Visibility as `cpu_attention` takes it: mask, first slot of the mask, and the window if there is no mask."""
    if forward.mask is None or new_tokens == 1:
        return None, 0, forward.window if sliding else None
    return forward.mask.folded(sliding, 1, like), forward.mask.sliding_start if sliding else 0, None


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: ScoreOptions = ScoreOptions(), window: int | None = None
) -> Tensor:
    """Attention of the last T tokens of a text [B, Q, T, D] over all of it [B, H, S, D]; returns [B, Q, T, D_v]. Chunks
    the queries where a mask is needed, so that memory does not grow with T * S."""
    groups = query.shape[1] // key.shape[1]
    new, seen = query.shape[2], key.shape[2]
    if window is not None and seen <= window:
        window = None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if new == seen and window is None and scores.fits_sdpa:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scores.scaling)
    chunks = []
    for start in range(0, new, CHUNK):
        stop = min(start + CHUNK, new)
        last = seen - new + stop
        first = 0 if window is None else max(0, last - (stop - start) - window + 1)
        mask = _causal_mask(stop - start, last - first, window, query)
        chunk = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        chunks.append(_masked_attention(*chunk, mask, scores))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def _causal_mask(new: int, seen: int, window: int | None, like: Tensor) -> Tensor:
    """Additive mask [1, 1, T, S] of the last T of S tokens.

    >>> _causal_mask(2, 4, 2, torch.zeros(1)).exp().int()[0, 0].tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    allowed = torch.ones(new, seen, dtype=torch.bool, device=like.device).tril_(seen - new)
    if window is not None:
        allowed = allowed.triu_(seen - new - window + 1)
    return like.new_zeros(1, 1, new, seen).masked_fill_(~allowed, float("-inf"))


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: ScoreOptions) -> Tensor:
    """Attend with [B, H, G * T, D] under an additive mask."""
    if scores.fits_sdpa:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scaling)
    return _eager_attention(query, key, value, mask, scores)


def _eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: ScoreOptions = ScoreOptions()
) -> Tensor:
    """Attend with soft caps or sinks, which sdpa lacks; scores in float32."""
    scores = torch.matmul(query, key.transpose(2, 3)).float().mul_(options.scale(query.shape[-1]))
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is not None:
        scores += mask
    if options.sink is None:
        return torch.matmul(scores.softmax(-1).to(value.dtype), value)
    rows, heads, folded = scores.shape[:3]
    groups = len(options.sink) // heads
    sink = options.sink.to(scores.dtype).reshape(1, heads, groups, 1, 1).expand(rows, -1, -1, folded // groups, -1)
    scores = torch.cat([scores, sink.reshape(rows, heads, folded, 1)], dim=-1)
    return torch.matmul(scores.softmax(-1)[..., :-1].to(value.dtype), value)


AttentionInterface.register(NAME, tree_attention)
