"""Views of a target: everything as it is, with something noted or remembered beside it.

Shape suffixes: B rows, N tree nodes, X = B * N, M remembered texts, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.target.cache import TreeCache
from headstart.target.model import Target, TargetOutput
from headstart.tree.tree import Tree, TreeBatch

MAX_TEXTS = 4000
"""Texts that `RememberingTarget` keeps."""
MAX_BYTES = 1 << 30
"""Memory for their logits; a vocabulary of 50k takes 0.2 MB a text."""
_MAX_NODES = 256
"""Nodes read in one forward."""

Text = tuple[int, ...]


class TargetView(Target):
    """A target by another name: forwards are the original's, and so is every attribute.

    Args:
        target: the original.
    """

    def __init__(self, target: Target) -> None:
        self.original = target
        self.__dict__["end_tokens"] = target.end_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def new_cache(self, rows: int, capacity: int) -> TreeCache:
        return self.original.new_cache(rows, capacity)

    def prefill(self, cache: TreeCache, rows: Sequence[Sequence[int]], aux_layers: Sequence[int] = ()) -> TargetOutput:
        return self.original.prefill(cache, rows, aux_layers)

    def forward_tree(self, cache: TreeCache, batch: TreeBatch, aux_layers: Sequence[int] = ()) -> TargetOutput:
        return self.original.forward_tree(cache, batch, aux_layers)


class WatchedTarget(TargetView):
    """Notes the trees of one generation, without looking at them while the clock runs."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._batches: list[TreeBatch] = []

    def prefill(self, cache: TreeCache, rows: Sequence[Sequence[int]], aux_layers: Sequence[int] = ()) -> TargetOutput:
        self._batches = []
        return super().prefill(cache, rows, aux_layers)

    def forward_tree(self, cache: TreeCache, batch: TreeBatch, aux_layers: Sequence[int] = ()) -> TargetOutput:
        self._batches.append(batch)
        return super().forward_tree(cache, batch, aux_layers)

    def depths(self, rounds_B: Sequence[int]) -> list[list[int]]:
        """Depth of the tree of each round, for each row of the last generation.

        Args:
            rounds_B: how many rounds each row took; rows that have ended leave the batch, the others keep their order.
        """
        depths_B: list[list[int]] = [[] for _ in rounds_B]
        for number, batch in enumerate(self._batches):
            running = [row for row, count in enumerate(rounds_B) if count > number]
            for index, row in enumerate(running):
                depths_B[row].append(batch.trees[index].depth)
        return depths_B


@dataclass
class Texts:
    """What stands in for the cache: the tokens that each row has committed after the prompt."""

    prompt_length: int
    rows_B: list[Text]
    batch: TreeBatch | None = None

    @property
    def rows(self) -> int:
        """Batch size."""
        return len(self.rows_B)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [self.prompt_length + len(text) for text in self.rows_B]

    def commit(self, paths: Sequence[Sequence[int]], paths_BP: Tensor | None = None) -> None:
        """See `TreeCache.commit`."""
        assert self.batch is not None, "a forward comes before its commit"
        tokens = [tree.tokens for tree in self.batch.trees]
        self.rows_B = [
            (*text, *(tokens[row][node] for node in path))
            for row, (text, path) in enumerate(zip(self.rows_B, paths, strict=True))
        ]

    def reorder(self, rows: Sequence[int]) -> None:
        """See `TreeCache.reorder`."""
        self.rows_B = [self.rows_B[row] for row in rows]


