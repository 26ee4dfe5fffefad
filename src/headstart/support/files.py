"""Writing files so that a half-written one is never taken for a complete one."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import UserError
from headstart.support.lock import runs

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"
"""Suffix of a file or folder that is still being written."""
DAMAGED = ".damaged"
"""Suffix of a file that was found damaged and put aside."""
_LENGTH = 8
"""Bytes at the beginning of a safetensors file that say how long its header is."""
_OWNER_ALONE = 0o600
"""The mode of private files; libraries such as safetensors write them."""
_HERE, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2: AT_FDCWD and a flag."""


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file, folder or link beside `path`, then `replace` with it.

    When `write` raises, or the disk is full, `path` is left as it was and no file beside it. Any number of processes
    and threads may write the same path: the last one wins. Leftovers of killed processes of this machine are deleted.
    Files get the mode of any new file here, even where a library makes them private; hard links to files elsewhere keep
    theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(path)
    for left in path.parent.glob(f"{glob.escape(f'{path.name}.{socket.gethostname()}')}.*{PARTIAL}"):
        process = left.name.split(".")[-2].partition("-")[0]
        if left == partial or (process.isdecimal() and not runs(int(process))):  # ids are used again
            with suppress(OSError):
                remove(left)
    try:
        write(partial)
        for file in [] if partial.is_symlink() else [partial, *partial.rglob("*")]:
            if file.is_file() and file.stat().st_nlink == 1:
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())
                if file.stat().st_mode & 0o777 == _OWNER_ALONE:
                    file.chmod(_mode_here(path))
        replace(partial, path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            remove(partial)
        raise


_COUNT = itertools.count()


def partial_name(path: Path) -> Path:
    """Return a name beside `path` that no other process or thread uses, for incomplete content."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}-{next(_COUNT)}{PARTIAL}")


def replace(new: Path, path: Path) -> None:
    """Move a complete file, folder or link to `path` in one step, and delete what was there.

    A folder that replaces another takes two steps, with nothing at `path` in between, where the system or the file
    system cannot exchange names.
    """
    is_folder = new.is_dir() and not new.is_symlink()
    while True:
        old = partial_name(path)
        if is_folder and os.path.lexists(path):
            if _exchange(new, path):
                return remove(new)
            with suppress(FileNotFoundError):  # another process has moved it
                path.rename(old)
        try:
            return os.replace(new, path)
        except OSError as error:  # another process has put a folder there
            if not is_folder or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        finally:
            remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where that fails or is not supported."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux
    words = _HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE
    return exchange is not None and exchange(*words) == 0


def _mode_here(path: Path) -> int:
    """Return the mode that a new file beside a path gets."""
    probe = partial_name(path)
    probe.touch()
    try:
        return probe.stat().st_mode & 0o777
    finally:
        probe.unlink()


def check_writable(folder: Path) -> None:
    """See that files can be written into a folder, before the work whose results they hold.

    Raises:
        UserError: they cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=existing(folder)) as handle:
            handle.write(b"x")
    except OSError as error:
        raise UserError(f"Cannot write to {folder} ({error.strerror or error}).", "Choose another folder.") from None


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, as UTF-8."""
    write_atomic(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write a file atomically, as JSON."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def json_lines(value: Any, depth: int, margin: str = "") -> str:
    """JSON with a line for each value down to a depth, and what lies deeper on the line of what holds it.

    >>> print(json_lines({"a": [1, 2], "b": {"c": {"d": 3}}}, 2))
    {
     "a": [
      1,
      2
     ],
     "b": {
      "c": {"d":3}
     }
    }
    """
    if not depth or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    inner = margin + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(key))}: {json_lines(each, depth - 1, inner)}" for key, each in value.items()]
    else:
        lines = [json_lines(each, depth - 1, inner) for each in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}{end}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, in place; an OSError where the system refuses, as from every other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    complete = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(complete, path, metadata=dict(metadata or {"format": "pt"}))
    except SafetensorError as error:  # its text is all that it says of the system's reason
        if reason := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(reason[1]), os.strerror(int(reason[1])), str(path)) from None
        raise


def append_whole(file: int, data: bytes) -> None:
    """Add bytes to a file that was opened for appending, by nobody else meanwhile; an OSError where the system refuses,
    the file being as it was."""
    size, written = os.fstat(file).st_size, 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        os.ftruncate(file, size)
        raise


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's bytes lie in its file, from `start` up to `stop`; the dtype is in the words of safetensors."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def tensor_places(file: Path) -> dict[str, TensorPlace]:
    """Where the tensors of a safetensors file lie, by name; a ValueError where it is cut short or damaged."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(_LENGTH), "little")
        size = file.stat().st_size
        if length > size:
            raise ValueError("its header is cut short")
        header: dict[str, Any] = json.loads(handle.read(length))
    places = {}
    for name, known in header.items():
        if name != "__metadata__":
            start, stop = (_LENGTH + length + offset for offset in known["data_offsets"])
            places[name] = TensorPlace(known["dtype"], tuple(known["shape"]), start, stop)
    if max((place.stop for place in places.values()), default=_LENGTH + length) != size:
        raise ValueError("it is not as long as its header says")
    return places


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file atomically, one JSON object a line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def no_folder(path: Path | str, remedy: str) -> UserError:
    """What to say of a path where a folder should be, and there is none."""
    if Path(path).expanduser().is_file():
        return UserError(f"{path} is a file, not a folder.", remedy)
    return UserError(f"No folder at {path}.", remedy)


