"""Lookahead decoding (Fu et al., arXiv 2402.02057): drafting without a draft model, from the target's own guesses.

A window of guessed tokens rides along in every verified tree. What the target says after each guess (a Jacobi step)
makes the next guesses and fills a pool of n-grams; n-grams that begin with the root token are the drafts.

The window has W columns. Column j is a guess of the tokens j, j+1, ..., j+n-2 after the root, each entry a Jacobi
iteration newer than the one above it, and the first entries of the columns follow each other. As a tree this is a trunk
with a branch at each of its nodes, which gives every guess exactly the context it has in the paper's two-dimensional
attention mask; for W = 3 columns a, b, c of n = 3 (two entries each):

    root - a0 - b0 - c0 - c1     after a1, b1, c1 the target says a2, b2, c2:
            |    |               the pool learns (a0 a1 a2), (b0 b1 b2), (c0 c1 c2), and
            a1   b1              the columns become (a1 a2), (b1 b2), (c1 c2)

The new first entries guess one token further on, as does the root of the next round. Guesses are wrong most of the time
and verified like any draft, so the output stays lossless; the window costs its W (n - 1) nodes in every round.

Shape suffixes: B rows, P committed tokens of a round.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headstart.tree.proposal import Committed, Proposal, ProposedTree, Request, Root


class Trie:
    """One row's tree while it is built from token paths below the root.

    Args:
        root: the root token.
        limit: nodes at most, root included.

    >>> trie = Trie(5, limit=4)
    >>> trie.add([6, 7]), trie.add([6, 8]), trie.add([9])
    (True, True, False)
    >>> trie.tokens, trie.parents, trie.find([6, 8]), trie.find([9])
    ([5, 6, 7, 8], [-1, 0, 1, 1], 3, None)
    """

    def __init__(self, root: int, limit: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self._limit = limit
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> Trie:
        """A tree that exists already."""
        trie = cls(tokens[0], len(parents))
        trie.tokens, trie.parents = list(tokens[: len(parents)]), list(parents)
        trie._children = {(parents[node], tokens[node]): node for node in range(len(parents) - 1, 0, -1)}
        return trie

    def add(self, path: Iterable[int]) -> bool:
        """Add a path below the root, sharing nodes with those there; false when there is no room for all of it."""
        node = 0
        for token in path:
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                if child >= self._limit:
                    return False
                self._children[node, token] = child
                self.tokens.append(token)
                self.parents.append(node)
            node = child
        return True

    def find(self, path: Iterable[int]) -> int | None:
        """The node at the end of a path below the root."""
        node: int | None = 0
        for token in path:
            if node is not None:
                node = self._children.get((node, token))
        return node


@dataclass
class _Row:
    """One row's guesses.

    Attributes:
        columns: the window; see the top of the file.
        pool: by first token, the n-grams (the rest of each) that were seen last, oldest first.
        recent: the last tokens of the text, for n-grams of the text itself.
    """

    columns: list[list[int]]
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    recent: list[int] = field(default_factory=list)


class LookaheadDrafter:
    """Draft n-grams that the target's own Jacobi iterations came up with.

    Acceptance probabilities are unknown, so its trees are verified as they are.

    Args:
        window: W, guesses that are iterated side by side.
        ngram: n, tokens of the n-grams; n - 1 of them are drafted. At least 2.
        guesses: n-grams kept for each first token, and drafted at most.
        seed: of the first guesses, which are random tokens of the prompt.
    """

    name = "lookahead"
    aux_layers: tuple[int, ...] = ()
    draft_share = 0.01

    def __init__(self, window: int = 4, ngram: int = 4, guesses: int = 3, seed: int = 0) -> None:
        assert window >= 1 and ngram >= 2 and guesses >= 1, "a window has columns, and an n-gram something to draft"
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.seed = seed
        self.max_nodes = 1 + (window + guesses) * (ngram - 1)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> list[_Row]:
        rows = []
        for prompt in prompts:
            rng = random.Random(self.seed)
            row = _Row([rng.choices(prompt, k=self.ngram - 1) for _ in range(self.window)])
            self._read(row, prompt)
            rows.append(row)
        return rows

    def propose(self, session: list[_Row], root: Root, request: Request) -> Proposal:
        tries = []
        for row, token in zip(session, root.tokens, strict=True):
            trie = Trie(token, min(self.max_nodes, request.max_nodes))
            drafts = list(row.pool.get(token, ()))[::-1]
            for path in [*drafts, *_paths(row.columns)][: 1 if request.chain else None]:
                trie.add(path)
            tries.append(trie)
        return Proposal([trie.tokens for trie in tries], [trie.parents for trie in tries])

    def learn(self, session: list[_Row], tree: ProposedTree, choices: list[list[int]]) -> None:
        """Take a Jacobi step with the columns that were in the tree down to their last entry."""
        for number, (row, tokens, chosen) in enumerate(zip(session, tree.tokens, choices, strict=True)):
            trie = Trie.of(tokens, tree.parents_of(number))
            ends = [trie.find(path) for path in _paths(row.columns)]
            for column, end in zip(row.columns, ends, strict=True):
                if end is not None:
                    self._keep(row, (*column, chosen[end]))
                    column[:] = [*column[1:], chosen[end]]

    def commit(self, session: list[_Row], committed: Committed) -> None:
        for row, tokens in zip(session, committed.tokens, strict=True):
            self._read(row, tokens)

    def reorder(self, session: list[_Row], rows: Sequence[int]) -> None:
        session[:] = [session[row] for row in rows]

    def _read(self, row: _Row, tokens: Sequence[int]) -> None:
        """Put the n-grams that end in these committed tokens into the pool."""
        text = [*row.recent, *tokens]
        for start in range(len(text) - self.ngram + 1):
            self._keep(row, tuple(text[start : start + self.ngram]))
        row.recent = text[len(text) - self.ngram + 1 :] if len(text) >= self.ngram else text

    def _keep(self, row: _Row, ngram: tuple[int, ...]) -> None:
        known = row.pool.setdefault(ngram[0], {})
        known.pop(ngram[1:], None)  # it moves to the end
        known[ngram[1:]] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]


def _paths(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """The path of each column below the root: the trunk down to its first entry, then the rest of it.

    >>> _paths([[1, 2], [3, 4]])
    [[1, 2], [1, 3, 4]]
    """
    trunk = [column[0] for column in columns]
    return [[*trunk[: index + 1], *column[1:]] for index, column in enumerate(columns)]
