"""How the linear layers of a target multiply a few rows by their weights in forwards of ours: with prepacked copies of
them where there are any, see `prepacked`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from headstart.target.attention import running
from headstart.target.prepacked import Packed, PackedCopy, can_pack, in_panels, multiplied

_MERGED = 1 << 28
"""Bytes of weights up to which layers become one product: with more, the calls that it saves do not count."""


class Matrix:
    """A linear layer's forward, in forwards of ours; else the layer's own, or what somebody put in its place before."""

    def __init__(self, module: nn.Module, original: Any) -> None:
        self.is_stock = original is None  # the forward of the module's class, and of nobody else
        self._module: Any = module
        self._original = original or partial(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, module, out = running(), self._module, None
        if self.is_stock and forward is not None and forward.recording is None and len(args) == 1 and not kwargs:
            out = multiplied(args[0], module.weight, module.bias, int8=forward.int8, any_rows=forward.bits)
        return self._original(*args, **kwargs) if out is None else out


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

    @staticmethod
    def groups(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[list[int]]:
        """Which of these layers become one product: all that have a bias, and all that have none, where together they
        are small enough for the calls to count."""
        parts = [[at for at, bias in enumerate(biases) if (bias is None) == without] for without in (True, False)]
        small = [part for part in parts if sum(weights[at].nbytes for at in part) <= _MERGED]
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
        packed, norm = self.packed(), None if norm_I is None else (norm_I, eps)
        return packed.times(rows, packed.bias_O, norm=norm, gates=gates, added=added)


def can_prepack(module: nn.Module) -> bool:
    """Whether it is a plain linear layer whose weights can be prepacked."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return can_pack(module.weight)


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies rows by weights of its own: linear layers, and the experts and routers of an MoE."""
    if isinstance(module, nn.Embedding) or any(True for child in module.children() for _ in child.parameters()):
        return False
    return any(weight.ndim >= 2 for weight in module.parameters(False))
