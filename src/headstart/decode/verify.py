"""Verifiers: from a drafted tree and the target's logits to the tokens that are emitted.

Greedy decoding reads all choices at once. Sampling follows a rule (see `headstart.decode.rules`) down the tree, all
rows together, one depth after the other: the target's distribution is computed only at the nodes that rows come to, and
the host waits for the device once, for what came out.

Each token of a row's text takes one number of each of the row's random streams, whatever was drafted and whatever the
other rows do.

Shape suffixes: B rows, N tree nodes, K depths, M rows that still go on, W distributions, V vocabulary, G groups of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headstart.decode.drafting import Children
from headstart.decode.sampling import Sampling
from headstart.target import DraftTree
from headstart.target.tree import Drawn

_GROUP = 256
"""Tokens that are summed together to draw one: the group is found first, then the token in it."""
_INSIDE = 1 - 1e-12
"""The largest share of a sum that a draw may fall on: the sum itself lies behind the last token."""
_CACHED, _TOGETHER = 1 << 18, 1 << 27
"""Probabilities that are computed at a time, on a CPU and elsewhere."""
_AHEAD = 64
"""Random numbers that are drawn at a time."""


@dataclass
class Accepted:
    """What one round decided for one row.

    Attributes:
        path: accepted nodes, root first (at least the root); these are committed to the cache.
        tokens: the tokens emitted by the round: those of the accepted drafts, then the target's own next token.
    """

    path: list[int]
    tokens: list[int]


class Verifier(Protocol):
    """Decides which drafts are accepted.

    Attributes:
        lossless: whether the output is that of plain decoding with the same settings.
        children: what drafters may draw; see `Children`.
        chains_only: whether it takes chains only.
    """

    lossless: bool
    children: Children
    chains_only: bool

    def first(self, logits_BV: Tensor) -> list[int]:
        """Each row's first token, from the logits after its prompt."""
        ...

    def accept(self, tree: DraftTree, logits_BNV: Tensor) -> list[Accepted]:
        """Decide one round for every row."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


class GreedyVerifier:
    """Accept a draft when it is the target's argmax. Lossless: the output is that of plain greedy decoding."""

    lossless = True
    children = Children.TOP
    chains_only = False

    def first(self, logits_BV: Tensor) -> list[int]:
        return argmax(logits_BV).tolist()

    def accept(self, tree: DraftTree, logits_BNV: Tensor) -> list[Accepted]:
        return walk(tree, argmax(logits_BNV))

    def select(self, rows: Sequence[int]) -> None:
        """Greedy decoding keeps nothing per row."""


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit; that of `argmax`, ties included, and five times faster in bfloat16 on a CPU."""
    return logits.max(-1).indices


def walk(tree: DraftTree, choice_BN: Tensor) -> list[Accepted]:
    """Follow the target's choices down the drafted tree, as far as the drafts agree. One host synchronisation."""
    both = torch.stack([tree.tokens_BN, choice_BN]).tolist()
    rows = []
    for row, (drafts, choices) in enumerate(zip(*both, strict=True)):
        parents = tree.parents_of(row)
        children = {(parents[node], drafts[node]): node for node in range(len(parents) - 1, 0, -1)}
        path, node = [0], 0
        while (child := children.get((node, choices[node]))) is not None:
            path.append(child)
            node = child
        rows.append(Accepted(path, [*(drafts[i] for i in path[1:]), choices[node]]))
    return rows


# -- sampling --------------------------------------------------------------------------------------------------------


@dataclass
class Streams:
    """Independent random numbers of one row. Drafting has a third stream, so no noise is ever shared.

    Attributes:
        accept: for acceptance tests.
        residual: for drawing tokens.
    """

    accept: torch.Generator
    residual: torch.Generator


