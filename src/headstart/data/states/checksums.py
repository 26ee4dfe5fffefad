"""Checksums of stored hidden states: a flipped bit is noticed when it is read, before anything learns from it.

A shard says in its metadata, for each of its tensors, the CRC-32 of every conversation's part. Reading verifies each
part once: 4 GB a second, more than most disks give.

Shape suffixes: S tokens of one shard.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.errors import UserError
from headstart.support.files import DAMAGED

KEY = "checksums"
"""In the metadata of a shard."""
REBUILD = "Build the states again (headstart data build RECIPE): only that shard is computed anew."
_BROKEN = (ValueError, KeyError, AttributeError, TypeError, RuntimeError)
"""What reading damaged metadata raises."""


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes.

    >>> checksum(torch.tensor([1, 2], dtype=torch.int32)), checksum(torch.tensor([1, 3], dtype=torch.int32))
    (58791804, 3141365785)
    """
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def checksums(tensors: Mapping[str, Tensor], lengths: Sequence[int]) -> str:
    """For a shard's metadata: of its tensors [S, ...], whose conversations of these lengths lie end to end."""
    return json.dumps(
        {name: list(map(checksum, torch.split(tensor, list(lengths)))) for name, tensor in tensors.items()}
    )


class Checks:
    """What the parts of one shard should be.

    Raises:
        UserError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._wanted: dict[tuple[str, int], int] = {}
        try:
            with safe_open(file, framework="pt") as handle:
                metadata = handle.metadata()
            starts = list(accumulate(json.loads(metadata["lengths"]), initial=0))
            for name, sums in json.loads(metadata[KEY]).items():
                self._wanted.update(zip(((name, start) for start in starts), sums, strict=False))
        except FileNotFoundError:
            raise is_missing(file) from None
        except (SafetensorError, *_BROKEN):
            raise put_aside(file) from None

    def verify(self, name: str, start: int, part: Tensor) -> None:
        """See that a conversation's part of a tensor, from this token on, is as it was written; once.

        Raises:
            UserError: it is not. The shard is put aside.
        """
        wanted = self._wanted.pop((name, start), None)
        if wanted is not None and checksum(part) != wanted:
            raise put_aside(self._file)


def whole(file: Path) -> bool:
    """Whether all of a shard is as it was written; nothing is put aside."""
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata()
            lengths, wanted = json.loads(metadata["lengths"]), json.loads(metadata[KEY])
            parts = {name: torch.split(handle.get_tensor(name), lengths) for name in wanted}
        return all(list(map(checksum, parts[name])) == sums for name, sums in wanted.items())
    except (SafetensorError, FileNotFoundError, *_BROKEN):
        return False


def damaged(file: Path) -> UserError:
    """A shard whose content is not what was written."""
    return UserError(f"{file} is damaged: its checksums do not match.", f"Delete it. {REBUILD}")


def put_aside(file: Path) -> UserError:
    """The same, for a shard that is given another name, so that building the states computes it anew."""
    aside = file.with_name(file.name + DAMAGED)
    with suppress(OSError):  # another process was first, or it lies where nobody may write
        file.rename(aside)
    if file.exists():
        return damaged(file)
    return UserError(f"{damaged(file).problem} It is kept as {aside.name}.", REBUILD)


def is_missing(file: Path) -> UserError:
    """A shard that another process has put aside, or somebody deleted."""
    return UserError(f"{file} is missing.", REBUILD)
