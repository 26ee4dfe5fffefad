"""Drafting from the target's earlier answers, in training or since: continuations of the same words.

Answers are concatenated in parts, oldest first; a part is sorted by the three tokens before each token, so all places
after the same words form a range. Those with the longest match give a tree of continuations. A place votes for its
continuation with a weight that grows with its match, and disagreeing places leave room for something new, as in
prediction by partial matching (Witten and Bell 1991):

    p(token) = sum of the weights of its places / (sum of all weights + number of different continuations)

A trust factor per match length is learned from each text while it is written. Beside other drafters it is lower: a
continuation that trained heads do not propose is seldom right, for they know their training answers. That factor is
learned as well; tokens that others propose keep their probabilities.

Parts are merged as they grow, the newest first, so that a search reads few of them. A text searches the parts of its
start; adding answers replaces the list of parts, and never changes one.
"""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headstart.drafters.ngram import TextDrafter
from headstart.errors import UserError
from headstart.support.answer_file import AnswerFile, read_answers
from headstart.tree.tree import Request, Tree, TreeBatch

MOST_TOKENS = 1_000_000
"""Size of an index; beyond it the oldest tokens are dropped."""
CONTEXT = 8
"""Tokens of the prompt kept before an answer, so that its beginning can be found."""
LONGEST = 16
"""Longest match that is compared."""
AHEAD = 24
"""Tokens of a continuation."""
WEIGHTS = (0.0, 0.0, 0.42, 0.53, 0.7, 1.3, 1.6, 1.8, 2.0, 2.9, 3.4, 3.8, 4.5, 12.0, 20.0, 40.0, 57.0)
"""Weight of a place, by the length of its match.

Fitted (maximum likelihood) to greedy answers of SmolLM2-135M-Instruct to 54 prompts of its own, 6,600 tokens, beside
1,145 answers that it was trained on: 77 % of the 6,600 had a place, and the probability that any continuation is
right agrees within 0.02 with the measured frequency, for each match length.
"""

NEW = (0.03, 0.03, 0.05, 0.1, 0.25, 0.6, 0.9)
"""Initial trust, by `_CLASSES`, in a continuation that other drafters do not propose although they draft."""

_PLACES = 32  # most places per tree
_LOOKS = 1024  # most places with the same last tokens to compare, latest first
_BITS = 21  # bits of a token in a key
_NO_TOKEN = (1 << _BITS) - 1
_SMALL = 4  # a part is merged with the previous one unless that is this many times larger
_CLASSES = (2, 3, 4, 6, 8, 12, 16)  # shortest match length of each class
_CLASS = [max(0, bisect_right(_CLASSES, length) - 1) for length in range(LONGEST + 1)]
_PRIOR_WEIGHT = 4.0  # promised tokens that a prior counts as
_KEPT = 31 / 32  # decay of a text's statistics per token
_MOST_CERTAIN = 0.98
_AGREEING = 8  # most places to follow per continuation


