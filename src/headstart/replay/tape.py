"""Record the operators of a forward and replay them without its modules.

Module overhead is a fifth of a small forward on a CPU. `record` runs the model's code under `_Recorder`, and
`Tape.compile` turns the recorded operators into one straight-line function.

The code runs twice, over different numbers of tokens. An int that differs between the runs becomes a linear function of
the token count, so one tape serves any width. Code that reads tensor values or branches on the count raises
`NotRecordable`.

Operators are recorded at the level of Python calls (`torch.nn.functional.linear`, `Tensor.mul`), before decomposition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode, resolve_name

_ON_HOST = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "numpy"}
"""Functions that copy tensor values to Python."""
_DATA_SHAPED = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "equal", "allclose"}
"""Functions with data-dependent shapes or Python results."""
_MAY_DO_NOTHING = {"to", "float", "type_as", "dropout"}
"""Functions that may return their first argument unchanged."""
SIZE = "size"
"""Name of the token count input."""
COUNT = -1
"""Placeholder for the number of tokens in a shape."""


class NotRecordable(Exception):
    """Why a forward cannot be recorded; the message completes a sentence that begins with its name."""


@dataclass(frozen=True, slots=True)
class _Value:
    """An input, or the result of an earlier operator."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...] = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Constant:
    """A weight or a buffer."""

    number: int


@dataclass(frozen=True, slots=True)
class _Size:
    """`slope` times the count of tokens, plus `offset`."""

    slope: int
    offset: int


class _Call(NamedTuple):
    """An operator, with arguments and results as nested `_Value` and `_Constant` objects."""

    function: Any
    args: Any
    results: Any


