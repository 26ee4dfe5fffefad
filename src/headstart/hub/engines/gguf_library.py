"""The gguf package, which only those need who write for llama.cpp."""

from __future__ import annotations

import importlib
from typing import Any

from headstart.errors import UserError


def library() -> Any:
    """The package `gguf` with its `quants`.

    Raises:
        UserError: it is not installed.
    """
    try:
        gguf = importlib.import_module("gguf")
        importlib.import_module("gguf.quants")
    except ImportError:
        raise UserError("GGUF files need the package gguf.", "Run: pip install 'headstart[gguf]'") from None
    return gguf
