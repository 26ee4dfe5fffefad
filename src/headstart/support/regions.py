"""Regional compilation: torch.compile on parts of a model, called from uncompiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, TypeVar

import torch

R = TypeVar("R")

_VARIANTS = 64
"""Beyond torch's limit of 8, attention would run uncompiled, and store all scores."""


@cache
def compile_region(function: Callable[..., R]) -> Callable[..., R]:
    """Compile a function, once per process, for up to `_VARIANTS` kinds of inputs."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    return torch.compile(function)


def call_compiled(function: Callable[..., R], *inputs: Any) -> R:
    """Call a function or method, compiled. Objects of a class share the compiled code of a method."""
    code: Callable[..., R] = compile_region(getattr(function, "__func__", function))
    return code(function.__self__, *inputs) if isinstance(function, MethodType) else code(*inputs)
