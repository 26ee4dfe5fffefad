"""Run consecutive products and attention of a replay as one C call.

Takes a rewritten graph; replaces each run of `MergedLinear`s and `QKVAttention`s, the steps, by one `Steps` call.
Called one by one from Python, the 150 or so steps of a small forward would spend a third of its time in call overhead.
The steps' data flow and weight addresses are prepared once per snapshot of the weights. Scratch addresses follow from
the number of tokens, all others are read from the tensors of a call.

Shape suffixes: M tokens of all rows.
"""

from __future__ import annotations

import ctypes
import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain
from math import prod
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, fx

from headstart.kernels import prepacked
from headstart.kernels.cpu_attention import attention_address, mask_arguments
from headstart.kernels.memory import address, check_status
from headstart.kernels.prepacked import PrepackedWeights
from headstart.replay.attention import ForwardContext, current_forward, visible_range
from headstart.replay.cache import Place
from headstart.replay.products import MergedLinear
from headstart.replay.recorder import DYNAMIC_DIM, call, remove_unused
from headstart.replay.rewrites import QKVAttention
from headstart.support.compiled import library

SOURCE = prepacked.SOURCE.with_name("steps.c")
_VIEWS = (Tensor.reshape, torch.reshape, Tensor.view, Tensor.contiguous)
_P, _N = ctypes.c_void_p, ctypes.c_int64
_VERSION = operator.attrgetter("_version")


class _Step(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _N) for name in ("x", "out", "added", "cos", "sin")),
        *((name, _P) for name in ("norm", "key_norm", "weights", "bias")),
        *((name, _N) for name in ("inputs", "outputs", "gates", "heads", "groups", "size")),
        *(("keys", _N * 2), ("values", _N * 2), ("sliding", _N)),
        *(("eps", ctypes.c_float), ("scaling", ctypes.c_float)),
    ]


class _Store(ctypes.Structure):
    _fields_: ClassVar = [("start", _P), ("layer", _N), ("strides", _N * 2)]


class _VisibleRange(ctypes.Structure):
    _fields_: ClassVar = [("mask", _P), ("strides", _N * 2), ("first", _N), ("window", _N)]


class _Forward(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _P) for name in ("tensors", "scratch", "starts", "slots")),
        *(("stores", ctypes.POINTER(_Store)), ("visible", _VisibleRange * 2)),
        *((name, _N) for name in ("count", "rows", "tokens")),
        *(("multiply", _P), ("attend", _P), ("threads", ctypes.c_int)),
    ]


@cache
def _compiled() -> Any:
    functions = library(SOURCE)
    if functions is not None:
        functions.run_steps.argtypes, functions.run_steps.errcheck = [_P, _N, _P], check_status
    return functions


def group_steps(graph: fx.Graph) -> list[Steps]:
    """Replace consecutive steps of a rewritten graph by single calls; return the calls."""
    return [_replace_group(graph, group) for group in list(_groups(graph))] if _compiled() is not None else []


# -- grouping ----------------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Consecutive steps, and views of their results, each mapped to its step."""

    steps: list[Any] = field(default_factory=list)
    views: dict[Any, Any] = field(default_factory=dict)

    def source(self, node: Any) -> Any:
        return self.views.get(node, node)

    def reads(self, node: Any) -> bool:
        return any(self.source(source) in self.steps for source in node.all_input_nodes)

    def accepts(self, node: Any) -> bool:
        """Whether a node is a step that can join the group: inputs and result are token-major, in one dtype."""
        step, first = node.target, (self.steps[0] if self.steps else node).target
        if isinstance(step, QKVAttention) and self.source(node.args[0]) in self.steps:
            qkv, angles, _ = node.args
            widths = {qkv: (step.heads + 2 * step.key_heads) * step.size, **dict.fromkeys(angles, step.size)}
        elif isinstance(step, MergedLinear) and step.int8 == first.int8:
            rows, *_, added = node.args
            widths = {rows: step.weights[0].shape[1], **({} if added is None else {added: _width(node)})}
        else:
            return False
        dtype = first.weights[0].dtype
        in_layout = node.meta.get("shape") == (1, DYNAMIC_DIM, *_shape(node)) and node.meta["dtype"] is dtype
        return in_layout and all(_is_token_major(source, dtype, width) for source, width in widths.items())

    def is_view(self, node: Any) -> bool:
        """Whether a node is a view, read only by products."""
        same = node.target in _VIEWS and node.meta.get("dtype") is node.args[0].meta.get("dtype")
        return same and all(isinstance(user.target, MergedLinear) or self.is_view(user) for user in node.users)

    @property
    def is_complete(self) -> bool:
        """Whether it has several steps, and no outside node reads its views."""
        inside = {*self.steps, *self.views}
        return len(self.steps) > 1 and all(inside.issuperset(view.users) for view in self.views)


def _groups(graph: fx.Graph) -> Iterator[_Group]:
    group = _Group()
    for node in graph.nodes:
        if group.accepts(node):
            group.steps.append(node)
        elif group.reads(node) and group.is_view(node):
            group.views[node] = group.source(node.args[0])
        elif group.reads(node) or node.meta.get("writes") or node.op == "output":
            if group.is_complete:
                yield group
            group = _Group()
            if group.accepts(node):
                group.steps.append(node)


