"""Mistakes that decoders make, each planted in an otherwise right round: the proofs must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headstart.decode import rules
from headstart.decode.verify import Row
from tests.decode.tables import Grower, Kind, Shape, q_table


@dataclass(frozen=True)
class Mutant:
    """A mistake, and where it shows.

    Attributes:
        rules: names of the rules it is planted in.
        kind, shape: of the trees.
        patches: replacements for functions of `headstart.decode.rules`.
        grower, row_type: what drafts, and what rules read.
        same_noise: two random streams that get the same noise. Enumeration cannot see this: it has no streams.
    """

    rules: tuple[str, ...]
    kind: str = "drawn"
    shape: str = "wide"
    patches: dict[str, Callable[..., Any]] = field(default_factory=dict)
    grower: Callable[[Kind, Shape], Grower] = Grower
    row_type: type[Row] = Row
    same_noise: tuple[str, str] | None = None


_residual, _draws = rules.residual, rules.drawn_children


def _keeps_p(p_target_V: Tensor, q_draft_V: Tensor, reach: float = 1.0) -> tuple[Tensor, float]:
    """After a rejection the token is drawn from p instead of norm((p - q)+)."""
    return p_target_V, _residual(p_target_V, q_draft_V, reach)[1]


def _by_probability(row: Row, node: int) -> Iterator[tuple[int, Tensor]]:
    """Drawn siblings are tried the likeliest first, each with q without those tried before."""
    if node not in row.sampled:
        return
    q_draft_V = row.q_draft(node).clone()
    for child in sorted(row.sampled[node].children, key=lambda child: -float(row.q_draft(node)[row.tokens[child]])):
        yield child, q_draft_V / q_draft_V.sum()
        q_draft_V[row.tokens[child]] = 0.0


def _with_replacement(row: Row, node: int) -> Iterator[tuple[int, Tensor]]:
    """Siblings drawn without replacement are tested as if each came from all of q."""
    for child, _ in _draws(row, node):
        yield child, row.q_draft(node)


class RawBonusRow(Row):
    """The token after a fully accepted path comes from the plain softmax, before temperature and cut."""

    def p_target(self, node: int) -> Tensor:
        return super().p_target(node) if self.children[node] else torch.softmax(self._logits_NV[node], -1)


class PruningGrower(Grower):
    """Sampled children that the drafter finds unlikely are dropped."""

    def keep(self, token: int, q_draft: list[float]) -> bool:
        return q_draft[token] > 0.25


class UnmaskedGrower(Grower):
    """The sampled child comes from q without the top-k tokens, but is tested against the whole q."""

    def source(self, q_sampled_V: Tensor, q_draft_V: Tensor) -> Tensor:
        return q_draft_V


class BestPathGrower(Grower):
    """The children of every node are drawn as those of the drafter's best token there, whatever token it holds."""

    def drawn_from(self, prefix: tuple[int, ...], q_sampled_V: Tensor, top_k: list[int]) -> Tensor:
        q_draft_V = q_table((*prefix[:-1], int(q_table(prefix[:-1]).argmax())) if prefix else ()).clone()
        q_draft_V[top_k] = 0.0
        return q_draft_V


_SHARED = ("greedy_draft", "traversal")

MUTANTS = {
    "residual is p": Mutant(("greedy_draft", "traversal"), patches={"residual": _keeps_p}),
    "residual of a chain is p": Mutant(("traversal",), shape="chain of 3", patches={"residual": _keeps_p}),
    "bonus token from the raw softmax": Mutant(("top_k", "greedy_draft", "traversal"), row_type=RawBonusRow),
    "drawn children pruned by identity": Mutant(("greedy_draft", "traversal"), grower=PruningGrower),
    "siblings out of draw order": Mutant(("greedy_draft", "traversal"), patches={"drawn_children": _by_probability}),
    "q not renormalised": Mutant(("traversal",), shape="bushy", patches={"drawn_children": _with_replacement}),
    "q holds the top-k tokens": Mutant(("greedy_draft",), kind="top and drawn", grower=UnmaskedGrower),
    "siblings' children along the best path": Mutant(_SHARED, shape="bushy", grower=BestPathGrower),
    "kept by reach alone": Mutant(("traversal",), shape="chain of 3", patches={"_keep": lambda _, reach: reach}),
    "accept and residual share noise": Mutant(_SHARED, shape="chain of 3", same_noise=("accept", "residual")),
    "draft and accept share noise": Mutant(_SHARED, shape="chain of 3", same_noise=("draft", "accept")),
    "draft and residual share noise": Mutant(_SHARED, shape="chain of 3", same_noise=("draft", "residual")),
}
