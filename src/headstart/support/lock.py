"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from headstart.errors import UserError

_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems answer that have no such locks: some network and user-space ones."""


class Busy(UserError):
    """Another process works in a folder, or did on a machine that is gone: `way_out` says what to type then. It is
    empty where the process is of this machine, whose system lets go of locks by itself."""

    def __init__(self, holder: str, folder: Path, mark: Path, remedy: str) -> None:
        process, _, machine = holder.partition(" on ")
        here = machine == socket.gethostname()
        named = process if here else holder
        self.way_out = "" if here else f"If no process works there any more, since its machine has died, say: rm {mark}"
        super().__init__(
            f"Another run (process {named or 'unknown'}) is working in {folder}.",
            f"{remedy} {self.way_out}".rstrip(),
        )


@contextmanager
def locked(folder: Path, remedy: str = "Wait for it, or choose another --run-dir.") -> Iterator[None]:
    """Hold a folder against a second run. The system lets go of the lock when its process ends, however it ends.

    On a file system without locks of either kind a file `lock.held` names the process that works there. It stays behind
    when that process is killed, and is then taken over on the same machine.

    Raises:
        Busy: another process holds it.
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        problem = f"Cannot write in {folder}: {error.strerror}."
        raise UserError(problem, "Choose a folder of yours with --run-dir.") from None
    with handle:
        try:
            has_locks = _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                handle.seek(0)
                raise Busy(handle.read().strip(), folder, Path(handle.name), remedy) from None
            problem = f"Cannot lock {handle.name}: {error.strerror}."
            raise UserError(problem, "Choose a folder on another disk with --run-dir.") from None
        if has_locks:
            handle.truncate(0)
            print(_here(), file=handle, flush=True)
            yield
            handle.truncate(0)
            return
        mark = folder / "lock.held"
        _claim(mark, folder, remedy)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait for a lock on a file, made if need be, and hold it; on a file system without locks, do not wait.

    Raises:
        OSError: the file cannot be opened.
    """
    with file.open("a") as handle:
        _lock(handle, fcntl.LOCK_EX)
        yield


def _lock(handle: TextIO, how: int) -> bool:
    """Lock a file; False on a file system without locks."""
    for lock in (fcntl.flock, fcntl.lockf):
        try:
            lock(handle, how)
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return False


def _claim(mark: Path, folder: Path, remedy: str) -> None:
    """Write a file that no other process has written; that of a process which was killed is replaced."""
    for _ in range(2):
        try:
            with mark.open("x", encoding="utf-8") as file:
                file.write(_here())
            return
        except FileExistsError:
            holder = ""
            with suppress(FileNotFoundError):  # released meanwhile
                holder = mark.read_text(encoding="utf-8").strip()
            process, _, machine = holder.partition(" on ")
            if machine != socket.gethostname() or not process.isdecimal() or runs(int(process)):
                raise Busy(holder, folder, mark, remedy) from None
            mark.unlink(missing_ok=True)
    raise Busy("", folder, mark, remedy)


def _here() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def runs(process: int) -> bool:
    """Whether a process of this machine is running."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
