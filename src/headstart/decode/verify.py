"""Verifiers: from a drafted tree and the target's logits to the tokens that are emitted.

Greedy decoding reads all choices at once. Sampling follows a rule (see `headstart.decode.rules`), which asks for the
target's distribution only at the nodes that it comes to.

Shape suffixes: B rows, N tree nodes, W distributions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headstart.decode.drafting import Children
from headstart.decode.sampling import Sampling
from headstart.target import DraftTree
from headstart.target.tree import Drawn

if TYPE_CHECKING:
    from headstart.decode.rules import Rule


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


class Row:
    """One row of a verified tree, as a rule reads it.

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

    def first(self, logits_BV: Tensor) -> list[int]:
        tokens = []
        for logits_V, text, own in zip(logits_BV, self._texts, self._streams, strict=True):
            tokens.append(draw(self._distribution(logits_V, text), own.residual))
            text.append(tokens[-1])
        return tokens

    def accept(self, tree: DraftTree, logits_BNV: Tensor) -> list[Accepted]:
        accepted = []
        for number, tokens in enumerate(tree.tokens_BN.tolist()):
            parents, text = tree.parents_of(number), self._texts[number]
            row = Row(
                tokens[: len(parents)],
                parents,
                tree.drawn[number] if tree.drawn is not None else {},
                logits_BNV[number],
                lambda logits_V, path, text=text: self._distribution(logits_V, text + path),  # type: ignore[misc]  # a default's type
            )
            accepted.append(self.rule.accept_row(row, self._streams[number]))
            text.extend(accepted[-1].tokens)
        return accepted

    def select(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._streams = [self._streams[row] for row in rows]

    def _distribution(self, logits_V: Tensor, prefix: list[int]) -> Tensor:
        if self._sampling.needs_prefix:
            logits_V = self._sampling.process(logits_V, prefix)
        return self._sampling.warp(logits_V)
