"""Computation of hidden states into shards, by one or several processes; see `headstart.data.states.store`.

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
from headstart.data.states.store import FORMAT, MANIFEST, NOT_FINITE, StateStore, all_finite, estimate_bytes
from headstart.data.workers import POLL_SECONDS, claim, prune_claims
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.support.files import format_bytes, need_disk, write_atomic, write_json, write_tensors

BATCH_TOKENS = 2048
"""Maximum tokens of a forward, with padding; a longer conversation runs alone."""
SHARD_BYTES = 64_000_000, 2_000_000_000
"""Lower and upper limit of the shard size. A kill loses at most one shard of work."""
Compute = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Mapping[int, Tensor] | str]]
"""Function of rows and layers that returns each row's states [T, E] by layer, or the reason why there are none."""
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

    def fit(self, conversations: Sequence[Conversation], budget_bytes: int) -> Sequence[Conversation]:
        """Return the leading conversations whose states fit the byte budget; at least one, or a UserError."""
        used = 0
        for count, conversation in enumerate(conversations):
            used += self.bytes(len(conversation.tokens))
            if used > budget_bytes:
                if not count:
                    raise UserError(
                        f"The byte budget of {format_bytes(max(0, budget_bytes))} does not hold one conversation "
                        f"({format_bytes(used)} for {len(conversation.tokens)} tokens).",
                        "Raise data.cache_gigabytes.",
                    )
                return conversations[:count]
        return conversations


def build_store(
    folder: Path,
    conversations: Sequence[Conversation],
    target: Target,
    aux_layers: Sequence[int],
    *,
    budget_bytes: int,
    shards: Path | None = None,
    states_dtype: str = AUTO,
    advance: Callable[[int, int], None] = lambda done, total: None,
    compute: Compute | None = None,
) -> StateStore:
    """Compute the hidden states that no intact shard holds, and write the manifest of a store.

    The store keeps the leading conversations that fit `budget_bytes`, except those with non-finite states. Stores of
    one target may share the `shards` folder, by default the store's own. `advance` is called with (tokens done, total).
    `compute` replaces the target's own forwards.

    Raises:
        UserError: nothing to store, a budget too small for the first conversation, or too little free disk.
    """
    check_conversations(conversations, target)
    shards, kind = shards or folder, StateKind(target, tuple(dict.fromkeys(aux_layers)), states_dtype)
    fitting = kind.fit(conversations, budget_bytes)
    index, without = compute_states(kind, fitting, shards, advance, compute)
    prune_claims(shards)
    left_out = {i: item.id for i, item in enumerate(fitting) if tokens_key(item.tokens) in without}
    stored = [item for i, item in enumerate(fitting) if i not in left_out]
    if not stored:
        raise UserError(
            f"None of {len(left_out)} conversations has hidden states: {next(iter(without.values()))}.",
            "Load the target in float32 (target.dtype=float32), or check its weights.",
        )
    manifest = _manifest(folder, index, kind, stored)
    manifest |= {"dropped": len(conversations) - len(fitting), "left_out": list(left_out.items())}
    manifest["reasons"] = sorted(set(without.values()))
    write_json(folder / MANIFEST, manifest, indent=None)
    return StateStore(folder)


