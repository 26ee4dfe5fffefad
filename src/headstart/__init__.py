"""headstart: draft heads for a frozen language model, and lossless decoding with them.

>>> import headstart
>>> headstart.load.__module__
'headstart.api'
"""

import os
from importlib import import_module
from typing import Any

try:
    import fcntl  # noqa: F401  # imported to see whether it exists
except ImportError:
    raise ImportError("headstart needs Linux (macOS is untested); on Windows, run it in WSL.") from None

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    # OpenMP reads these when torch is loaded. Its threads spin while they wait, so a preempted thread delays all others
    # at every matmul. Here they sleep after a short spin of about 0.1 ms, which costs no time on a quiet machine. They
    # do not sleep at once (`active`), since a second Python thread has its own OpenMP threads.
    os.environ.update(GOMP_SPINCOUNT="6000", OMP_WAIT_POLICY="active")

__version__ = "0.1.0"


_HOMES = {
    "load": "headstart.api",
    "Decoder": "headstart.api",
    "export": "headstart.api",
    "import_heads": "headstart.api",
    "custom_generate": "headstart.hf_generate.call",
}


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `import headstart` alone loads neither torch nor transformers."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headstart' has no attribute {name!r}")
