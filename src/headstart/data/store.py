"""Hidden states of conversations on disk: computed once with the frozen target, read many times by training.

States lie in shards, safetensors files that are only ever added: a shard holds some layers of some conversations, is
named by them and is written atomically. A store is a folder whose manifest says which conversations it holds, in which
order, and in which shards their states lie. Several stores can share the shards of one folder; whoever asks for more
conversations or for other layers computes what no shard holds yet. Whatever moment a build is killed at, the next one
goes on from the shards that are complete.

    shard-<name>.safetensors   tokens [S] int32, states.<layer> [S, E], sequences end to end
    manifest.json              fingerprint, aux layers, and for every conversation its length, mask and places

Shape suffixes: T tokens of one conversation, S tokens of one shard, E hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.data.conversations import Conversation
from headstart.data.jobs import Board, Job, share
from headstart.data.workers import Workers
from headstart.errors import UserError
from headstart.files import format_bytes, need_disk, read_json, write_atomic, write_json
from headstart.target import Target

SHARD_BYTES = 64_000_000
"""A shard is closed once it holds this much; it is the most work that a kill can lose."""

CACHE_BYTES = 2_000_000_000
"""Stores up to this size are kept in memory once read."""

MANIFEST = "manifest.json"
_TOKEN_BYTES = 5  # an int32 id and the mask
_FORMAT = 2

Location = tuple[int, int]
"""Where the states of a conversation lie: number of the shard among the manifest's, first token in it."""


@dataclass(frozen=True)
class Sample:
    """One conversation with its hidden states. The tensors may share memory with the store: do not write to them.

    Attributes:
        tokens_T: int64 [T].
        supervised_T: bool [T], true where the assistant wrote the token.
        states: by layer, [T, E] in the target's dtype.
    """

    tokens_T: Tensor
    supervised_T: Tensor
    states: dict[int, Tensor]