def read_json(path: Path, again: str = "Delete it and run the command again.") -> Any:
    """Read a JSON file; a UserError names a file that is missing or damaged, and then gives `again` as the remedy."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors mark UTF-8
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.", "Check the path.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}).", again) from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number counted from 1, object) for each line of a file or pipe that is not blank.

    Raises:
        UserError: no such file, or a line is not a JSON object in UTF-8; the message names file and line.
    """
    if path.is_dir() or not path.exists():
        raise UserError(f"No file at {path}.", "Check the path; questions and prompts are JSONL, one object a line.")
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            where, remedy = f"{path}, line {number}", "Write one JSON object a line."
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # Windows' editors mark UTF-8
                if not text.strip():
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 ({error.reason}).", "Convert the file to UTF-8.") from None
            except json.JSONDecodeError as error:
                problem = f"{where}: not valid JSON ({error.msg} at column {error.colno})."
                raise UserError(problem, remedy) from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: a {type(row).__name__}, not an object.", remedy)
            yield number, row


def existing(folder: Path) -> Path:
    """A folder or its nearest existing parent."""
    return next(path for path in [folder, *folder.parents] if path.exists())


_IN_A_RUN = "choose another --run-dir, or lower the byte or token budget in the recipe"


def size(path: Path, second_names: bool = True) -> int:
    """Bytes of all files under a folder, or of a file; links are not followed. Files that have a second name elsewhere
    count only with `second_names`."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):  # moved into its place meanwhile
            status = file.lstat()
            total += status.st_size if second_names or status.st_nlink == 1 else 0
    return total


def free_disk(folder: Path) -> int:
    """Bytes that are free at a folder or its nearest existing parent."""
    return shutil.disk_usage(existing(folder)).free


def need_disk(folder: Path, needed_bytes: int, what: str, remedy: str = _IN_A_RUN) -> None:
    """Refuse to start work that the disk cannot hold.

    Raises:
        UserError: when fewer than `needed_bytes` (plus 5 %) are free.
    """
    free = free_disk(folder)
    if free < needed_bytes * 1.05:
        raise UserError(
            f"{what} needs {format_bytes(needed_bytes)} at {folder}, and {format_bytes(free)} are free.",
            f"Free some space, {remedy}.",
        )


def format_bytes(count: float) -> str:
    """A byte count as people write it, in powers of 1000.

    >>> format_bytes(98_000_000)
    '98.0 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder with its content, if there is one; other processes may delete it too."""
    while path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):  # another process has deleted a part of it
            shutil.rmtree(path)
    path.unlink(missing_ok=True)


def refuse_others(folder: Path, known: Collection[str]) -> None:
    """Refuse (UserError) to replace a folder that holds more than these files and folders."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file.", "Give a folder.")
    if other := sorted({path.name for path in folder.iterdir()} - set(known)):
        raise UserError(
            f"{folder} holds other files, which would be lost: {', '.join(other[:3])}.",
            "Move them away, or choose another folder.",
        )


def file_hash(file: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
