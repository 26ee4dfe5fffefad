"""`train.compile`: what every position goes through in a step, compiled by torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from headstart.errors import UserError

F = TypeVar("F", bound=Callable[..., object])

BACKEND = "inductor"
"""Of `torch.compile`."""


def compiled(function: F) -> F:
    """The function compiled, for batches of any shape."""
    return cast(F, torch.compile(function, dynamic=True, backend=BACKEND))


def check_compiler(device: torch.device | str) -> None:
    """Refuse to compile where what compiles is missing.

    Raises:
        UserError: no C++ compiler, or on a GPU no triton.
    """
    if BACKEND != "inductor":
        return
    kind = torch.device(device).type
    if kind == "cpu":
        from torch._inductor import config

        names = [name for name in (config.cpp.cxx if isinstance(config.cpp.cxx, tuple) else (config.cpp.cxx,)) if name]
        if not any(shutil.which(name) for name in [*names, "g++", "clang++"]):
            raise UserError(
                "train.compile needs a C++ compiler, and there is none.",
                "Install g++ (or name one in the variable CXX), or set train.compile=false.",
            )
    elif kind == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError(
                "train.compile needs triton on a GPU, and it is missing or too old for this one.",
                "Install triton (pip install triton), or set train.compile=false.",
            )