def estimate_bytes(tokens: int, aux_layers: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes on disk of so many tokens, each with `aux_layers` states of `hidden` numbers."""
    return tokens * (aux_layers * hidden * dtype.itemsize + _TOKEN_BYTES)


class StateStore:
    """A finished store; samples are numbered like the conversations it was built from.

    Args:
        folder: what `build_store` wrote.
        cache_bytes: keep shards in memory when the whole store is at most this large; read from disk otherwise.

    Raises:
        UserError: not a store, unfinished, or a shard is missing or cut short.
    """

    def __init__(self, folder: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.folder = folder
        if not (folder / MANIFEST).is_file():
            raise UserError(f"{folder} holds no finished store of hidden states.", "Run: headstart data build RECIPE")
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise UserError(f"{folder} is a store of another format.", "Build it again, in another folder.")
        self.fingerprint: str = manifest["fingerprint"]
        self.target_fingerprint: str = manifest["target_fingerprint"]
        self.aux_layers: tuple[int, ...] = tuple(manifest["taps"])
        self.hidden_size: int = manifest["hidden_size"]
        self.lengths: list[int] = manifest["lengths"]
        self.dropped: int = manifest["dropped"]
        self.shards: Path = folder / manifest["shards"]
        self.files = [self.shards / file["file"] for file in manifest["files"]]
        self.bytes: int = sum(file["bytes"] for file in manifest["files"])
        self._spans: list[list[list[int]]] = manifest["supervised"]
        self._places: dict[int, list[Location]] = {
            layer: [(number, start) for number, start in indices]
            for layer, indices in zip(self.aux_layers, manifest["places"], strict=True)
        }
        for path, file in zip(self.files, manifest["files"], strict=True):
            found = path.stat().st_size if path.is_file() else 0
            if found != file["bytes"]:
                raise UserError(
                    f"{path} is {'cut short' if found else 'missing'} ({found} of {file['bytes']} bytes).",
                    "Build the states again (headstart data build RECIPE): only that shard is computed anew.",
                )
        self._cached = self.bytes <= cache_bytes
        self._loaded: dict[int, dict[str, Tensor]] = {}
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all conversations."""
        return sum(self.lengths)

    @property
    def notice(self) -> str:
        """One sentence when the byte budget left conversations out, else empty."""
        if not self.dropped:
            return ""
        return (
            f"The byte budget holds {len(self)} of {len(self) + self.dropped} conversations "
            f"({format_bytes(self.bytes)}); the last {self.dropped} are left out (raise data.cache_gigabytes for more)."
        )

    def get(self, index: int) -> Sample:
        """One conversation with its states.

        Raises:
            IndexError: beyond the last conversation.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        states = {layer: self._read(f"states.{layer}", self._places[layer][index], index) for layer in self.aux_layers}
        return Sample(self._tokens(index), self._supervised(index), states)

    def _tokens(self, index: int) -> Tensor:
        return self._read("tokens", self._places[self.aux_layers[0]][index], index).long()

    def _supervised(self, index: int) -> Tensor:
        supervised_T = torch.zeros(self.lengths[index], dtype=torch.bool)
        for start, stop in self._spans[index]:
            supervised_T[start:stop] = True
        return supervised_T

    def _read(self, name: str, position: Location, index: int) -> Tensor:
        shard, start = position
        part = slice(start, start + self.lengths[index])
        if self._cached:
            if shard not in self._loaded:
                self._loaded[shard] = load_file(self.files[shard])
            return self._loaded[shard][name][part]
        if shard not in self._open:
            self._open[shard] = safe_open(self.files[shard], framework="pt")
        part_of_it: Tensor = self._open[shard].get_slice(name)[part]
        return part_of_it

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


def build_store(
    folder: Path,
    conversations: Sequence[Conversation],
    target: Target,
    aux_layers: Sequence[int],
    *,
    budget_bytes: int,
    shards: Path | None = None,
    batch_tokens: int = 2048,
    advance: Callable[[int, int], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    board: Board | None = None,
) -> StateStore:
    """Compute and keep the aux hidden states of conversations; states that a whole shard holds already are not
    computed.

    Args:
        folder: of the store; a manifest that is there is replaced.
        conversations: their order is the order of the store.
        target: the frozen model.
        aux_layers: which hidden states to keep.
        budget_bytes: conversations from the first one on are kept while they fit; see `StateStore.notice`.
        shards: folder of the shards, which other stores of the same target may share; by default `folder` itself.
        batch_tokens: tokens of a forward at most, padding included (one longer conversation goes alone).
        advance: called with (tokens done, tokens in all) after every forward here, and after every shard of others.
        shard_bytes: size at which a shard is closed.
        board: where other processes find shards to compute; None to compute all of them here.

    Raises:
        UserError: nothing to store, a conversation that the target cannot read, a budget too small for the first
            conversation, or too little free disk.
    """
    _check(conversations, target)
    aux_layers, shards = tuple(dict.fromkeys(aux_layers)), shards or folder
    kept = conversations[: fitting(conversations, target, aux_layers, budget_bytes)]
    lengths = [len(conversation.tokens) for conversation in kept]
    keys = [_key(conversation.tokens) for conversation in kept]
    if board is not None:  # shards that a process which was killed had planned: its helpers may be computing them still
        posted = [Job(name.rpartition("-")[0], board.job(name)) for name in board.names()]
        for _ in _computed(target, shards, posted, board):
            pass
    index = _Index(shards, owner_of(target))
    lacking = index.lacking(keys, aux_layers)
    total, left = sum(lengths), sum(lengths[i] for numbers in lacking.values() for i in numbers)
    per_token = {layers: estimate_bytes(1, len(layers), target.hidden_size, target.dtype) for layers in lacking}
    needed = sum(per_token[layers] * lengths[i] for layers, numbers in lacking.items() for i in numbers)
    need_disk(shards, needed, "Keeping hidden states")
    planned = [
        (layers, numbers)
        for layers, missing in lacking.items()
        for numbers in _shards(missing, lengths, per_token[layers], shard_bytes)
    ]
    jobs = (
        _shard_job(number, target, layers, [kept[i].tokens for i in numbers], batch_tokens)
        for number, (layers, numbers) in enumerate(planned)
    )

    def read(tokens: int) -> None:
        if advance is not None:
            advance(total - left + tokens, total)

    for job, file in _computed(target, shards, jobs, board, read):
        index.add(file)
        left -= sum(map(len, job.what["rows"]))
        read(0)
    if board is not None:
        board.clear()
    manifest = _manifest(folder, index, target, aux_layers, kept, keys)
    write_json(folder / MANIFEST, {**manifest, "dropped": len(conversations) - len(kept)}, indent=None)
    return StateStore(folder)


class Capture:
    """Hidden states that writing conversations computes anyway, kept as shards that a store built later finds.

    They are those of decoding, token by token, and differ from what `build_store` computes by rounding alone.

    Args:
        shards: folder of the shards.
        target: the model that writes.
        aux_layers: which hidden states to keep.
    """

    def __init__(self, shards: Path, target: Target, aux_layers: Sequence[int]) -> None:
        self.aux_layers = tuple(dict.fromkeys(aux_layers))
        self._shards, self._target = shards, target

    def keep(self, written: Sequence[tuple[Conversation, Mapping[int, Tensor]]]) -> None:
        """Write a shard of conversations and the states [T, E] of their tokens, by layer.

        Raises:
            UserError: too little free disk.
        """
        if not written:
            return
        once = {_key(conversation.tokens): (conversation.tokens, states) for conversation, states in written}
        rows = [tokens for tokens, _ in once.values()]
        target, tokens = self._target, sum(map(len, rows))
        need_disk(
            self._shards,
            estimate_bytes(tokens, len(self.aux_layers), target.hidden_size, target.dtype),
            "Keeping hidden states",
        )
        states = [states for _, states in once.values()]
        _write_shard(self._shards, owner_of(target), self.aux_layers, rows, states)


STATES = "states"
"""Kind of these jobs."""


def _shard_job(
    number: int, target: Target, aux_layers: Sequence[int], rows: Sequence[Sequence[int]], batch_tokens: int
) -> Job:
    """A shard to compute, of conversations that are told by their tokens."""
    what = {
        "kind": STATES,
        "target": owner_of(target),
        "layers": list(aux_layers),
        "rows": [list(row) for row in rows],
        "batch_tokens": batch_tokens,
    }
    return Job(f"{number:06d}", what)


def compute_shard(
    target: Target,
    what: dict[str, Any],
    shards: Path,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Compute and write the shard of a job.

    Args:
        target: the model that the job asks for.
        what: the job.
        shards: folder of the shards.
        check: called before every forward.
        advance: called with the tokens of this shard that are done, after every forward.
    """
    rows, layers, done = what["rows"], tuple(what["layers"]), 0
    states: dict[int, dict[int, Tensor]] = {}
    for batch in _batches(range(len(rows)), list(map(len, rows)), what["batch_tokens"]):
        check()
        found = target.hidden_states([rows[i] for i in batch], layers)
        states.update(zip(batch, ({layer: row[layer].cpu() for layer in layers} for row in found), strict=True))
        done += sum(len(rows[i]) for i in batch)
        advance(done)
    return {"file": _write_shard(shards, owner_of(target), layers, rows, [states[i] for i in range(len(rows))]).name}


class _InTurn:
    """Jobs one after the other, see `headstart.data.jobs.Plan`."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)

    def next(self, waiting: Sequence[Job], writers: int) -> Job | None:
        return next(self._jobs, None)

    def still(self, job: Job, writers: int) -> bool:
        return True


def _computed(
    target: Target,
    shards: Path,
    jobs: Iterable[Job],
    board: Board | None,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[Job, Path]]:
    """The files of jobs, computed here or by those who help."""
    with Workers(target.device, 1, beside=board is not None) as workers:
        for job, result in share(
            _InTurn(jobs), lambda what: compute_shard(target, what, shards, workers.check, advance), workers, board
        ):
            yield job, shards / result["file"]


def owner_of(target: Target) -> str:
    """Whose states a shard holds, or a job asks for."""
    return f"{target.identity().fingerprint} {target.settings} {_name_of(target.dtype)}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _manifest(
    folder: Path,
    index: _Index,
    target: Target,
    aux_layers: Sequence[int],
    kept: Sequence[Conversation],
    keys: Sequence[str],
) -> dict[str, Any]:
    """What a store says of itself; see `StateStore` for what is read of it."""
    files = sorted({index.places[layer, key][0] for layer in aux_layers for key in keys})
    number_of = {file: number for number, file in enumerate(files)}
    digest = hashlib.sha256(json.dumps([_FORMAT, index.owner]).encode())
    for conversation in kept:
        digest.update(json.dumps([conversation.tokens, conversation.supervised_spans]).encode())
    return {
        "format": _FORMAT,
        "fingerprint": digest.hexdigest()[:32],
        "target": target.name,
        "target_fingerprint": target.identity().fingerprint,
        "dtype": _name_of(target.dtype),
        "taps": list(aux_layers),
        "hidden_size": target.hidden_size,
        "shards": os.path.relpath(index.folder.resolve(), folder.resolve()),
        "files": [{"file": file, "bytes": (index.folder / file).stat().st_size} for file in files],
        "lengths": [len(conversation.tokens) for conversation in kept],
        "supervised": [[list(span) for span in conversation.supervised_spans] for conversation in kept],
        "places": [
            [[number_of[file], start] for file, start in (index.places[layer, key] for key in keys)]
            for layer in aux_layers
        ],
    }


def fitting(conversations: Sequence[Conversation], target: Target, aux_layers: Sequence[int], budget_bytes: int) -> int:
    """How many conversations, from the first one on, a byte budget holds the states of.

    Raises:
        UserError: not even the first.
    """
    per_token = estimate_bytes(1, len(set(aux_layers)), target.hidden_size, target.dtype)
    used = 0
    for kept, conversation in enumerate(conversations):
        used += len(conversation.tokens) * per_token
        if used > budget_bytes:
            if not kept:
                raise UserError(
                    f"The byte budget of {format_bytes(max(0, budget_bytes))} does not hold one conversation "
                    f"({format_bytes(used)} for {len(conversation.tokens)} tokens).",
                    "Raise data.cache_gigabytes.",
                )
            return kept
    return len(conversations)


class _Index:
    """What the whole shards of a folder hold.

    Args:
        folder: of the shards.
        owner: whose states count: a target and its dtype.

    Attributes:
        places: (name of the shard's file, first token in it) by layer and key of a conversation.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder = folder
        self.owner = owner
        self.places: dict[tuple[int, str], tuple[str, int]] = {}
        for file in sorted(folder.glob("shard-*.safetensors")):
            self.add(file)

    def add(self, file: Path) -> None:
        """Read what a shard says of itself; one that is cut short, or another target's, counts for nothing."""
        try:
            with safe_open(file, framework="pt") as handle:  # refuses a file of another length than its header's
                metadata = handle.metadata() or {}
        except (SafetensorError, OSError):
            return
        if metadata.get("owner") != self.owner:
            return
        start = 0
        for key, length in zip(json.loads(metadata["keys"]), json.loads(metadata["lengths"]), strict=True):
            for layer in json.loads(metadata["taps"]):
                self.places.setdefault((layer, key), (file.name, start))
            start += length

    def lacking(self, keys: Sequence[str], aux_layers: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
        """By the layers that no whole shard holds of them: numbers of conversations, equal ones once."""
        found: dict[tuple[int, ...], dict[str, int]] = {}
        for number, key in enumerate(keys):
            if missing := tuple(layer for layer in aux_layers if (layer, key) not in self.places):
                found.setdefault(missing, {}).setdefault(key, number)
        return {missing: list(numbers.values()) for missing, numbers in found.items()}


def _check(conversations: Sequence[Conversation], target: Target) -> None:
    if not conversations:
        raise UserError("There are no conversations to store.", "Check data.prompts and data.conversations.")
    for conversation in conversations:
        if not any(conversation.supervised):
            raise UserError(
                f"Nothing is supervised in conversation {conversation.id!r}.", "Give it an assistant turn with text."
            )
        if len(conversation.tokens) > target.max_length:
            raise UserError(
                f"Conversation {conversation.id!r} has {len(conversation.tokens)} tokens; the context of {target.name} "
                f"is {target.max_length}.",
                "Lower data.max_prompt_tokens or data.max_new_tokens, or shorten the conversation.",
            )
        if max(conversation.tokens) >= target.vocab_size:
            raise UserError(
                f"Conversation {conversation.id!r} holds token {max(conversation.tokens)}; {target.name} knows "
                f"{target.vocab_size}.",
                "It was written with another tokenizer: delete the file and run the command again.",
            )


def _key(tokens: Sequence[int]) -> str:
    """What a conversation's states depend on, besides the target."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:24]


def _shards(numbers: Sequence[int], lengths: Sequence[int], per_token: int, shard_bytes: int) -> list[list[int]]:
    """Conversations by shard, longest first: rows of a batch have about one length, and memory runs out at once or
    never."""
    shards: list[list[int]] = [[]]
    filled = 0
    for i in sorted(numbers, key=lambda i: (-lengths[i], i)):
        if filled >= shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(i)
        filled += lengths[i] * per_token
    return shards


def _batches(shard: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Split a shard, longest first, into batches of at most `batch_tokens` tokens once padded to their longest.

    >>> _batches([2, 0, 1], [5, 4, 9], 10)
    [[2], [0, 1]]
    """
    batches: list[list[int]] = []
    for i in shard:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _write_shard(
    folder: Path,
    owner: str,
    aux_layers: Sequence[int],
    rows: Sequence[Sequence[int]],
    states: Sequence[Mapping[int, Tensor]],
) -> Path:
    """Write one shard: tokens of conversations, and their states; returns its file."""
    tensors = {
        "tokens": torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        **{f"states.{layer}": torch.cat([of_row[layer] for of_row in states]) for layer in aux_layers},
    }
    metadata = {
        "owner": owner,
        "taps": json.dumps(list(aux_layers)),
        "keys": json.dumps([_key(row) for row in rows]),
        "lengths": json.dumps(list(map(len, rows))),
    }
    name = hashlib.sha256(json.dumps(metadata).encode()).hexdigest()[:16]
    file = folder / f"shard-{name}.safetensors"
    write_atomic(file, lambda partial: save_file(tensors, partial, metadata=metadata))
    return file