def streams(seed: int) -> tuple[Streams, torch.Generator]:
    """A row's streams for verifying, and the one for drafting."""
    seeds = torch.randint(1 << 62, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    accept, residual, draft = (torch.Generator().manual_seed(one) for one in seeds)
    return Streams(accept, residual), draft


def uniform(stream: torch.Generator) -> float:
    """A number from [0, 1)."""
    return torch.rand((), generator=stream, dtype=torch.float64).item()


def draw(probs_V: Tensor, stream: torch.Generator) -> int:
    """A token from a distribution; one without probability is never drawn."""
    return int(draw_each(probs_V[None], stream).clamp(max=len(probs_V) - 1))


def draw_each(probs_WV: Tensor, stream: torch.Generator) -> Tensor:
    """A token from each distribution, int64 [W], by inverting cumulative sums; V where there is no probability."""
    cumulative_WV = probs_WV.cumsum(-1, dtype=torch.float64)
    chance_W = torch.rand(len(probs_WV), generator=stream, dtype=torch.float64).to(probs_WV.device)
    place_W1 = (cumulative_WV[:, -1] * chance_W)[:, None]
    # The first token whose cumulative sum passes the place: its own probability is then above 0.
    return torch.searchsorted(cumulative_WV, place_W1, right=True)[:, 0]


def draw_at(weights_MV: Tensor, number_M: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at which uniform numbers fall in distributions that need not sum to 1, and what those sum to.

    Args:
        weights_MV: not negative.
        number_M: float64, from [0, 1).

    Returns:
        int64 [M], never a token of weight 0 unless all are; float64 [M].

    >>> token_M, sum_M = draw_at(torch.tensor([[0.0, 2.0, 6.0]] * 3), torch.tensor([0.0, 0.2, 0.9]).double())
    >>> token_M.tolist(), sum_M.tolist()
    ([1, 1, 2], [8.0, 8.0, 8.0])
    """
    size = weights_MV.shape[1]
    whole = size // _GROUP * _GROUP
    sums_MG = weights_MV[:, :whole].reshape(len(weights_MV), -1, _GROUP).sum(-1).double() if whole else None
    if whole < size or sums_MG is None:
        rest_M1 = weights_MV[:, whole:].sum(-1, keepdim=True).double()
        sums_MG = rest_M1 if sums_MG is None else torch.cat([sums_MG, rest_M1], 1)
    until_MG = sums_MG.cumsum(1)
    sum_M = until_MG[:, -1]
    place_M1 = (number_M.clamp(max=_INSIDE) * sum_M)[:, None]
    # The first whose cumulative sum passes the place: its own weight is then above 0.
    group_M1 = torch.searchsorted(until_MG, place_M1, right=True).clamp(max=sums_MG.shape[1] - 1)
    own_M1 = sums_MG.gather(1, group_M1)
    token_MG = group_M1 * _GROUP + torch.arange(min(_GROUP, size), device=weights_MV.device)
    inside_MG = weights_MV.gather(1, token_MG.clamp(max=size - 1)).double().masked_fill(token_MG >= size, 0.0).cumsum(1)
    share_M1 = ((place_M1 - until_MG.gather(1, group_M1) + own_M1) / own_M1).clamp(0.0, _INSIDE)
    inside_M1 = torch.searchsorted(inside_MG, share_M1 * inside_MG[:, -1:], right=True)
    return (group_M1 * _GROUP + inside_M1).clamp(max=size - 1)[:, 0], sum_M


class Numbers:
    """Uniform numbers of one random stream, drawn ahead; they are those that `uniform` would draw.

    Args:
        stream: used for nothing else.

    >>> numbers = Numbers(torch.Generator().manual_seed(0))
    >>> numbers.peek(3)[1:] == (numbers.skip(1), numbers.peek(2))[1]
    True
    """

    def __init__(self, stream: torch.Generator) -> None:
        self._stream = stream
        self._ahead: list[float] = []

    def peek(self, count: int) -> list[float]:
        """The next numbers, which stay the next ones."""
        while len(self._ahead) < count:
            self._ahead += torch.rand(_AHEAD, generator=self._stream, dtype=torch.float64).tolist()
        return self._ahead[:count]

    def skip(self, count: int) -> None:
        """So many were used."""
        self.peek(count)
        del self._ahead[:count]


@dataclass
class Visited:
    """The nodes that rows have come to, one of each row, as a rule for many rows reads them.

    Attributes:
        p_target_MV: the target's distribution after each; the rule may overwrite it.
        accept_M: numbers for acceptance tests, float64 from [0, 1).
        residual_M: numbers for drawing tokens.
        drawn_M: the token of each node's first drawn child, -1 where no child was drawn.
        q_draft_MV: what that child was drawn from, anything where none was; None where no node has one.
    """

    p_target_MV: Tensor
    accept_M: Tensor
    residual_M: Tensor
    drawn_M: Tensor | None = None
    q_draft_MV: Tensor | None = None


class Row:
    """One row of a verified tree, as a rule for single rows reads it.

    Args:
        tokens: of each node, the root's first.
        parents: of each node, -1 for the root.
        drawn: how the children of some nodes were drawn.
        logits_NV: the target's, after each node.
        distribution: (logits [V], tokens from behind the root down to the node) to the distribution [V] to draw from.

    Attributes:
        tokens: as given.
        children: child nodes of each node, in order.
        drawn: as given.
    """

    def __init__(
        self,
        tokens: list[int],
        parents: Sequence[int],
        drawn: dict[int, Drawn],
        logits_NV: Tensor,
        distribution: Callable[[Tensor, list[int]], Tensor],
    ) -> None:
        self.tokens = tokens
        self.drawn = drawn
        self.children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents[1:], start=1):
            self.children[parent].append(node)
        self._parents = parents
        self._logits_NV = logits_NV
        self._distribution = distribution
        self._known: dict[int, Tensor] = {}

    def p_target(self, node: int) -> Tensor:
        """The target's distribution after a node, float [V], with all settings applied."""
        if node not in self._known:
            path, place = [], node
            while place:
                path.append(self.tokens[place])
                place = self._parents[place]
            self._known[node] = self._distribution(self._logits_NV[node], path[::-1])
        return self._known[node]

    def q_draft(self, node: int) -> Tensor:
        """The distribution that the first drawn child of a node came from, float [V]."""
        return self.drawn[node].q_draft_V(self._logits_NV.shape[-1])

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that holds a token."""
        return next((child for child in self.children[node] if self.tokens[child] == token), None)


@dataclass(frozen=True)
class Rule:
    """A rule for sampling, and what it needs.

    Attributes:
        name: what users call it.
        accept_row: decides one round of one row.
        children: how drafters should choose children for it. Lossless rules are so for every choice; this is the one
            that they accept most of.
        next_tokens: the token after each visited node, for rules that decide node by node, from the root down. Where it
            is there it decides in place of `accept_row`, which is then its reference: the same for one row.
        lossless: whether the output is distributed as the target's own.
        chains_only: whether no node may have more than one child.
    """

    name: str
    accept_row: Callable[[Row, Streams], Accepted]
    children: Children
    next_tokens: Callable[[Visited], Tensor] | None = None
    lossless: bool = True
    chains_only: bool = False


class RuleVerifier:
    """Follow a rule at every row, with random streams of the row's own.

    Args:
        rule: from `headstart.decode.rules`.
        sampling: settings; a temperature of 0 leaves one possible token everywhere, so every rule is then greedy.
        prompts: of each row; processors read them.
        streams_B: of each row.
    """

    def __init__(
        self, rule: Rule, sampling: Sampling, prompts: Sequence[Sequence[int]], streams_B: Sequence[Streams]
    ) -> None:
        self.rule = rule
        self.lossless = rule.lossless
        self.children = rule.children
        self.chains_only = rule.chains_only
        self._sampling = sampling
        self._texts = [list(prompt) for prompt in prompts]
        self._streams = list(streams_B)
        self._numbers = [(Numbers(own.accept), Numbers(own.residual)) for own in streams_B]

    def first(self, logits_BV: Tensor) -> list[int]:
        _, residual_BK = self._peek(1, logits_BV.device)
        parts = _parts(len(logits_BV), logits_BV.shape[1], logits_BV.device)
        drawn = [
            draw_at(self._distributions(logits_BV[part], self._texts[part]), residual_BK[part, 0])[0] for part in parts
        ]
        tokens: list[int] = torch.cat(drawn).tolist()
        for number, token in enumerate(tokens):
            self._emitted(number, [token])
        return tokens

    def accept(self, tree: DraftTree, logits_BNV: Tensor) -> list[Accepted]:
        if self.rule.next_tokens is None:
            tokens = tree.tokens_BN.tolist()
            accepted = [self._alone(tree, logits_BNV, number, tokens[number]) for number in range(len(tokens))]
        else:
            accepted = self._together(tree, logits_BNV, self.rule.next_tokens)
        for number, one in enumerate(accepted):
            self._emitted(number, one.tokens)
        return accepted

    def select(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._streams = [self._streams[row] for row in rows]
        self._numbers = [self._numbers[row] for row in rows]

    def _together(
        self, tree: DraftTree, logits_BNV: Tensor, next_tokens: Callable[[Visited], Tensor]
    ) -> list[Accepted]:
        """All rows go down their trees side by side.

        Where asking the device costs nothing, or processors must see the text, rows that have ended are left out; else
        they stay, and what they come to is ignored.
        """
        device, (rows, _, vocab) = logits_BNV.device, logits_BNV.shape
        asks = device.type == "cpu" or self._sampling.needs_prefix
        depths = tree.depth + 1
        accept_BK, residual_BK = self._peek(depths, device)
        drawn = _Draws(tree, vocab, device)
        tokens_BK = torch.full((rows, depths), -1, device=device)
        path_BK = torch.full((rows, depths), -1, device=device)
        row_M, node_M = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.long, device=device)
        going_M = torch.ones(rows, dtype=torch.bool, device=device)
        for depth in range(depths):
            logits_MV = logits_BNV[row_M, node_M] if depth else logits_BNV[:, 0]
            texts = self._texts
            if depth and self._sampling.needs_prefix:
                so_far = zip(row_M.tolist(), tokens_BK[row_M, :depth].tolist(), strict=True)
                texts = [self._texts[row] + tokens for row, tokens in so_far]
            found = []
            for part in _parts(len(row_M), vocab, device):
                probs_MV = self._distributions(logits_MV[part], texts[part])
                rows_M, places_M = row_M[part], node_M[part]
                visited = Visited(probs_MV, accept_BK[rows_M, depth], residual_BK[rows_M, depth])
                if drawn:
                    visited.drawn_M, visited.q_draft_MV = drawn.at(rows_M, places_M, asks)
                found.append(next_tokens(visited))
            next_M = torch.cat(found)
            holds_MN = (drawn.parents_BN[row_M] == node_M[:, None]) & (tree.tokens_BN[row_M] == next_M[:, None])
            child_M, goes_M = holds_MN.int().argmax(1), holds_MN.any(1) & going_M
            tokens_BK[row_M, depth] = next_M.masked_fill(~going_M, -1)
            path_BK[row_M, depth] = child_M.masked_fill(~goes_M, -1)
            node_M, going_M = torch.where(goes_M, child_M, node_M), goes_M
            if asks:
                row_M, node_M, going_M = row_M[goes_M], node_M[goes_M], going_M[goes_M]
                if not len(row_M):
                    break
        tokens, paths = torch.stack([tokens_BK, path_BK]).tolist()
        return [
            Accepted([0, *(node for node in path if node >= 0)], [token for token in own if token >= 0])
            for path, own in zip(paths, tokens, strict=True)
        ]

    def _alone(self, tree: DraftTree, logits_BNV: Tensor, number: int, tokens: list[int]) -> Accepted:
        """One row, by a rule for single rows."""
        parents, text = tree.parents_of(number), self._texts[number]
        row = Row(
            tokens[: len(parents)],
            parents,
            tree.drawn[number] if tree.drawn is not None else {},
            logits_BNV[number],
            lambda logits_V, path: self._distributions(logits_V[None], [text + path])[0],
        )
        return self.rule.accept_row(row, self._streams[number])

    def _peek(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The next numbers of each row for accepting and for drawing, [B, count] each; one upload."""
        numbers = [[own[kind].peek(count) for own in self._numbers] for kind in (0, 1)]
        accept_BK, residual_BK = torch.tensor(numbers, dtype=torch.float64, device=device).unbind()
        return accept_BK, residual_BK

    def _emitted(self, number: int, tokens: Sequence[int]) -> None:
        self._texts[number].extend(tokens)
        for numbers in self._numbers[number]:
            numbers.skip(len(tokens))

    def _distributions(self, logits_MV: Tensor, texts: Sequence[list[int]]) -> Tensor:
        """What to draw from behind each text, float [M, V]."""
        if self._sampling.needs_prefix:
            processed = [
                self._sampling.process(logits_V, text) for logits_V, text in zip(logits_MV, texts, strict=True)
            ]
            logits_MV = torch.stack(processed)
        return self._sampling.warp(logits_MV)


def _parts(rows: int, vocab: int, device: torch.device) -> list[slice]:
    """Rows whose distributions are computed together: on a CPU as many as its caches hold."""
    size = max(1, (_CACHED if device.type == "cpu" else _TOGETHER) // vocab)
    return [slice(start, start + size) for start in range(0, rows, size)]


class _Draws:
    """A tree's shape and its drawn children on the device, in one upload.

    Attributes:
        parents_BN: parent of each node, -1 for the root and -2 for padding.
    """

    def __init__(self, tree: DraftTree, vocab: int, device: torch.device) -> None:
        rows, size = tree.tokens_BN.shape
        self._vocab, self._tokens_BN = vocab, tree.tokens_BN
        self._drawn = tree.drawn or []
        self._all = [drawn for row in self._drawn for drawn in row.values()]
        parents, firsts, places = [], [], []
        count = 0
        for row in range(rows):
            own = tree.parents_of(row)
            parents.append([*own, *[-2] * (size - len(own))])
            firsts.append([-1] * size)
            places.append([0] * size)
            for node, drawn in self._drawn[row].items() if self._drawn else ():
                firsts[row][node], places[row][node] = drawn.children[0], count
                count += 1
        whole = torch.tensor([parents, firsts, places] if count else [parents], device=device)
        self.parents_BN = whole[0]
        if count:
            self._first_BN, self._place_BN = whole[1:]
        self._q_draft_WV: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._all)

    def at(self, row_M: Tensor, node_M: Tensor, asks: bool) -> tuple[Tensor, Tensor]:
        """The first drawn child's token of each of these nodes, and what it was drawn from; see `Visited`."""
        first_M, place_M = self._first_BN[row_M, node_M], self._place_BN[row_M, node_M]
        token_M = self._tokens_BN[row_M, first_M.clamp(min=0)]
        if asks:  # only what is needed is put together
            q_draft_MV = torch.stack([self._all[place].q_draft_V(self._vocab) for place in place_M.tolist()])
        else:
            if self._q_draft_WV is None:
                self._q_draft_WV = torch.stack([drawn.q_draft_V(self._vocab) for drawn in self._all])
            q_draft_MV = self._q_draft_WV[place_M]
        return token_M.masked_fill(first_M < 0, -1), q_draft_MV
