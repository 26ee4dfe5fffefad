"""Rewrite a recorded graph into fewer, faster operators with the same results up to rounding.

Takes the fx graph of a decoder's forward (see `recorder`) and changes it in place:

- Linear layers on the same input become a `MergedLinear` with prepacked weights, which can also compute the RMS norm
  before it and the gate or residual sum after it. Layers with a bias and layers without are merged separately, and
  groups above a size limit are not merged.
- In rotary positions, `rotate_half` becomes one roll; its sign moves into the sine table.
- The scale of an RMS norm takes three operators instead of five, and no float32 copy of the input. On a GPU, where
  launches dominate, a norm is one operator.
- Norms of queries and keys, rotary positions, cache writes and attention after a merged query-key-value product become
  a `QKVAttention`.

`steps` then runs consecutive `MergedLinear`s and `QKVAttention`s in one C call; the other operators run on torch.

Shape suffixes: B rows, T tokens of a row, M = B * T, Q query heads, H key-value heads, D head size, I inputs of a row,
N outputs of a product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from headstart.kernels.prepacked import can_gate, can_pack
from headstart.replay.attention import ScoreOptions, attend, current_forward
from headstart.replay.products import MergedLinear
from headstart.replay.recorder import call, remove_unused, replace_node


def rewrite(graph: fx.Graph, device: torch.device, packs: bool, int8: bool) -> list[MergedLinear]:
    """Rewrite a recorded graph in place; return its products with prepacked weights."""
    shorten_norms(graph, device)
    products = merge_products(graph, int8) if packs else []
    shorten_rotations(graph)
    remove_unused(graph)
    if device.type == "cuda":
        _replace_matches(graph, partial(_match_norm, rms_norm_cuda))
    elif products:
        _replace_matches(graph, partial(_match_norm, rms_norm_cpu))  # first: others look for it
        _replace_matches(graph, _match_gate)
        _replace_matches(graph, _match_attention)
        fuse_products(graph)
    return products


@dataclass(frozen=True)
class AttentionCall:
    """One layer's cache update and attention, an operator of a recorded graph. The sink is an operand, so
    `scores.sink` is None."""

    layer: int
    scores: ScoreOptions
    sliding: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        """Attend with new queries [1, Q, M, D], keys and values [1, H, M, D] and sinks [Q]: [1, M, Q, D_v]."""
        forward = current_forward()
        assert forward is not None and forward.cache is not None, "a replay has a cache"
        rows = forward.cache.rows
        if rows > 1:
            query, key, value = (
                part.reshape(part.shape[1], rows, -1, part.shape[3]).transpose(0, 1) for part in (query, key, value)
            )
        keys, values = forward.cache.update(key, value, self.layer)
        out = attend(forward, query, keys, values, replace(self.scores, sink=sink), self.sliding)
        return out.reshape(1, -1, *out.shape[2:])


def _constant(node: Any) -> Tensor | None:
    tensor: Tensor | None = node.meta["constant"] if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return tensor


def merge_products(graph: fx.Graph, int8: bool) -> list[MergedLinear]:
    """Merge linear layers on the same input into prepacked products."""
    by_input: dict[Any, list[Any]] = {}
    node: Any
    for node in graph.nodes:
        if node.target is not F.linear or node.kwargs:
            continue
        weight, bias = _constant(node.args[1]), node.args[2] if len(node.args) > 2 else None
        if weight is not None and (bias is None or _constant(bias) is not None) and can_pack(weight):
            by_input.setdefault(node.args[0], []).append(node)
    products = []
    for rows, nodes in by_input.items():
        if any(user.meta.get("writes") for user in rows.users):
            continue
        weights = [node.args[1].meta["constant"] for node in nodes]
        biases = [_constant(node.args[2]) if len(node.args) > 2 else None for node in nodes]
        for group in MergedLinear.groups(weights, biases):
            product = MergedLinear([weights[index] for index in group], [biases[index] for index in group], int8)
            products.append(product)
            with graph.inserting_before(nodes[group[0]]):
                merged = call(graph, product, (rows, None, 0.0, False, None))  # nothing fused yet
                if len(group) > 1:
                    parts = call(graph, Tensor.split, (merged, product.sizes, -1))
                    replacements = [call(graph, operator.getitem, (parts, at)) for at in range(len(group))]
                else:
                    replacements = [merged]
            first = nodes[group[0]].meta
            merged.meta.update(dtype=first.get("dtype"), shape=(*first["shape"][:-1], sum(product.sizes)))
            for index, replacement in zip(group, replacements, strict=True):
                replace_node(nodes[index], replacement)
                graph.erase_node(nodes[index])
    return products


_POWERS = (Tensor.pow, torch.pow, Tensor.__pow__)
_MEANS = (Tensor.mean, torch.mean)
_ROOTS = (torch.rsqrt, Tensor.rsqrt)
_SUMS = (Tensor.__add__, Tensor.add, torch.add)
_PRODUCTS = (Tensor.__mul__, Tensor.mul, torch.mul)
_NEGATIVES = (Tensor.__neg__, Tensor.neg, torch.neg)


def _is(node: Any, functions: Sequence[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and any(node.target is f for f in functions)


def shorten_norms(graph: fx.Graph, device: torch.device) -> None:
    """Compute the scale of `x * rsqrt(mean(x ** 2) + eps)`, x in float32, in one call and without a copy of x."""
    scales: dict[float, Callable[[Tensor], Tensor]] = {}
    for root in list(graph.nodes):
        if not _is(root, _ROOTS) or not _is(root.args[0], _SUMS):
            continue
        mean, eps = root.args[0].args
        if not isinstance(eps, float) or not _is(mean, _MEANS) or not _is(mean.args[0], _POWERS):
            continue
        along = (mean.args[1:], dict(mean.kwargs))
        power = mean.args[0]
        if along not in (((-1,), {"keepdim": True}), ((-1, True), {})) or power.args[1] != 2:
            continue
        x = power.args[0]
        if x.meta.get("dtype") is not torch.float32:
            continue
        source = _as_float32(x) or x
        if eps not in scales:
            scales[eps] = partial(inverse_rms, eps=torch.tensor(eps, device=device))
        with graph.inserting_before(root):
            scale = call(graph, scales[eps], (source,))
        root.replace_all_uses_with(scale)
        for user in list(x.users):
            if _is(user, _PRODUCTS) and set(user.args) == {x, scale}:
                user.replace_input_with(x, source)  # the float32 scale promotes the product


def _as_float32(node: Any) -> fx.Node | None:
    """Return the input of a conversion to float32."""
    found = _is(node, [Tensor.float]) or (_is(node, [Tensor.to]) and node.args[1:] == (torch.float32,))
    return node.args[0] if found and not node.kwargs else None


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """1 / RMS of the last dimension (kept, size 1), in float32."""
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    scale: Tensor = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return scale


def shorten_rotations(graph: fx.Graph) -> None:
    """Compute `x * cos + cat((-x2, x1)) * sin`, x1 and x2 being the halves of x, in one call."""
    signed: dict[str, fx.Node] = {}
    cosines: dict[str, Any] = {}
    for total in list(graph.nodes):
        if not _is(total, _SUMS) or len(total.args) != 2 or not all(_is(part, _PRODUCTS) for part in total.args):
            continue
        (x, cos), (rotated_x, sin) = (part.args for part in total.args)
        half = _swapped_half(rotated_x, x)
        if half is None or not isinstance(sin, fx.Node):
            continue
        view = _view_key(sin)
        if view not in signed:
            with graph.inserting_after(sin):
                signed[view] = call(graph, negate_half, (sin, half))
                signed[view].meta.update(sin.meta)
        cos = cosines.setdefault(_view_key(cos), cos) if isinstance(cos, fx.Node) else cos
        with graph.inserting_before(total):
            total.replace_all_uses_with(call(graph, rotate, (x, cos, signed[view], half)))


def _view_key(node: fx.Node) -> str:
    """Key of a view; equal for the same view in every layer."""
    return repr((node.op, node.target, node.args, node.kwargs))


def _swapped_half(node: Any, x: Any) -> int | None:
    """Match `cat((-x2, x1))` over the last dimension; return the size of a half."""
    if not _is(node, [torch.cat]) or (node.args[1:], dict(node.kwargs)) not in (((), {"dim": -1}), ((-1,), {})):
        return None
    parts = node.args[0]
    if len(parts) != 2 or not _is(parts[0], _NEGATIVES):
        return None
    second, first = parts[0].args[0], parts[1]
    if not all(_is(part, [Tensor.__getitem__]) and part.args[0] is x for part in (first, second)):
        return None
    half = second.args[1][-1].start
    halves = (Ellipsis, slice(None, half, None)), (Ellipsis, slice(half, None, None))
    return half if (first.args[1], second.args[1]) == halves and isinstance(half, int) else None


def negate_half(x: Tensor, half: int) -> Tensor:
    """Negate the last dimension up to `half`."""
    return torch.cat((-x[..., :half], x[..., half:]), dim=-1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor, half: int) -> Tensor:
    out: Tensor = (x * cos).add_(x.roll(half, -1) * signed_sin)
    return out


# -- norms, gates and attention ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QKVAttention:
    """A layer's attention on a merged qkv product, with norms (of `eps`) and rotary positions; `steps` runs it in C."""

    attention: AttentionCall
    heads: int
    key_heads: int
    size: int
    eps: float = 0.0

    def __call__(
        self, qkv_1MN: Tensor, angles_11MD: tuple[Tensor, Tensor], norms_D: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Attend: [1, M, Q, D]. Angles are cosines, and sines with a negated first half; norms are query and key norm
        weights."""
        parts = qkv_1MN.view(1, -1, self.heads + 2 * self.key_heads, self.size)
        query, key, value = torch.split(parts, [self.heads, self.key_heads, self.key_heads], dim=2)
        if norms_D is not None:
            query, key = rms_norm_cpu(query, norms_D[0], self.eps), rms_norm_cpu(key, norms_D[1], self.eps)
        query, key = (rotate(part.transpose(1, 2), *angles_11MD, self.size // 2) for part in (query, key))
        return self.attention(query, key, value.transpose(1, 2), None)


def rms_norm_cpu(x: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """RMS norm of x [.., I], rounded before the weight is applied."""
    return weight_I * (x * inverse_rms(x, _scalar(eps))).to(x.dtype)


@cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value)


def silu_gate(both: Tensor) -> Tensor:
    """Multiply the second half of [.., 2 * I] by silu of the first."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def rms_norm_cuda(x: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """RMS norm as one GPU kernel, rounded once."""
    return F.rms_norm(x, weight_I.shape, weight_I, eps)


_Call = tuple[Callable[..., Tensor], tuple[Any, ...]]


def _replace_matches(graph: fx.Graph, pattern: Callable[[Any], _Call | None]) -> None:
    """Replace each node that the pattern matches by the call that it returns."""
    for node in list(graph.nodes):
        found = pattern(node)
        if found is not None:
            with graph.inserting_before(node):
                new = call(graph, *found)
            replace_node(node, new)
    remove_unused(graph)


def fuse_products(graph: fx.Graph) -> None:
    """Fuse products with a norm before, and a gate or a sum after them."""
    for node in list(graph.nodes):
        product: Any = node.target
        if not isinstance(product, MergedLinear):
            continue
        rows, norm, eps, gates, last, added = node.args[0], None, 0.0, False, node, None
        if _is(rows, [rms_norm_cpu]) and len(rows.users) == 1 and _no_write_between(rows, node):
            rows, norm, eps = rows.args
        user: Any = next(iter(node.users)) if len(node.users) == 1 else None
        if _is(user, [silu_gate]) and can_gate(product.weights):
            last, gates = user, True
        elif _is(user, _SUMS) and len(user.args) == 2 and not user.kwargs:
            other = user.args[user.args[0] is node]
            if isinstance(other, fx.Node) and other is not node and _same_kind(other, node):
                last, added = user, other
        if norm is None and last is node:
            continue
        with graph.inserting_before(last):
            merged = call(graph, product, (rows, norm, eps, gates, added))
        replace_node(last, merged)
    remove_unused(graph)


def _no_write_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether no node in between writes into its arguments."""
    node = first
    while node is not last and not node.meta.get("writes"):
        node = node.next
    return node is last


def _same_kind(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have the same shape and dtype."""
    kinds = [(node.meta.get("shape"), node.meta.get("dtype")) for node in (one, other)]
    return None not in kinds[0] and kinds[0] == kinds[1]


def _match_norm(function: Callable[..., Tensor], node: Any) -> _Call | None:
    """Match weight * (x * inverse_rms(x)) in the dtype of x; call the function with x, weight and epsilon."""
    if not _is(node, _PRODUCTS) or len(node.args) != 2:
        return None
    weight, product = node.args
    weight_I, dtype = _constant(weight), torch.float32
    if _is(product, [Tensor.to]) and len(product.args) == 2 and len(product.users) == 1 and not product.kwargs:
        product, dtype = product.args
    if weight_I is None or not _is(product, _PRODUCTS) or len(product.users) > 1:
        return None
    x, scale = product.args
    if getattr(getattr(scale, "target", None), "func", None) is not inverse_rms:
        return None
    if scale.args[0] is not x or x.meta.get("dtype") is not dtype or weight_I.ndim != 1 or weight_I.dtype is not dtype:
        return None
    return function, (x, weight, float(scale.target.keywords["eps"]))


def _match_gate(node: Any) -> _Call | None:
    """Match silu of a product's first half, times the second."""
    if not _is(node, _PRODUCTS) or len(node.args) != 2 or not _is(node.args[0], [F.silu]):
        return None
    gate, up = _part(node.args[0].args[0]), _part(node.args[1])
    if gate is None or up is None or gate[0] is not up[0] or (gate[1], up[1]) != (0, 1):
        return None
    sizes = gate[0].target.sizes
    return (silu_gate, (gate[0],)) if len(sizes) == 2 and sizes[0] == sizes[1] else None


def _match_attention(node: Any) -> _Call | None:
    """Match attention on a merged qkv product, with rotary positions over the whole head."""
    attention = node.target
    if not isinstance(attention, AttentionCall) or not attention.scores.fits_sdpa or node.args[3] is not None:
        return None
    query, key, value = node.args[:3]
    if not _is(query, [rotate]) or not _is(key, [rotate]) or query.args[1:] != key.args[1:]:
        return None
    _, cos, signed_sin, half = query.args
    size = 2 * half
    sources = [_heads(part, size) for part in (query.args[0], key.args[0], value)]
    parts = [part for part in (_part(source) for source, *_ in sources) if part is not None]
    if len(parts) < 3 or any(part != (parts[0][0], index) for index, part in enumerate(parts)):
        return None
    merged = parts[0][0]
    sizes = merged.target.sizes
    heads, rest = divmod(sizes[0], size)
    key_heads = sizes[1] // size
    if rest or sizes[1:] != [key_heads * size] * 2 or heads % key_heads:
        return None
    if [len(reader.users) for split in merged.users for reader in split.users] != [1, 1, 1]:
        return None  # the C kernel rotates q and k in place, so no other node may read the product
    (_, query_norm, eps), (_, key_norm, key_eps), (_, value_norm, _) = sources
    if value_norm is not None or (query_norm is None) != (key_norm is None) or eps != key_eps:
        return None
    norms = None if query_norm is None else (query_norm, key_norm)
    return QKVAttention(attention, heads, key_heads, size, eps), (merged, (cos, signed_sin), norms)


def _part(node: Any) -> tuple[Any, int] | None:
    """Match a part of a merged product, but not of a split that the model's own code makes; return the product and the
    part's index."""
    if not _is(node, [operator.getitem]) or not _is(node.args[0], [Tensor.split]):
        return None
    merged, sizes = node.args[0].args[:2]
    is_merged = isinstance(merged.target, MergedLinear) and merged.target.sizes == sizes
    return (merged, node.args[1]) if is_merged else None


def _heads(node: Any, size: int) -> tuple[Any, Any, float]:
    """Match heads of this size, with or without a norm; return their source, and the norm's weight and epsilon."""
    no_match = None, None, 0.0
    if not _is(node, [Tensor.transpose]) or node.args[1:] != (1, 2) or len(node.users) > 1:
        return no_match
    view, norm, eps = node.args[0], None, 0.0
    if _is(view, [rms_norm_cpu]) and len(view.users) == 1:
        view, norm, eps = view.args
    if not _is(view, [Tensor.view]) or len(view.users) > 1:
        return no_match
    shape = view.args[1] if len(view.args) == 2 else view.args[1:]
    return (view.args[0], norm, eps) if len(shape) == 4 and shape[0] == 1 and shape[2:] == (-1, size) else no_match
