"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.errors import UserError


class Busy(UserError):
    """Another process works in a folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against a second run. The system lets go of the lock when its process ends, however it ends.

    Raises:
        Busy: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise Busy(
                f"Another run (process {holder}) is working in {folder}.", "Wait for it, or choose another --run-dir."
            ) from None
        handle.truncate(0)
        print(os.getpid(), file=handle, flush=True)
        yield
        handle.truncate(0)
