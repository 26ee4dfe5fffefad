"""A stand-in for a CUDA device on machines without one: tensors that report `cuda` and compute on the CPU.

It counts operations that a real device would make slow: waits of the host, uploads and launches. It refuses operations
that mix tensors of both devices. Everything runs at once and in order, so results equal the CPU's.

    with StandIn() as device:
        target = Target(tiny_model("llama").to(CUDA))
        before = device.counts
        ...
        print(device.counts - before)

Tensors cross over as they do in torch: `to`, `cuda`, `cpu`, `copy_`, factories with `device=`. To C++ a stand-in
tensor is on the CPU, since autograd of a torch without CUDA can record nothing else.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from headstart.model.model import Target
from headstart.replay import recorded
from headstart.replay.cuda_graphs import GraphPool

CUDA = torch.device("cuda", 0)

_NAMES = "_reshape_alias _unsafe_view detach detach_ empty empty_like empty_strided is_pinned is_same_size lift_fresh"
_LAUNCH_NOTHING = {f"aten::{name}" for name in f"{_NAMES} new_empty new_empty_strided".split()}
"""Operations other than views that launch no kernel."""

_WAIT = {"aten::bincount", "aten::_linalg_check_errors"}
"""Operations that read a result back to the host, in addition to those torch tags."""

_READ_BACK = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations that make the host wait for a result or its shape."""

_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_PINS = {"aten::pin_memory", "aten::_pin_memory"}

_OF_CUDA: dict[str, Callable[..., Any]] = {
    "_lazy_init": lambda: None,
    "_exchange_device": lambda index: 0,
    "_maybe_exchange_device": lambda index: 0,
    "current_device": lambda: 0,
    "get_device_capability": lambda *_: (9, 0),
    "mem_get_info": lambda *_: (1 << 40, 1 << 40),
    "graph_pool_handle": lambda: object(),
}
"""Replacements in `torch.cuda`, which refuses without CUDA."""


@dataclass(frozen=True)
class Counts:
    """Counters of a device's work.

    Attributes:
        waits: times the host blocked until the device had finished its queue.
        uploads: tensors copied from the host to the device.
        slow_uploads: uploads that block the host: all but pinned ones with `non_blocking`.
        launches: operations queued on the device.
        graphs: launches that replay a whole graph.
    """

    waits: int = 0
    uploads: int = 0
    slow_uploads: int = 0
    launches: int = 0
    graphs: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(**{name: value - getattr(other, name) for name, value in vars(self).items()})


class MixedDevices(RuntimeError):
    """An operation mixed tensors of the host and of the device."""


class StandInTensor(Tensor):
    """A tensor that reports `CUDA` as its device; `held` is its data on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> StandInTensor:
        made: StandInTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute there
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # an attribute there
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # an attribute there
        return False

    def get_device(self) -> int:
        return 0

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # an attribute there
        return f"StandInTensor({self.held!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (moved := _MOVES.get(func)) is not None:
            return moved(*args, **kwargs)
        _check_generator(kwargs.get("generator"), CUDA)
        with torch._C.DisableTorchFunctionSubclass(), _inside():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares none
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {}, _ACTIVE[-1] if _ACTIVE else StandIn())


@dataclass
class Event:
    """A wait or an upload.

    Attributes:
        kind: "wait" or "upload".
        operation: torch's name of it.
        where: file and line of the caller.
    """

    kind: str
    operation: str
    where: str


class Graph:
    """A CUDA graph: the operations recorded during capture, over the memory that they had then.

    Graphs of one pool share memory: a replay invalidates the results of all other graphs.
    """

    def __init__(self) -> None:
        self.others: list[Graph] = []
        self._calls: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []
        self._own: list[Tensor] = []

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record an operation on held tensors."""
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._calls.append((func, args, kwargs, results))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._own += [result for result in results if result.untyped_storage().data_ptr() not in known]

    def replay(self) -> None:
        _ACTIVE[-1].launched_one("cudaGraphLaunch")
        for other in self.others:
            if other is not self:
                other.spoil()
        for func, args, kwargs, results in self._calls:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for result, new in zip(results, again, strict=True):
                if new.data_ptr() != result.data_ptr():
                    result.copy_(new)

    def spoil(self) -> None:
        """Overwrite its results, as another use of their memory would."""
        for result in self._own:
            result.fill_(float("nan") if result.is_floating_point() else 0)