class _Recorder(TorchFunctionMode):
    """Records every operator that Python code calls."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.constants: list[Tensor] = []
        # Tensors are identified by id, and kept alive so that ids stay unique.
        self._kept: list[Tensor] = list(inputs)
        self._values = {id(tensor): number for number, tensor in enumerate(inputs)}
        self._count = len(inputs)
        self._constants: dict[int, int] = {}
        self._listens = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._listens:
            return result
        name = getattr(func, "__name__", "")
        if name in _ON_HOST or name in _DATA_SHAPED or _selects(name, args):
            raise NotRecordable(f"its code reads tensor values ({resolve_name(func) or name})")
        if name == "__set__":
            raise NotRecordable("its code replaces parts of tensors")
        if name in _MAY_DO_NOTHING and args and result is args[0]:
            return result
        if _has_tensors(result) or (result is None and name != "__get__"):
            self.note(func, (args, kwargs or {}), result)
        return result

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Pause recording."""
        before, self._listens = self._listens, False
        try:
            yield
        finally:
            self._listens = before

    def note(self, function: Any, args: Any, result: Any) -> None:
        """Record a call."""
        encoded = _mapped(
            self._source, args
        )  # encoded before `_new`: an in-place result is the same tensor as its argument
        self.calls.append(_Call(function, encoded, _mapped(self._new, result)))

    def _source(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        number = self._values.get(id(value))
        if number is not None:
            return _Value(number, value.dtype, tuple(value.shape))
        if id(value) not in self._constants:
            self._constants[id(value)] = len(self.constants)
            self.constants.append(value)
        return _Constant(self._constants[id(value)])

    def _new(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._values[id(value)] = self._count  # an in-place operator returns its first argument
        self._kept.append(value)
        self._count += 1
        return _Value(self._count - 1, value.dtype, tuple(value.shape))


def _selects(name: str, args: Any) -> bool:
    """Whether this selects by a boolean mask, with a data-dependent size."""
    if name == "where":
        return len(args) == 1
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensors, value)))


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Map the leaves of nested lists, tuples, dictionaries and slices."""
    if isinstance(value, tuple):
        return tuple([_mapped(change, part) for part in value])
    kind = type(value)
    if kind is list:
        return [_mapped(change, part) for part in value]
    if kind is dict:
        return {key: _mapped(change, part) for key, part in value.items()}
    if kind is slice:
        return slice(_mapped(change, value.start), _mapped(change, value.stop), _mapped(change, value.step))
    return change(value)


@dataclass
class Tape:
    """A recorded forward.

    Attributes:
        graph: its operators; placeholders are the inputs by name, then `SIZE`, the token count. Weights and buffers are
            "get_attr" nodes with the tensor in `meta["constant"]`; results have `meta["dtype"]` and `meta["shape"]`,
            with `COUNT` for the token dimension.
        constants: weights and buffers.
    """

    graph: fx.Graph
    constants: list[Tensor]

    def giving(self, which: Sequence[int]) -> Tape:
        """Copy the tape, returning only these results, without unused operators."""
        graph = fx.Graph()
        results: Any = graph.graph_copy(self.graph, {})
        graph.output([results[index] for index in which])
        clean(graph)
        return Tape(graph, self.constants)

    def compile(self) -> Callable[..., Any]:
        """Compile Python source with a line per operator; it deletes tensors after their last use."""
        source, space = _source(self.graph)
        exec(compile(source, "<recorded forward>", "exec"), space)
        replay: Callable[..., Any] = space["replay"]
        return replay


def record(
    code: Callable[..., Any], names: Sequence[str], inputs: Callable[[int], Sequence[Tensor]], counts: tuple[int, int]
) -> Tape:
    """Record the operators that code runs.

    Args:
        code: takes a `_Recorder` and the inputs, and returns nested tensors computed from them.
        names: of the inputs.
        inputs: makes the inputs for a token count.
        counts: token counts of the two recordings; sizes that no part of the model has.

    Raises:
        NotRecordable: the code is not a fixed list of operators.
    """
    (recorder, results), (other, other_results) = (_run(code, inputs(count)) for count in counts)
    if len(recorder.calls) != len(other.calls):
        raise NotRecordable("its operators depend on the number of tokens")
    if any(a is not b for a, b in zip(recorder.constants, other.constants, strict=False)):
        raise NotRecordable("its code creates tensors that the recorder cannot trace")
    builder = _Builder(names, recorder.constants, counts)
    for calls in zip(recorder.calls, other.calls, strict=True):
        builder.add(*calls)
    builder.graph.output(_mapped(builder.node, builder.joined(results, other_results)))
    return Tape(builder.graph, recorder.constants)


def _run(code: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[_Recorder, Any]:
    recorder = _Recorder(inputs)
    with torch.no_grad(), recorder:
        results = code(recorder, *inputs)
    return recorder, _mapped(recorder._source, results)


class _Builder:
    """Converts calls to graph nodes."""

    def __init__(self, names: Sequence[str], constants: list[Tensor], counts: tuple[int, int]) -> None:
        self.graph = fx.Graph()
        self._values = {number: self.graph.placeholder(name) for number, name in enumerate(names)}
        self._size = self.graph.placeholder(SIZE)
        self._constants, self._counts = constants, counts
        self._attributes: dict[int, fx.Node] = {}
        self._sizes: dict[_Size, fx.Node | int] = {}

    def add(self, first: _Call, second: _Call) -> None:
        """Add a call, given both recordings of it."""
        if first.function != second.function:
            raise NotRecordable("its operators depend on the number of tokens")
        args, kwargs = _mapped(self.node, self.joined(first.args, second.args))
        node = call(self.graph, first.function, args, kwargs)
        name = getattr(first.function, "__name__", "")
        # Operators that write into their arguments stay even if their result is unused.
        node.meta["writes"] = first.results is None or (name.endswith("_") and not name.endswith("__"))
        node.meta["writes"] |= name.startswith("__i") and name != "__invert__"
        self._name(first.results, second.results, node)

    def _name(self, results: Any, others: Any, node: fx.Node) -> None:
        if isinstance(results, _Value):
            self._values[results.number] = node
            pairs = zip(results.shape, others.shape, strict=True)
            shape = tuple(COUNT if pair == self._counts else pair[0] for pair in pairs)
            node.meta.update(dtype=results.dtype, shape=shape)
        elif isinstance(results, (tuple, list)):
            for index, (part, other) in enumerate(zip(results, others, strict=True)):
                self._name(part, other, call(self.graph, operator.getitem, (node, index)))

    def node(self, leaf: Any) -> Any:
        """Convert a leaf of the arguments for the graph."""
        if isinstance(leaf, _Value):
            return self._values[leaf.number]
        if isinstance(leaf, _Constant):
            if leaf.number not in self._attributes:
                node = self.graph.create_node("get_attr", f"constant_{leaf.number}")
                node.meta["constant"] = self._constants[leaf.number]
                self._attributes[leaf.number] = node
            return self._attributes[leaf.number]
        if isinstance(leaf, _Size):
            if leaf not in self._sizes:
                node = self._size
                if leaf.slope != 1:
                    node = call(self.graph, operator.mul, (node, leaf.slope))
                if leaf.offset:
                    node = call(self.graph, operator.add, (node, leaf.offset))
                self._sizes[leaf] = node
            return self._sizes[leaf]
        return leaf

    def joined(self, value: Any, other: Any) -> Any:
        """Merge two recordings of the same argument."""
        if type(value) is not type(other):
            raise NotRecordable("its operators depend on the number of tokens")
        if isinstance(value, (_Value, _Constant)) or not isinstance(value, (tuple, list, dict, slice, int)):
            if value is not other and value != other:
                raise NotRecordable(f"an argument is {value!r} or {other!r}, depending on the tokens")
            return value
        if isinstance(value, slice):
            ends = [(value.start, other.start), (value.stop, other.stop), (value.step, other.step)]
            return slice(*(self.joined(*pair) for pair in ends))
        if isinstance(value, dict):
            return {key: self.joined(part, other[key]) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            parts = [self.joined(*pair) for pair in zip(value, other, strict=True)]
            return parts if isinstance(value, list) else tuple(parts)
        if value == other:
            return value
        if isinstance(value, bool):
            raise NotRecordable("its code branches on the number of tokens")
        slope, rest = divmod(other - value, self._counts[1] - self._counts[0])
        if rest:
            raise NotRecordable(f"an argument is {value} or {other}, depending on the number of tokens")
        return _Size(slope, value - slope * self._counts[0])


# -- from a graph to a function ----------------------------------------------------------------------------------------


def call(graph: fx.Graph, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Create a node that calls a function or callable object."""
    name = getattr(function, "__name__", type(function).__name__)
    return graph.create_node("call_function", function, args, kwargs, name=name)