def shard_size(total: int) -> int:
    """Return the shard size for a build of `total` bytes."""
    least, most = SHARD_BYTES
    return min(most, max(least, total // _SHARDS))


class Capture:
    """A sink that stores hidden states of generation as shards for a later build; they equal prefill up to rounding."""

    def __init__(self, shards: Path, kind: StateKind) -> None:
        self._shards, self._kind, self.aux_layers = shards, kind, kind.aux_layers

    def store(self, states: Sequence[tuple[Conversation, Mapping[int, Tensor]]]) -> None:
        """Write a shard of the conversations with finite states [T, E], by layer; a UserError if the disk is full."""
        finite = {tokens_key(item.tokens): (item.tokens, of_item) for item, of_item in states if all_finite(of_item)}
        if finite:
            rows, of_rows = zip(*finite.values(), strict=True)
            need_disk(self._shards, self._kind.bytes(sum(map(len, rows))), "Keeping hidden states")
            _write_shard(self._shards, self._kind, rows, of_rows)


def compute_states(
    kind: StateKind,
    conversations: Sequence[Conversation],
    shards: Path,
    advance: Callable[[int, int], None] = lambda done, total: None,
    compute: Compute | None = None,
) -> tuple[ShardIndex, dict[str, str]]:
    """Compute the states that no shard holds, shared with other processes.

    Every process splits the conversations into the same groups, of about a shard each, and claims the first group that
    no other process has claimed. Returns the index of all shards, and by key the reasons for conversations without
    states.
    """
    rows = {tokens_key(item.tokens): item.tokens for item in conversations}
    index, without, total = ShardIndex(shards, kind.owner), dict[str, str](), sum(map(len, rows.values()))
    needed = sum(
        replace(kind, aux_layers=layers).bytes(sum(len(rows[key]) for key in keys))
        for layers, keys in index.missing(rows, kind.aux_layers).items()
    )
    need_disk(shards, needed, "Keeping hidden states")
    waiting, done = _groups(rows, kind.bytes(1), shard_size(kind.bytes(total))), 0

    def missing(group: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
        wanted = [key for key in group if key not in without]
        if index.missing(wanted, kind.aux_layers):
            index.update()
        return index.missing(wanted, kind.aux_layers)

    def is_done(group: Sequence[str]) -> bool:
        return not missing(group)

    while waiting:
        claimed_elsewhere = []
        for group in waiting:
            name = hashlib.sha256(" ".join([kind.owner, *group]).encode()).hexdigest()[:16]
            if not is_done(group) and (held := claim(shards, name, partial(is_done, group))) is not None:
                with held:
                    for layers, keys in missing(group).items():
                        of_layers, of_keys = replace(kind, aux_layers=layers), {key: rows[key] for key in keys}
                        without |= _compute_shard(of_layers, shards, of_keys, compute or partial(_forward, kind.target))
            if not is_done(group):
                claimed_elsewhere.append(group)
                continue
            done += sum(len(rows[key]) for key in group)
            advance(done, total)
        if len(claimed_elsewhere) == len(waiting):
            time.sleep(POLL_SECONDS)
        waiting = claimed_elsewhere
    return index, without


def _compute_shard(
    kind: StateKind, shards: Path, rows: Mapping[str, Sequence[int]], compute: Compute
) -> dict[str, str]:
    """Compute and write a shard of rows, longest first; return by key the reasons for rows without states."""
    computed = zip(rows, compute(list(rows.values()), kind.aux_layers), strict=True)
    without, found = dict[str, str](), dict[str, Mapping[int, Tensor]]()
    for key, states in computed:
        if isinstance(states, str):
            without[key] = states
        else:
            found[key] = states
    if found:
        _write_shard(shards, kind, [rows[key] for key in found], list(found.values()))
    return without


def _forward(target: Target, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[dict[int, Tensor] | str]:
    """Compute states of rows (longest first) with forwards of the loaded target."""
    states: list[dict[int, Tensor] | str] = []
    for batch in _batches(rows):
        for of_row in target.hidden_states(batch, layers):
            kept = {layer: of_row[layer].cpu() for layer in layers}
            states.append(kept if all_finite(kept) else NOT_FINITE)
    return states


def _manifest(
    folder: Path, index: ShardIndex, kind: StateKind, conversations: Sequence[Conversation]
) -> dict[str, Any]:
    target = kind.target
    keys = [tokens_key(item.tokens) for item in conversations]
    places = [[index.places[layer, key] for key in keys] for layer in kind.aux_layers]
    files = sorted({file for of_layer in places for file, _ in of_layer})
    number_of = {file: number for number, file in enumerate(files)}
    digest = hashlib.sha256(json.dumps([FORMAT, index.owner]).encode())
    for conversation in conversations:
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
        "lengths": [len(conversation.tokens) for conversation in conversations],
        "supervised": [[list(span) for span in conversation.supervised_spans] for conversation in conversations],
        "places": [[[number_of[file], start] for file, start in of_layer] for of_layer in places],
    }


class ShardIndex:
    """Index of an owner's intact shards: file and first token by layer and conversation."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder = folder
        self.owner = owner
        self.places: dict[tuple[int, str], tuple[str, int]] = {}
        self._known: set[Path] = set()
        self.update()

    def update(self) -> None:
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

    def missing(self, keys: Iterable[str], aux_layers: Sequence[int]) -> dict[tuple[int, ...], list[str]]:
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


def _batches(rows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Split rows, longest first, into batches of at most `BATCH_TOKENS` tokens, padded to their longest row."""
    batches: list[list[Sequence[int]]] = []
    for row in rows:
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= BATCH_TOKENS:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _write_shard(
    folder: Path, kind: StateKind, rows: Sequence[Sequence[int]], states: Sequence[Mapping[int, Tensor]]
) -> None:
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
    metadata[KEY] = checksums(tensors, lengths)
    write_atomic(folder / f"shard-{name}.safetensors", lambda partial: write_tensors(partial, tensors, metadata))


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
