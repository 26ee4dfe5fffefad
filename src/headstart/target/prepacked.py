"""Linear layers on a CPU whose weights are kept in the order in which oneDNN reads them.

torch hands oneDNN the weights as they are stored, and for a handful of rows it spends as long reordering them as
multiplying, in every call. Reordered once, the linear layers of SmolLM2-135M take 20 ms instead of 40 for a tree of 12
nodes and 16 instead of 25 for a single token (bfloat16, two threads of an AVX-512 machine). The kernels are the same
ones: in bfloat16 not a bit of a result changed. It costs a second copy of the weights in memory.

Shape suffixes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.target.memory import free_bytes

MAX_ROWS = 256
"""With more rows the reordering hardly counts, and plain products are as fast."""
_LAID_OUT_FOR = 32
"""Rows that the order is chosen for; for 1 row it is a slower one for most other numbers."""
_SHARE = 0.5
"""Of free memory, what the copies may take."""
_DTYPES = (torch.bfloat16, torch.float32)


def prepack(weight_OI: Tensor) -> Tensor:
    """The same weights in oneDNN's order; of use to `product` alone."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _LAID_OUT_FOR)
    return packed


def product(rows: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """Rows [.., I] times prepacked weights, [.., O]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias_O, "none", [], "")
    return out


def can_prepack(module: nn.Module) -> bool:
    """Whether it is a plain linear layer in a dtype that oneDNN multiplies on this CPU."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    weight = module.weight
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.is_contiguous()
    return plain and weight.dtype in _DTYPES and _works(weight.dtype)


def fits(modules: list[nn.Module]) -> bool:
    """Whether there is memory for second copies of the weights of these layers."""
    needed = sum(weight.nbytes for module in modules for weight in module.parameters(False))
    return needed <= _SHARE * free_bytes(torch.device("cpu"))


@cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operations, for this dtype on this CPU, and they do what they say."""
    rows_MI, weight_OI = torch.eye(4, 32, dtype=dtype), torch.arange(64 * 32).view(64, 32).remainder(7).to(dtype)
    try:
        with torch.inference_mode():
            found = product(rows_MI, prepack(weight_OI), None)
            return torch.equal(found, F.linear(rows_MI, weight_OI))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


def _sample(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """A row and a column: one number of each column and one of each row."""
    weight_OI = weight_OI.detach()
    return weight_OI[weight_OI.shape[0] // 2], weight_OI[:, weight_OI.shape[1] // 2]


class Prepacked:
    """The forward of a linear layer, with prepacked weights where they pay.

    When the layer's weights change, they are packed again: at once where PyTorch counts the change, and at the next
    `refresh` where it goes past the count, as through `weight.data` (merged adapters do that).

    Args:
        module: the layer.
        own: its own forward.
    """

    def __init__(self, module: nn.Linear, own: Callable[..., Any]) -> None:
        self._module, self._own = module, own
        self._packed: tuple[Tensor, int, Tensor] | None = None  # the weights, their version, and they packed
        self._sample: tuple[Tensor, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies pack their own: prepacked tensors can be neither copied nor saved."""
        return {**vars(self), "_packed": None, "_sample": None}

    def refresh(self) -> None:
        """Forget the packed weights when a row, a column or all of the layer's own are others by now."""
        if self._sample is not None and not all(map(torch.equal, self._sample, _sample(self._module.weight))):
            self._packed = self._sample = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows, weight, known = args[0], self._module.weight, self._packed
        few = rows.numel() <= MAX_ROWS * weight.shape[1]
        if not few or kwargs or rows.dtype != weight.dtype or (torch.is_grad_enabled() and rows.requires_grad):
            return self._own(*args, **kwargs)
        version = 0 if weight.is_inference() else weight._version
        if known is None or known[0] is not weight or known[1] != version:
            if not can_prepack(self._module):
                return self._own(*args, **kwargs)
            row_I, column_O = _sample(weight)
            self._sample = row_I.clone(), column_O.clone()
            known = self._packed = weight, version, prepack(weight)
        return product(rows, known[2], self._module.bias)
