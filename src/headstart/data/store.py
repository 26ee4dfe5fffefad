"""Hidden states of conversations on disk: computed once with the frozen target, read many times by training.

A store is a folder of safetensors shards and a manifest. Every shard is written atomically and says what it is part of,
and the manifest comes last; whatever moment a build is killed at, the next one goes on from the shards that are whole.

    shard-00000.safetensors   tokens [S] int32, supervised [S] bool, states.<tap> [S, E], sequences end to end
    manifest.json             fingerprints, taps, and for every conversation its shard, place and length

Shape suffixes: T tokens of one conversation, S tokens of one shard, E hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.data.conversations import Conversation
from headstart.errors import UserError
from headstart.files import PARTIAL, format_bytes, need_disk, read_json, write_atomic, write_json
from headstart.target import Target

SHARD_BYTES = 64_000_000
"""A shard is closed once it holds this much; it is the most work that a kill can lose."""

CACHE_BYTES = 2_000_000_000
"""Stores up to this size are kept in memory once read."""

_MANIFEST = "manifest.json"
_TOKEN_BYTES = 5  # an int32 id and the mask
_FORMAT = 1


@dataclass(frozen=True)
class Sample:
    """One conversation with its hidden states. The tensors may share memory with the store: do not write to them.

    Attributes:
        tokens_T: int64 [T].
        supervised_T: bool [T], true where the assistant wrote the token.
        states: by tap, [T, E] in the target's dtype.
    """

    tokens_T: Tensor
    supervised_T: Tensor
    states: dict[int, Tensor]


def estimate_bytes(tokens: int, taps: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes on disk of so many tokens, each with `taps` states of `hidden` numbers."""
    return tokens * (taps * hidden * dtype.itemsize + _TOKEN_BYTES)


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
        if not (folder / _MANIFEST).is_file():
            raise UserError(f"{folder} holds no finished store of hidden states.", "Run: headstart data RECIPE")
        manifest = read_json(folder / _MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise UserError(f"{folder} is a store of another format.", "Delete it and build it again.")
        self.fingerprint: str = manifest["fingerprint"]
        self.target_fingerprint: str | None = manifest.get("target_fingerprint")  # None: written before it was kept
        self.taps: tuple[int, ...] = tuple(manifest["taps"])
        self.hidden_size: int = manifest["hidden_size"]
        self.lengths: list[int] = manifest["lengths"]
        self.dropped: int = manifest["dropped"]
        self.bytes: int = sum(shard["bytes"] for shard in manifest["shards"])
        self._files = [folder / shard["file"] for shard in manifest["shards"]]
        self._place: dict[int, tuple[int, int]] = {}
        for number, shard in enumerate(manifest["shards"]):
            file = self._files[number]
            found = file.stat().st_size if file.is_file() else 0
            if found != shard["bytes"]:
                raise UserError(
                    f"{file} is {'cut short' if found else 'missing'} ({found} of {shard['bytes']} bytes).",
                    "Run the same command again: only that shard is computed anew.",
                )
            start = 0
            for index in shard["conversations"]:
                self._place[index] = (number, start)
                start += self.lengths[index]
        self._cached = self.bytes <= cache_bytes
        self._shards: dict[int, dict[str, Tensor]] = {}
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
        shard, start = self._place[index]
        part = slice(start, start + self.lengths[index])
        return Sample(
            self._read(shard, "tokens", part).long(),
            self._read(shard, "supervised", part),
            {tap: self._read(shard, f"states.{tap}", part) for tap in self.taps},
        )

    def _read(self, shard: int, name: str, part: slice) -> Tensor:
        if self._cached:
            if shard not in self._shards:
                self._shards[shard] = load_file(self._files[shard])
            return self._shards[shard][name][part]
        if shard not in self._open:
            self._open[shard] = safe_open(self._files[shard], framework="pt")
        part_of_it: Tensor = self._open[shard].get_slice(name)[part]
        return part_of_it

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each token of the vocabulary is supervised, int64 [V]."""
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for tokens_S, supervised_S in self._masks():
            counts_V += torch.bincount(tokens_S[supervised_S].long(), minlength=vocab_size)
        return counts_V

    def _masks(self) -> list[tuple[Tensor, Tensor]]:
        masks = []
        for file in self._files:
            with safe_open(file, framework="pt") as handle:
                masks.append((handle.get_tensor("tokens"), handle.get_tensor("supervised")))
        return masks


@dataclass(frozen=True)
class _Plan:
    """What a store will hold: decided by its inputs alone, so that a killed build finds the same plan again."""

    fingerprint: str
    taps: tuple[int, ...]
    kept: int
    shards: list[list[int]]  # conversation numbers, longest first


def build_store(
    folder: Path,
    conversations: Sequence[Conversation],
    target: Target,
    taps: Sequence[int],
    *,
    budget_bytes: int,
    batch_tokens: int = 8192,
    advance: Callable[[int, int], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> StateStore:
    """Compute and keep the tapped states of conversations; whole shards of an earlier, killed build are kept.

    A folder that was built from other conversations, another target or other taps is built anew.

    Args:
        folder: of the store; files in it that are not a store's are left alone.
        conversations: their order is the order of the store.
        target: the frozen model.
        taps: which hidden states to keep.
        budget_bytes: conversations from the first one on are kept while they fit; see `StateStore.notice`.
        batch_tokens: tokens of a forward at most, padding included (one longer conversation goes alone).
        advance: called with (tokens done, tokens in all) after every forward.
        shard_bytes: size at which a shard is closed.

    Raises:
        UserError: nothing to store, a conversation that the target cannot read, a budget too small for the first
            conversation, or too little free disk.
    """
    _check(conversations, target)
    plan = _plan(conversations, target, taps, budget_bytes, shard_bytes)
    lengths = [len(conversation.tokens) for conversation in conversations[: plan.kept]]
    files = [folder / f"shard-{number:05d}.safetensors" for number in range(len(plan.shards))]
    whole = [_is_whole(file, plan.fingerprint, shard) for file, shard in zip(files, plan.shards, strict=True)]
    if all(whole) and _is_finished(folder, plan.fingerprint):
        return StateStore(folder)
    (folder / _MANIFEST).unlink(missing_ok=True)
    for stale in [*folder.glob("shard-*.safetensors"), *folder.glob(f"shard-*.safetensors{PARTIAL}")]:
        if stale not in files or not whole[files.index(stale)]:
            stale.unlink()
    total = sum(lengths)
    done = sum(lengths[i] for shard, ready in zip(plan.shards, whole, strict=True) if ready for i in shard)
    missing = estimate_bytes(total - done, len(plan.taps), target.hidden_size, target.dtype)
    need_disk(folder, missing, "Keeping hidden states")
    for file, shard, ready in zip(files, plan.shards, whole, strict=True):
        if ready:
            continue
        states: dict[int, dict[int, Tensor]] = {}
        for batch in _batches(shard, lengths, batch_tokens):
            rows = target.hidden_states([conversations[i].tokens for i in batch], plan.taps)
            states.update(zip(batch, ({tap: row[tap].cpu() for tap in plan.taps} for row in rows), strict=True))
            done += sum(lengths[i] for i in batch)
            if advance is not None:
                advance(done, total)
        _write_shard(file, plan, shard, conversations, states)
    write_json(
        folder / _MANIFEST,
        {
            "format": _FORMAT,
            "fingerprint": plan.fingerprint,
            "target": target.name,
            "target_fingerprint": target.identity().fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
            "taps": list(plan.taps),
            "hidden_size": target.hidden_size,
            "dropped": len(conversations) - plan.kept,
            "lengths": lengths,
            "shards": [
                {"file": file.name, "bytes": file.stat().st_size, "conversations": shard}
                for file, shard in zip(files, plan.shards, strict=True)
            ],
        },
    )
    return StateStore(folder)


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


def _plan(
    conversations: Sequence[Conversation], target: Target, taps: Sequence[int], budget_bytes: int, shard_bytes: int
) -> _Plan:
    unique = tuple(dict.fromkeys(taps))
    per_token = estimate_bytes(1, len(unique), target.hidden_size, target.dtype)
    digest = hashlib.sha256()
    settings = [_FORMAT, target.identity().fingerprint, str(target.dtype), unique, shard_bytes]
    digest.update(json.dumps(settings).encode())
    kept = used = 0
    for conversation in conversations:
        used += len(conversation.tokens) * per_token
        if used > budget_bytes:
            break
        kept += 1
        digest.update(json.dumps([conversation.tokens, conversation.supervised_spans]).encode())
    if not kept:
        raise UserError(
            f"The byte budget of {format_bytes(budget_bytes)} does not hold one conversation "
            f"({format_bytes(used)} for {len(conversations[0].tokens)} tokens).",
            "Raise data.cache_gigabytes.",
        )
    # Longest first: rows of a batch have about one length, and memory runs out at once or never.
    order = sorted(range(kept), key=lambda i: (-len(conversations[i].tokens), i))
    shards: list[list[int]] = [[]]
    filled = 0
    for i in order:
        if filled >= shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(i)
        filled += len(conversations[i].tokens) * per_token
    return _Plan(digest.hexdigest()[:32], unique, kept, shards)


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
    file: Path,
    plan: _Plan,
    shard: Sequence[int],
    conversations: Sequence[Conversation],
    states: dict[int, dict[int, Tensor]],
) -> None:
    tensors = {
        "tokens": torch.tensor([token for i in shard for token in conversations[i].tokens], dtype=torch.int32),
        "supervised": torch.tensor([flag for i in shard for flag in conversations[i].supervised]),
        **{f"states.{tap}": torch.cat([states[i][tap] for i in shard]) for tap in plan.taps},
    }
    metadata = {"fingerprint": plan.fingerprint, "conversations": json.dumps(list(shard))}
    write_atomic(file, lambda partial: save_file(tensors, partial, metadata=metadata))


def _is_whole(file: Path, fingerprint: str, shard: Sequence[int]) -> bool:
    """Whether a shard is all there and belongs to this plan; safetensors refuses a file of another length."""
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
    except (SafetensorError, OSError):
        return False
    return metadata == {"fingerprint": fingerprint, "conversations": json.dumps(list(shard))}


def _is_finished(folder: Path, fingerprint: str) -> bool:
    try:
        return StateStore(folder).fingerprint == fingerprint
    except (UserError, KeyError):
        return False
