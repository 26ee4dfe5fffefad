"""headstart: draft heads for a frozen language model, and lossless decoding with them.

>>> import headstart
>>> headstart.load.__module__
'headstart.api'
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`load` and `Decoder`, imported when first used: `import headstart` alone loads neither torch nor transformers."""
    if name in ("load", "Decoder"):
        return getattr(import_module("headstart.api"), name)
    raise AttributeError(f"module 'headstart' has no attribute {name!r}")
