"""Computing hidden states into shards, in this process and helper processes; see `headstart.data.states.store`.

Shape suffixes: T tokens of one conversation, S tokens of one shard, E hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.data.conversations.jobs import JOBS, Board, Job, Workers, share
from headstart.data.conversations.records import Conversation, tokens_key
from headstart.data.states.shard_format import AUTO, KEY, checksums, encode
from headstart.data.states.store import FORMAT, MANIFEST, StateStore, all_finite, estimate_bytes
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.support.files import format_bytes, need_disk, write_atomic, write_json, write_tensors

STATES = "states"
"""Kind of shard jobs."""
SHARD_BYTES = 64_000_000, 2_000_000_000
"""Lower and upper limit of the shard size, which is the work that a kill can lose."""
_SHARDS = 200
"""Approximate number of shards of a build, within these limits."""


@dataclass(frozen=True)
class StateKind:
    """Layers and storage format (see `shard_format`) of a target's hidden states."""

    target: Target
    aux_layers: tuple[int, ...]
    states_dtype: str = AUTO

    @property
    def owner(self) -> str:
        """Identity of target and storage format in shard metadata."""
        owner = self.target.whole_identity
        return owner if self.states_dtype == AUTO else f"{owner} {self.states_dtype}"

    def bytes(self, tokens: int) -> int:
        size = self.target.hidden_size, self.target.dtype
        return estimate_bytes(tokens, len(self.aux_layers), *size, states_dtype=self.states_dtype)

    def fitting(self, conversations: Sequence[Conversation], budget_bytes: int) -> int:
        """Return how many leading conversations fit the byte budget; at least one, or a UserError."""
        used = 0
        for kept, conversation in enumerate(conversations):
            used += self.bytes(len(conversation.tokens))
            if used > budget_bytes:
                if not kept:
                    raise UserError(
                        f"The byte budget of {format_bytes(max(0, budget_bytes))} does not hold one conversation "
                        f"({format_bytes(used)} for {len(conversation.tokens)} tokens).",
                        "Raise data.cache_gigabytes.",
                    )
                return kept
        return len(conversations)


@dataclass(frozen=True)
class Work:
    """Settings of a build; `advance` is called with (tokens done, total tokens) after every shard.

    A forward has at most `batch_tokens` with padding (a longer conversation runs alone). `shard_bytes` None scales with
    the build.
    """

    states_dtype: str = AUTO
    batch_tokens: int = 2048
    shard_bytes: int | None = None
    advance: Callable[[int, int], None] = lambda done, total: None


def build_store(
    folder: Path,
    conversations: Sequence[Conversation],
    target: Target,
    aux_layers: Sequence[int],
    *,
    budget_bytes: int,
    shards: Path | None = None,
    work: Work | None = None,
) -> StateStore:
    """Compute the aux hidden states that no intact shard holds, and write the manifest of a store.

    Conversations are kept in order while they fit `budget_bytes`; ones with non-finite states are left out. Stores of
    one target may share the `shards` folder, by default the store's own.

    Raises:
        UserError: nothing to store, a budget too small for the first conversation, or too little free disk.
    """
    check_conversations(conversations, target)
    shards, work = shards or folder, work or Work()
    kind = StateKind(target, tuple(dict.fromkeys(aux_layers)), work.states_dtype)
    kept = conversations[: kind.fitting(conversations, budget_bytes)]
    board = Board(shards / JOBS)
    # Jobs of a killed planner: its helpers may still be computing them.
    posted = [Job(name.rpartition("-")[0], board.job(name)) for name in board.names()]
    for _ in _computed(target, shards, posted, board):
        pass
    index = ShardIndex(shards, kind.owner)
    planned = _planned(kind, kept, index, work)
    total = sum(len(conversation.tokens) for conversation in kept)
    done = total - sum(len(kept[i].tokens) for _, numbers in planned for i in numbers)
    jobs = (_job(f"{place:06d}", kind, kept, shard, work) for place, shard in enumerate(planned))
    lost = set[str]()
    for job, result in _computed(target, shards, jobs, board):
        if result["file"]:
            index.add(shards / result["file"])
        lost |= {tokens_key(job.what["rows"][i]) for i in result["not_finite"]}
        done += sum(map(len, job.what["rows"]))
        work.advance(done, total)
    board.clear()
    not_finite = [(i, item.id) for i, item in enumerate(kept) if tokens_key(item.tokens) in lost]
    dropped, left_out = len(conversations) - len(kept), {i for i, _ in not_finite}
    kept = [item for i, item in enumerate(kept) if i not in left_out]
    if not kept:
        raise UserError(
            f"The hidden states of {target.name} are not finite in any of {len(left_out)} conversations.",
            "Load the target in float32 (target.dtype=float32), or check its weights.",
        )
    manifest = {**_manifest(folder, index, kind, kept), "dropped": dropped, "not_finite": not_finite}
    write_json(folder / MANIFEST, manifest, indent=None)
    return StateStore(folder)