class _Part:
    """Concatenated answers, with gaps of -1 between them and at both ends; `order` are the places of tokens, sorted by
    the three tokens before them, and `keys` these tokens, the nearest first."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self.tokens = np.concatenate([np.full(LONGEST, -1, np.int32), tokens, np.full(AHEAD, -1, np.int32)])
        wide = self.tokens.astype(np.int64)
        key = (wide[2:-1] << 2 * _BITS) | (wide[1:-2] << _BITS) | (wide[:-3] + 1)
        known = (wide[2:-1] >= 0) & (wide[1:-2] >= 0) & (wide[3:] >= 0)
        key = key[known]
        order = np.argsort(key, kind="stable")
        self.keys = key[order]
        self.order = (np.flatnonzero(known)[order] + 3).astype(np.int32)

    @property
    def size(self) -> int:
        return len(self.tokens) - LONGEST - AHEAD

    @property
    def inner(self) -> NDArray[np.int32]:
        return self.tokens[LONGEST:-AHEAD]

    def places(self, tail: Sequence[int]) -> NDArray[np.int32]:
        """Places after the same last tokens: the latest of the longest matches, at most `_PLACES`."""
        two = (tail[-1] << 2 * _BITS) | (tail[-2] << _BITS)
        three = two | (tail[-3] + 1 if len(tail) > 2 else _NO_TOKEN)
        bounds = self.keys.searchsorted([two, three, three + 1, two + (1 << _BITS)]).tolist()
        begin, end, length = (bounds[1], bounds[2], 3) if bounds[1] < bounds[2] else (bounds[0], bounds[3], 2)
        found = self.order[max(begin, end - _LOOKS) : end]
        while len(found) > _PLACES and length < min(LONGEST, len(tail)):
            longer = found[self.tokens[found - length - 1] == tail[-length - 1]]
            if not len(longer):
                break
            found, length = longer, length + 1
        return found[-_PLACES:]


_AROUND = np.arange(-LONGEST, AHEAD)


class Index:
    """Searchable answers; adding to them never changes an earlier `parts`.

    >>> index = Index(vocab_size=10)
    >>> index.add([[1, 2, 3, 4], [5, 2, 3, 6]])
    2
    >>> index.parts[0].places([9, 2, 3]).size
    2
    """

    def __init__(self, vocab_size: int, most_tokens: int = MOST_TOKENS) -> None:
        self.parts: tuple[_Part, ...] = ()
        self._vocab_size = vocab_size
        self._most_tokens = most_tokens
        self._held: set[int] = set()

    def add(self, answers: Iterable[Sequence[int]]) -> int:
        """Add new answers, unless the target lacks one of their tokens; return the number added."""
        added: list[int] = []
        count = 0
        for answer in answers:
            if len(answer) < 3 or self.holds(answer) or not 0 <= min(answer) <= max(answer) < self._vocab_size:
                continue
            self._held.add(hash(tuple(answer)))
            added += [*answer, -1]
            count += 1
        if not added:
            return 0
        parts, tokens = list(self.parts), np.array(added[-self._most_tokens :], np.int32)
        while parts and parts[-1].size < _SMALL * len(tokens):
            tokens = np.concatenate([parts.pop().inner, tokens])
        parts.append(_Part(tokens))
        self.parts = tuple(parts)
        if self.size > self._most_tokens:
            # Drop an eighth at once, since the part is sorted anew; dropped answers may be added again.
            self.parts = (_Part(np.concatenate([part.inner for part in parts])[-self._most_tokens * 7 // 8 :]),)
            self._held.clear()
        return count

    def holds(self, answer: Sequence[int]) -> bool:
        return hash(tuple(answer)) in self._held

    @property
    def size(self) -> int:
        """Tokens, with a gap after each answer."""
        return sum(part.size for part in self.parts)


def find(parts: Sequence[_Part], tail: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Continuations of a text's last tokens, `AHEAD` tokens each (meaningless from a -1 on, where an answer ended), and
    their match lengths; the longest matches first, then the latest."""
    if len(tail) < 2:
        return [], []
    around = [part.tokens[at[:, None] + _AROUND] for part in reversed(parts) if len(at := part.places(tail)[::-1])]
    if not around:
        return [], []
    rows = around[0] if len(around) == 1 else np.concatenate(around)
    before = np.full(LONGEST, -2, np.int32)
    before[-len(tail) :] = tail[-LONGEST:]
    differs = rows[:, :LONGEST][:, ::-1] != before[::-1]
    lengths = np.where(differs.any(1), differs.argmax(1), LONGEST)
    best = np.argsort(-lengths, kind="stable")[:_PLACES]
    return rows[best, LONGEST:].tolist(), lengths[best].tolist()


@dataclass
class _Seen:
    """Predictions of the next token, to be checked: their match class, the probability of each token, and of tokens
    that no other drafter proposed, if others drafted."""

    kind: int
    every: dict[int, float]
    new: dict[int, float]


@dataclass
class _Trust:
    """Numbers of predicted tokens, and of right ones, by match class."""

    promised: list[float]
    came: list[float]

    @classmethod
    def prior(cls, rates: Sequence[float]) -> _Trust:
        return cls([_PRIOR_WEIGHT] * len(rates), [_PRIOR_WEIGHT * rate for rate in rates])

    def of(self, kind: int) -> float:
        """Factor of a predicted probability."""
        return self.came[kind] / self.promised[kind]

    def note(self, kind: int, said: Mapping[int, float], token: int) -> None:
        """Learn from the decided token."""
        if said:
            self.promised[kind] = _KEPT * self.promised[kind] + sum(said.values())
            self.came[kind] = _KEPT * self.came[kind] + (token in said)