def _is_token_major(node: Any, dtype: torch.dtype, width: int) -> bool:
    """Whether a node is token-major (no other axis of size above 1 comes before the tokens), with `width` elements per
    token, of this dtype."""
    shape = node.meta.get("shape", ())
    token_axis = shape.index(DYNAMIC_DIM) if DYNAMIC_DIM in shape else None
    if token_axis is None or any(size != 1 for size in shape[:token_axis]):
        return False
    return node.meta["dtype"] is dtype and prod(shape[token_axis + 1 :]) == width


def _shape(node: Any) -> tuple[int, ...]:
    """Shape of a step's result per token."""
    step = node.target
    if isinstance(step, QKVAttention):
        return step.heads, step.size
    _, _, _, gates, _ = node.args
    return (sum(step.sizes) // (2 if gates else 1),)


def _width(node: Any) -> int:
    return prod(_shape(node))


def _replace_group(graph: fx.Graph, group: _Group) -> Steps:
    """Replace a group by one call."""
    read = chain.from_iterable(
        node.args[:1] + (node.args[1] if isinstance(node.target, QKVAttention) else node.args[-1:])
        for node in group.steps
    )
    inputs = list(dict.fromkeys(n for n in read if n is not None and group.source(n) not in group.steps))
    inside = {*group.steps, *group.views}
    outputs = [node for node in group.steps if not inside.issuperset(node.users)]
    steps = Steps(group, inputs, outputs)
    with graph.inserting_after(group.steps[-1]):
        results = call(graph, steps, tuple(inputs))
    for at, node in reversed(list(enumerate(outputs))):
        with graph.inserting_after(results):
            part = call(graph, operator.getitem, (results, at))
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, part)
    remove_unused(graph)
    return steps


# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Snapshot:
    """The prepacked weights of each product, the contiguous weight of each norm parameter, and the sum of the original
    tensors' version counters, which in-place changes raise."""

    packed: dict[MergedLinear, PrepackedWeights]
    norms: dict[Tensor, Tensor]
    changes: int


class Weights:
    """Weights of all steps of a rewritten graph. In-place changes that PyTorch counts take effect at the next forward.
    Weights that moved, or changed through `.data`, are noticed only by `refresh`, which runs when a text begins."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = [node for node in graph.nodes if isinstance(node.target, (MergedLinear, QKVAttention))]
        self._products = [node.target for node in nodes if isinstance(node.target, MergedLinear)]
        norms = [norm for node in nodes for norm in _norms(node) if norm is not None]
        self._norms = list({id(norm): norm for norm in norms}.values())
        every = [*self._norms, *chain.from_iterable(product.tensors for product in self._products)]
        self._watched = [tensor for tensor in every if not tensor.is_inference()]
        self._snapshot: _Snapshot | None = None

    def now(self) -> _Snapshot:
        """Return the current weights; the forward keeps the snapshot alive."""
        changes, snapshot = sum(map(_VERSION, self._watched)), self._snapshot
        if snapshot is None or snapshot.changes != changes:
            self._snapshot = snapshot = None  # free the old copies first
            packed = {product: product.prepacked() for product in self._products}
            norms = {norm: norm.detach().contiguous() for norm in self._norms}
            self._snapshot = snapshot = _Snapshot(packed, norms, changes)
        return snapshot

    def refresh(self) -> None:
        """Drop stale copies, and the snapshot if weights moved or changed."""
        current, snapshot = {product: product.refresh() for product in self._products}, self._snapshot
        if snapshot is not None and (
            any(current[product] is not packed for product, packed in snapshot.packed.items())
            or any(norm.data_ptr() != copy.data_ptr() for norm, copy in snapshot.norms.items())
        ):
            self._snapshot = None


class Steps:
    """A group of steps as one operator.

    Args:
        group: the steps.
        inputs: nodes outside the group that it reads; the arguments of a call.
        outputs: steps with results that other nodes read; the results of a call.
    """

    def __init__(self, group: _Group, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        first = group.steps[0].target
        self._dtype, self._int8, self._first_width = first.weights[0].dtype, first.int8, first.weights[0].shape[1]
        results, widths = _allocate_results(group, outputs)
        indices = {node: index for index, node in enumerate(inputs)}
        indices |= {node: len(inputs) + index for node, index in results.items()}
        self._targets = [(node.target, _norms(node)) for node in group.steps]
        self._steps = (_Step * len(group.steps))(*(_to_c(node, group, indices) for node in group.steps))
        self._attends = any(isinstance(target, QKVAttention) for target, _ in self._targets)
        self._output_shapes = [_shape(node) for node in outputs]
        starts = list(accumulate(widths[len(outputs) :], initial=0))
        self._scratch_width = starts.pop()
        self._scratch_offsets = array("q", (start * self._dtype.itemsize for start in starts))
        self._prepared: tuple[Any, ref[_Snapshot], Sequence[Place]] | None = None

    def __len__(self) -> int:
        return len(self._targets)

    def serves(self, forward: ForwardContext) -> bool:
        """Whether a forward is supported: attention in C, and a cache in the steps' dtype."""
        if forward.slots_B is None:
            return False
        stores = forward.cache.stores if self._attends else ()
        return all(
            (store.dtype, store.device.type) == (self._dtype, "cpu") for store in stores if store.is_floating_point()
        )

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run the steps on the forward's cache; return the outputs, [1, M, ..] each."""
        forward = current_forward()
        assert forward is not None and forward.slots_B is not None and forward.weights is not None, "see `serves`"
        cache, weights = forward.cache, forward.weights
        prepared = self._prepared
        if prepared is None or prepared[1]() is not weights or prepared[2] != cache.places:
            self._prepared = prepared = self._prepare(weights, cache.places), ref(weights), cache.places
        inputs = tuple(part.contiguous() for part in inputs)
        count = inputs[0].numel() // self._first_width
        outputs = [inputs[0].new_empty(1, count, *shape) for shape in self._output_shapes]
        tokens = count // cache.rows
        scratch = inputs[0].new_empty(count * self._scratch_width)
        visible = (visible_range(forward, scratch, tokens, sliding) for sliding in (False, True))
        ranges = (_VisibleRange(*mask_arguments(mask), first, window or 0) for mask, first, window in visible)
        tensors = array("Q", [part.data_ptr() for part in (*inputs, *outputs)])
        c_forward = _Forward(
            *(tensors.buffer_info()[0], scratch.data_ptr()),
            *(self._scratch_offsets.buffer_info()[0], forward.slots_B.data_ptr()),
            (_Store * len(cache.stores))(*map(_store, cache.stores)),
            (_VisibleRange * 2)(*ranges),
            *(len(tensors), cache.rows, tokens),
            *(prepacked.product_address(self._dtype, self._int8), attention_address(self._dtype)),
            torch.get_num_threads(),
        )
        _compiled().run_steps(prepared[0], len(prepared[0]), ctypes.byref(c_forward))
        return outputs

    def _prepare(self, weights: _Snapshot, places: Sequence[Place]) -> Any:
        """Copy the steps, with the addresses of the weights and the places in the cache."""
        steps = type(self._steps).from_buffer_copy(self._steps)
        for step, (target, parameters) in zip(steps, self._targets, strict=True):
            norms = [None if parameter is None else weights.norms[parameter] for parameter in parameters]
            width = step.size if step.heads else step.inputs
            assert all(x is None or (x.dtype is self._dtype and len(x) == width) for x in norms), "norms match the rows"
            step.norm, step.key_norm = map(address, norms)
            if isinstance(target, MergedLinear):
                packed = weights.packed[target]
                step.weights, step.bias = packed.weight.data.data_ptr(), address(packed.bias_O)
            else:
                step.keys[:], step.values[:] = places[target.attention.layer]
        return steps


