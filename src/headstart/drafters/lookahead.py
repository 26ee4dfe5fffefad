"""Lookahead decoding (Fu et al., arXiv 2402.02057): drafting from the target's own guesses.

A window of guessed tokens is part of every verified tree. The target's token after each guess (a Jacobi step) extends
the guesses and fills a pool of n-grams. N-grams that begin with the root token are the drafts.

The window has W columns. Column j is a guess of the tokens j, j+1, ..., j+n-2 after the root, each entry a Jacobi
iteration newer than the previous entry; the first entries of the columns follow each other. As a tree this is a trunk
with a branch at each node, which gives every guess the context of the paper's two-dimensional attention mask. For W = 3
columns a, b, c of n = 3 (two entries each):

    root - a0 - b0 - c0 - c1     after a1, b1, c1 the target says a2, b2, c2:
            |    |               the pool gets (a0 a1 a2), (b0 b1 b2), (c0 c1 c2), and
            a1   b1              the columns become (a1 a2), (b1 b2), (c1 c2)

The new first entries guess one token further on, as does the root of the next round. Guesses are wrong most of the time
and verified like any draft, so the output stays lossless. The window adds W (n - 1) nodes to every round.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headstart.tree.tree import Committed, Request, Tree, TreeBatch


@dataclass
class _Row:
    """A row's guesses.

    Attributes:
        columns: the window; see the top of the file.
        pool: by first token, the rest of each recent n-gram, oldest first.
        recent: the last tokens of the text, for n-grams of the text itself.
    """

    columns: list[list[int]]
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    recent: list[int] = field(default_factory=list)


class LookaheadDrafter:
    """Drafter of n-grams from the target's own Jacobi iterations, at most `guesses` for a first token.

    The first guesses are random tokens of the prompt. Trees have no acceptance probabilities, so they are not pruned.
    """

    aux_layers: tuple[int, ...] = ()
    draft_share = 0.01

    def __init__(self, window: int = 4, ngram: int = 4, guesses: int = 3) -> None:
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.max_nodes = 1 + (window + guesses) * (ngram - 1)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> list[_Row]:
        rows = []
        for prompt in prompts:
            rng = random.Random(0)
            rows.append(_Row([rng.choices(prompt, k=self.ngram - 1) for _ in range(self.window)]))
            self._read(rows[-1], prompt)
        return rows

    def propose(self, session: list[_Row], roots: TreeBatch, request: Request) -> list[Tree]:
        trees = []
        for row, root in zip(session, roots.root_tokens, strict=True):
            paths = [*reversed(row.pool.get(root, {})), *_paths(row.columns)][: 1 if request.chain else None]
            trees.append(Tree.joined(root, paths, min(self.max_nodes, request.max_nodes)))
        return trees

    def commit(self, session: list[_Row], committed: Committed) -> None:
        rows = zip(session, committed.batch.trees, committed.choices, committed.tokens, strict=True)
        for row, tree, choices, tokens in rows:
            self._step(row, tree, choices)
            self._read(row, tokens)

    def _step(self, row: _Row, tree: Tree, choices: Sequence[int]) -> None:
        """Take a Jacobi step with the columns that the tree holds to their last entry."""
        nodes = {path: node for node, path in enumerate(tree.paths, start=1)}
        for column, path in zip(row.columns, _paths(row.columns), strict=True):
            if (end := nodes.get(tuple(path))) is not None:
                self._add_ngram(row, (*column, choices[end]))
                column[:] = [*column[1:], choices[end]]

    def reorder(self, session: list[_Row], rows: Sequence[int]) -> None:
        session[:] = [session[row] for row in rows]

    def join(self, session: list[_Row], other: list[_Row]) -> list[_Row]:
        return session + other

    def _read(self, row: _Row, tokens: Sequence[int]) -> None:
        """Add the n-grams that end in these committed tokens to the pool."""
        text = [*row.recent, *tokens]
        for start in range(len(text) - self.ngram + 1):
            self._add_ngram(row, tuple(text[start : start + self.ngram]))
        row.recent = text[max(0, len(text) - self.ngram + 1) :]

    def _add_ngram(self, row: _Row, ngram: tuple[int, ...]) -> None:
        rests = row.pool.setdefault(ngram[0], {})
        rests.pop(ngram[1:], None)  # the newest is last
        rests[ngram[1:]] = None
        if len(rests) > self.guesses:
            del rests[next(iter(rests))]


def _paths(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """The path of each column below the root: the trunk down to its first entry, then the rest of it.

    >>> _paths([[1, 2], [3, 4]])
    [[1, 2], [1, 3, 4]]
    """
    trunk = [column[0] for column in columns]
    return [[*trunk[: index + 1], *column[1:]] for index, column in enumerate(columns)]
