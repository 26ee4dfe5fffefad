"""Where records come from: files, folders and datasets of the hub.

A source is pinned to what it holds (`find_origin`), and its records are drawn from all of it in an order that depends
on that content and a seed alone: whoever asks for more of them later goes on in the same order.
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
"""The source of the requests that come with headstart, so that no time is spent on writing any: SmolLM2-135M-Instruct
wrote them from our seed prompts (`headstart.data.prompts.self_prompts`)."""
_WHOLE_BYTES = 8_000_000_000
"""Datasets of the hub up to this size are downloaded and drawn from as a whole."""
_BUFFER = 20_000
"""Of larger ones, the files are read in random order, and each record is drawn from so many."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Origin:
    """What a source holds, now: the commit of a dataset on the hub, or the hash of a file or folder on this machine."""

    source: str
    commit: str | None = None
    content: str | None = None

    @property
    def identity(self) -> str:
        """What the records depend on; where a file lies is not part of it."""
        if self.commit is None:
            return f"content {self.content}"
        return f"{self.source} at {self.commit}"


@dataclass(frozen=True)
class Record:
    """One record of a source: `location` is for people ("line 3"), `id` unique in the source."""

    location: str
    id: str
    row: Mapping[str, Any]


def find_origin(source: str, revision: str | None = None) -> Origin:
    """Pin a source: the commit that a dataset of the hub stands at, the content of a file or folder.

    Asks the hub unless `revision` is a commit; without a network, the newest commit that was downloaded before counts.
    A UserError says that there is no such file, dataset or revision.
    """
    path = _local(source)
    if path is None:
        whole = revision is not None and _COMMIT.fullmatch(revision)
        return Origin(source, commit=revision if whole else _commit_of(source, revision))
    if revision is not None:
        raise UserError(f"{path} has no revisions.", "Remove data.revision: it belongs to datasets of the hub.")
    return Origin(source, content=_hash(path))


def read_records(origin: Origin, split: str, seed: int | None = None, *, whole: bool = True) -> Iterator[Record]:
    """Every record of a source once, in the order of a seed; None reads them as they stand.

    A dataset of the hub may be downloaded as a `whole`; records come as they are read otherwise. A UserError names what
    cannot be read, with the line of a malformed one.
    """
    path = _local(origin.source)
    if path is None or path.is_dir():
        yield from _dataset_records(origin, split, seed, whole=whole)
        return
    records = _file_records(path)
    if seed is not None:
        records = iter(drawn(list(records), seed))
    yield from records


def drawn(items: Sequence[Any], seed: int) -> list[Any]:
    """The items in an order of their own for each seed and number of items."""
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    return [items[i] for i in order]


def is_here(source: str) -> bool:
    """Whether a source is a file or folder of this machine, or comes with headstart."""
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
    """Of a file's content, or of the names and contents of a folder's files."""
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
            yield Record(f"line {number}", f"{path.stem}-{number}", row)
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
        yield Record(f"record {number}", f"{path.stem}-{number}", row)


# -- datasets ----------------------------------------------------------------------------------------------------------


def _dataset_records(origin: Origin, split: str, seed: int | None, *, whole: bool) -> Iterator[Record]:
    import datasets  # slow to import, and few runs need it

    name, _, config = origin.source.partition(":")
    if (folder := _local(origin.source)) is not None:
        name, config = str(folder), "" if folder == Path(origin.source).expanduser() else config
    try:
        size = 0 if origin.commit is None else _bytes_of(name, config, origin.commit)
        streaming = size > 0 and not (whole and size <= _WHOLE_BYTES)
        try:
            rows = datasets.load_dataset(name, config or None, split=split, streaming=streaming, revision=origin.commit)
        except datasets.exceptions.DatasetGenerationError:
            if folder is None:
                raise
            # A table has one type for each column, and files of JSON lines may differ.
            files = datasets.load_dataset_builder(name, config or None).config.data_files[split]
            if any(Path(file).suffix != ".jsonl" for file in files):
                raise
            rows = [row for file in files for _, row in read_jsonl(Path(file))]
        numbered: Iterable[tuple[int, Mapping[str, Any]]]
        if streaming:
            numbered = enumerate(rows if seed is None else rows.shuffle(seed=seed, buffer_size=_BUFFER))
        else:
            order = range(len(rows)) if seed is None else drawn(range(len(rows)), seed)
            numbered = ((number, rows[number]) for number in order)
        for number, row in numbered:
            yield Record(f"row {number + 1}", f"{split}-{number + 1}", row)
    except UserError:
        raise
    except Exception as error:  # datasets raises many kinds; all mean the same to the user
        raise _unreadable(f"{origin.source!r}, split {split!r}", error) from error


def _unreadable(where: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [""])[0].rstrip(".")
    if error.__cause__ is not None:  # datasets says there which column is at fault
        reason = f"{reason}: {' '.join(str(error.__cause__).split())[:300]}"
    return UserError(
        f"Cannot read prompts from {where}: {type(error).__name__}: {reason}.",
        "Give 'self', 'ready-made', a .jsonl or .json file, or a dataset that datasets.load_dataset can reach.",
    )


def _commit_of(source: str, revision: str | None) -> str:
    """The commit that a branch or tag stands at; without a network, that of what was downloaded last."""
    name, _, config = source.partition(":")
    try:
        info = _hub_info(name, revision)
        if info is not None:
            return str(info.sha)
        if revision is None:
            return _downloaded(name, config)
    except Exception as error:
        raise _unreadable(repr(source), error) from error
    raise UserError(
        f"The hub does not answer, so revision {revision!r} of {name!r} cannot be looked up.",
        "Connect to the network, or set data.revision to the commit that was downloaded before.",
    )


def _bytes_of(name: str, config: str, commit: str) -> int:
    """Bytes of a dataset's files; 0 where the hub does not answer and this very commit was downloaded before."""
    info = _hub_info(name, commit)
    if info is not None:
        return sum(file.size or 0 for file in info.siblings or [])
    downloaded = _downloaded(name, config)
    if downloaded != commit:  # `datasets` would take it for the one that was asked for
        raise UserError(
            f"The hub does not answer, and of {name!r} only revision {downloaded} was downloaded before, not {commit}.",
            "Connect to the network, or set data.revision to that one.",
        )
    return 0


def _downloaded(name: str, config: str) -> str:
    """The commit of a dataset that was downloaded last."""
    import datasets

    return str(datasets.load_dataset_builder(name, config or None).hash)


def _hub_info(name: str, revision: str | None) -> Any:
    """What the hub says of a dataset; None when it does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().dataset_info(name, revision=revision, files_metadata=True, timeout=20.0)
    except HfHubHTTPError:  # an answer: no such dataset or revision, or no access to it
        raise
    except Exception:
        return None
