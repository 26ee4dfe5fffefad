"""Prefix caching between requests, so that no turn of a conversation is prefilled twice.

When a row leaves, its keys and values are copied out of the batch's cache; a later prompt with the same beginning loads
them into its own. Drafters start from the states of the whole text, as after a full prefill.

Shape suffixes: B rows, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from headstart.errors import out_of_memory
from headstart.kernels.memory import free_bytes
from headstart.model.model import Target
from headstart.replay.cache import TreeCache
from headstart.tree.tree import Committed

_MEMORY_FRACTION = 0.1
"""Largest fraction of free memory for the texts of a pool."""


class CachedText:
    """A text that the target has read: its tokens, the aux states [1, T, E] of all of them by layer, and its keys and
    values once it is in a pool."""

    def __init__(self, tokens: Sequence[int], states: Mapping[int, Tensor]) -> None:
        self.tokens = list(tokens)
        self.cache: TreeCache | None = None
        self._states = {layer: [state_1TE] for layer, state_1TE in states.items()}

    def append(self, committed: Committed, row: int) -> None:
        """Append the tokens that a round committed in a row."""
        tokens = committed.tokens[row]
        self.tokens += tokens
        for layer, pieces in self._states.items():
            pieces.append(committed.states[layer][row : row + 1, : len(tokens)].clone())  # no view of the whole tree

    def states(self, layers: Sequence[int], length: int) -> dict[int, Tensor]:
        """Return the states of the first tokens, [1, length, E] by layer."""
        return {layer: torch.cat(self._states[layer], dim=1)[:, :length] for layer in layers}

    def has(self, layers: Sequence[int]) -> bool:
        return set(layers) <= self._states.keys()

    def compact(self) -> None:
        """Join the states of all rounds, so that its size is found at once and no small tensors stay."""
        self._states = {layer: [torch.cat(pieces, dim=1)] for layer, pieces in self._states.items()}

    def nbytes(self, target: Target) -> int:
        """Bytes of its states, keys and values."""
        states = sum(piece.nbytes for pieces in self._states.values() for piece in pieces)
        return len(self.tokens) * target.kv_bytes_per_token + states


class PrefixPool:
    """Texts that later prompts may begin with. The least recently used ones leave when memory is short."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._texts: list[CachedText] = []  # most recently used last

    def load(self, cache: TreeCache, prompt: Sequence[int], aux_layers: Sequence[int]) -> tuple[int, dict[int, Tensor]]:
        """Load the longest common prefix of a text and a prompt into an empty cache of one row; return its length and
        its states, [1, length, E] by layer. The last token of the prompt is left to read."""
        length, text = max(
            ((self._usable(text, prompt), text) for text in self._texts if text.has(aux_layers)),
            key=lambda found: found[0],
            default=(0, None),
        )
        if text is None or text.cache is None or not length:
            return 0, {}
        cache.load_row(0, text.cache.copy_row(0, length))
        self._texts.remove(text)
        self._texts.append(text)
        return length, text.states(aux_layers, length)

    @property
    def _nbytes(self) -> int:
        return sum(text.nbytes(self._target) for text in self._texts)

    def _usable(self, text: CachedText, prompt: Sequence[int]) -> int:
        """Return how many tokens of a text a prompt can begin with; a running state cannot go back in its text."""
        length = min(common_prefix_length([text.tokens, prompt]), len(prompt) - 1)
        whole = length == len(text.tokens) or not self._target.chains_only
        return length if whole and self._target.can_read_in_parts(max(len(prompt), len(text.tokens))) else 0

    def add(self, text: CachedText, cache: TreeCache, place: int) -> None:
        """Copy a row's keys and values out of a cache, if they fit into memory."""
        size = text.nbytes(self._target)
        room = _MEMORY_FRACTION * (free_bytes(self._target.device) + self._nbytes)
        self._texts = [one for one in self._texts if common_prefix_length([one.tokens, text.tokens]) < len(one.tokens)]
        while self._texts and size + self._nbytes > room:
            del self._texts[0]
        if size <= room:
            try:
                text.compact()
                text.cache = cache.copy_row(place, len(text.tokens))
            except Exception as error:
                if not out_of_memory(error):
                    raise
                return self.clear()
            self._texts.append(text)

    def clear(self) -> None:
        """Free the memory of all texts."""
        self._texts = []


def common_prefix_length(texts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of several texts.

    >>> common_prefix_length([[1, 2, 3], [1, 2, 4, 3], [1, 2]])
    2
    """
    first, last = min(map(list, texts)), max(map(list, texts))  # these two differ earliest
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