class StandIn:
    """A context with the stand-in as `device="cuda"`, which counts its work.

    Attributes:
        counts: totals so far.
        events: waits and uploads, in order.
        launched: launches by operation.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.events: list[Event] = []
        self.launched: Counter[str] = Counter()
        self.capturing: Graph | None = None
        self._pinned: dict[int, Tensor] = {}  # by address
        self._in_pool: defaultdict[Any, list[Graph]] = defaultdict(list)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_keeping(torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors, True))
        future = torch.__future__
        self._stack.enter_context(
            _keeping(
                future.get_swap_module_params_on_conversion,
                future.set_swap_module_params_on_conversion,
                True,  # a parameter stays the same object, as on a real device: an optimizer may hold it
            )
        )
        self._stack.enter_context(patch.object(torch, "Generator", _Generator))
        self._stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: self.pin(tensor)))
        self._stack.enter_context(patch.object(recorded, "PLAIN", (*recorded.PLAIN, StandInTensor)))
        for name, answer in (_OF_CUDA | self._graphs()).items():
            self._stack.enter_context(patch.object(torch.cuda, name, answer))
        self._stack.enter_context(_Moves())
        self._stack.enter_context(_Operations(self))
        _ACTIVE.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.pop()
        self._stack.close()

    # -- graphs --------------------------------------------------------------------------------------------------

    def _graphs(self) -> dict[str, Any]:
        """Return replacements for CUDA graphs and streams in `torch.cuda`."""

        @contextmanager
        def graph(captured: Graph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
            assert self.capturing is None, "captures do not nest"
            self._in_pool[pool].append(captured)
            captured.others = self._in_pool[pool]
            self.capturing = captured
            try:
                yield
            finally:
                self.capturing = None
            captured.spoil()  # on a real device nothing has run yet

        return {
            "CUDAGraph": Graph,
            "graph": graph,
            "Stream": lambda *_: SimpleNamespace(wait_stream=lambda other: None),
            "current_stream": lambda *_: SimpleNamespace(wait_stream=lambda other: None),
            "stream": lambda stream: nullcontext(),
        }

    # -- counting ------------------------------------------------------------------------------------------------

    def waited(self, operation: str) -> None:
        """Count a wait of the host."""
        self._refuse_while_capturing(operation)
        self._add(waits=1)
        self.events.append(Event("wait", operation, _caller()))

    def uploaded(self, source: Tensor, operation: str, non_blocking: bool = False) -> None:
        """Count an upload."""
        self._refuse_while_capturing(operation)
        slow = not (non_blocking and self.is_pinned(source))
        self._add(uploads=1, slow_uploads=int(slow))
        self.events.append(Event("upload", operation, _caller()))

    def _refuse_while_capturing(self, operation: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({operation})")

    def launched_one(self, operation: str) -> None:
        """Count a launch."""
        if self.capturing is not None:
            return
        self._add(launches=1, graphs=int(operation == "cudaGraphLaunch"))
        self.launched[operation] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark a tensor's memory as pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _add(self, **more: int) -> None:
        now = self.counts
        self.counts = Counts(**{name: getattr(now, name) + more.get(name, 0) for name in vars(now)})


class _Moves(TorchFunctionMode):
    """Sends host tensors to the stand-in on `to` and `cuda`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type_as):
            return _MOVES[func](*args, **kwargs)
        if "device" in kwargs:
            _check_generator(kwargs.get("generator"), torch.device(kwargs["device"] or "cpu"))
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """A random generator that can report `CUDA` as its device."""

    _where: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> Self:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch declares __init__ alone
        made._where = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute there
        return self._where


def _check_generator(generator: torch.Generator | None, where: torch.device) -> None:
    if generator is not None and generator.device.type != where.type:
        raise MixedDevices(f"Expected a {where.type!r} device type for generator but found {generator.device.type!r}")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Passes every torch operation to a stand-in device."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.device)


_ACTIVE: list[StandIn] = []
_INSIDE = [0]


@contextmanager
def _inside() -> Iterator[None]:
    """Place tensors that an operation on stand-ins creates on the stand-in too."""
    _INSIDE[0] += 1
    try:
        yield
    finally:
        _INSIDE[0] -= 1


