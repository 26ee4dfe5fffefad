"""What was read of a conversation, kept from one answer to the next, so that no turn is read twice.

Keys and values lie in the cache of the target; drafters start from the states of the whole text, as after reading it
anew.

Shape suffixes: B rows (one), T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headstart.target.cache import TreeCache
from headstart.target.memory import free_bytes
from headstart.target.model import Target, TargetOutput
from headstart.tree.tree import Committed

_SHARE = 0.2
"""Of free memory, what the keys, values and states of a conversation may take between its turns."""


class KeptText:
    """What a target has read of one conversation; `DecodeLoop.generate` goes on from there, and adds what it reads.

    A text that begins otherwise is read from where it differs, or anew where the cache cannot go back.
    """

    def __init__(self) -> None:
        self._target: Target | None = None
        self._cache: TreeCache | None = None
        self._tokens: list[int] = []
        self._states: dict[int, list[Tensor]] = {}  # by layer, pieces [1, T, E]

    def prefill(
        self, target: Target, cache: TreeCache, prompt: Sequence[int], aux_layers: Sequence[int]
    ) -> TargetOutput:
        """As `Target.prefill` of one row with an empty cache; what is kept is not read again."""
        before, states = self._go_on(target, cache, prompt, aux_layers)
        out = target.prefill(cache, [prompt[before:]], aux_layers)
        for layer in aux_layers if before else ():
            out.aux_hidden_states[layer] = torch.cat([states[layer], out.aux_hidden_states[layer]], dim=1)
        self._target, self._tokens = target, list(prompt)
        self._states = {layer: [state_BTE] for layer, state_BTE in out.aux_hidden_states.items()}
        return out

    def add(self, committed: Committed) -> None:
        """Note what a round committed."""
        self._tokens += committed.tokens[0]
        for layer, pieces in self._states.items():
            pieces.append(committed.states[layer].clone())  # not a view of those of a whole tree

    def keep(self, cache: TreeCache) -> None:
        """Keep what was read, at the end of an answer, if memory has room."""
        assert self._target is not None, "a text was read"
        states = sum(piece.nbytes for pieces in self._states.values() for piece in pieces)
        size = len(self._tokens) * self._target.kv_bytes_per_token + states
        if size <= _SHARE * free_bytes(self._target.device):
            self._cache = cache.kept(0, len(self._tokens))

    def _go_on(
        self, target: Target, cache: TreeCache, prompt: Sequence[int], aux_layers: Sequence[int]
    ) -> tuple[int, Mapping[int, Tensor]]:
        """Put what is kept of a text's beginning into a cache: how many tokens that is, and their states."""
        kept, self._cache = self._cache, None  # an answer that is broken off leaves nothing
        same = target is self._target and set(aux_layers) <= self._states.keys()
        if kept is None or not same or not target.reads_alike(max(len(prompt), len(self._tokens))):
            return 0, {}
        alike = common_beginning([self._tokens, prompt])
        cache.go_on_with(0, kept.kept(0, min(alike, len(prompt) - 1)))
        before = cache.lengths[0]
        return before, {layer: torch.cat(self._states[layer], dim=1)[:, :before] for layer in aux_layers}


def common_beginning(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens several texts begin with alike.

    >>> common_beginning([[1, 2, 3], [1, 2, 4, 3], [1, 2]])
    2
    """
    lists = sorted(map(list, texts))
    pairs = enumerate(zip(lists[0], lists[-1], strict=False))  # in order, the first and last differ most
    return next((index for index, (first, last) in pairs if first != last), min(map(len, texts)))
