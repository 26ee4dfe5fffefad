"""Drafting from the target's earlier answers, in training or since: continuations of the same words.

Answers are concatenated in segments, oldest first. A segment is sorted by the three tokens before each position, so all
positions after the same words form a range. The longest matches give a tree of continuations. A match votes for its
continuation with a weight that grows with its length, and disagreeing matches leave room for something new, as in
prediction by partial matching (Witten and Bell 1991):

    p(token) = sum of the weights of its matches / (sum of all weights + number of different continuations)

Each text learns how often predictions are right, by match length, and scales later ones. Tokens that other drafters
propose keep the other drafters' probabilities. A second rate, which is lower, scales the tokens that they do not
propose: trained heads know their training answers.

Segments are merged as they grow, the newest first, so that a search reads few of them. A text searches the segments of
its start; adding answers replaces the tuple of segments, and never changes one.
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

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headstart.drafters.ngram import TextDrafter
from headstart.errors import UserError
from headstart.support.answer_file import AnswerFile, read_answers
from headstart.tree.tree import Tree

MOST_TOKENS = 1_000_000
"""Size of an index; beyond it the oldest tokens are dropped."""
CONTEXT = 8
"""Tokens of the prompt kept before an answer, so that its beginning can be found."""
LONGEST = 16
"""Longest match that is compared."""
AHEAD = 24
"""Tokens of a continuation."""
WEIGHTS = (0.0, 0.0, 0.42, 0.53, 0.7, 1.3, 1.6, 1.8, 2.0, 2.9, 3.4, 3.8, 4.5, 12.0, 20.0, 40.0, 57.0)
"""Weight of a match, by its length.

Fitted (maximum likelihood) to greedy answers of SmolLM2-135M-Instruct to 54 prompts of its own, 6,600 tokens, beside
1,145 answers that it was trained on: 77 % of the 6,600 had a match, and the probability that any continuation is
right agrees within 0.02 with the measured frequency, for each match length.
"""

NOVEL = (0.03, 0.03, 0.05, 0.1, 0.25, 0.6, 0.9)
"""Initial hit rates, by `_CLASSES`, of continuations that other drafters do not propose although they draft."""

_MOST_MATCHES = 32  # most matches per tree
_LOOKS = 1024  # most positions after the same last tokens to compare, latest first
_BITS = 21  # bits of a token in a key
_NO_TOKEN = (1 << _BITS) - 1
_MERGE_RATIO = 4  # a segment is merged with the previous one unless that is this many times larger
_CLASSES = (2, 3, 4, 6, 8, 12, 16)  # shortest match length of each class
_CLASS = [max(0, bisect_right(_CLASSES, length) - 1) for length in range(LONGEST + 1)]
_PRIOR_WEIGHT = 4.0  # predicted tokens that a prior counts as
_DECAY = 31 / 32  # of a text's statistics per token
_MOST_CERTAIN = 0.98
_FOLLOWED = 8  # most matches to follow per continuation
_AROUND = np.arange(-LONGEST, AHEAD)


class _Segment:
    """Concatenated answers, each followed by -1, with padding of -1 at both ends of `tokens`. `order` are the positions
    of tokens, sorted by the three tokens before them, and `keys` these tokens, the nearest first."""

    def __init__(self, answers: NDArray[np.int32]) -> None:
        self.tokens = np.pad(answers, (LONGEST, AHEAD), constant_values=-1)
        self.answers = self.tokens[LONGEST:-AHEAD]
        wide = self.tokens.astype(np.int64)
        key = (wide[2:-1] << 2 * _BITS) | (wide[1:-2] << _BITS) | (wide[:-3] + 1)
        known = (wide[2:-1] >= 0) & (wide[1:-2] >= 0) & (wide[3:] >= 0)
        key = key[known]
        order = np.argsort(key, kind="stable")
        self.keys = key[order]
        self.order = (np.flatnonzero(known)[order] + 3).astype(np.int32)

    def matches(self, tail: Sequence[int]) -> NDArray[np.int32]:
        """Positions after the same last tokens: the latest of the longest matches, at most `_MOST_MATCHES`."""
        two = (tail[-1] << 2 * _BITS) | (tail[-2] << _BITS)
        three = two | (tail[-3] + 1 if len(tail) > 2 else _NO_TOKEN)
        bounds = self.keys.searchsorted([two, three, three + 1, two + (1 << _BITS)]).tolist()
        begin, end, length = (bounds[1], bounds[2], 3) if bounds[1] < bounds[2] else (bounds[0], bounds[3], 2)
        found = self.order[max(begin, end - _LOOKS) : end]
        while len(found) > _MOST_MATCHES and length < min(LONGEST, len(tail)):
            longer = found[self.tokens[found - length - 1] == tail[-length - 1]]
            if not len(longer):
                break
            found, length = longer, length + 1
        return found[-_MOST_MATCHES:]


class AnswerIndex:
    """Searchable answers; adding to them never changes earlier `segments`.

    >>> index = AnswerIndex(vocab_size=10)
    >>> index.add([[1, 2, 3, 4], [5, 2, 3, 6]])
    >>> len(index.segments[0].matches([9, 2, 3]))
    2
    """

    def __init__(self, vocab_size: int, most_tokens: int = MOST_TOKENS) -> None:
        self.segments: tuple[_Segment, ...] = ()
        self._vocab_size = vocab_size
        self._most_tokens = most_tokens
        self._hashes: set[int] = set()

    def add(self, answers: Iterable[Sequence[int]]) -> None:
        """Add new answers, unless the target lacks one of their tokens."""
        added: list[int] = []
        for answer in answers:
            if len(answer) < 3 or answer in self or not 0 <= min(answer) <= max(answer) < self._vocab_size:
                continue
            self._hashes.add(hash(tuple(answer)))
            added += [*answer, -1]
        if not added:
            return
        segments, tokens = list(self.segments), np.array(added[-self._most_tokens :], np.int32)
        while segments and len(segments[-1].answers) < _MERGE_RATIO * len(tokens):
            tokens = np.concatenate([segments.pop().answers, tokens])
        self.segments = (*segments, _Segment(tokens))
        if self.size > self._most_tokens:
            # Drop an eighth at once, since the segment is sorted anew; dropped answers may be added again.
            tokens = np.concatenate([segment.answers for segment in self.segments])
            self.segments = (_Segment(tokens[-self._most_tokens * 7 // 8 :]),)
            self._hashes.clear()

    def __contains__(self, answer: Sequence[int]) -> bool:
        return hash(tuple(answer)) in self._hashes

    @property
    def size(self) -> int:
        """Tokens, with a gap after each answer."""
        return sum(len(segment.answers) for segment in self.segments)


def find(segments: Sequence[_Segment], tail: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Continuations of a text's last tokens, `AHEAD` tokens each (meaningless from a -1 on, where an answer ended), and
    their match lengths; the longest matches first, then the latest."""
    if len(tail) < 2 or not segments:
        return [], []
    around = np.concatenate(
        [segment.tokens[segment.matches(tail)[::-1, None] + _AROUND] for segment in reversed(segments)]
    )
    before = np.full(LONGEST, -2, np.int32)
    before[-len(tail) :] = tail[-LONGEST:]
    lengths = (around[:, LONGEST - 1 :: -1] != before[::-1]).argmax(1)
    lengths[lengths == 0] = LONGEST  # no difference: every match has two tokens
    best = np.argsort(-lengths, kind="stable")[:_MOST_MATCHES]
    return around[best, LONGEST:].tolist(), lengths[best].tolist()


