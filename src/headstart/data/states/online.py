"""Hidden states that are computed when training reads them: the target's forward in the loop, nothing on disk.

Shape suffixes: T tokens of one conversation, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headstart.data.conversations.records import Conversation
from headstart.data.states.shards import check_conversations
from headstart.data.states.store import Sample
from headstart.target.model import Target


class States(Protocol):
    """Conversations with hidden states, as training reads them: stored (`StateStore`) or online (`OnlineStates`).

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

    def __len__(self) -> int: ...

    def get(self, index: int) -> Sample:
        """One conversation with its states."""

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """Those of a batch. Where several processes train, each asks as often as the others, if need be for none."""

    def supervised(self) -> Iterable[Tensor]:
        """The mask of each conversation in turn, bool [T]; no states are read."""

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each token of the vocabulary is supervised, int64 [V]."""


class OnlineStates:
    """Conversations whose states are computed, on the target's device, whenever they are read.

    They are what `build_store` keeps but for the order of sums: there the rows of a forward are as long as each other,
    here those of a training batch.

    Raises:
        UserError: nothing to learn from, or a conversation that the target cannot read.
    """

    stored: ClassVar[bool] = False

    def __init__(
        self, folder: Path, conversations: Sequence[Conversation], target: Target, aux_layers: Sequence[int]
    ) -> None:
        check_conversations(conversations, target)
        self.folder, self._conversations, self._target = folder, conversations, target
        self.aux_layers = tuple(dict.fromkeys(aux_layers))
        self.hidden_size = target.hidden_size
        self.target_fingerprint = target.identity().fingerprint
        self.lengths = [len(conversation.tokens) for conversation in conversations]
        of = [self.target_fingerprint, target.settings, str(target.dtype).removeprefix("torch.")]
        digest = hashlib.sha256(json.dumps(["online", *of]).encode())
        for conversation in conversations:
            digest.update(json.dumps([conversation.tokens, conversation.supervised_spans]).encode())
        self.fingerprint = digest.hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> Sample:
        return self.samples([index])[0]

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        rows = [self._conversations[index] for index in indices]
        states = self._states(tuple(indices))
        return [
            Sample(torch.tensor(row.tokens), torch.tensor(row.supervised), state)
            for row, state in zip(rows, states, strict=True)
        ]

    def _states(self, indices: tuple[int, ...]) -> list[dict[int, Tensor]]:
        """Of these conversations. With a sharded target every process asks, and all run the forward of each batch."""
        batches: list[Any] = [indices]
        if self._target.sharded:
            batches = [None] * dist.get_world_size()
            dist.all_gather_object(batches, indices)
        of_indices: list[dict[int, Tensor]] = []
        for batch in dict.fromkeys(filter(None, batches)):
            rows = [self._conversations[index].tokens for index in batch]
            states = self._target.hidden_states(rows, self.aux_layers)
            if batch == indices:
                of_indices = states
        return of_indices

    def supervised(self) -> Iterable[Tensor]:
        return (torch.tensor(conversation.supervised) for conversation in self._conversations)

    def supervised_counts(self, vocab_size: int) -> Tensor:
        counts_V = torch.zeros(vocab_size, dtype=torch.long)
        for conversation, supervised_T in zip(self._conversations, self.supervised(), strict=True):
            counts_V += torch.bincount(torch.tensor(conversation.tokens)[supervised_T], minlength=vocab_size)
        return counts_V
