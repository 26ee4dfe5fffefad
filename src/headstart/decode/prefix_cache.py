"""Prefix caching between the answers of a conversation, so that no turn is prefilled twice.

At the end of an answer its keys and values are copied out of the target's cache; the next turn loads them into a new
cache. Drafters start from the states of the whole text, as after a full prefill.

Shape suffixes: B rows (one), T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from headstart.kernels.memory import free_bytes
from headstart.model.model import Target, TargetOutput
from headstart.replay.cache import TreeCache
from headstart.tree.tree import Committed

_MEMORY_FRACTION = 0.2
"""Largest fraction of free memory for keys, values and states between two turns.

Above it keys and values are not copied, so that the next turn is prefilled completely; the states stay until then."""


class PrefixCache:
    """The cached text of one conversation, for `DecodeLoop.generate` to continue from and extend.

    A prompt that differs is prefilled from the first difference, or completely if the target's cache cannot go back.
    """

    def __init__(self) -> None:
        self._target: Target | None = None
        self._cache: TreeCache | None = None
        self._tokens: list[int] = []
        self._states: dict[int, list[Tensor]] = {}  # by layer, pieces [1, T, E]

    def prefill(
        self, target: Target, cache: TreeCache, prompt: Sequence[int], aux_layers: Sequence[int]
    ) -> TargetOutput:
        """Prefill one row like `Target.prefill`, skipping the cached prefix."""
        length, states = self._load(target, cache, prompt, aux_layers)
        out = target.prefill(cache, [prompt[length:]], aux_layers)
        for layer in aux_layers if length else ():
            out.aux_hidden_states[layer] = torch.cat([states[layer], out.aux_hidden_states[layer]], dim=1)
        self._target, self._tokens = target, list(prompt)
        self._states = {layer: [state_BTE] for layer, state_BTE in out.aux_hidden_states.items()}
        return out

    def append(self, committed: Committed) -> None:
        """Append the committed tokens and states of a round."""
        self._tokens += committed.tokens[0]
        for layer, pieces in self._states.items():
            pieces.append(committed.states[layer].clone())  # not a view into the states of a whole tree

    def store(self, cache: TreeCache) -> None:
        """Store the target's cache at the end of an answer, if it fits into memory."""
        assert self._target is not None, "prefill comes first"
        states = sum(piece.nbytes for pieces in self._states.values() for piece in pieces)
        size = len(self._tokens) * self._target.kv_bytes_per_token + states
        if size <= _MEMORY_FRACTION * free_bytes(self._target.device):
            self._cache = cache.copy_row(0, len(self._tokens))

    def _load(
        self, target: Target, cache: TreeCache, prompt: Sequence[int], aux_layers: Sequence[int]
    ) -> tuple[int, Mapping[int, Tensor]]:
        """Load the cached prefix of a prompt into the target's cache; return its length and its states."""
        stored, self._cache = self._cache, None  # an interrupted answer stores nothing
        same = target is self._target and set(aux_layers) <= self._states.keys()
        if stored is None or not same or not target.can_read_in_parts(max(len(prompt), len(self._tokens))):
            return 0, {}
        cache.load_row(0, stored.copy_row(0, min(common_prefix_length([self._tokens, prompt]), len(prompt) - 1)))
        length = cache.lengths[0]
        return length, {layer: torch.cat(self._states[layer], dim=1)[:, :length] for layer in aux_layers}


def common_prefix_length(texts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of several texts.

    >>> common_prefix_length([[1, 2, 3], [1, 2, 4, 3], [1, 2]])
    2
    """
    first, last = min(map(list, texts)), max(map(list, texts))  # these two differ earliest
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
