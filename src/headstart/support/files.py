"""Atomic writes, JSON and safetensors files, and disk space."""

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

from rich import filesize

from headstart.errors import UserError
from headstart.support.lock import is_running

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"
"""Suffix of a file or folder that is still being written."""
DAMAGED = ".damaged"
"""Suffix of a damaged file that was renamed."""
_LOWER_BUDGET = "choose another --run-dir, or lower the byte or token budget in the recipe"
_LENGTH = 8
"""Bytes of the header length at the start of a safetensors file."""
_PRIVATE = 0o600
"""Mode of files written by libraries such as safetensors."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2."""


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` create a file, folder or link beside `path`, then move it to `path`.

    If `write` fails, `path` is unchanged and nothing is left beside it. Concurrent writers are safe: the last one wins.
    Leftovers of killed processes on this machine are deleted. Files get the default mode, even if a library makes them
    private; hard links keep theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(path)
    for leftover in path.parent.glob(f"{glob.escape(f'{path.name}.{socket.gethostname()}')}.*{PARTIAL}"):
        process = leftover.name.split(".")[-2].partition("-")[0]
        if leftover == partial or (process.isdecimal() and not is_running(int(process))):  # process ids are reused
            with suppress(OSError):
                remove(leftover)
    try:
        write(partial)
        for file in [] if partial.is_symlink() else [partial, *partial.rglob("*")]:
            if file.is_file() and file.stat().st_nlink == 1:
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())
                if file.stat().st_mode & 0o777 == _PRIVATE:
                    file.chmod(_default_mode(path))
        replace(partial, path)
    except BaseException:
        with suppress(OSError):  # report the first error
            remove(partial)
        raise


_COUNT = itertools.count()


def partial_name(path: Path) -> Path:
    """Return a unique name beside `path` for incomplete content."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}-{next(_COUNT)}{PARTIAL}")


def replace(new: Path, path: Path) -> None:
    """Move a complete file, folder or link to `path` atomically, and delete the old one.

    Replacing a folder is not atomic where names cannot be exchanged: `path` is briefly missing.
    """
    is_folder = new.is_dir() and not new.is_symlink()
    while True:
        old = partial_name(path)
        try:
            if is_folder and os.path.lexists(path):
                if _exchange(new, path):
                    return remove(new)
                with suppress(FileNotFoundError):  # another process has moved it
                    path.rename(old)
            os.replace(new, path)
        except BaseException as error:
            taken = isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY)
            if not is_folder or not taken:
                with suppress(OSError):
                    old.rename(path)
                raise
            remove(old)  # another process has put a folder there
        else:
            return remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False if that fails or is unsupported."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux
    words = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    return exchange is not None and exchange(*words) == 0


def _default_mode(path: Path) -> int:
    """Return the default mode of a new file beside a path."""
    probe = partial_name(path)
    probe.touch()
    try:
        return probe.stat().st_mode & 0o777
    finally:
        probe.unlink()


def check_writable(folder: Path) -> None:
    """Raise a UserError if a folder is not writable, before any work is done."""
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
    """Format JSON with one value a line down to `depth`, and deeper values inline.

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
    """Write a safetensors file in place; raise OSError on system errors, as for other files."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    complete = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(complete, path, metadata=dict(metadata or {"format": "pt"}))
    except SafetensorError as error:  # the system error is only in its text
        if reason := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(reason[1]), os.strerror(int(reason[1])), str(path)) from None
        raise


def append_atomic(file: int, data: bytes) -> None:
    """Append bytes as the only writer; on an OSError the file is unchanged."""
    size, written = os.fstat(file).st_size, 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        os.ftruncate(file, size)
        raise


@dataclass(frozen=True)
class TensorPlace:
    """Byte range of a tensor in a safetensors file, with safetensors' name of its dtype."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def tensor_places(file: Path) -> dict[str, TensorPlace]:
    """Read the places of a safetensors file's tensors; a ValueError if it is truncated or damaged."""
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
    """Return the error for a path that is not a folder."""
    is_file = Path(path).expanduser().is_file()
    return UserError(f"{path} is a file, not a folder." if is_file else f"No folder at {path}.", remedy)


def read_json(path: Path, again: str = "Delete it and run the command again.") -> Any:
    """Read a JSON file; a UserError names a missing or damaged file, with `again` as remedy for the latter."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors mark UTF-8
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.", "Check the path.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}).", again) from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or damaged."""
    try:
        value = read_json(path)
    except UserError:
        return {}
    return value if isinstance(value, dict) else {}


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each non-blank line of a file or pipe.

    Raises:
        UserError: no such file, or a line is not a JSON object in UTF-8.
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
    """Return the folder or its nearest existing parent."""
    return next(path for path in [folder, *folder.parents] if path.exists())


def size(path: Path, second_names: bool = True) -> int:
    """Return the bytes of a file or folder without following links; hard links count only with `second_names`."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):  # moved into its place meanwhile
            status = file.lstat()
            total += status.st_size if second_names or status.st_nlink == 1 else 0
    return total


def free_disk(folder: Path) -> int:
    """Return the free bytes at a folder or its nearest existing parent."""
    return shutil.disk_usage(existing(folder)).free


def need_disk(folder: Path, needed_bytes: int, what: str, remedy: str = _LOWER_BUDGET) -> None:
    """Raise a UserError if fewer than `needed_bytes` plus 5 % are free."""
    free = free_disk(folder)
    if free < needed_bytes * 1.05:
        raise UserError(
            f"{what} needs {format_bytes(needed_bytes)} at {folder}, and {format_bytes(free)} are free.",
            f"Free some space, {remedy}.",
        )


def format_bytes(count: float) -> str:
    """Format a byte count in powers of 1000.

    >>> format_bytes(98_000_000)
    '98.0 MB'
    """
    return filesize.decimal(int(count))


def remove(path: Path) -> None:
    """Delete a file, link or folder if it exists; safe against concurrent deletion."""
    while path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):  # another process has deleted a part of it
            shutil.rmtree(path)
    path.unlink(missing_ok=True)


def refuse_foreign_code(folder: Path, known: Collection[str]) -> None:
    """Raise a UserError if a folder to replace holds anything but these names."""
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
    """Return the SHA-256 of a file, in hex."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
