"""Linear layers (`nn.Linear`) of a target that use prepacked weights for a few rows (see `prepacked`).

`PrepackedForward` replaces the forward of one layer. `MergedLinear` is an operator of a replay, for one layer or
several that read the same rows. Layers with a bias and layers without are merged separately, up to a size limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from headstart.kernels.prepacked import PrepackedCopy, PrepackedWeights, can_pack, prepacked_linear, product
from headstart.replay.attention import current_forward

_MAX_MERGED_BYTES = 1 << 28
"""Maximum bytes of weights to merge into one product; the saved call overhead is negligible beyond."""


class PrepackedForward:
    """Replacement for a linear layer's `forward`; outside our forwards it calls the original."""

    def __init__(self, module: nn.Module, original: Any) -> None:
        self.is_stock = original is None  # it replaces the class's own forward
        self._module: Any = module
        self._original = original or partial(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, module, out = current_forward(), self._module, None
        if self.is_stock and forward is not None and forward.recording is None and len(args) == 1 and not kwargs:
            options = {"int8": forward.int8, "any_rows": forward.batch_invariant}
            out = prepacked_linear(args[0], module.weight, module.bias, **options)
        return self._original(*args, **kwargs) if out is None else out


class MergedLinear:
    """Linear layers on the same rows, merged into one prepacked product; in 8 bits with `int8` if supported."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], int8: bool = False) -> None:
        self.int8 = int8 and can_pack(weights[0], int8)
        self.weights, self._biases = list(weights), [bias for bias in biases if bias is not None]
        self.tensors = [*self.weights, *self._biases]
        self.sizes = [len(weight) for weight in weights]
        self._copy = PrepackedCopy(self.int8)

    @staticmethod
    def groups(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[list[int]]:
        """Group layers with a bias and layers without; a group above `_MAX_MERGED_BYTES` is not merged."""
        groups: list[list[int]] = []
        for has_bias in (False, True):
            group = [index for index, bias in enumerate(biases) if (bias is not None) == has_bias]
            too_large = sum(weights[index].nbytes for index in group) > _MAX_MERGED_BYTES
            groups += [[index] for index in group] if too_large else [group]
        return [group for group in groups if group]

    def prepacked(self) -> PrepackedWeights:
        """Return the up-to-date copy."""
        copy = self._copy.of(self.weights, self._biases)
        assert copy is not None, "recorded with weights that can be packed"
        return copy

    def refresh(self) -> PrepackedWeights | None:
        """Drop a stale copy; return the current one."""
        return self._copy.refresh(self.weights, self._biases)

    def __call__(self, rows: Tensor, norm_I: Tensor | None, eps: float, gates: bool, added: Tensor | None) -> Tensor:
        """See `prepacked.product`."""
        copy, norm = self.prepacked(), None if norm_I is None else (norm_I, eps)
        return product(rows, copy.weight, copy.bias_O, norm, gates, added)


def can_prepack(module: nn.Module) -> bool:
    """Whether a module is an unmodified `nn.Linear` with packable weights."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and can_pack(module.weight)


def has_matrix(module: nn.Module) -> bool:
    """Whether a module is a leaf module with matrix weights, such as a linear layer, or an MoE's experts or router.
    Embeddings are not."""
    if isinstance(module, nn.Embedding) or any(True for child in module.children() for _ in child.parameters()):
        return False
    return any(weight.ndim >= 2 for weight in module.parameters(False))
