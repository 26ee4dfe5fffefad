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

from headstart.decode.options import SamplingOptions
from headstart.decode.sampling import process, warp
from headstart.support.rng import Numbers, draw_at, in_parts
from headstart.tree.proposal import Children, ProposedTree, Root, SampledChildren


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
        choice_BN: the target's argmax after each node; None where the verifier did not need it.
    """

    rows: list[Accepted]
    paths_BP: Tensor
    counts_B: Tensor
    root_B: Tensor
    choice_BN: Tensor | None = None

    @classmethod
    def of(
        cls, rows: Sequence[Accepted], device: torch.device | str = "cpu", choice_BN: Tensor | None = None
    ) -> Outcome:
        """Decided on the host; one upload."""
        longest = max(len(row.path) for row in rows)
        table = [
            [*row.path, *(row.path[-1],) * (longest - len(row.path)), len(row.path), row.tokens[-1]] for row in rows
        ]
        there = torch.tensor(table, device=device)
        return cls(list(rows), there[:, :-2], there[:, -2], there[:, -1], choice_BN)

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

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


class GreedyVerifier:
    """Accept a draft when it is the target's argmax. Lossless: the output is that of plain greedy decoding."""

    lossless = True
    children = Children.TOP_K
    chains_only = False

    def first(self, logits_BV: Tensor) -> list[int]:
        return argmax(logits_BV).tolist()

    def accept(self, tree: ProposedTree, logits_BNV: Tensor) -> Outcome:
        choice_BN = argmax(logits_BNV)
        if choice_BN.device.type == "cpu":
            return Outcome.of(walk(tree, choice_BN.tolist()), choice_BN=choice_BN)
        return walk_on_device(tree, choice_BN)

    def reorder(self, rows: Sequence[int]) -> None:
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
    return Outcome(rows, paths_BN[:, :longest], counts_B1[:, 0], root_B1[:, 0], choice_BN)


# -- sampling --------------------------------------------------------------------------------------------------------


@dataclass
class Streams:
    """A row's random generators. Drafting has a third one, so no noise is ever shared.

    Attributes:
        accept: for acceptance tests.
        residual: for drawing tokens.
    """

    accept: torch.Generator
    residual: torch.Generator