@contextmanager
def _keeping(get: Callable[[], bool], put: Callable[[bool], None], value: bool) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def _caller() -> str:
    """Return the innermost line outside torch and this file."""
    frame: Any = sys._getframe(2)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return "?" if frame is None else f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"


# -- operations --------------------------------------------------------------------------------------------------------


def _run(func: Any, args: Any, kwargs: dict[str, Any], device: StandIn) -> Any:
    """Run one operation of torch on what the stand-ins hold."""
    name = func._schema.name
    flat = tree_leaves((args, kwargs))
    leaves = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    stands = [leaf for leaf in leaves if isinstance(leaf, StandInTensor)]
    there = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in flat)
    if name in _PINS and not stands:
        return device.pin(args[0])
    if name == "aten::is_pinned" and not stands:
        return device.is_pinned(args[0])
    if not stands and not there and not (_INSIDE[0] and not leaves):
        if kwargs.pop("pin_memory", False):
            return device.pin(func(*args, **kwargs))
        return func(*args, **kwargs)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    if composite and name != "aten::scaled_dot_product_attention":  # one kernel there
        with torch._C.DisableTorchFunction(), _Operations(device):
            return func.decompose(*args, **kwargs)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
    if name == "aten::_to_copy":
        return _copied(args[0], kwargs, there, func, device)
    if name == "aten::copy_" and isinstance(args[0], StandInTensor) != isinstance(args[1], StandInTensor):
        return _copied_over(args[0], args[1], bool((*args, False)[2] or kwargs.get("non_blocking")), device)
    if name in _INDEXING:
        args = _indexed(name, args, device)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    mixed = [leaf for leaf in leaves if not isinstance(leaf, StandInTensor) and leaf.ndim]
    if stands and mixed:
        raise MixedDevices(f"Expected all tensors on the same device, but found at least two in {name}: cuda:0, cpu")
    if name in _WAIT or (name not in _INDEXING and not _READ_BACK.isdisjoint(func.tags)):
        device.waited(name)
    if not func.is_view and name not in _LAUNCH_NOTHING and name != "aten::_local_scalar_dense":
        device.launched_one(name)
    held = {id(stand.held): stand for stand in stands}
    args, kwargs = tree_map(_held, (args, kwargs))
    if name == "aten::histc" and not args[0].is_floating_point():
        func = _histc
    out = func(*args, **kwargs)
    if device.capturing is not None and not getattr(func, "is_view", False):
        device.capturing.note(func, args, kwargs, out)
    return tree_map(lambda leaf: _wrapped(leaf, held), out)


def _histc(own: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Support integers, which the CPU's histc refuses."""
    return torch.histc(own.double(), *args, **kwargs).to(own.dtype)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, StandInTensor) else leaf


