"""How the linear layers of a target multiply a few rows by their weights in forwards of ours.

They do it with prepacked copies of the weights where there are any, see `prepacked`.

**The bits a row has alone.** Libraries choose another kernel, and with it another order of the sums, by the number of
rows. Which numbers share a kernel differs from machine to machine and from shape to shape, so it is tried: with
products whose exact result is 0, what comes out is rounding alone, and any other order of the sums shows. Where a
single row differs from several, it runs beside an empty one.

Shape suffixes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headstart.target.attention import running
from headstart.target.prepacked import Packed, PackedCopy, can_pack, in_panels, multiplied, prepack, product

_LEVELS = (32, 64, 128)
"""Most rows that are tried, first and when more rows come."""
_TRIED = (*range(1, 9), 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128)
_TRIED_LARGE = (1, 2, 3, 4, 16, 32, 48, 64, 96, 128)
"""Numbers of rows that are tried, and those for large layers (LM heads)."""
_LARGE = 1 << 23
"""Weights from which a layer is large."""
_PADDED = 4
"""A single row may be filled up to so many: that costs next to nothing, since the weights are read but once."""
_COPIED = 1 << 28
"""Bytes of weights up to which a layer is tried with numbers of our own choice; larger ones with their own."""


class Matrix:
    """A linear layer's forward, in forwards of ours; else the layer's own, or what somebody put in its place before."""

    def __init__(self, module: nn.Module, original: Any, prepacked: bool) -> None:
        self.is_stock = original is None  # the forward of the module's class, and of nobody else
        self._module, self._original = module, original or partial(type(module).forward, module)
        self._prepacked = prepacked and original is None
        self._alone = Alone(self._same_bits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = running()
        if forward is None or not args or forward.recording is not None:
            return self._original(*args, **kwargs)
        multiply = partial(self._multiply, forward.int8) if self._prepacked and not kwargs else self._original
        return self._alone(multiply, args, kwargs) if forward.bits else multiply(*args, **kwargs)

    def _multiply(self, int8: bool, rows: Tensor) -> Any:
        module: Any = self._module
        out = multiplied(rows, module.weight, module.bias, int8=int8)
        return self._original(rows) if out is None else out

    def _same_bits(self, rows: int) -> SameBits:
        return same_bits(self._module, rows, self._prepacked)


class Merged:
    """Linear layers that read the same rows, as one product with prepacked weights, in 8 bits if asked.

    Attributes:
        int8: whether they are, which not all processors and sizes have.
        in_panels: whether what lies around is computed with the product, see `prepacked.product`.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], int8: bool = False) -> None:
        self.int8 = int8 and in_panels(weights[0], int8)
        self.in_panels = in_panels(weights[0], self.int8)
        self.weights, self._biases = list(weights), [bias for bias in biases if bias is not None]
        self.sizes = [len(weight) for weight in weights]
        self._copy = PackedCopy(self.int8)
        self._alone = Alone(self._same_bits)

    @staticmethod
    def groups(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[list[int]]:
        """Which of these layers become one product: all that have a bias, and all that have none, where together they
        are small enough for the calls to count."""
        parts = [[at for at, bias in enumerate(biases) if (bias is None) == without] for without in (True, False)]
        small = [part for part in parts if sum(weights[at].nbytes for at in part) <= _COPIED]
        return [part for part in small if part] + [[at] for part in parts if part not in small for at in part]

    @property
    def tensors(self) -> list[Tensor]:
        """Weights and biases."""
        return [*self.weights, *self._biases]

    def packed(self) -> Packed:
        """The copy of the weights as they are now."""
        packed = self._copy.of(self.weights, self._biases)
        assert packed is not None, "recorded with weights that can be packed"
        return packed

    def has(self, packed: Packed) -> bool:
        """Whether this is the copy that it multiplies by."""
        return self._copy.is_now(packed, self.tensors)

    def refresh(self) -> None:
        """See whether the copy is still one of the layers' weights."""
        self._copy.refresh(self.weights, self._biases)

    def __call__(
        self,
        rows: Tensor,
        norm_I: Tensor | None,
        eps: float,
        gates: bool,
        added: Tensor | None,
    ) -> Tensor:
        """Rows [.., I] times the weights, with what is computed around it, see `prepacked.product`."""
        packed, forward = self.packed(), running()
        norm = None if norm_I is None else (norm_I, eps)
        if forward is None or not forward.bits:
            return packed.times(rows, packed.bias_O, norm=norm, gates=gates, added=added)
        multiply = partial(packed.times, bias_O=packed.bias_O, norm=norm, gates=gates)
        out: Tensor = self._alone(multiply, (rows,), {})
        return out if added is None else added + out

    def keeps_bits(self, rows: int) -> bool:
        """Whether each of so many rows has the bits it has alone, without more ado."""
        return self._same_bits(rows).holds(rows)

    def _same_bits(self, rows: int) -> SameBits:
        first = self.weights[0]
        return _same_bits(first.new_empty(sum(self.sizes), first.shape[1]), False, bool(self._biases), rows, True)


def can_prepack(module: nn.Module) -> bool:
    """Whether it is a plain linear layer whose weights can be prepacked."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return can_pack(module.weight)


# -- the bits a row has alone ------------------------------------------------------------------------------------------


class Alone:
    """Runs a product so that each row has the bits it has alone; `find` says with how many rows that is, from about so
    many on."""

    def __init__(self, find: Callable[[int], SameBits]) -> None:
        self._find = find
        self._known: tuple[int, SameBits] | None = None  # and with how many threads

    def __call__(self, multiply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        threads, rows = torch.get_num_threads(), args[0].numel() // args[0].shape[-1]
        known = self._known
        if known is None or known[0] != threads or rows > known[1].maximum:
            known = self._known = threads, self._find(rows)
        same = known[1]
        if same.holds(rows):
            return multiply(*args, **kwargs)
        return in_pieces(multiply, same, args, kwargs)


@dataclass(frozen=True)
class SameBits:
    """Numbers of rows that agree with each other: single rows are filled up to the fewest, and more than the maximum
    run in pieces, each row alone where that is 1."""

    fewest: int = 1
    maximum: int = 1

    def holds(self, rows: int) -> bool:
        """Whether so many rows agree."""
        return self.fewest <= rows <= self.maximum

    def pieces(self, rows: int) -> list[tuple[int, int]]:
        """Starts and stops.

        >>> SameBits(2, 32).pieces(70)
        [(0, 24), (24, 48), (48, 70)]
        >>> SameBits(2, 32).pieces(33)
        [(0, 17), (17, 33)]
        """
        size = -(-rows // -(-rows // self.maximum))
        return [(start, min(start + size, rows)) for start in range(0, rows, size)]


ALONE = SameBits()
"""Every row by itself: right for any layer."""

_KNOWN: dict[tuple[Any, ...], SameBits] = {}
_LOCK = threading.Lock()


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies rows by weights of its own: linear layers, and the experts and routers of an MoE."""
    if isinstance(module, nn.Embedding) or any(True for child in module.children() for _ in child.parameters()):
        return False
    return any(weight.ndim >= 2 for weight in module.parameters(False))


def can_try(module: nn.Module) -> bool:
    """Whether it is a plain linear layer, so that how it computes is known."""
    plain = type(module) is Conv1D or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
    return plain and isinstance(module.weight, Tensor) and module.weight.is_floating_point()


def same_bits(module: nn.Module, rows: int = 1, prepacked: bool = False) -> SameBits:
    """Numbers of rows at which this layer gives a row the same bits, with prepacked weights or its own; tried once for
    each shape, dtype and device. The more rows are about to run, the more are tried."""
    if not can_try(module):
        return ALONE
    weight: Any = module.weight
    return _same_bits(weight, isinstance(module, Conv1D), module.bias is not None, rows, prepacked)


def _same_bits(weight: Tensor, conv: bool, biased: bool, rows: int, prepacked: bool) -> SameBits:
    threads = torch.get_num_threads() if weight.device.type == "cpu" else 0
    level = next((level for level in _LEVELS if rows <= level), _LEVELS[-1])
    key = (conv, biased, tuple(weight.shape), weight.dtype, weight.device, threads, level, prepacked)
    if key not in _KNOWN:
        with _LOCK:
            if key not in _KNOWN:
                _KNOWN[key] = _try(weight, conv, biased, level, prepacked)
    return _KNOWN[key]


@torch.inference_mode()
def _try(weight: Tensor, conv: bool, biased: bool, level: int, prepacked: bool) -> SameBits:
    inputs, outputs = weight.shape if conv else (weight.shape[1], weight.shape[0])
    tried = [rows for rows in (_TRIED if weight.numel() < _LARGE else _TRIED_LARGE) if rows <= level]
    generator = torch.Generator().manual_seed(0)
    rows_4I, columns_OI = _cancelling(inputs, weight.dtype, generator)
    rows_MI = rows_4I.repeat(-(-tried[-1] // 4), 1)[: tried[-1]].to(weight.device)
    if weight.numel() * weight.itemsize <= _COPIED:
        chosen_OI = columns_OI.to(weight.device).repeat(-(-outputs // len(columns_OI)), 1)[:outputs]
        weight = chosen_OI.T.contiguous() if conv else chosen_OI
    bias_O = weight.new_zeros(outputs) if biased else None

    packed = [prepack(weight)] if prepacked else []
    if packed and weight.dtype == torch.float32 and weight.nbytes <= _COPIED:
        # Of floats that bfloat16 holds few rows are multiplied in another way than many.
        packed.append(prepack(weight.bfloat16().float()))

    def multiply(rows: int) -> Tensor:
        if conv:
            assert bias_O is not None, "as in every Conv1D"
            return torch.addmm(bias_O, rows_MI[:rows], weight)
        if packed:
            return torch.cat([product(rows_MI[None, :rows], part, bias_O)[0] for part in packed], dim=1)
        return F.linear(rows_MI[None, :rows], weight, bias_O)[0]

    return agreeing({rows: multiply(rows) for rows in tried})


def agreeing(products: dict[int, Tensor]) -> SameBits:
    """The widest range of numbers of rows that agree, given for each number M of rows, ascending, the products [M, O];
    row i + 4 of what was multiplied is row i.

    >>> one = torch.arange(8.0).view(8, 1) % 4
    >>> agreeing({1: one[:1] + 1, 2: one[:2], 4: one[:4], 8: one + 1})
    SameBits(fewest=2, maximum=4)
    """
    numbers = list(products)
    even = {rows: torch.equal(out[4:], out[:-4]) if rows > 4 else True for rows, out in products.items()}
    for maximum in reversed(numbers):
        if not even[maximum]:
            continue
        fewest = maximum
        for rows in reversed(numbers[: numbers.index(maximum)]):
            if not even[rows] or not torch.equal(products[rows], products[maximum][:rows]):
                break
            fewest = rows
        if fewest <= _PADDED:
            return SameBits(fewest, maximum)
    return ALONE


def _cancelling(inputs: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows [4, I] and columns [256, I] whose products are sums of pairs that cancel, in an order drawn at random."""
    half = inputs // 2
    order = torch.randperm(inputs, generator=generator)
    rows_4I, columns_OI = torch.zeros(4, inputs), torch.zeros(256, inputs)
    size = torch.exp2(torch.randint(-6, 7, (4, half), generator=generator).float())
    rows = size * torch.randn(4, half, generator=generator)
    columns = torch.randn(256, half, generator=generator)
    rows_4I[:, order[:half]], rows_4I[:, order[half : 2 * half]] = rows, -rows
    columns_OI[:, order[:half]] = columns_OI[:, order[half : 2 * half]] = columns
    return rows_4I.to(dtype), columns_OI.to(dtype)


def in_pieces(forward: Callable[..., Any], same: SameBits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer's forward, so many rows at a time: the first argument holds rows [.., I], and others of as many rows are
    cut with it."""
    hidden: Tensor = args[0]
    if len(args) + len(kwargs) > 1:  # experts, with the rows' routes
        pieces = same.pieces(len(hidden))
        return _joined(
            [
                forward(
                    *(_cut(value, len(hidden), piece) for value in args),
                    **{name: _cut(value, len(hidden), piece) for name, value in kwargs.items()},
                )
                for piece in pieces
            ]
        )
    rows = hidden.numel() // hidden.shape[-1]
    flat_1MI = hidden.reshape(1, rows, hidden.shape[-1])
    if rows < same.fewest:
        flat_1MI = F.pad(flat_1MI, (0, 0, 0, same.fewest - rows))
    parts = [forward(flat_1MI[:, start:stop]) for start, stop in same.pieces(flat_1MI.shape[1])]
    if not isinstance(parts[0], Tensor) or parts[0].ndim < 3:  # a router
        return _joined(parts)
    out_1MO = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return out_1MO[:, :rows].reshape(*hidden.shape[:-1], -1)


def _cut(value: Any, rows: int, piece: tuple[int, int]) -> Any:
    return value[slice(*piece)] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