@dataclass
class _Prediction:
    """Probabilities of the next token, to be checked, of a match class; `novel` are those of tokens that no other
    drafter proposed, if others drafted."""

    match_class: int
    probs: dict[int, float]
    novel: dict[int, float]


class _HitRates:
    """How often predictions are right, by match class."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._predicted = [_PRIOR_WEIGHT] * len(priors)
        self._right = [_PRIOR_WEIGHT * rate for rate in priors]

    def __getitem__(self, match_class: int) -> float:
        """Factor of a predicted probability."""
        return self._right[match_class] / self._predicted[match_class]

    def update(self, match_class: int, probs: Mapping[int, float], token: int) -> None:
        """Learn from the decided token."""
        if probs:
            self._predicted[match_class] = _DECAY * self._predicted[match_class] + sum(probs.values())
            self._right[match_class] = _DECAY * self._right[match_class] + (token in probs)


@dataclass
class _Row:
    """The last tokens of a row's text, and how often continuations were right.

    Attributes:
        segments: the index when the text began.
        rates, novel_rates: of all continuations, and of those that no other drafter proposed.
        predictions: by path of tokens after the newest root.
        path: tokens since then.
    """

    segments: Sequence[_Segment]
    tail: list[int]
    rates: _HitRates = field(default_factory=lambda: _HitRates([1.0] * len(_CLASSES)))
    novel_rates: _HitRates = field(default_factory=lambda: _HitRates(NOVEL))
    has_root: bool = False
    predictions: dict[tuple[int, ...], _Prediction] = field(default_factory=dict)
    path: tuple[int, ...] = ()

    def append(self, token: int) -> None:
        """Append a decided token, and check its prediction."""
        self.tail.append(token)
        if len(self.tail) > 4 * LONGEST:
            del self.tail[:-LONGEST]
        if (made := self.predictions.get(self.path)) is not None:
            self.rates.update(made.match_class, made.probs, token)
            self.novel_rates.update(made.match_class, made.novel, token)
            self.path = (*self.path, token)

    def grow(self, others: Tree, max_nodes: int, minimum: float, chain: bool) -> Tree:
        """The most probable continuations after the root of other drafters' tree, best first; records predictions."""
        continuations, lengths = find(self.segments, self.tail)
        proposed: dict[int, dict[int, tuple[int, float]]] = {}  # by node and token: the child and its probability or 0
        probs = others.accept_probs or [0.0] * others.size
        for child in range(1, others.size):
            proposed.setdefault(others.parents[child], {})[others.tokens[child]] = (child, probs[child])
        tree, numbers = Tree(others.tokens[:1], accept_probs=[1.0]), count()
        self.predictions, self.path = {}, ()
        # -probability, number, parent, token, matches, node of the other tree or -1, path
        heap: list[tuple[float, int, int, int, list[int], int, tuple[int, ...]]] = []
        node, prob, matches, path = 0, 1.0, list(range(len(lengths))), tuple[int, ...]()
        other = 0 if others.size > 1 else -1
        while True:
            if matches and len(path) < AHEAD:
                match_class = _CLASS[min(LONGEST, lengths[matches[0]] + len(path))]
                votes = _vote(continuations, lengths, matches, len(path))
                known = proposed.get(other, {})
                rate = self.rates[match_class] if other < 0 else self.novel_rates[match_class]
                children = []
                for share, token, agreeing in votes:
                    child, accept_prob = known.get(token, (-1, 0.0))
                    accept_prob = accept_prob or prob * min(_MOST_CERTAIN, share * rate)
                    if accept_prob >= minimum:
                        children.append((-accept_prob, next(numbers), node, token, agreeing, child, (*path, token)))
                for entry in [min(children)] if chain and children else children:
                    heappush(heap, entry)
                shares = {token: share for share, token, _ in votes}
                novel = {token: share for token, share in shares.items() if other >= 0 and token not in known}
                self.predictions[path] = _Prediction(match_class, shares, novel)
            if not heap or tree.size >= max_nodes:
                return tree
            negated, _, parent, token, matches, other, path = heappop(heap)
            prob = -negated
            node = tree.add(parent, token, prob)


