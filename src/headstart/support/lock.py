"""Locks on folders and files, across processes."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

from headstart.errors import UserError

_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks: some network and user-space ones."""


class Busy(UserError):
    """Another process holds a folder; `way_out` is the remedy if its machine has died, empty for this machine."""

    def __init__(self, holder: str, folder: Path, mark: Path, remedy: str) -> None:
        process, _, machine = holder.partition(" on ")
        self.way_out, name = "", process
        if machine != socket.gethostname():
            self.way_out, name = f"If that machine has died, type: rm {mark}", holder
        problem = f"Another run (process {name or 'unknown'}) is working in {folder}."
        super().__init__(problem, f"{remedy} {self.way_out}".rstrip())


@contextmanager
def locked(
    folder: Path, remedy: str = "Wait for it, or choose another --run-dir.", name: str = "lock"
) -> Iterator[TextIO]:
    """Lock a folder, or an output in it by `name`, and yield the lock file.

    The system releases the lock when the process ends. On a file system without locks, a file `lock.held` names the
    process; a later process on the same machine replaces the file of a killed one.

    Raises:
        Busy: another process holds it.
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / name).open("a+", encoding="utf-8")
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
            yield handle
            handle.truncate(0)
            return
        mark = folder / f"{name}.held"
        _claim(mark, folder, remedy)
        try:
            yield handle
        finally:
            mark.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait for a lock on a file, created if missing; does not wait on a file system without locks."""
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
    """Create the `mark` exclusively; replace the mark of a dead process of this machine."""
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
            if machine != socket.gethostname() or not process.isdecimal() or is_running(int(process)):
                raise Busy(holder, folder, mark, remedy) from None
            mark.unlink(missing_ok=True)
    raise Busy("", folder, mark, remedy)


def _here() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def is_running(process: int) -> bool:
    """Whether a process of this machine is running."""
    return bool(psutil.pid_exists(process))
