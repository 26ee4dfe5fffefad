"""Hidden states of conversations on disk: computed once with the frozen target, read many times by training.

States lie in shards, safetensors files that are only ever added: a shard holds some layers of some conversations, is
named by them and is written atomically. A store is a folder whose manifest says which conversations it holds, in which
order, and in which shards their states lie. Several stores can share the shards of one folder; whoever asks for more
conversations or for other layers computes what no shard holds yet. Whatever moment a build is killed at, the next one
goes on from the shards that are complete.

    shard-<name>.safetensors   tokens [S] int32, states.<layer> [S, E], sequences end to end; checksums in its metadata;
                               scales.<layer> [S] where states are stored in one byte a number
    manifest.json              fingerprint, aux layers, and for every conversation its length, mask and places

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
    put_aside,
    wanted_sums,
    whole,
)
from headstart.errors import UserError
from headstart.support.files import TensorPlace, format_bytes, read_json, tensor_places

MANIFEST = "manifest.json"
_TOKEN_BYTES = 5  # an int32 id and the mask
FORMAT = 3
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}

Location = tuple[int, int]
"""Where the states of a conversation lie: number of the shard among the manifest's, first token in it."""


@dataclass(frozen=True)
class Sample:
    """One conversation: its tokens (int64), whether the assistant wrote them, and hidden states by layer, [T, E].

    The tensors may share memory with the store: do not write to them.

    Attributes:
        kept: by layer, states as they are stored.
        scales: by layer, [T], of states in one byte a number (see `shard_format`); they stand for numbers of a `dtype`.
    """

    tokens_T: Tensor
    supervised_T: Tensor
    kept: dict[int, Tensor]
    scales: dict[int, Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    @property
    def states(self) -> dict[int, Tensor]:
        if self.dtype is None:
            return self.kept
        return {layer: decode(kept_TE, self.scales[layer], self.dtype) for layer, kept_TE in self.kept.items()}


def estimate_bytes(tokens: int, aux_layers: int, hidden: int, dtype: torch.dtype, states_dtype: str = AUTO) -> int:
    """Bytes on disk of so many tokens, each with `aux_layers` states of `hidden` numbers.

    >>> [estimate_bytes(1, 1, 4096, torch.bfloat16, states_dtype) for states_dtype in ("auto", "fp8")]
    [8197, 4105]
    """
    of_state = hidden * dtype.itemsize if states_dtype == AUTO else hidden + SCALE_BYTES
    return tokens * (aux_layers * of_state + _TOKEN_BYTES)


def all_finite(states: Mapping[int, Tensor]) -> bool:
    return all(bool(state_TE.isfinite().all()) for state_TE in states.values())


class States(ABC):
    """Conversations with hidden states, as training reads them: stored, or online (`headstart.data.states.online`).

    Attributes:
        stored: whether reading them computes nothing.
        folder: for messages: where they lie, or where the conversations were read.
        fingerprint: of the conversations and of whose states these are.
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
        """Those of a batch, with the states of some layers, or of all. Where several processes train, each asks as
        often as the others, if need be for none."""

    @abstractmethod
    def _tokens(self, index: int) -> Tensor: ...

    @abstractmethod
    def _supervised(self, index: int) -> Tensor: ...

    def get(self, index: int) -> Sample:
        return self.samples([index])[0]

    def supervised(self) -> Iterable[Tensor]:
        """The mask of each conversation in turn, bool [T]; no states are read."""
        return map(self._supervised, range(len(self)))

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each token of the vocabulary is supervised, int64 [V]."""
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for index in range(len(self)):
            supervised_S = self._tokens(index)[self._supervised(index)]
            counts_V += torch.bincount(supervised_S, minlength=vocab_size)
        return counts_V


class StateStore(States):
    """A finished store; samples are in the order of the conversations it was built from, see `number_of`.

    Attributes:
        dropped: how many conversations the byte budget left out.
        not_finite: conversations that were left out for their states: their ids, by their index.

    A UserError says that the folder holds no finished store, or that a shard is missing, cut short or damaged.
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
        self.aux_layers = tuple(manifest["taps"])
        self.hidden_size = manifest["hidden_size"]
        self.states_dtype: str = manifest["states_dtype"]
        self._dtype: torch.dtype = getattr(torch, manifest["dtype"])
        self.lengths = manifest["lengths"]
        self.dropped: int = manifest["dropped"]
        self.not_finite: dict[int, str] = dict(manifest["not_finite"])
        self.shards: Path = folder / manifest["shards"]
        self.files = [self.shards / file["file"] for file in manifest["files"]]
        self.bytes: int = sum(file["bytes"] for file in manifest["files"])
        self._spans: list[list[list[int]]] = manifest["supervised"]
        self._places: dict[int, list[Location]] = {
            layer: [(number, start) for number, start in indices]
            for layer, indices in zip(self.aux_layers, manifest["places"], strict=True)
        }
        for path, file in zip(self.files, manifest["files"], strict=True):
            size = path.stat().st_size if path.is_file() else 0
            if size != file["bytes"]:
                state = "cut short" if size else "missing"
                raise UserError(f"{path} is {state} ({size} of {file['bytes']} bytes).", REBUILD)
        self._open: dict[int, tuple[int, dict[str, TensorPlace]]] = {}
        self._wanted: dict[int, dict[tuple[str, int], tuple[int, int]]] = {}

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
        if names := list(self.not_finite.values()):
            shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            notices.append(
                f"{len(names)} conversations are left out, with hidden states that are not finite: {shown} (with "
                "target.dtype=float32 they may be)."
            )
        return " ".join(notices)

    def number_of(self, index: int) -> int | None:
        """Map an index of the given conversations to a sample number; None if the conversation was left out."""
        number = index - sum(left_out < index for left_out in self.not_finite)
        return number if index not in self.not_finite and number < len(self) else None

    def samples(self, indices: Sequence[int], layers: Sequence[int] | None = None) -> list[Sample]:
        """Those of a batch; a damaged shard is put aside."""
        layers, samples = self.aux_layers if layers is None else layers, list[Sample]()
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"conversation {index} of {len(self)}")
            tokens_T, kept = self._tokens(index), self._of_layers("states", index, layers)
            coded = self.states_dtype != AUTO
            scales = self._of_layers("scales", index, layers) if coded else {}
            samples.append(Sample(tokens_T, self._supervised(index), kept, scales, self._dtype if coded else None))
        return samples

    def _of_layers(self, what: str, index: int, layers: Sequence[int]) -> dict[int, Tensor]:
        return {layer: self._read(f"{what}.{layer}", self._places[layer][index], index) for layer in layers}

    def _tokens(self, index: int) -> Tensor:
        return self._read("tokens", self._places[self.aux_layers[0]][index], index).long()

    def _supervised(self, index: int) -> Tensor:
        supervised_T = torch.zeros(self.lengths[index], dtype=torch.bool)
        for start, stop in self._spans[index]:
            supervised_T[start:stop] = True
        return supervised_T

    def _read(self, name: str, position: Location, index: int) -> Tensor:
        shard, start = position
        file = self.files[shard]
        try:
            if shard not in self._wanted:
                self._wanted[shard] = wanted_sums(file)
                with suppress(OSError):  # for `headstart gc`: many disks keep no time of reading
                    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
        except FileNotFoundError:  # another process has put it aside, or somebody deleted it
            raise UserError(f"{file} is missing.", REBUILD) from None
        except UNREADABLE:
            raise put_aside(file) from None
        try:
            part = self._part(name, shard, slice(start, start + self.lengths[index]))
        except FileNotFoundError:
            raise UserError(f"{file} is missing.", REBUILD) from None
        except UNREADABLE:
            raise put_aside(file) from None
        wanted = self._wanted[shard].pop((name, start), None)
        if wanted is not None and checksum(part) != wanted[1]:
            raise put_aside(file)
        return part

    def _part(self, name: str, shard: int, tokens: slice) -> Tensor:
        """Tokens of one of a shard's tensors, by a read of all of them at once, which other threads need not wait for:
        network disks give a few large reads faster than many small ones."""
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
        """Shards that are not as they were written; all of them are read."""
        return [file for file in self.files if not whole(file)]
