"""The target's decoder, recorded once and replayed for forwards of a few tokens.

What is recorded is the forward over one text; see `tape`. The tokens of a batch go through it as if they were of one
row, since nothing but attention looks from one token to another: there each row gets its own shape back, and its keys
and values go to the cache, as in every forward of ours. The operators are then rewritten where that pays on a CPU:

- Linear layers that read the same numbers become one product with prepacked weights (see `products`).
- The scale of an RMS norm comes from three operators on the state as it is, instead of six on a copy in float32.
- Rotary positions swap the halves of queries and keys in one operator; the sign of one half is in the table of sines.

What cannot be recorded, or gives other logits than the modules do, runs through the modules, and `Target.eager` says
why. Long texts do so anyway: there the operators themselves take all the time. On a GPU, trees go through CUDA graphs
of this replay (see `graphs`).

Shape suffixes: B rows, T tokens of a row, M = B * T, Q query heads, H key-value heads, D head size, E hidden size.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_not
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers.cache_utils import Cache

from headstart.target.attention import Running, Scores, attend, causal_attention, run, running
from headstart.target.prepacked import MAX_ROWS, can_pack, drop
from headstart.target.products import Matrix, Merged, is_matrix
from headstart.target.tape import NotRecordable, call, clean, record

PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
"""Weights that are what they say; others are packed, or spread over processes."""
_COUNTS = (11, 13)
"""Tokens of the two recordings."""


@dataclass(frozen=True)
class Site:
    """One layer's attention, which is not recorded: a replay calls it. Its scores are without their sink."""

    layer: int
    scores: Scores
    sliding: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        """Attention of new tokens, queries [1, Q, M, D], keys and values [1, H, M, D], sinks [Q]: [1, M, Q, D_v]."""
        forward = running()
        assert forward is not None and forward.cache is not None, "a replay has a cache"
        rows = forward.cache.rows
        if rows > 1:
            query, key, value = (
                part.reshape(part.shape[1], rows, -1, part.shape[3]).transpose(0, 1) for part in (query, key, value)
            )
        keys, values = forward.cache.update(key, value, self.layer)
        out = attend(forward, query, keys, values, replace(self.scores, sink=sink), self.sliding)
        return out.reshape(1, -1, *out.shape[2:])


@dataclass
class Recording:
    """What stands in for cache and attention while a forward is recorded."""

    recorder: Any
    cache: Any = field(default_factory=lambda: _NewKeys())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sliding: bool) -> Tensor:
        """Causal attention of a text that is read from its beginning, [1, T, Q, D_v]."""
        layer = self.cache.layer_of.get(id(key))
        if layer is None:
            raise NotRecordable("a layer attends over keys of another one")
        with self.recorder.deaf():
            out = causal_attention(query, key, value, scores).transpose(1, 2).contiguous()
        site = Site(layer, replace(scores, sink=None), sliding)
        self.recorder.note(site, ((query, key, value, scores.sink), {}), out)
        return out


