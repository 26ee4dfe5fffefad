"""Keep large blocks of freed memory in the process, so that a training step on a CPU does not pay for fresh pages."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed blocks of up to 1 GiB instead of handing them back to the system.

    By default every block above 32 MiB (a table of logits, the gradient of an LM head) is mapped anew each time and
    its pages are faulted in and zeroed. Memory at its peak is the same; it is not given back afterwards.

    Returns:
        Whether the C library took the setting; any other than glibc is left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE - 1))
