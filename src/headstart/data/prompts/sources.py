"""Sources of records: files, folders and Hub datasets.

A source is pinned to its content (`find_origin`); record order depends on content and seed alone, so a later request
for more records continues the same sequence.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.support.files import file_hash, read_json, read_jsonl

READY_MADE = "ready-made"
"""The packaged requests, written by SmolLM2-135M-Instruct from our seed prompts (see `self_prompts`)."""
_MAX_DOWNLOAD = 8_000_000_000
"""Size in bytes up to which Hub datasets are downloaded; larger ones are streamed."""
_BUFFER = 20_000
"""Shuffle buffer of streamed datasets, in records."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Origin:
    """A pinned source: the commit of a Hub dataset, or the content hash of a local file or folder."""

    source: str
    commit: str | None = None
    content: str | None = None

    @property
    def identity(self) -> str:
        """Identity of the records; a local path is not part of it."""
        return f"content {self.content}" if self.commit is None else f"{self.source} at {self.commit}"


Record = tuple[str, str, Mapping[str, Any]]
"""Location for messages ("line 3"), id unique in the source, and row of a record."""


def find_origin(source: str, revision: str | None = None) -> Origin:
    """Pin a source to a Hub commit or a content hash; a UserError if it or the revision does not exist.

    Asks the Hub unless `revision` is a commit; offline, the last downloaded commit is used.
    """
    path = _local(source)
    if path is None:
        is_commit = revision is not None and _COMMIT.fullmatch(revision)
        return Origin(source, commit=revision if is_commit else _commit_of(source, revision))
    if revision is not None:
        raise UserError(f"{path} has no revisions.", "Remove data.revision: it belongs to datasets of the hub.")
    return Origin(source, content=_hash(path))


def read_records(origin: Origin, split: str, seed: int | None, *, stream: bool) -> Iterator[Record]:
    """Yield every record once, shuffled by `seed`; None keeps file order.

    `stream` reads Hub datasets without downloading them first. A UserError names the unreadable source or line.
    """
    path = _local(origin.source)
    if path is None or path.is_dir():
        yield from _dataset_records(origin, split, seed, stream=stream)
    else:
        records = _file_records(path)
        yield from records if seed is None else shuffled(list(records), seed)


def shuffled(items: Sequence[Any], seed: int) -> list[Any]:
    """Shuffle items; the permutation depends only on the seed and the number of items."""
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    return [items[i] for i in order]


def is_here(source: str) -> bool:
    """Whether a source is local or packaged."""
    path = _local(source)
    return path is not None and path.exists()


def _local(source: str) -> Path | None:
    if source == READY_MADE:
        return Path(__file__).with_name("ready_made.jsonl")
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json") or path.exists():
        return path
    folder = Path(source.partition(":")[0]).expanduser()
    return folder if folder.is_dir() else None


def _hash(path: Path) -> str:
    """Hash a file's content, or the names and contents of a folder's files."""
    if path.is_file():
        return file_hash(path)[:32]
    if not path.is_dir():
        problem = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {problem}.", "Check the path; a pipe is read twice, so save it to a file first.")
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path).as_posix()} {_hash(file)}\n".encode())
    return digest.hexdigest()[:32]


def _file_records(path: Path) -> Iterator[Record]:
    if path.suffix == ".jsonl":
        for number, row in read_jsonl(path):
            yield f"line {number}", f"{path.stem}-{number}", row
        return
    if path.suffix != ".json":
        raise UserError(f"{path} is neither .jsonl nor .json.", "Convert it: one JSON object a line.")
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UserError(f"{path} holds a {type(rows).__name__}, not a list.", "Write a list of records, or JSONL.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            problem = f"{path}, record {number}: a {type(row).__name__}, not an object."
            raise UserError(problem, "Write a list of objects.")
        yield f"record {number}", f"{path.stem}-{number}", row


# -- datasets ----------------------------------------------------------------------------------------------------------


def _dataset_records(origin: Origin, split: str, seed: int | None, *, stream: bool) -> Iterator[Record]:
    import datasets  # slow to import, and few runs need it

    name, _, config = origin.source.partition(":")
    if (folder := _local(origin.source)) is not None:
        name, config = str(folder), "" if folder == Path(origin.source).expanduser() else config
    try:
        size = 0 if origin.commit is None else _bytes_of(name, config, origin.commit)
        streaming = size > 0 and (stream or size > _MAX_DOWNLOAD)
        try:
            rows = datasets.load_dataset(name, config or None, split=split, streaming=streaming, revision=origin.commit)
        except datasets.exceptions.DatasetGenerationError:
            if folder is None:
                raise
            # A table has one type per column; JSONL files may differ.
            files = datasets.load_dataset_builder(name, config or None).config.data_files[split]
            if any(Path(file).suffix != ".jsonl" for file in files):
                raise
            rows = [row for file in files for _, row in read_jsonl(Path(file))]
        numbered: Iterable[tuple[int, Mapping[str, Any]]]
        if streaming:
            numbered = enumerate(rows if seed is None else rows.shuffle(seed=seed, buffer_size=_BUFFER))
        else:
            order = range(len(rows)) if seed is None else shuffled(range(len(rows)), seed)
            numbered = ((number, rows[number]) for number in order)
        for number, row in numbered:
            yield f"row {number + 1}", f"{split}-{number + 1}", row
    except UserError:
        raise
    except Exception as error:  # datasets raises many kinds, all the same to the user
        raise _unreadable(f"{origin.source!r}, split {split!r}", error) from error


def _unreadable(where: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0].rstrip(".")
    if error.__cause__ is not None:  # names the column at fault
        reason = f"{reason}: {' '.join(str(error.__cause__).split())[:300]}"
    return UserError(
        f"Cannot read prompts from {where}: {type(error).__name__}: {reason}.",
        "Give 'self', 'ready-made', a .jsonl or .json file, or a dataset that datasets.load_dataset can reach.",
    )


def _commit_of(source: str, revision: str | None) -> str:
    """Return the commit of a branch or tag; offline and without a revision, the last downloaded one."""
    name, _, config = source.partition(":")
    try:
        info = _hub_info(name, revision)
        if info is not None:
            return str(info.sha)
        if revision is None:
            return _downloaded_commit(name, config)
    except Exception as error:
        raise _unreadable(repr(source), error) from error
    raise UserError(
        f"The hub does not answer, so revision {revision!r} of {name!r} cannot be looked up.",
        "Connect to the network, or set data.revision to the commit that was downloaded before.",
    )


def _bytes_of(name: str, config: str, commit: str) -> int:
    """Return the size of a dataset's files; 0 if the Hub is unreachable and this commit was downloaded last."""
    info = _hub_info(name, commit)
    if info is not None:
        return sum(file.size or 0 for file in info.siblings or [])
    downloaded = _downloaded_commit(name, config)
    if downloaded != commit:  # `datasets` would return it instead
        raise UserError(
            f"The hub does not answer, and of {name!r} only revision {downloaded} was downloaded before, not {commit}.",
            "Connect to the network, or set data.revision to that one.",
        )
    return 0


def _downloaded_commit(name: str, config: str) -> str:
    """Return the last downloaded commit of a dataset."""
    import datasets

    return str(datasets.load_dataset_builder(name, config or None).hash)


def _hub_info(name: str, revision: str | None) -> Any:
    """Return the Hub's metadata of a dataset; None if it is unreachable."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().dataset_info(name, revision=revision, files_metadata=True, timeout=20.0)
    except HfHubHTTPError:  # an answer: no such dataset or revision, or no access to it
        raise
    except Exception:
        return None