class _NewKeys(Cache):  # type: ignore[misc]  # transformers has no types
    """A cache that holds nothing: layers get their new keys and values back."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layer_of: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer_of[id(key_states)] = layer_idx
        self._kept.append(key_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return int(query_length), 0


class Captured:
    """A decoder's recorded forward.

    Args:
        model: in eval mode, its decoder with the hooks of `layers` in place; it is not kept.
        layers: whose states it gives, see `TargetOutput`.
        packs: whether weights may be kept prepacked.

    Raises:
        NotRecordable: with the reason.

    Attributes:
        graphs: CUDA graphs of the replay (see `headstart.target.graphs`), on a GPU.
    """

    def __init__(self, model: Any, layers: Sequence[int], device: torch.device, packs: bool) -> None:
        decoder = model.get_decoder()
        self._decoder, self.layers = decoder, list(layers)
        self.graphs: Any = None
        refuse_others(model, decoder)
        vocab_size = decoder.get_input_embeddings().num_embeddings
        self._modules = list(decoder.modules())
        self.products: list[Merged] = []

        def code(recorder: Any, tokens_1T: Tensor, positions_1T: Tensor, mask_11TT: Tensor) -> list[Tensor]:
            forward = Running(aux_layers=frozenset(layers), recording=Recording(recorder))
            with run(forward):
                decoder(
                    input_ids=tokens_1T,
                    attention_mask=mask_11TT,
                    position_ids=positions_1T,
                    past_key_values=forward.recording.cache,
                    use_cache=True,
                )
            return [forward.captured[layer] for layer in layers]

        def inputs(count: int) -> list[Tensor]:
            positions_1T = torch.arange(count, device=device)[None]
            mask_TT = torch.full((count, count), float("-inf"), device=device).triu_(1)
            return [(positions_1T + count % 3) % vocab_size, positions_1T, mask_TT[None, None]]

        tape = record(code, ("tokens_1M", "positions_1M", "mask"), inputs, _COUNTS)
        self._known = list(_places(decoder, tape.constants))
        clean(tape.graph)
        shorten_norms(tape.graph, device)
        if packs:
            self.products = merge_products(tape.graph)
            drop(weight for product in self.products for weight in product.weights)
        shorten_rotations(tape.graph)
        clean(tape.graph)
        self._replay = tape.compile()
        # Other matrices know nothing of `Running.bits`.
        self._has_bits = sum(len(product.sizes) for product in self.products) == sum(map(is_matrix, decoder.modules()))

    def __call__(self, tokens_BT: Tensor, positions_BT: Tensor) -> dict[int, Tensor]:
        """States [B, T, E] by layer, in a forward of ours that has a cache."""
        shape = tokens_BT.shape
        states = self._replay(tokens_BT.reshape(1, -1), positions_BT.reshape(1, -1), None, tokens_BT.numel())
        return {layer: state.view(*shape, -1) for layer, state in zip(self.layers, states, strict=True)}

    def serves(self, tokens: int, bits: bool) -> bool:
        """Whether it replays a forward over so many tokens of all rows, with the bits that a row has alone or not."""
        # Modules have other bits than a replay: where there is one with bits, plain steps and wide trees go through it.
        return self._has_bits if bits else tokens <= MAX_ROWS

    def holds(self, model: nn.Module) -> bool:
        """Whether the decoder has the modules and weights that it was recorded with, and the model nobody's hooks."""
        for product in self.products:
            product.refresh()
        modules = list(self._decoder.modules())
        if len(modules) != len(self._modules) or any(map(is_not, modules, self._modules)):
            return False
        unchanged = all(getattr(module, name, None) is tensor for module, name, tensor in self._known)
        return unchanged and not _hooked(model)


@dataclass
class Recorded:
    """What came of recording a target's forward; copies of the target share it.

    Attributes:
        captured: the recording; None before anybody decodes, and where there can be none.
        refused: why there can be none.
        lock: held while a forward is recorded: other threads wait for it.
    """

    captured: Captured | None = None
    refused: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, model: nn.Module, capture: Callable[[], Captured | str]) -> None:
        """Record, or learn why not, where that was never done, or modules or weights are others since."""
        with self.lock:
            if self.refused is not None or (self.captured is not None and self.captured.holds(model)):
                return
            self.captured = None  # forwards that run meanwhile go through the modules
            outcome = capture()
            if isinstance(outcome, Captured):
                self.captured = outcome
            else:
                self.refused = outcome


def refuse_others(model: nn.Module, decoder: nn.Module) -> None:
    """Refuse modules that others changed, and may change again unseen."""
    hooked = _hooked(model)
    if hooked:
        raise NotRecordable(f"{hooked} has hooks or a forward of somebody else's")
    if not isinstance(cast(Any, decoder).get_input_embeddings(), nn.Embedding):
        raise NotRecordable("its embeddings are no table")
    for name, module in decoder.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise NotRecordable(f"{name} is an adapter's, which may be switched")
        if any(type(weight) not in PLAIN for weight in module.parameters(False)):
            raise NotRecordable(f"{name} has weights that are packed, or spread over processes")


def _hooked(model: nn.Module) -> str | None:
    """A module with hooks or a forward that are neither its class's, nor transformers', nor ours."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        forward = vars(module).get("forward")
        if any(not _is_ours(hook) for hook in hooks) or not (forward is None or _is_ours(forward)):
            return name or type(module).__name__
    return None


def _is_ours(function: Any) -> bool:
    if isinstance(function, Matrix):
        return bool(function.is_stock)
    function = getattr(function, "func", function)  # of a partial
    module: str = function.__module__
    return module.startswith(("headstart.", "transformers."))


def _places(decoder: nn.Module, constants: Sequence[Tensor]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Where the decoder keeps these tensors."""
    wanted = {id(tensor): tensor for tensor in constants}
    for module in decoder.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in wanted:
                yield module, name, wanted[id(tensor)]


# -- rewrites ----------------------------------------------------------------------------------------------------------


def _constant(node: Any) -> Tensor | None:
    tensor: Tensor | None = node.meta["constant"] if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return tensor


