"""Mistakes that decoders make, each planted in a correct round: the proofs must notice every mutant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.decode.tables import Draft, Grower, Kind, Shape, q_table


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the trees that reveal it.

    Attributes:
        kind, shape: of the trees.
        patches: replacements for functions of `tests.reference`.
        grower: grows the drafts.
        same_noise: two random streams that share noise. Enumeration cannot see this: it has no streams.
    """

    kind: str = "top and sampled"
    shape: str = "wide"
    patches: dict[str, Callable[..., Any]] = field(default_factory=dict)
    grower: Callable[[Kind, Shape], Grower] = Grower
    same_noise: tuple[str, str] | None = None


def _keeps_p(p_target_V: Tensor, q_draft_V: Tensor) -> Tensor:
    """After a rejection the token is drawn from p instead of norm((p - q)+)."""
    return p_target_V


class RawBonusDraft(Draft):
    """The token after a fully accepted path comes from the plain softmax, before temperature and cut."""

    def p_target(self, path: Sequence[int]) -> Tensor:
        node = 1 + self.tree.paths.index(tuple(path[1:])) if len(path) > 1 else 0
        return super().p_target(path) if self.tree.children[node] else torch.softmax(self.logits[node], -1)


class RawBonusGrower(Grower):
    draft_type = RawBonusDraft


class PruningGrower(Grower):
    """Sampled children that the drafter finds unlikely are dropped."""

    def keep(self, token: int, q_draft: list[float]) -> bool:
        return q_draft[token] > 0.25


class UnmaskedGrower(Grower):
    """The sampled child comes from q without the top-k tokens, but is tested against the whole q."""

    def source(self, q_sampled_V: Tensor, q_draft_V: Tensor) -> Tensor:
        return q_draft_V


class BestPathGrower(Grower):
    """Draws every node's child after the drafter's best token, whatever token the node holds."""

    def sampled_from(self, prefix: tuple[int, ...], q_sampled_V: Tensor, top_k: list[int]) -> Tensor:
        q_draft_V = q_table((*prefix[:-1], int(q_table(prefix[:-1]).argmax())) if prefix else ()).clone()
        q_draft_V[top_k] = 0.0
        return q_draft_V


MUTANTS = {
    "residual is p": Mutant(patches={"residual": _keeps_p}),
    "residual of a chain is p": Mutant(shape="chain of 3", patches={"residual": _keeps_p}),
    "bonus token from the raw softmax": Mutant(grower=RawBonusGrower),
    "bonus token from the raw softmax, top-k": Mutant("top", grower=RawBonusGrower),
    "sampled children pruned by identity": Mutant(shape="chain of 3", grower=PruningGrower),
    "q holds the top-k tokens": Mutant(grower=UnmaskedGrower),
    "siblings' children along the best path": Mutant(shape="bushy", grower=BestPathGrower),
    "accept and residual share noise": Mutant(shape="chain of 3", same_noise=("accept", "residual")),
    "draft and accept share noise": Mutant(shape="chain of 3", same_noise=("draft", "accept")),
    "draft and residual share noise": Mutant(shape="chain of 3", same_noise=("draft", "residual")),
}