def put_for(new: fx.Node, node: fx.Node) -> None:
    """Replace a node's uses by a new node of the same shape and dtype."""
    new.meta.update({name: node.meta[name] for name in ("dtype", "shape") if name in node.meta})
    node.replace_all_uses_with(new)


def clean(graph: fx.Graph) -> None:
    """Remove unused nodes."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not node.meta.get("writes"):
            graph.erase_node(node)


def _source(graph: fx.Graph) -> tuple[str, dict[str, Any]]:
    """Write a graph as a Python function; return it with the objects that it names."""
    names: dict[fx.Node, str] = {}
    space: dict[str, Any] = {}
    last = {source: node for node in graph.nodes for source in node.all_input_nodes}

    def written(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(written, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {written(part)}" for key, part in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({written(value.start)}, {written(value.stop)}, {written(value.step)})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        name = f"k{len(space)}"
        space[name] = value
        return name

    functions: dict[int, str] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "get_attr":
            names[node] = written(node.meta["constant"])
        elif node.op == "output":
            lines.append(f"return {written(node.args[0])}")
        else:
            function = functions.get(id(node.target)) or functions.setdefault(id(node.target), written(node.target))
            arguments = [*map(written, node.args), *(f"{key}={written(part)}" for key, part in node.kwargs.items())]
            call, names[node] = f"{function}({', '.join(arguments)})", f"v{number}"
            lines.append(f"v{number} = {call}" if node.users else call)
            done = [source for source in node.all_input_nodes if source.op == "call_function" and last[source] is node]
            if done:
                lines.append("del " + ", ".join(names[source] for source in done))
    inputs = ", ".join(str(node.target) for node in graph.nodes if node.op == "placeholder")
    body = "\n    ".join(lines)
    return f"def replay({inputs}):\n    {body}\n", space
