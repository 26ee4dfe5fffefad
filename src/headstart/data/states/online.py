"""Hidden states computed on the fly by the target during training, with nothing on disk.

Shape suffixes: T tokens of one conversation, S tokens of all of them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headstart.data.conversations.records import Conversation
from headstart.data.states.store import NOT_FINITE, Sample, States, which_finite
from headstart.model.frozen import FrozenModel
from headstart.model.model import Target


class OnlineStates(States):
    """Conversations with states computed on the target's device at every read; five bytes of memory a token.

    States equal the ones of `build_store` up to summation order, as forwards are batched differently.
    """

    stored = False

    def __init__(
        self, folder: Path, conversations: Iterable[Conversation], target: FrozenModel, aux_layers: Sequence[int]
    ) -> None:
        self.folder, self._target = folder, target
        self.aux_layers = tuple(dict.fromkeys(aux_layers))
        self.hidden_size = target.hidden_size
        self.target_fingerprint = target.identity().fingerprint
        self.lengths, self._starts = list[int](), list[int]()
        self.left_out: list[int] = []
        tokens, supervised = array("i"), bytearray()
        of = [self.target_fingerprint, target.settings, target.dtype_name]
        digest = hashlib.sha256(json.dumps(["online", *of]).encode())
        for conversation in conversations:
            self._starts.append(len(tokens))
            self.lengths.append(len(conversation.tokens))
            tokens.extend(conversation.tokens)
            supervised.extend(conversation.supervised)
            digest.update(json.dumps([list(conversation.tokens), conversation.supervised_spans]).encode())
        self.fingerprint = digest.hexdigest()[:32]
        self._tokens_S, self._supervised_S = _tensor(tokens, torch.int32), _tensor(supervised, torch.bool)

    def samples(self, indices: Sequence[int], layers: Sequence[int] | None = None) -> list[Sample]:
        """Compute a batch. Conversations without usable states are fully masked, with one warning each."""
        layers, samples = self.aux_layers if layers is None else layers, list[Sample]()
        for index, states in zip(indices, self._states(tuple(indices), layers), strict=True):
            tokens_T, supervised_T = self._tokens(index), self._supervised(index)
            if isinstance(states, str):
                if index not in self.left_out:
                    self.left_out.append(index)
                    warnings.warn(
                        f"Conversation {index} (from 0) of {self.folder} is left out ({len(self.left_out)} so far): "
                        f"{states}.",
                        stacklevel=2,
                    )
                supervised_T = torch.zeros_like(supervised_T)
                where = None if self.stored else self._target.device
                zeros_TE = torch.zeros(len(tokens_T), self.hidden_size, dtype=self._target.dtype, device=where)
                states = dict.fromkeys(layers, zeros_TE)
            samples.append(Sample(tokens_T, supervised_T, states))
        return samples

    def _states(self, indices: tuple[int, ...], layers: Sequence[int]) -> list[dict[int, Tensor] | str]:
        """Return each conversation's states by layer, or the reason why there are none.

        With a sharded target, all ranks run the forwards of every rank's batch.
        """
        assert isinstance(self._target, Target), "it computes states"
        batches: list[Any] = [indices]
        if self._target.sharded:
            batches = [None] * dist.get_world_size()
            dist.all_gather_object(batches, indices)
        of_indices: list[dict[int, Tensor]] = []
        for batch in dict.fromkeys(filter(None, batches)):
            rows = [self._tokens(index).tolist() for index in batch]
            states = self._target.hidden_states(rows, layers)
            if batch == indices:
                of_indices = states
        finite = which_finite(of_indices)
        return [states if known else NOT_FINITE for states, known in zip(of_indices, finite, strict=True)]

    def _tokens(self, index: int) -> Tensor:
        return self._tokens_S[self._of(index)].long()

    def _supervised(self, index: int) -> Tensor:
        return self._supervised_S[self._of(index)]

    def _of(self, index: int) -> slice:
        return slice(self._starts[index], self._starts[index] + self.lengths[index])


def _tensor(numbers: array[int] | bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.zeros(0, dtype=dtype)