def shard_size(total: int) -> int:
    """Return the shard size for a build of `total` bytes."""
    least, most = SHARD_BYTES
    return min(most, max(least, total // _SHARDS))


class Capture:
    """A sink that keeps hidden states of generation as shards for a later build; they equal prefill up to rounding."""

    def __init__(self, shards: Path, target: Target, aux_layers: Sequence[int], states_dtype: str = AUTO) -> None:
        self.aux_layers = tuple(dict.fromkeys(aux_layers))
        self._shards, self._kind = shards, StateKind(target, self.aux_layers, states_dtype)

    def keep(self, written: Sequence[tuple[Conversation, Mapping[int, Tensor]]]) -> None:
        """Write a shard of the conversations with finite states [T, E], by layer; needs free disk."""
        once = {tokens_key(item.tokens): (item.tokens, states) for item, states in written if all_finite(states)}
        if not once:
            return
        rows, states = [tokens for tokens, _ in once.values()], [states for _, states in once.values()]
        need_disk(self._shards, self._kind.bytes(sum(map(len, rows))), "Keeping hidden states")
        _write_shard(self._shards, self._kind, rows, states)


# -- computing -------------------------------------------------------------------------------------------------------


def _planned(
    kind: StateKind, kept: Sequence[Conversation], index: ShardIndex, work: Work
) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return layers and conversation numbers of each shard to compute."""
    lengths = [len(conversation.tokens) for conversation in kept]
    lacking = index.lacking(kept, kind.aux_layers)
    per_token = {layers: replace(kind, aux_layers=layers).bytes(1) for layers in lacking}
    needed = sum(per_token[layers] * lengths[i] for layers, numbers in lacking.items() for i in numbers)
    need_disk(index.folder, needed, "Keeping hidden states")
    return [
        (layers, numbers)
        for layers, missing in lacking.items()
        for numbers in _split(missing, lengths, per_token[layers], work.shard_bytes or shard_size(needed))
    ]


def _job(
    order: str, kind: StateKind, kept: Sequence[Conversation], shard: tuple[Sequence[int], Sequence[int]], work: Work
) -> Job:
    layers, numbers = shard
    what = {
        "kind": STATES,
        "target": kind.target.whole_identity,
        "layers": list(layers),
        "rows": [list(kept[i].tokens) for i in numbers],
        "batch_tokens": work.batch_tokens,
        "states_dtype": work.states_dtype,
    }
    return Job(order, what)


def compute_shard(
    target: Target, what: dict[str, Any], shards: Path, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Compute and write a job's shard; `check` is called before every forward."""
    rows, layers = what["rows"], tuple(what["layers"])
    states: dict[int, dict[int, Tensor]] = {}
    for batch in _batches(range(len(rows)), list(map(len, rows)), what["batch_tokens"]):
        check()
        computed = target.hidden_states([rows[i] for i in batch], layers)
        states.update(zip(batch, ({layer: row[layer].cpu() for layer in layers} for row in computed), strict=True))
    kind = StateKind(target, layers, what["states_dtype"])
    finite = [i for i in range(len(rows)) if all_finite(states[i])]
    file = _write_shard(shards, kind, [rows[i] for i in finite], [states[i] for i in finite]).name if finite else ""
    return {"file": file, "not_finite": sorted({*range(len(rows))} - {*finite})}


def _computed(target: Target, shards: Path, jobs: Iterable[Job], board: Board) -> Iterator[tuple[Job, dict[str, Any]]]:
    waiting = iter(jobs)
    with Workers(target.device, 1) as workers:
        compute = partial(compute_shard, target, shards=shards, check=workers.check)
        yield from share(lambda *_: next(waiting, None), compute, workers, board)


def _manifest(folder: Path, index: ShardIndex, kind: StateKind, kept: Sequence[Conversation]) -> dict[str, Any]:
    target = kind.target
    places = [[index.places[layer, tokens_key(item.tokens)] for item in kept] for layer in kind.aux_layers]
    files = sorted({file for of_layer in places for file, _ in of_layer})
    number_of = {file: number for number, file in enumerate(files)}
    digest = hashlib.sha256(json.dumps([FORMAT, index.owner]).encode())
    for conversation in kept:
        digest.update(json.dumps([list(conversation.tokens), conversation.supervised_spans]).encode())
    return {
        "format": FORMAT,
        "states_dtype": kind.states_dtype,
        "fingerprint": digest.hexdigest()[:32],
        "target": target.name,
        "target_fingerprint": target.identity().fingerprint,
        "dtype": target.dtype_name,
        "aux_layers": list(kind.aux_layers),
        "hidden_size": target.hidden_size,
        "shards": os.path.relpath(index.folder.resolve(), folder.resolve()),
        "files": [{"file": file, "bytes": (index.folder / file).stat().st_size} for file in files],
        "lengths": [len(conversation.tokens) for conversation in kept],
        "supervised": [[list(span) for span in conversation.supervised_spans] for conversation in kept],
        "places": [[[number_of[file], start] for file, start in of_layer] for of_layer in places],
    }


class ShardIndex:
    """Index of an `owner`'s intact shards: file and first token by layer and conversation."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder = folder
        self.owner = owner
        self.places: dict[tuple[int, str], tuple[str, int]] = {}
        for file in sorted(folder.glob("shard-*.safetensors")):
            self.add(file)

    def add(self, file: Path) -> None:
        """Index a shard by its metadata; ignore truncated or damaged ones, and other owners'."""
        try:
            with safe_open(file, framework="pt") as handle:  # refuses a file of another length than in its header
                metadata = handle.metadata() or {}
            keys, lengths, layers = (json.loads(metadata[name]) for name in ("keys", "lengths", "aux_layers"))
        except (SafetensorError, OSError, ValueError, KeyError):
            return
        if metadata.get("owner") != self.owner:
            return
        start = 0
        for key, length in zip(keys, lengths, strict=True):
            for layer in layers:
                self.places.setdefault((layer, key), (file.name, start))
            start += length

    def lacking(
        self, conversations: Sequence[Conversation], aux_layers: Sequence[int]
    ) -> dict[tuple[int, ...], list[int]]:
        """Group conversation numbers by the layers missing from all shards; duplicates appear once."""
        numbers: dict[tuple[int, ...], dict[str, int]] = {}
        for number, key in enumerate(tokens_key(conversation.tokens) for conversation in conversations):
            if missing := tuple(layer for layer in aux_layers if (layer, key) not in self.places):
                numbers.setdefault(missing, {}).setdefault(key, number)
        return {missing: list(by_key.values()) for missing, by_key in numbers.items()}


def _split(numbers: Sequence[int], lengths: Sequence[int], per_token: int, shard_bytes: int) -> list[list[int]]:
    # Longest first: rows of a batch have similar lengths, and memory runs out at once or never.
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
    folder: Path, kind: StateKind, rows: Sequence[Sequence[int]], states: Sequence[Mapping[int, Tensor]]
) -> Path:
    tensors = {"tokens": torch.tensor([token for row in rows for token in row], dtype=torch.int32)}
    for layer in kind.aux_layers:
        tensors |= encode(layer, torch.cat([of_row[layer] for of_row in states]), kind.states_dtype)
    lengths = list(map(len, rows))
    metadata = {
        "owner": kind.owner,
        "aux_layers": json.dumps(list(kind.aux_layers)),
        "keys": json.dumps([tokens_key(row) for row in rows]),
        "lengths": json.dumps(lengths),
    }
    name = hashlib.sha256(json.dumps(metadata).encode()).hexdigest()[:16]
    file = folder / f"shard-{name}.safetensors"
    described = {**metadata, KEY: checksums(tensors, lengths)}
    write_atomic(file, lambda partial: write_tensors(partial, tensors, described))
    return file


def check_conversations(conversations: Sequence[Conversation], target: Target) -> None:
    """Refuse conversations that do not fit the target or have nothing supervised."""
    if not conversations:
        raise UserError("There are no conversations to store.", "Check data.prompts and data.conversations.")
    for conversation in conversations:
        name, length, largest = conversation.id, len(conversation.tokens), max(conversation.tokens, default=0)
        if not any(conversation.supervised):
            raise UserError(f"Nothing is supervised in conversation {name!r}.", "Give it an assistant turn with text.")
        if length > target.max_length:
            raise UserError(
                f"Conversation {name!r} has {length} tokens; the context of {target.name} is {target.max_length}.",
                "Lower data.max_prompt_tokens or data.max_new_tokens, or shorten the conversation.",
            )
        if largest >= target.vocab_size:
            raise UserError(
                f"Conversation {name!r} holds token {largest}; {target.name} knows {target.vocab_size}.",
                "It was written with another tokenizer: delete the file and run the command again.",
            )
