"""Hidden states of conversations on disk: computed once by the frozen target, read many times by training.

Shards are append-only safetensors files, written atomically and named by their layers and conversations. A store is a
manifest of conversations with the locations of their states. Stores can share a folder of shards. A build computes only
states that no shard holds, so an interrupted build resumes from the complete shards.

    shard-<name>.safetensors   tokens [S] int32, states.<layer> [S, E], scales.<layer> [S] of 8-bit states; sequences
                               concatenated, checksums in the metadata
    manifest.json              fingerprint, aux layers, and length, mask and places of every conversation

Shape suffixes: T tokens of one conversation, S tokens of one shard, E hidden size, V vocabulary.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from headstart.data.states.shard_format import (
    AUTO,
    REBUILD,
    SCALE_BYTES,
    UNREADABLE,
    checksum,
    decode,
    is_intact,
    quarantine,
    read_checksums,
)
from headstart.errors import UserError
from headstart.support.files import TensorPlace, format_bytes, read_json, tensor_places

MANIFEST = "manifest.json"
_TOKEN_BYTES = 5  # an int32 id and the mask
FORMAT = 4
NOT_FINITE = "its hidden states are not finite (target.dtype=float32 may help)"
"""Reason for leaving out a conversation."""
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Sample:
    """A conversation's tokens (int64), loss mask and hidden states [T, E] by layer; read-only, may alias the store.

    Attributes:
        stored: by layer, states as stored.
        scales: by layer, [T], of 8-bit states (see `shard_format`), which decode to `dtype`; else empty.
    """

    tokens_T: Tensor
    supervised_T: Tensor
    stored: dict[int, Tensor]
    scales: dict[int, Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    @property
    def states(self) -> dict[int, Tensor]:
        if self.dtype is None:
            return self.stored
        return {layer: decode(codes_TE, self.scales[layer], self.dtype) for layer, codes_TE in self.stored.items()}


def estimate_bytes(tokens: int, aux_layers: int, hidden: int, dtype: torch.dtype, states_dtype: str = AUTO) -> int:
    """Estimate bytes on disk of tokens with `aux_layers` states of size `hidden` each.

    >>> [estimate_bytes(1, 1, 4096, torch.bfloat16, states_dtype) for states_dtype in ("auto", "fp8")]
    [8197, 4105]
    """
    of_state = hidden * dtype.itemsize if states_dtype == AUTO else hidden + SCALE_BYTES
    return tokens * (aux_layers * of_state + _TOKEN_BYTES)


def all_finite(states: Mapping[int, Tensor]) -> bool:
    return which_finite([states])[0]


def which_finite(states: Sequence[Mapping[int, Tensor]]) -> list[bool]:
    """Return for each conversation whether its states are finite; syncs with the device once."""
    flags = [[state_TE.isfinite().all() for state_TE in of_one.values()] for of_one in states]
    if not any(flags):
        return [True] * len(states)
    return torch.stack([torch.stack(of_one).all() for of_one in flags]).tolist()


class States(ABC):
    """A training set of conversations with hidden states, stored or online (`headstart.data.states.online`).

    Attributes:
        stored: whether states are read instead of computed.
        folder: folder of the store or the conversations, for messages.
        fingerprint: hash of the conversations, target and format.
        lengths: tokens of each conversation.
    """

    stored: ClassVar[bool]
    folder: Path
    fingerprint: str
    target_fingerprint: str
    aux_layers: tuple[int, ...]
    hidden_size: int
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def samples(self, indices: Sequence[int], layers: Sequence[int] | None = None) -> list[Sample]:
        """Return a batch with states of these layers, by default all. Collective: every rank calls it equally often."""

    @abstractmethod
    def _tokens(self, index: int) -> Tensor: ...

    @abstractmethod
    def _supervised(self, index: int) -> Tensor: ...

    def get(self, index: int) -> Sample:
        return self.samples([index])[0]

    def supervised(self) -> Iterable[Tensor]:
        """Yield the mask of each conversation, bool [T], without reading states."""
        return map(self._supervised, range(len(self)))

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """Count how often each token of the vocabulary is supervised, int64 [V]."""
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for index in range(len(self)):
            supervised_S = self._tokens(index)[self._supervised(index)]
            counts_V += torch.bincount(supervised_S, minlength=vocab_size)
        return counts_V


class StateStore(States):
    """A finished store, in the order of the conversations it was built from; see `number_of`.

    Attributes:
        dropped: number of conversations beyond the byte budget.
        left_out: ids of conversations without usable states, by index.
        reasons: distinct reasons for leaving them out.

    Raises a UserError if there is no finished store, or a shard is missing, truncated or damaged.
    """

    stored = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / MANIFEST).is_file():
            raise UserError(f"{folder} holds no finished store of hidden states.", "Run: headstart data build RECIPE")
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise UserError(f"{folder} is a store of another format.", "Build it again: headstart data build RECIPE")
        self.fingerprint = manifest["fingerprint"]
        self.target_fingerprint = manifest["target_fingerprint"]
        self.dtype: str = manifest["dtype"]
        self.aux_layers = tuple(manifest["aux_layers"])
        self.hidden_size = manifest["hidden_size"]
        self.states_dtype: str = manifest["states_dtype"]
        self._dtype: torch.dtype = getattr(torch, manifest["dtype"])
        self.lengths = manifest["lengths"]
        self.dropped: int = manifest["dropped"]
        self.left_out: dict[int, str] = dict(manifest["left_out"])
        self.reasons: list[str] = manifest["reasons"]
        self.shards: Path = folder / manifest["shards"]
        self.files = [self.shards / file["file"] for file in manifest["files"]]
        self.bytes: int = sum(file["bytes"] for file in manifest["files"])
        self._spans: list[list[list[int]]] = manifest["supervised"]
        # By layer and conversation: number of the shard and first token in it.
        self._places: dict[int, list[list[int]]] = dict(zip(self.aux_layers, manifest["places"], strict=True))
        for path, file in zip(self.files, manifest["files"], strict=True):
            size = path.stat().st_size if path.is_file() else 0
            if size != file["bytes"]:
                state = "cut short" if size else "missing"
                raise UserError(f"{path} is {state} ({size} of {file['bytes']} bytes).", REBUILD)
        self._open: dict[int, tuple[int, dict[str, TensorPlace]]] = {}
        self._unverified: dict[int, dict[tuple[str, int], tuple[int, int]]] = {}

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def notice(self) -> str:
        """Name the conversations that were left out, with the reason; empty if there are none."""
        notices = []
        if self.dropped:
            notices.append(
                f"The byte budget holds {len(self)} of {len(self) + self.dropped} conversations "
                f"({format_bytes(self.bytes)}); the last {self.dropped} are left out (raise data.cache_gigabytes for "
                "more)."
            )
        if names := list(self.left_out.values()):
            shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            notices.append(f"{len(names)} conversations are left out ({'; '.join(self.reasons)}): {shown}.")
        return " ".join(notices)

    def number_of(self, index: int) -> int | None:
        """Map an index of the given conversations to a sample number; None if the conversation was left out."""
        number = index - sum(left_out < index for left_out in self.left_out)
        return number if index not in self.left_out and number < len(self) else None

    def samples(self, indices: Sequence[int], layers: Sequence[int] | None = None) -> list[Sample]:
        """Read a batch; a damaged shard is renamed."""
        layers, samples = self.aux_layers if layers is None else layers, list[Sample]()
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"conversation {index} of {len(self)}")
            coded, tokens_T = self.states_dtype != AUTO, self._tokens(index)
            states = {layer: self._read(f"states.{layer}", layer, index) for layer in layers}
            scales = {layer: self._read(f"scales.{layer}", layer, index) for layer in layers if coded}
            samples.append(Sample(tokens_T, self._supervised(index), states, scales, self._dtype if coded else None))
        return samples

    def _tokens(self, index: int) -> Tensor:
        return self._read("tokens", self.aux_layers[0], index).long()

    def _supervised(self, index: int) -> Tensor:
        supervised_T = torch.zeros(self.lengths[index], dtype=torch.bool)
        for start, stop in self._spans[index]:
            supervised_T[start:stop] = True
        return supervised_T

    def _read(self, name: str, layer: int, index: int) -> Tensor:
        """Read a conversation's rows of a tensor of the shard with its states of this layer."""
        shard, start = self._places[layer][index]
        file = self.files[shard]
        try:
            if shard not in self._unverified:
                self._unverified[shard] = read_checksums(file)
                with suppress(OSError):  # for `headstart gc`: many disks record no access time
                    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
            part = self._part(name, shard, slice(start, start + self.lengths[index]))
        except FileNotFoundError:  # renamed by another process, or deleted
            raise UserError(f"{file} is missing.", REBUILD) from None
        except UNREADABLE:
            raise quarantine(file) from None
        expected = self._unverified[shard].pop((name, start), None)
        if expected is not None and checksum(part) != expected[1]:
            raise quarantine(file)
        return part

    def _part(self, name: str, shard: int, tokens: slice) -> Tensor:
        """Read tokens of a shard's tensor in one large read, fast on network disks and concurrent between threads."""
        if shard not in self._open:
            handle = os.open(self.files[shard], os.O_RDONLY)
            weakref.finalize(self, os.close, handle)
            self._open[shard] = handle, tensor_places(self.files[shard])
        handle, places = self._open[shard]
        place = places[name]
        part = torch.empty((tokens.stop - tokens.start, *place.shape[1:]), dtype=_DTYPES[place.dtype])
        bytes_of_part = part.view(torch.uint8).flatten().numpy().data
        start, done = place.start + tokens.start * (part.nbytes // max(1, len(part))), 0
        while done < part.nbytes:
            if not (count := os.preadv(handle, [bytes_of_part[done:]], start + done)):
                raise ValueError("the file ends before the tensor does")
            done += count
        return part

    def damaged_files(self) -> list[Path]:
        """Verify all shards; return the damaged ones."""
        return [file for file in self.files if not is_intact(file)]
