"""A model of low precision in float32, without a copy of it: each part is cast while its own forward runs.

The results are those of `copy.deepcopy(model).float()`, bit for bit; the memory is that of the largest part, a layer or
the LM head, instead of the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def in_float32(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let the model's forward compute in float32 with its own weights; the weights are as before when it ends.

    Args:
        model: of any dtype.
        layers: its decoder layers. Each is cast as a whole, since what is in it may read its neighbours' weights;
            outside of them each module is cast on its own.
    """
    layers = list(layers)
    inside = {id(part) for layer in layers for part in layer.modules()}
    with ExitStack() as hooks:
        for layer in layers:
            _cast(layer, hooks, recurse=True)
        for module in model.modules():
            if id(module) not in inside:
                _cast(module, hooks, recurse=False)
        yield


def _cast(module: nn.Module, hooks: ExitStack, recurse: bool) -> None:
    """Cast what a module holds before its forward, and give it back afterwards, also when the forward raises."""
    held = [*module.parameters(recurse), *module.buffers(recurse)]
    low = [tensor for tensor in held if tensor.is_floating_point() and tensor.dtype != torch.float32]
    if not low:
        return
    kept: list[tuple[Tensor, Tensor]] = []

    def before(*_: Any) -> None:
        kept.extend((tensor, tensor.data) for tensor in low)
        for tensor in low:
            tensor.data = tensor.data.float()

    def after(*_: Any) -> None:
        while kept:
            tensor, own = kept.pop()
            tensor.data = own

    hooks.callback(module.register_forward_pre_hook(before).remove)
    hooks.callback(module.register_forward_hook(after, always_call=True).remove)