@dataclass
class _Row:
    """The last tokens of a row's text, and how often continuations were right.

    Attributes:
        parts: the index when the text began.
        any, new: trust in all continuations, and in continuations that no other drafter proposed.
        seen: predictions by path of tokens after the newest root.
        path: tokens since then.
    """

    parts: Sequence[_Part]
    tail: list[int]
    any: _Trust = field(default_factory=lambda: _Trust.prior([1.0] * len(_CLASSES)))
    new: _Trust = field(default_factory=lambda: _Trust.prior(NEW))
    ahead: bool = False
    seen: dict[tuple[int, ...], _Seen] = field(default_factory=dict)
    path: tuple[int, ...] = ()

    def append(self, token: int) -> None:
        """Append a decided token, and check its prediction."""
        self.tail.append(token)
        if len(self.tail) > 4 * LONGEST:
            del self.tail[:-LONGEST]
        if (seen := self.seen.get(self.path)) is not None:
            self.any.note(seen.kind, seen.every, token)
            self.new.note(seen.kind, seen.new, token)
            self.path = (*self.path, token)

    def grow(self, beside: Tree, max_nodes: int, minimum: float, chain: bool) -> Tree:
        """The most probable continuations after the root of other drafters' tree, best first; records predictions."""
        ahead, lengths = find(self.parts, self.tail)
        others: dict[int, dict[int, tuple[int, float]]] = {}  # by node and token: the child and its probability or 0
        probs = beside.accept_probs or [0.0] * beside.size
        for child in range(1, beside.size):
            others.setdefault(beside.parents[child], {})[beside.tokens[child]] = (child, probs[child])
        tree, numbers = Tree(beside.tokens[:1], accept_probs=[1.0]), count()
        self.seen, self.path = {}, ()
        # -probability, number, parent, token, places, node of the tree beside or -1, path
        open_: list[tuple[float, int, int, int, list[int], int, tuple[int, ...]]] = []
        node, prob, places, path = 0, 1.0, list(range(len(ahead))), tuple[int, ...]()
        other = 0 if beside.size > 1 else -1
        while True:
            if places and len(path) < AHEAD:
                kind = _CLASS[min(LONGEST, lengths[places[0]] + len(path))]
                said = _continuations(ahead, lengths, places, len(path))
                known = others.get(other, {})
                trust = self.any.of(kind) if other < 0 else self.new.of(kind)
                children = []
                for share, token, agreeing in said:
                    child, accept_prob = known.get(token, (-1, 0.0))
                    accept_prob = accept_prob or prob * min(_MOST_CERTAIN, share * trust)
                    if accept_prob >= minimum:
                        children.append((-accept_prob, next(numbers), node, token, agreeing, child, (*path, token)))
                for opened in [min(children)] if chain and children else children:
                    heappush(open_, opened)
                every = {token: share for share, token, _ in said}
                new = {token: share for token, share in every.items() if other >= 0 and token not in known}
                self.seen[path] = _Seen(kind, every, new)
            if not open_ or tree.size >= max_nodes:
                return tree
            prob, _, parent, token, places, other, path = heappop(open_)
            prob = -prob
            node = tree.add(parent, token, prob)


def _continuations(
    ahead: Sequence[Sequence[int]], lengths: Sequence[int], places: Sequence[int], depth: int
) -> list[tuple[float, int, list[int]]]:
    """Tokens at a depth after some places: the probability and the places of each, most likely first.

    >>> found = _continuations([[7, 8], [7, 9], [6, -1]], [2, 2, 2], [0, 1, 2], 0)
    >>> [(round(prob, 3), token, places) for prob, token, places in found]
    [(0.258, 7, [0, 1]), (0.129, 6, [2])]
    """
    following: dict[int, list[int]] = {}
    for place in places:
        following.setdefault(ahead[place][depth], []).append(place)
    weights = {
        token: sum(WEIGHTS[min(LONGEST, lengths[place] + depth)] for place in agreeing)
        for token, agreeing in following.items()
    }
    total = sum(weights.values()) + len(weights)
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    # A few of the agreeing places suffice to continue.
    return [(weights[token] / total, token, following[token][:_AGREEING]) for token in ranked if token >= 0]


class MemoryDrafter(TextDrafter):
    """Draft continuations of the same words in the target's earlier answers.

    Args:
        shipped: file of answers that came with the heads, if any.
        served: answers that `remember` and other processes add to; None keeps nothing.
    """

    def __init__(
        self, vocab_size: int, shipped: Path | None = None, served: AnswerFile | None = None, **limits: Any
    ) -> None:
        super().__init__(**limits)
        self._vocab_size = vocab_size
        self._shipped = read_answers(shipped) if shipped is not None else []
        self._served = served
        self._lock = threading.Lock()
        self._index = self._fresh_index()

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> list[_Row]:
        with self._lock:
            self._look_for_more()
            return [_Row(self._index.parts, list(prompt[-LONGEST:])) for prompt in prompts]

    def propose(self, session: list[_Row], roots: TreeBatch, request: Request) -> list[Tree]:
        nodes, minimum = min(self.max_nodes, request.max_nodes), max(self.minimum, request.threshold)
        trees = []
        for row, beside in zip(session, request.beside or roots.trees, strict=True):
            row.append(beside.tokens[0])
            row.ahead = True
            trees.append(row.grow(beside, nodes, minimum, request.chain))
        return trees

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add an answer to the file, if any; a failure is a warning."""
        if self._served is None:
            return
        kept = [*prompt[-CONTEXT:], *answer]
        with self._lock:
            try:
                self._look_for_more()
                if not self._index.holds(kept):
                    self._served.add([kept])
            except UserError as error:
                warnings.warn(f"An answer was not kept: {error.problem}", RuntimeWarning, stacklevel=2)

    def _look_for_more(self) -> None:
        """Read answers that were added to the file."""
        if self._served is None:
            return
        answers, begun_anew = self._served.new()
        if begun_anew:
            self._index = self._fresh_index()
        self._index.add(answers)

    def _fresh_index(self) -> Index:
        index = Index(self._vocab_size)
        index.add(self._shipped)
        return index