def streams(seed: int) -> tuple[Streams, torch.Generator]:
    """A row's random generators for verifying, and the one for drafting."""
    seeds = torch.randint(1 << 62, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    accept, residual, draft = (torch.Generator().manual_seed(one) for one in seeds)
    return Streams(accept, residual), draft


def uniform(stream: torch.Generator) -> float:
    """A number from [0, 1)."""
    return torch.rand((), generator=stream, dtype=torch.float64).item()


@dataclass
class Visited:
    """The nodes that rows have come to, one of each row, as a rule for many rows reads them.

    Attributes:
        p_target_MV: the target's distribution after each; the rule may overwrite it.
        accept_M: numbers for acceptance tests, float64 from [0, 1).
        residual_M: numbers for drawing tokens.
        sampled_M: the token of each node's first sampled child, -1 where no child was drawn.
        q_draft_MV: what that child was drawn from, anything where none was; None where no node has one.
    """

    p_target_MV: Tensor
    accept_M: Tensor
    residual_M: Tensor
    sampled_M: Tensor | None = None
    q_draft_MV: Tensor | None = None


class Row:
    """One row of a verified tree, as a rule for single rows reads it.

    Args:
        tokens: of each node, the root's first.
        parents: of each node, -1 for the root.
        sampled: how the children of some nodes were drawn.
        logits_NV: the target's, after each node.
        distribution: (logits [V], tokens below the root down to the node) to the distribution [V] to draw from.

    Attributes:
        tokens: as given.
        children: child nodes of each node, in order.
        sampled: as given.
    """

    def __init__(
        self,
        tokens: list[int],
        parents: Sequence[int],
        sampled: dict[int, SampledChildren],
        logits_NV: Tensor,
        distribution: Callable[[Tensor, list[int]], Tensor],
    ) -> None:
        self.tokens = tokens
        self.sampled = sampled
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
            path, index = [], node
            while index:
                path.append(self.tokens[index])
                index = self._parents[index]
            self._known[node] = self._distribution(self._logits_NV[node], path[::-1])
        return self._known[node]

    def q_draft(self, node: int) -> Tensor:
        """The distribution that the first sampled child of a node came from, float [V]."""
        return self.sampled[node].q_draft_V(self._logits_NV.shape[-1])

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
        self, rule: Rule, sampling: SamplingOptions, prompts: Sequence[Sequence[int]], streams_B: Sequence[Streams]
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
        parts = in_parts(len(logits_BV), logits_BV.shape[1], logits_BV.device)
        sampled = [
            draw_at(self._distributions(logits_BV[part], self._texts[part]), residual_BK[part, 0])[0] for part in parts
        ]
        tokens: list[int] = torch.cat(sampled).tolist()
        for number, token in enumerate(tokens):
            self._emitted(number, [token])
        return tokens

    def accept(self, tree: ProposedTree, logits_BNV: Tensor) -> Outcome:
        if self.rule.next_tokens is None:
            accepted = [self._alone(tree, logits_BNV, number) for number in range(len(tree.tokens))]
        else:
            accepted = self._together(tree, logits_BNV, self.rule.next_tokens)
        for number, one in enumerate(accepted):
            self._emitted(number, one.tokens)
        return Outcome.of(accepted, logits_BNV.device)

    def reorder(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._streams = [self._streams[row] for row in rows]
        self._numbers = [self._numbers[row] for row in rows]

    def _together(
        self, tree: ProposedTree, logits_BNV: Tensor, next_tokens: Callable[[Visited], Tensor]
    ) -> list[Accepted]:
        """All rows go down their trees side by side.

        Where asking the device costs nothing, or processors must see the text, rows that have ended are left out; else
        they stay, and what they come to is ignored.
        """
        device, (rows, _, vocab) = logits_BNV.device, logits_BNV.shape
        asks = device.type == "cpu" or self._sampling.needs_prefix
        depths = tree.depth + 1
        accept_BK, residual_BK = self._peek(depths, device)
        sampled, parents_BN = _Draws(tree, vocab, device), tree.parents_BN.expand(rows, -1)
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
            for part in in_parts(len(row_M), vocab, device):
                probs_MV = self._distributions(logits_MV[part], texts[part])
                rows_M, index_M = row_M[part], node_M[part]
                visited = Visited(probs_MV, accept_BK[rows_M, depth], residual_BK[rows_M, depth])
                if sampled:
                    visited.sampled_M, visited.q_draft_MV = sampled.at(rows_M, index_M, asks)
                found.append(next_tokens(visited))
            next_M = torch.cat(found)
            holds_MN = (parents_BN[row_M] == node_M[:, None]) & (tree.tokens_BN[row_M] == next_M[:, None])
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

    def _alone(self, tree: ProposedTree, logits_BNV: Tensor, number: int) -> Accepted:
        """One row, by a rule for single rows."""
        text = self._texts[number]
        row = Row(
            tree.tokens[number],
            tree.parents_of(number),
            tree.sampled[number] if tree.sampled is not None else {},
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
        """What to draw from after each text, float [M, V]."""
        if self._sampling.needs_prefix:
            processed = [
                process(self._sampling, logits_V, text) for logits_V, text in zip(logits_MV, texts, strict=True)
            ]
            logits_MV = torch.stack(processed)
        return warp(self._sampling, logits_MV)


class _Draws:
    """The sampled children of a tree on the device, in one upload."""

    def __init__(self, tree: ProposedTree, vocab: int, device: torch.device) -> None:
        self._vocab, self._tokens_BN = vocab, tree.tokens_BN
        sampled = tree.sampled or []
        self._all = [one for row in sampled for one in row.values()]
        if self._all:
            rows, size = tree.tokens_BN.shape
            firsts, indices = ([[value] * size for _ in range(rows)] for value in (-1, 0))
            count = 0
            for row, own in enumerate(sampled):
                for node, one in own.items():
                    firsts[row][node], indices[row][node] = one.children[0], count
                    count += 1
            self._first_BN, self._index_BN = torch.tensor([firsts, indices], device=device).unbind()
        self._q_draft_WV: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._all)

    def at(self, row_M: Tensor, node_M: Tensor, asks: bool) -> tuple[Tensor, Tensor]:
        """The first sampled child's token of each of these nodes, and what it was drawn from; see `Visited`."""
        first_M, index_M = self._first_BN[row_M, node_M], self._index_BN[row_M, node_M]
        token_M = self._tokens_BN[row_M, first_M.clamp(min=0)]
        if asks:  # only what is needed is put together
            q_draft_MV = torch.stack([self._all[index].q_draft_V(self._vocab) for index in index_M.tolist()])
        else:
            if self._q_draft_WV is None:
                self._q_draft_WV = torch.stack([sampled.q_draft_V(self._vocab) for sampled in self._all])
            q_draft_MV = self._q_draft_WV[index_M]
        return token_M.masked_fill(first_M < 0, -1), q_draft_MV