def _vote(
    continuations: Sequence[Sequence[int]], lengths: Sequence[int], matches: Sequence[int], depth: int
) -> list[tuple[float, int, list[int]]]:
    """Tokens at a depth after some matches: the probability and the matches of each, most likely first.

    >>> found = _vote([[7, 8], [7, 9], [6, -1]], [2, 2, 2], [0, 1, 2], 0)
    >>> [(round(prob, 3), token, matches) for prob, token, matches in found]
    [(0.258, 7, [0, 1]), (0.129, 6, [2])]
    """
    following: dict[int, list[int]] = {}
    for match in matches:
        following.setdefault(continuations[match][depth], []).append(match)
    weights = {
        token: sum(WEIGHTS[min(LONGEST, lengths[match] + depth)] for match in agreeing)
        for token, agreeing in following.items()
    }
    total = sum(weights.values()) + len(weights)
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    # A few of the agreeing matches suffice to continue.
    return [(weights[token] / total, token, following[token][:_FOLLOWED]) for token in ranked if token >= 0]


class MemoryDrafter(TextDrafter):
    """Drafter of continuations of the same words in the target's earlier answers.

    Args:
        shipped: file of answers that came with the heads, if any.
        served: answers that `remember` and other processes add to; None keeps nothing.
    """

    def __init__(self, vocab_size: int, shipped: Path | None = None, served: AnswerFile | None = None) -> None:
        self._vocab_size = vocab_size
        self._shipped = read_answers(shipped) if shipped is not None else []
        self._served = served
        self._lock = threading.Lock()
        self._index = self._new_index()

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> list[_Row]:
        with self._lock:
            self._read_new()
            return [_Row(self._index.segments, list(prompt[-LONGEST:])) for prompt in prompts]

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add an answer to the file, if any; a failure is a warning."""
        if self._served is None:
            return
        text = [*prompt[-CONTEXT:], *answer]
        with self._lock:
            try:
                self._read_new()
                if text not in self._index:
                    self._served.add([text])
            except UserError as error:
                warnings.warn(f"An answer was not kept: {error.problem}", RuntimeWarning, stacklevel=2)

    def _read_new(self) -> None:
        """Read answers that were added to the file."""
        if self._served is None:
            return
        answers, recreated = self._served.read_new()
        if recreated:
            self._index = self._new_index()
        self._index.add(answers)

    def _new_index(self) -> AnswerIndex:
        index = AnswerIndex(self._vocab_size)
        index.add(self._shipped)
        return index
