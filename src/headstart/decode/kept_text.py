"""The part of a conversation that was read, kept between answers so that no turn is read twice.

Keys and values stay in the target's cache; drafters start from the states of the whole text, as after a full prefill.

Shape suffixes: B rows (one), T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headstart.kernels.memory import free_bytes
from headstart.model.model import Target, TargetOutput
from headstart.replay.cache import TreeCache
from headstart.tree.tree import Committed

_SHARE = 0.2
"""Largest share of free memory for keys, values and states of a conversation between its turns."""


class KeptText:
    """A conversation that a target has read; `DecodeLoop.generate` continues from it and adds to it.

    A text that begins differently is read from the first difference, or anew if the cache cannot go back.
    """

    def __init__(self) -> None:
        self._target: Target | None = None
        self._cache: TreeCache | None = None
        self._tokens: list[int] = []
        self._states: dict[int, list[Tensor]] = {}  # by layer, pieces [1, T, E]

    def prefill(
        self, target: Target, cache: TreeCache, prompt: Sequence[int], aux_layers: Sequence[int]
    ) -> TargetOutput:
        """Prefill one row like `Target.prefill`, skipping the kept prefix."""
        before, states = self._go_on(target, cache, prompt, aux_layers)
        out = target.prefill(cache, [prompt[before:]], aux_layers)
        for layer in aux_layers if before else ():
            out.aux_hidden_states[layer] = torch.cat([states[layer], out.aux_hidden_states[layer]], dim=1)
        self._target, self._tokens = target, list(prompt)
        self._states = {layer: [state_BTE] for layer, state_BTE in out.aux_hidden_states.items()}
        return out

    def add(self, committed: Committed) -> None:
        """Add the committed tokens and states of a round."""
        self._tokens += committed.tokens[0]
        for layer, pieces in self._states.items():
            pieces.append(committed.states[layer].clone())  # not a view into the states of a whole tree

    def keep(self, cache: TreeCache) -> None:
        """Keep the cache at the end of an answer, if memory has room."""
        assert self._target is not None, "a text was read"
        states = sum(piece.nbytes for pieces in self._states.values() for piece in pieces)
        size = len(self._tokens) * self._target.kv_bytes_per_token + states
        if size <= _SHARE * free_bytes(self._target.device):
            self._cache = cache.copy_row(0, len(self._tokens))

    def _go_on(
        self, target: Target, cache: TreeCache, prompt: Sequence[int], aux_layers: Sequence[int]
    ) -> tuple[int, Mapping[int, Tensor]]:
        """Load the kept beginning of a text into a cache; return its length and its states."""
        kept, self._cache = self._cache, None  # an interrupted answer leaves nothing
        same = target is self._target and set(aux_layers) <= self._states.keys()
        if kept is None or not same or not target.can_read_in_parts(max(len(prompt), len(self._tokens))):
            return 0, {}
        cache.load_row(0, kept.copy_row(0, min(common_beginning([self._tokens, prompt]), len(prompt) - 1)))
        before = cache.lengths[0]
        return before, {layer: torch.cat(self._states[layer], dim=1)[:, :before] for layer in aux_layers}


def common_beginning(texts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of several texts.

    >>> common_beginning([[1, 2, 3], [1, 2, 4, 3], [1, 2]])
    2
    """
    lists = sorted(map(list, texts))
    pairs = enumerate(zip(lists[0], lists[-1], strict=False))  # sorted, the first and last differ earliest
    return next((index for index, (first, last) in pairs if first != last), min(map(len, texts)))