def _to_c(node: Any, group: _Group, indices: dict[Any, int]) -> _Step:
    """Convert a step for C: sizes, and tensors by index."""

    def index(source: Any) -> int:
        return -1 if source is None else indices[group.source(source)]

    step, target = _Step(x=index(node.args[0]), out=index(node), added=-1, cos=-1, sin=-1), node.target
    if isinstance(target, QKVAttention):
        step.cos, step.sin = map(index, node.args[1])
        step.heads, step.groups, step.size = target.key_heads, target.heads // target.key_heads, target.size
        attention, step.eps = target.attention, target.eps
        step.sliding, step.scaling = attention.sliding, attention.scores.scale(target.size)
    else:
        _, _, step.eps, step.gates, added = node.args
        step.added, step.inputs, step.outputs = index(added), target.weights[0].shape[1], sum(target.sizes)
    return step


def _norms(node: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the weights of a step's norms."""
    norms = (node.args[2] or (None, None)) if isinstance(node.target, QKVAttention) else (node.args[1], None)
    first, second = (None if norm is None else norm.meta["constant"] for norm in norms)
    return first, second


def _store(tensor: Tensor) -> _Store:
    layer, row, head = tensor.stride()[:3]
    return _Store(tensor.data_ptr(), layer * tensor.itemsize, (row, head))


def _allocate_results(group: _Group, outputs: Sequence[Any]) -> tuple[dict[Any, int], list[int]]:
    """Assign each step's result a buffer, outputs first, and reuse scratch buffers after their last use.

    Returns:
        The buffer's index by step, and the elements per token of each buffer.
    """
    last_use = {group.source(n): number for number, node in enumerate(group.steps) for n in node.all_input_nodes}
    buffers = {node: number for number, node in enumerate(outputs)}
    widths, free = [_width(node) for node in outputs], list[int]()
    for number, node in enumerate(group.steps):
        if node not in buffers:
            buffer = next((buffer for buffer in free if widths[buffer] == _width(node)), len(widths))
            if buffer == len(widths):
                widths.append(_width(node))
            else:
                free.remove(buffer)
            buffers[node] = buffer
        free += [buffers[n] for n in last_use if last_use[n] == number and n in buffers and n not in outputs]
    return buffers, widths