class RememberingTarget(TargetView):
    """Reads every text after one prompt only once, for drawing thousands of samples from it.

    Thousands of rows with the same prompt take the same few paths. What the target says after a text does not depend on
    the row, so it is computed once, by the target's own tree forward on top of its own cache, and looked up from then
    on. The decode loop, drafter, rules and random streams run as always; only the batched cache is left out (batches
    have a test of their own, see `headstart.eval.audit`). All rows must have the same prompt, of at least two tokens.
    Logits are good until the next forward.

    Args:
        target: what is asked.
        horizon: longer texts are answered as their first `horizon` tokens are. This is another model, with the same
            distribution of the first `horizon` + 1 tokens; trees reach far beyond them, and need not be read there.
    """

    def __init__(self, target: Target, horizon: int | None = None) -> None:
        super().__init__(target)
        self._horizon = horizon
        self._prompt: Text = ()
        self._asked: tuple[int, ...] = ()
        self._places: dict[Text, int] = {}
        maximum = max(_MAX_NODES, min(MAX_TEXTS, MAX_BYTES // (4 * self.vocab_size)))
        with torch.inference_mode():
            self._logits_MV = torch.empty(maximum, self.vocab_size, device=self.device)
            self._found_XV = torch.empty(0, self.vocab_size, device=self.device)
        self._states: dict[int, Tensor] = {}

    def new_cache(self, rows: int, capacity: int) -> Any:
        return Texts(0, [()] * rows)

    def prefill(self, cache: Any, rows: Sequence[Sequence[int]], aux_layers: Sequence[int] = ()) -> TargetOutput:
        prompt = tuple(rows[0])
        assert len(prompt) > 1 and all(tuple(row) == prompt for row in rows), "one prompt for all rows"
        if (prompt, tuple(aux_layers)) != (self._prompt, self._asked):
            self._start(prompt, tuple(aux_layers))
        cache.prompt_length = len(prompt)
        return TargetOutput(
            self._first.logits_BTV.expand(len(rows), -1, -1),
            {layer: state.expand(len(rows), -1, -1) for layer, state in self._first.aux_hidden_states.items()},
        )

    @torch.inference_mode()
    def forward_tree(self, cache: Any, batch: TreeBatch, aux_layers: Sequence[int] = ()) -> TargetOutput:
        cache.batch = batch
        texts_BN = [_texts(before, tree, batch.size) for before, tree in zip(cache.rows_B, batch.trees, strict=True)]
        texts_X = [text[: self._horizon] for texts_N in texts_BN for text in texts_N]
        self._read(dict.fromkeys(texts_X))
        index_X = torch.tensor([self._places[text] for text in texts_X], device=self.device)
        if len(texts_X) > len(self._found_XV):  # kept from call to call: fresh memory costs more than the copy
            self._found_XV = torch.empty(len(texts_X), self.vocab_size, device=self.device)
        found_XV = torch.index_select(self._logits_MV, 0, index_X, out=self._found_XV[: len(texts_X)])
        return TargetOutput(
            found_XV.view(cache.rows, batch.size, -1),
            {layer: self._states[layer][index_X].view(cache.rows, batch.size, -1) for layer in aux_layers},
        )

    def _start(self, prompt: Text, aux_layers: tuple[int, ...]) -> None:
        self._prompt, self._asked = prompt, aux_layers
        self._places.clear()
        self._first = self.original.prefill(self.original.new_cache(1, len(prompt)), [prompt], aux_layers)
        size = len(self._logits_MV), self.hidden_size
        self._states = {layer: torch.empty(size, dtype=self.dtype, device=self.device) for layer in aux_layers}
        # The prompt's last token is the root of every tree that is read, so that one tree can hold many first tokens.
        self._cache = self.original.new_cache(1, len(prompt) + _MAX_NODES)
        self.original.prefill(self._cache, [prompt[:-1]])

    def _read(self, texts: Iterable[Text]) -> None:
        """Compute what is not known yet, as trees after the prompt."""
        texts = set(texts)
        if len(self._places) + len(texts - self._places.keys()) > len(self._logits_MV):
            self._places.clear()
        assert len(texts) <= len(self._logits_MV), "a batch and its trees fit"
        waiting = sorted(texts - self._places.keys())
        while waiting:
            nodes: dict[Text, int] = {(): 0}
            taken = 0
            for text in waiting:
                if taken and len(nodes) + len(text) > _MAX_NODES:
                    break
                for length in range(1, len(text) + 1):
                    nodes.setdefault(text[:length], len(nodes))
                taken += 1
            drafted = [text for text in nodes if text]
            tokens = [self._prompt[-1], *(text[-1] for text in drafted)]
            tree = Tree(tokens, [-1, *(nodes[text[:-1]] for text in drafted)])
            out = self.original.forward_tree(self._cache, TreeBatch.of([tree], self.device), self._asked)
            read = torch.tensor([nodes[text] for text in waiting[:taken]], device=self.device)
            first = len(self._places)
            self._logits_MV[first : first + taken] = out.logits_BTV[0, read]
            for layer, state_BNE in out.aux_hidden_states.items():
                self._states[layer][first : first + taken] = state_BNE[0, read]
            self._places.update(zip(waiting[:taken], range(first, first + taken), strict=True))
            waiting = waiting[taken:]


def _texts(before: Text, tree: Tree, width: int) -> list[Text]:
    """The text that ends with each node of a row; padding nodes stand for the root."""
    root = (*before, tree.tokens[0])
    return [root, *((*root, *path) for path in tree.paths)] + [root] * (width - tree.size)