def _wrapped(leaf: Any, held: dict[int, StandInTensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    own = held.get(id(leaf))  # an operation in place returns what it was given
    if own is None:
        with torch.inference_mode(leaf.is_inference()):  # a view of a parameter is none of inference mode
            return StandInTensor(leaf)
    assert own.shape == leaf.shape and own.stride() == leaf.stride(), "no operation here changes a shape in place"
    return own


def _copied(source: Tensor, kwargs: dict[str, Any], there: bool, func: Any, device: StandIn) -> Tensor:
    """Run `_to_copy`: a conversion on the device, or an upload; downloads go through `_to`."""
    non_blocking = bool(kwargs.get("non_blocking"))
    if isinstance(source, StandInTensor):
        device.launched_one("aten::_to_copy")
        out = func(source.held, **kwargs)
        if device.capturing is not None:
            device.capturing.note(func, (source.held,), kwargs, out)
        return StandInTensor(out)
    assert there, "only uploads come here with tensors of the host"
    device.uploaded(source, "aten::_to_copy", non_blocking)
    return StandInTensor(func(source, **kwargs))


def _copied_over(into: Tensor, source: Tensor, non_blocking: bool, device: StandIn) -> Tensor:
    """Run `copy_` between the host and the device."""
    if isinstance(into, StandInTensor):
        device.uploaded(source, "aten::copy_", non_blocking)
        into.held.copy_(source)
    else:
        assert isinstance(source, StandInTensor)
        device.waited("aten::copy_")
        into.copy_(source.held)
    return into


def _indexed(name: str, args: Sequence[Any], device: StandIn) -> tuple[Any, ...]:
    """Return an indexing's arguments with all indices on the stand-in, uploading host indices."""
    own, indices, *rest = args
    if not isinstance(own, StandInTensor):
        raise MixedDevices("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    filled = name != "aten::index" and len(masks) == len([i for i in indices if i is not None]) == 1
    if masks and not (filled and rest[0].numel() == 1):  # the host must know how many there are
        device.waited(name)
    placed = []
    for index in indices:
        if index is not None and not isinstance(index, StandInTensor):
            device.uploaded(index, name)
            index = StandInTensor(index)
        placed.append(index)
    return own, placed, *rest


# -- ways between host and device --------------------------------------------------------------------------------------


def _to(own: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run `Tensor.to` on a stand-in, or to one."""
    copy = kwargs.pop("copy", False)
    other = kwargs.pop("other", args[0] if args and isinstance(args[0], Tensor) else None)
    if other is not None:
        where, dtype, non_blocking = other.device, other.dtype, kwargs.get("non_blocking", False)
    else:
        where, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    dtype = dtype or own.dtype
    if where is not None and where.type != own.device.type:
        if isinstance(own, StandInTensor):
            device = _ACTIVE[-1] if _ACTIVE else StandIn()
            device.waited("aten::_to_copy")
            return own.held.to(dtype, copy=True)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.to(own, CUDA, dtype, non_blocking=non_blocking)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.to(own, dtype, copy=copy)


def _refused(own: Tensor, *_: Any, **__: Any) -> Any:
    raise TypeError("Can't convert a cuda:0 tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")


def _put(own: Tensor, data: Tensor) -> None:
    """Run `own.data = data`: the tensor keeps its identity and gets other memory."""
    assert isinstance(own, StandInTensor) and isinstance(data, StandInTensor)
    own.held = data.held


_MOVES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda own: _to(own, "cpu"),
    torch.Tensor.cuda: lambda own, *_, **kwargs: _to(own, CUDA, **kwargs),
    torch.Tensor.type_as: lambda own, other: _to(own, other),
    torch.Tensor.tolist: lambda own: _to(own, "cpu").tolist(),
    torch.Tensor.numpy: _refused,
    torch.Tensor.__array__: _refused,
    torch.Tensor.data.__set__: _put,  # type: ignore[attr-defined]  # a descriptor there
    torch.Tensor.data_ptr: lambda own: own.held.data_ptr(),
    torch.Tensor.untyped_storage: lambda own: own.held.untyped_storage(),
}


def clock_of_captures(monkeypatch: pytest.MonkeyPatch, module: str) -> Callable[[], float]:
    """Replace a module's clock: a reading advances it by 1 ms, a capture by 500 ms. Return a reader in seconds."""
    now, capture = [0.0], GraphPool.capture

    def slow(*args: Any) -> Any:
        now[0] += 0.5
        return capture(*args)

    def read() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(GraphPool, "capture", slow)
    monkeypatch.setattr(f"{module}.perf_counter", read)
    return lambda: now[0]


# -- decoding ----------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """Device work of one decode round.

    Attributes:
        counts: from the forward that verified this round's drafts to just before the next one.
        events: its waits and uploads.
    """

    counts: Counts
    events: list[Event] = field(default_factory=list)


def rounds_of(device: StandIn, target: Target, decode: Callable[[], Any]) -> list[Round]:
    """Return each decode round but the last, from its verification to the next one's.

    Args:
        device: entered; holds `target`.
        target: its `forward_tree` delimits rounds; early exit has forwards of its own.
        decode: generates with that target.
    """
    marks: list[tuple[Counts, int]] = []
    target.record()  # checks itself with forwards of its own
    forward_tree = target.forward_tree

    def marked(*args: Any, **kwargs: Any) -> Any:
        marks.append((device.counts, len(device.events)))
        return forward_tree(*args, **kwargs)

    with patch.object(target, "forward_tree", marked):
        decode()
    return [Round(b[0] - a[0], device.events[a[1] : b[1]]) for a, b in itertools.pairwise(marks)]
