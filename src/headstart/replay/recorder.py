"""Record the operators of a forward as an fx graph, and compile the graph to one Python function.

Takes code that computes tensors, such as a decoder's forward; gives a function that calls the same operators without
the modules. Module overhead is a fifth of a small forward on a CPU.

The code runs twice, with different token counts. An int that differs between the two runs becomes a linear function of
the token count, so one graph serves any number of tokens. Code that reads tensor values raises `NotRecordable`; so does
a branch on the token count, if the two runs take different sides. A branch that both take alike goes unnoticed.

Operators are recorded as Python calls them (`torch.nn.functional.linear`, `Tensor.mul`), before decomposition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode, resolve_name

_ON_HOST = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "numpy"}
"""Functions that copy tensor values to Python."""
_DATA_SHAPED = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "equal", "allclose"}
"""Functions with data-dependent shapes or Python results."""
_MAY_DO_NOTHING = {"to", "float", "type_as", "dropout"}
"""Functions that may return their first argument unchanged."""
COUNT_INPUT = "size"
"""Name of the last input, the token count."""
DYNAMIC_DIM = -1
"""Placeholder for the token count in a shape."""


class NotRecordable(Exception):
    """Raised if a forward cannot be recorded. The message is the reason, as a clause of its own."""


class Recorder(TorchFunctionMode):
    """Adds every operator that Python code calls to `graph`.

    Weights and buffers become "get_attr" nodes with the tensor in `meta["constant"]`. Results have `meta["dtype"]` and
    `meta["shape"]`; operators that write into their arguments have `meta["writes"]`.
    """

    def __init__(self, names: Sequence[str], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}  # by id of the tensor
        self._kept: list[Tensor] = []  # alive, so that ids stay unique
        self._paused = False
        for name, tensor in zip(names, inputs, strict=True):
            self._add_result(tensor, self.graph.placeholder(name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        name = getattr(func, "__name__", "")
        if name in _ON_HOST or name in _DATA_SHAPED or _selects(name, args):
            raise NotRecordable(f"its code reads tensor values ({resolve_name(func) or name})")
        if name == "__set__":
            raise NotRecordable("its code assigns to tensor attributes (such as .data)")
        if name in _MAY_DO_NOTHING and args and result is args[0]:
            return result
        if _has_tensors(result) or (result is None and name != "__get__"):
            self.add(func, args, kwargs or {}, result)
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run a block without recording it."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def add(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add a call to the graph."""
        # Look up the arguments before the result is registered: an in-place operator returns its first argument.
        node = call(self.graph, function, map_aggregate(args, self.operand), map_aggregate(kwargs, self.operand))
        name = getattr(function, "__name__", "")
        node.meta["writes"] = result is None or (name.endswith("_") and not name.endswith("__"))
        node.meta["writes"] |= name.startswith("__i") and name != "__invert__"
        self._add_result(result, node)

    def operand(self, value: Any) -> Any:
        """Return the node of a tensor; a tensor that no recorded operator made is a constant."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            node = self.graph.create_node("get_attr", f"constant_{len(self._nodes)}")
            node.meta["constant"] = value
            self._nodes[id(value)] = node
        return self._nodes[id(value)]

    def _add_result(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            node.meta.update(dtype=result.dtype, shape=tuple(result.shape))
            self._nodes[id(result)] = node
            self._kept.append(result)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                self._add_result(part, call(self.graph, operator.getitem, (node, index)))


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


def record(
    code: Callable[..., Any], names: Sequence[str], inputs: Callable[[int], Sequence[Tensor]], counts: tuple[int, int]
) -> fx.Graph:
    """Record the operators that code runs, as a graph with the inputs `names` and `COUNT_INPUT`.

    Args:
        code: takes a `Recorder` and the inputs, and returns nested tensors computed from them.
        names: of the inputs.
        inputs: makes the inputs for a token count.
        counts: the different token counts of the two recordings.

    Raises:
        NotRecordable: the code is not a fixed list of operators.
    """
    graph, other = (_run(code, names, inputs(count)) for count in counts)
    if len(graph.nodes) != len(other.nodes):
        raise NotRecordable("its operators depend on the number of tokens")
    nodes = list(graph.nodes)
    with graph.inserting_after(nodes[len(names) - 1]):
        merge = _Merge(graph, graph.placeholder(COUNT_INPUT), counts)
    for pair in zip(nodes, other.nodes, strict=True):
        merge.merge_nodes(*pair)
    return graph


def _run(code: Callable[..., Any], names: Sequence[str], inputs: Sequence[Tensor]) -> fx.Graph:
    recorder = Recorder(names, inputs)
    with torch.no_grad(), recorder:
        results = code(recorder, *inputs)
    recorder.graph.output(map_aggregate(results, recorder.operand))
    return recorder.graph


class _Merge:
    """Merges the second recording into the graph of the first, with sizes as functions of the token count."""

    def __init__(self, graph: fx.Graph, count: fx.Node, counts: tuple[int, int]) -> None:
        self._graph, self._count, self._counts = graph, count, counts
        self._sizes: dict[tuple[int, int], fx.Node] = {}  # by slope and offset

    def merge_nodes(self, node: fx.Node, other: fx.Node) -> None:
        """Merge a node's arguments and shape."""
        if node.op == other.op == "get_attr" and node.meta["constant"] is not other.meta["constant"]:
            raise NotRecordable("its code creates tensors that the recorder cannot trace")
        if (node.target, node.meta.get("dtype")) != (other.target, other.meta.get("dtype")):
            raise NotRecordable("its operators depend on the number of tokens")
        with self._graph.inserting_before(node):
            node.args, node.kwargs = self._merge(node.args, other.args), self._merge(node.kwargs, other.kwargs)
        if "shape" in node.meta:
            pairs = zip(node.meta["shape"], other.meta["shape"], strict=True)
            node.meta["shape"] = tuple(DYNAMIC_DIM if pair == self._counts else pair[0] for pair in pairs)

    def _merge(self, value: Any, other: Any) -> Any:
        if type(value) is not type(other):
            raise NotRecordable("its operators depend on the number of tokens")
        if isinstance(value, slice):
            ends = [(value.start, other.start), (value.stop, other.stop), (value.step, other.step)]
            return slice(*(self._merge(*pair) for pair in ends))
        if isinstance(value, dict):
            return {key: self._merge(part, other[key]) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            parts = [self._merge(*pair) for pair in zip(value, other, strict=True)]
            return parts if isinstance(value, list) else tuple(parts)
        if value is other or value == other or (isinstance(value, fx.Node) and value.name == other.name):
            return value
        if isinstance(value, bool):
            raise NotRecordable("its code branches on the number of tokens")
        if not isinstance(value, int):
            raise NotRecordable(f"an argument is {value!r} or {other!r}, depending on the number of tokens")
        slope, rest = divmod(other - value, self._counts[1] - self._counts[0])
        if rest:
            raise NotRecordable(f"an argument is {value} or {other}, depending on the number of tokens")
        return self._size(slope, value - slope * self._counts[0])

    def _size(self, slope: int, offset: int) -> fx.Node:
        """Return a node for `slope` times the token count plus `offset`."""
        if (slope, offset) not in self._sizes:
            node = self._count if slope == 1 else call(self._graph, operator.mul, (self._count, slope))
            self._sizes[slope, offset] = call(self._graph, operator.add, (node, offset)) if offset else node
        return self._sizes[slope, offset]


def select(graph: fx.Graph, which: Sequence[int]) -> fx.Graph:
    """Copy a graph, returning only these of its results, without unused operators."""
    copied = fx.Graph()
    results: Any = copied.graph_copy(graph, {})
    copied.output([results[index] for index in which])
    remove_unused(copied)
    return copied


def call(graph: fx.Graph, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Create a node that calls a function or callable object."""
    name = getattr(function, "__name__", type(function).__name__)
    return graph.create_node("call_function", function, args, kwargs, name=name)


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Replace a node's uses by a new node of the same shape and dtype."""
    new.meta.update({name: node.meta[name] for name in ("dtype", "shape") if name in node.meta})
    node.replace_all_uses_with(new)


def remove_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not node.meta.get("writes"):
            graph.erase_node(node)


def compile_graph(graph: fx.Graph) -> Callable[..., Any]:
    """Compile Python source with a line per operator, which deletes tensors after their last use."""
    source, namespace = _python_source(graph)
    exec(compile(source, "<recorded forward>", "exec"), namespace)
    replay: Callable[..., Any] = namespace["replay"]
    return replay


def _python_source(graph: fx.Graph) -> tuple[str, dict[str, Any]]:
    """Write a graph as a Python function; return it with the objects that it names."""
    names: dict[fx.Node, str] = {}
    namespace: dict[str, Any] = {}
    last = {source: node for node in graph.nodes for source in node.all_input_nodes}

    def expression(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (tuple, list)):
            inner = ", ".join(map(expression, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {expression(part)}" for key, part in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({expression(value.start)}, {expression(value.stop)}, {expression(value.step)})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        name = f"k{len(namespace)}"
        namespace[name] = value
        return name

    functions: dict[int, str] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "get_attr":
            names[node] = expression(node.meta["constant"])
        elif node.op == "output":
            lines.append(f"return {expression(node.args[0])}")
        else:
            function = functions.get(id(node.target)) or functions.setdefault(id(node.target), expression(node.target))
            arguments = [*map(expression, node.args), *(f"{key}={expression(x)}" for key, x in node.kwargs.items())]
            call, names[node] = f"{function}({', '.join(arguments)})", f"v{number}"
            lines.append(f"v{number} = {call}" if node.users else call)
            done = [source for source in node.all_input_nodes if source.op == "call_function" and last[source] is node]
            if done:
                lines.append("del " + ", ".join(names[source] for source in done))
    inputs = ", ".join(str(node.target) for node in graph.nodes if node.op == "placeholder")
    body = "\n    ".join(lines)
    return f"def replay({inputs}):\n    {body}\n", namespace
