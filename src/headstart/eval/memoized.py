"""A target with memoised logits, for drawing thousands of samples after one prompt.

Shape suffixes: B rows, N tree nodes, X = B * N, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.model.model import Target, TargetOutput
from headstart.tree.tree import Tree, TreeBatch

MAX_TEXTS = 4000  # maximum number of cached texts
MAX_BYTES = 1 << 30  # memory for their logits; a vocabulary of 50k takes 0.2 MB per text
_MAX_NODES = 256  # maximum nodes of one forward

Text = tuple[int, ...]


class MemoizedTarget(Target):
    """A view of a target that memoises logits by text.

    Thousands of rows with the same prompt take the same few paths. The logits after a text are the same in every row up
    to rounding, so they are computed once, by the target's own tree forward on its own cache. The decode loop, drafter,
    rules and random streams run as always; only the batched cache is bypassed, and the audit covers it with the same
    seeds. All rows must have the same prompt, of at least two tokens. Logits are valid until the next forward.

    Texts longer than `horizon` get the logits of their first `horizon` tokens. The distribution of the first `horizon`
    + 1 tokens is unchanged, and trees that reach beyond need no further forwards.
    """

    def __init__(self, target: Target, horizon: int | None = None) -> None:
        self.original = target
        self.__dict__["end_tokens"] = target.end_tokens
        self._horizon = horizon
        self._key: tuple[Text, tuple[int, ...]] = ((), ())  # prompt and aux layers
        self._outputs: dict[Text, tuple[Tensor, dict[int, Tensor]]] = {}  # logits [V] and states [E] after each text
        with torch.inference_mode():
            self._logits_XV = torch.empty(0, self.vocab_size, device=self.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def new_cache(self, rows: int, capacity: int) -> Any:
        return _TextCache(0, [()] * rows)

    def prefill(self, cache: Any, rows: Sequence[Sequence[int]], aux_layers: Sequence[int] = ()) -> TargetOutput:
        prompt = tuple(rows[0])
        assert len(prompt) > 1 and all(tuple(row) == prompt for row in rows), "one prompt for all rows"
        if (prompt, tuple(aux_layers)) != self._key:
            self._key = prompt, tuple(aux_layers)
            self._outputs.clear()
            self._first = self.original.prefill(self.original.new_cache(1, len(prompt)), [prompt], aux_layers)
            # The prompt's last token is the root of every tree, so that one tree holds many first tokens.
            self._cache = self.original.new_cache(1, len(prompt) + _MAX_NODES)
            self.original.prefill(self._cache, [prompt[:-1]])
        cache.prompt_length = len(prompt)
        return TargetOutput(
            self._first.logits_BTV.expand(len(rows), -1, -1),
            {layer: state.expand(len(rows), -1, -1) for layer, state in self._first.aux_hidden_states.items()},
        )

    @torch.inference_mode()
    def forward_tree(self, cache: Any, batch: TreeBatch, aux_layers: Sequence[int] = ()) -> TargetOutput:
        cache.batch = batch
        texts_X: list[Text] = []  # the text that ends at each node; padding nodes repeat the root
        for committed, tree in zip(cache.rows_B, batch.trees, strict=True):
            root = (*committed, tree.tokens[0])
            nodes = [root, *((*root, *path) for path in tree.paths)] + [root] * (batch.size - tree.size)
            texts_X += [text[: self._horizon] for text in nodes]
        self._compute(set(texts_X))
        if len(texts_X) > len(self._logits_XV):  # reused: allocation costs more than the copy
            self._logits_XV = torch.empty(len(texts_X), self.vocab_size, device=self.device)
        outputs_X = [self._outputs[text] for text in texts_X]
        logits_XV = torch.stack([logits_V for logits_V, _ in outputs_X], out=self._logits_XV[: len(texts_X)])
        states = {layer: torch.stack([states[layer] for _, states in outputs_X]) for layer in aux_layers}
        shape = cache.rows, batch.size, -1
        return TargetOutput(logits_XV.view(shape), {layer: state_XE.view(shape) for layer, state_XE in states.items()})

    def _compute(self, texts: Collection[Text]) -> None:
        """Compute missing texts, as trees after the prompt."""
        capacity = max(_MAX_NODES, min(MAX_TEXTS, MAX_BYTES // (4 * self.vocab_size)))
        if len(self._outputs.keys() | texts) > capacity:
            self._outputs.clear()
        prompt, aux_layers = self._key
        missing = sorted(texts - self._outputs.keys())
        while missing:
            nodes: dict[Text, int] = {(): 0}
            count = 0
            for text in missing:
                if count and len(nodes) + len(text) > _MAX_NODES:
                    break
                for length in range(1, len(text) + 1):
                    nodes.setdefault(text[:length], len(nodes))
                count += 1
            drafted = [text for text in nodes if text]
            tokens = [prompt[-1], *(text[-1] for text in drafted)]
            tree = Tree(tokens, [-1, *(nodes[text[:-1]] for text in drafted)])
            out = self.original.forward_tree(self._cache, TreeBatch.of([tree], self.device), aux_layers)
            for text in missing[:count]:
                node = nodes[text]
                states = {layer: state_BNE[0, node].clone() for layer, state_BNE in out.aux_hidden_states.items()}
                self._outputs[text] = out.logits_BTV[0, node].clone(), states
            missing = missing[count:]


@dataclass
class _TextCache:
    """Stand-in for the cache: the tokens that each row has committed after the prompt."""

    prompt_length: int
    rows_B: list[Text]
    batch: TreeBatch | None = None

    @property
    def rows(self) -> int:
        return len(self.rows_B)

    @property
    def lengths(self) -> list[int]:
        return [self.prompt_length + len(text) for text in self.rows_B]

    def commit(
        self, paths: Sequence[Sequence[int]], paths_BP: Tensor | None = None, counts_B: Tensor | None = None
    ) -> None:
        assert self.batch is not None, "a forward comes before its commit"
        tokens = [tree.tokens for tree in self.batch.trees]
        self.rows_B = [
            (*text, *(tokens[row][node] for node in path))
            for row, (text, path) in enumerate(zip(self.rows_B, paths, strict=True))
        ]

    def reorder(self, rows: Sequence[int]) -> None:
        self.rows_B = [self.rows_B[row] for row in rows]

    def join(self, other: _TextCache, new_cache: object, capacity: int = 0) -> _TextCache:
        assert self.prompt_length == other.prompt_length, "one prompt for all rows"
        self.rows_B += other.rows_B
        return self
