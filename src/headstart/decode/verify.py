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

from headstart.decode.sampling import Sampling
from headstart.proposal import Children, Drawn, ProposedTree, Root
from headstart.rng import draw

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


@dataclass(frozen=True)
class Outcome:
    """What one round decided, on the host and on the device.

    Attributes:
        rows: of each row.
        paths_BP: accepted nodes, root first, int64; short rows repeat their last node.
        counts_B: accepted nodes of each row.
        root_B: the last token emitted by each row.
    """

    rows: list[Accepted]
    paths_BP: Tensor
    counts_B: Tensor
    root_B: Tensor

    @classmethod
    def of(cls, rows: Sequence[Accepted], device: torch.device | str = "cpu") -> Outcome:
        """Decided on the host; one upload."""
        longest = max(len(row.path) for row in rows)
        table = [
            [*row.path, *(row.path[-1],) * (longest - len(row.path)), len(row.path), row.tokens[-1]] for row in rows
        ]
        there = torch.tensor(table, device=device)
        return cls(list(rows), there[:, :-2], there[:, -2], there[:, -1])

    @property
    def root(self) -> Root:
        """Where the next round drafts from."""
        return Root([row.tokens[-1] for row in self.rows], self.root_B)


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

    def accept(self, tree: ProposedTree, logits_BNV: Tensor) -> Outcome:
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

    def accept(self, tree: ProposedTree, logits_BNV: Tensor) -> Outcome:
        choice_BN = argmax(logits_BNV)
        if choice_BN.device.type == "cpu":
            return Outcome.of(walk(tree, choice_BN.tolist()))
        return walk_on_device(tree, choice_BN)

    def select(self, rows: Sequence[int]) -> None:
        """Greedy decoding keeps nothing per row."""


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit; that of `argmax`, ties included, and five times faster in bfloat16 on a CPU."""
    return logits.max(-1).indices


def walk(tree: ProposedTree, choices: Sequence[Sequence[int]]) -> list[Accepted]:
    """Follow the target's choices (after each node of each row) down the drafted tree, as far as the drafts agree."""
    rows = []
    for row, (drafts, own) in enumerate(zip(tree.tokens, choices, strict=True)):
        parents = tree.parents_of(row)
        children = {(parents[node], drafts[node]): node for node in range(len(parents) - 1, 0, -1)}
        path, node = [0], 0
        while (child := children.get((node, own[node]))) is not None:
            path.append(child)
            node = child
        rows.append(Accepted(path, [*(drafts[i] for i in path[1:]), own[node]]))
    return rows


def walk_on_device(tree: ProposedTree, choice_BN: Tensor) -> Outcome:
    """The same as `walk`, found without the host, which waits once, to read what was decided."""
    parents_BN = tree.parents_BN.expand_as(choice_BN)
    # A node is right when it holds its parent's choice, and accepted when all on its path are right.
    right_BN = (choice_BN.gather(1, parents_BN.clamp(min=0)) == tree.tokens_BN) & (parents_BN >= 0)
    right_BN = right_BN | (tree.depths_BN == 0)
    accepted_BN = ~(tree.visible_BNN & ~right_BN[:, None]).any(-1)
    last_B1 = (accepted_BN * (tree.depths_BN + 1)).max(-1, keepdim=True).indices
    on_path_BN = tree.visible_BNN.expand(len(choice_BN), -1, -1).gather(
        1, last_B1[:, :, None].expand(-1, -1, choice_BN.shape[1])
    )[:, 0]
    paths_BN = (~on_path_BN).long().argsort(dim=1, stable=True)  # its nodes first, in order
    counts_B1 = on_path_BN.sum(-1, keepdim=True)
    paths_BN = paths_BN.where(torch.arange(choice_BN.shape[1], device=choice_BN.device) < counts_B1, last_B1)
    root_B1 = choice_BN.gather(1, last_B1)
    rows = []
    for tokens, (count, root, *path) in zip(
        tree.tokens, torch.cat([counts_B1, root_B1, paths_BN], dim=1).tolist(), strict=True
    ):
        rows.append(Accepted(path[:count], [*(tokens[node] for node in path[1:count]), root]))
    longest = max(len(row.path) for row in rows)
    return Outcome(rows, paths_BN[:, :longest], counts_B1[:, 0], root_B1[:, 0])


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

    def accept(self, tree: ProposedTree, logits_BNV: Tensor) -> Outcome:
        accepted = []
        for number, tokens in enumerate(tree.tokens):
            parents, text = tree.parents_of(number), self._texts[number]
            row = Row(
                tokens,
                parents,
                tree.drawn[number] if tree.drawn is not None else {},
                logits_BNV[number],
                lambda logits_V, path, text=text: self._distribution(logits_V, text + path),  # type: ignore[misc]  # a default's type
            )
            accepted.append(self.rule.accept_row(row, self._streams[number]))
            text.extend(accepted[-1].tokens)
        return Outcome.of(accepted, logits_BNV.device)

    def select(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._streams = [self._streams[row] for row in rows]

    def _distribution(self, logits_V: Tensor, prefix: list[int]) -> Tensor:
        if self._sampling.needs_prefix:
            logits_V = self._sampling.process(logits_V, prefix)
        return self._sampling.warp(logits_V)