def merge_products(graph: fx.Graph) -> list[Merged]:
    """One product for all linear layers that read the same numbers, prepacked."""
    by_input: dict[Any, list[Any]] = {}
    node: Any
    for node in graph.nodes:
        if node.target is not F.linear or node.kwargs:
            continue
        weight, bias = _constant(node.args[1]), node.args[2] if len(node.args) > 2 else None
        if weight is not None and (bias is None or _constant(bias) is not None) and can_pack(weight):
            by_input.setdefault(node.args[0], []).append(node)
    made = []
    for rows, nodes in by_input.items():
        if any(user.meta.get("writes") for user in rows.users):
            continue
        weights = [node.args[1].meta["constant"] for node in nodes]
        biases = [_constant(node.args[2]) if len(node.args) > 2 else None for node in nodes]
        for group in Merged.groups(weights, biases):
            product = Merged([weights[index] for index in group], [biases[index] for index in group])
            made.append(product)
            with graph.inserting_before(nodes[group[0]]):
                joined = call(graph, product, (rows,))
                if len(group) > 1:
                    parts = call(graph, Tensor.split, (joined, product.sizes, -1))
                    replacements = [call(graph, operator.getitem, (parts, at)) for at in range(len(group))]
                else:
                    replacements = [joined]
            for index, replacement in zip(group, replacements, strict=True):
                nodes[index].replace_all_uses_with(replacement)
                graph.erase_node(nodes[index])
    return made


_POWERS = (Tensor.pow, torch.pow, Tensor.__pow__)
_MEANS = (Tensor.mean, torch.mean)
_ROOTS = (torch.rsqrt, Tensor.rsqrt)
_SUMS = (Tensor.__add__, Tensor.add, torch.add)
_PRODUCTS = (Tensor.__mul__, Tensor.mul, torch.mul)
_NEGATIVES = (Tensor.__neg__, Tensor.neg, torch.neg)


def _is(node: Any, functions: Sequence[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and any(node.target is f for f in functions)


def shorten_norms(graph: fx.Graph, device: torch.device) -> None:
    """`x * rsqrt(mean(x ** 2) + eps)` over the last dimension, x in float32, with one call for the scale and without a
    copy of x."""
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
                user.replace_input_with(x, source)  # the product is in float32 all the same


def _as_float32(node: Any) -> fx.Node | None:
    """What is put into float32 here."""
    found = _is(node, [Tensor.float]) or (_is(node, [Tensor.to]) and node.args[1:] == (torch.float32,))
    return node.args[0] if found and not node.kwargs else None


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """1 / root mean square of the last dimension, which stays with size 1, in float32."""
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    scale: Tensor = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return scale


def shorten_rotations(graph: fx.Graph) -> None:
    """`x * cos + cat((-x2, x1)) * sin`, where x1 and x2 are the halves of x, with one call."""
    signed: dict[str, fx.Node] = {}
    for total in list(graph.nodes):
        if not _is(total, _SUMS) or len(total.args) != 2 or not all(_is(part, _PRODUCTS) for part in total.args):
            continue
        (x, cos), (turned, sin) = (part.args for part in total.args)
        half = _swapped_half(turned, x)
        if half is None or not isinstance(sin, fx.Node):
            continue
        view = repr((sin.op, sin.target, sin.args, sin.kwargs))  # each layer has a view of its own, made alike
        if view not in signed:
            with graph.inserting_after(sin):
                signed[view] = call(graph, negative_half, (sin, half))
        with graph.inserting_before(total):
            total.replace_all_uses_with(call(graph, rotated, (x, cos, signed[view], half)))


def _swapped_half(turned: Any, x: Any) -> int | None:
    """The size of a half, where `turned` is `cat((-x2, x1))` over the last dimension."""
    if not _is(turned, [torch.cat]) or (turned.args[1:], dict(turned.kwargs)) not in (((), {"dim": -1}), ((-1,), {})):
        return None
    parts = turned.args[0]
    if len(parts) != 2 or not _is(parts[0], _NEGATIVES):
        return None
    second, first = parts[0].args[0], parts[1]
    if not all(_is(part, [Tensor.__getitem__]) and part.args[0] is x for part in (first, second)):
        return None
    half = second.args[1][-1].start
    wanted = (Ellipsis, slice(None, half, None)), (Ellipsis, slice(half, None, None))
    return half if (first.args[1], second.args[1]) == wanted and isinstance(half, int) else None


def negative_half(x: Tensor, half: int) -> Tensor:
    """With the other sign up to `half` of the last dimension."""
    return torch.cat((-x[..., :half], x[..., half:]), dim=-1)


def rotated(x: Tensor, cos: Tensor, signed_sin: Tensor, half: int) -> Tensor:
    turned: Tensor = (x * cos).add_(x.roll(half, -1) * signed_sin)
    return turned
