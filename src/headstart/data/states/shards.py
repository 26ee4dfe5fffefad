"""Computing hidden states into shards, by one or several processes; see `headstart.data.states.store`.

Shape suffixes: T tokens of one conversation, S tokens of one shard, E hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.data.conversations.records import Conversation, tokens_key
from headstart.data.states.shard_format import AUTO, KEY, checksums, encode
from headstart.data.states.store import FORMAT, MANIFEST, StateStore, all_finite, estimate_bytes
from headstart.data.workers import POLL_SECONDS, claim, claims
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.support.files import format_bytes, need_disk, write_atomic, write_json, write_tensors

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
    index, lost = compute_states(kind, kept, shards, work)
    claims(shards)  # deletes those of killed processes
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


def compute_states(
    kind: StateKind, kept: Sequence[Conversation], shards: Path, work: Work
) -> tuple[ShardIndex, set[str]]:
    """Compute the states that no shard holds, beside other processes; return all shards and non-finite conversations.

    Every process splits the conversations into the same groups, of about a shard each, and claims the first group that
    no other process has claimed.
    """
    rows = {tokens_key(item.tokens): item.tokens for item in kept}
    index, lost, total = ShardIndex(shards, kind.owner), set[str](), sum(map(len, rows.values()))
    lacking = index.lacking(rows, kind.aux_layers)
    needed = sum(
        replace(kind, aux_layers=layers).bytes(sum(len(rows[key]) for key in keys)) for layers, keys in lacking.items()
    )
    need_disk(shards, needed, "Keeping hidden states")
    waiting = _groups(rows, kind.bytes(1), work.shard_bytes or shard_size(kind.bytes(total)))
    done = 0

    def missing(group: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
        if index.lacking(finite := [key for key in group if key not in lost], kind.aux_layers):
            index.update()
        return index.lacking(finite, kind.aux_layers)

    def is_done(group: Sequence[str]) -> bool:
        return not missing(group)

    while waiting:
        claimed_elsewhere = []
        for group in waiting:
            name = hashlib.sha256(" ".join([kind.owner, *group]).encode()).hexdigest()[:16]
            if not is_done(group) and (held := claim(shards, name, partial(is_done, group))) is not None:
                with held:
                    for layers, keys in missing(group).items():
                        of_layers = replace(kind, aux_layers=layers)
                        lost |= _compute_shard(of_layers, shards, {key: rows[key] for key in keys}, work.batch_tokens)
            if not is_done(group):
                claimed_elsewhere.append(group)
                continue
            done += sum(len(rows[key]) for key in group)
            work.advance(done, total)
        if len(claimed_elsewhere) == len(waiting):
            time.sleep(POLL_SECONDS)
        waiting = claimed_elsewhere
    return index, lost


def _compute_shard(kind: StateKind, shards: Path, rows: Mapping[str, Sequence[int]], batch_tokens: int) -> set[str]:
    """Compute and write a shard of rows, longest first; return the keys of rows with non-finite states."""
    keys, texts = list(rows), list(rows.values())
    states: dict[int, dict[int, Tensor]] = {}
    for batch in _batches(range(len(texts)), list(map(len, texts)), batch_tokens):
        computed = kind.target.hidden_states([texts[i] for i in batch], kind.aux_layers)
        states.update(
            zip(batch, ({layer: row[layer].cpu() for layer in kind.aux_layers} for row in computed), strict=True)
        )
    finite = [i for i in range(len(texts)) if all_finite(states[i])]
    if finite:
        _write_shard(shards, kind, [texts[i] for i in finite], [states[i] for i in finite])
    return {keys[i] for i in {*range(len(texts))} - {*finite}}


def _manifest(folder: Path, index: ShardIndex, kind: StateKind, kept: Sequence[Conversation]) -> dict[str, Any]:
    target = kind.target
    keys = [tokens_key(item.tokens) for item in kept]
    places = [[index.places[layer, key] for key in keys] for layer in kind.aux_layers]
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
        self._known: set[Path] = set()
        self.update()

    def update(self) -> None:
        """Index the shards that were added since."""
        for file in sorted({*self.folder.glob("shard-*.safetensors")} - self._known):
            if self._add(file):
                self._known.add(file)

    def _add(self, file: Path) -> bool:
        """Index a shard by its metadata unless it has another owner; return False if it is truncated or damaged."""
        try:
            with safe_open(file, framework="pt") as handle:  # refuses a file of another length than in its header
                metadata = handle.metadata() or {}
            keys, lengths, layers = (json.loads(metadata[name]) for name in ("keys", "lengths", "aux_layers"))
        except (SafetensorError, OSError, ValueError, KeyError):
            return False
        if metadata.get("owner") == self.owner:
            start = 0
            for key, length in zip(keys, lengths, strict=True):
                for layer in layers:
                    self.places.setdefault((layer, key), (file.name, start))
                start += length
        return True

    def lacking(self, keys: Iterable[str], aux_layers: Sequence[int]) -> dict[tuple[int, ...], list[str]]:
        """Group conversations by the layers missing from all shards."""
        by_layers: dict[tuple[int, ...], list[str]] = {}
        for key in keys:
            if missing := tuple(layer for layer in aux_layers if (layer, key) not in self.places):
                by_layers.setdefault(missing, []).append(key)
        return by_layers


def _groups(rows: Mapping[str, Sequence[int]], per_token: int, shard_bytes: int) -> list[list[str]]:
    # Longest first: rows of a batch have similar lengths, and memory runs out at once or never.
    groups: list[list[str]] = [[]]
    filled = 0
    for key in sorted(rows, key=lambda key: -len(rows[key])):
        if filled >= shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += len(rows[key]) * per_token
    return groups


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
