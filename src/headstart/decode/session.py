"""One generation's drafting, and what keeps the text going when a drafter fails.

Shape suffixes: B rows, P committed tokens of a round, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headstart.decode.drafting import Drafter, Learner, NoDrafter, Request, root_only
from headstart.decode.verify import Accepted, argmax
from headstart.target import DraftTree
from headstart.target.model import TargetOutput


class Session:
    """One generation's drafting: the drafter and its state. A drafter that raises is left out from then on.

    Attributes:
        drafter: what drafts now.
        error: what the drafter raised, if it did.
    """

    def __init__(self, drafter: Drafter, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None:
        self.drafter = drafter
        self.error: str | None = None
        self._state: Any = None
        with self._guard():
            self._state = drafter.open(prompts, states)

    def propose(self, root_B: Tensor, request: Request) -> DraftTree:
        """See `Drafter.propose`; the root alone when the drafter fails."""
        tree = root_only(root_B)
        with self._guard():
            tree = self.drafter.propose(self._state, root_B, request)
        return tree

    def observe(self, tree: DraftTree, out: TargetOutput, accepted: Sequence[Accepted]) -> None:
        """Tell the drafter what came of a round."""
        if isinstance(self.drafter, NoDrafter):
            return
        with self._guard():
            if isinstance(self.drafter, Learner):
                self.drafter.learn(self._state, tree, argmax(out.logits_BTV).tolist())
            self.drafter.observe(self._state, *_committed(tree, out.taps, accepted))

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        with self._guard():
            self.drafter.select(self._state, rows)

    def close(self) -> None:
        """Draft no more; what the drafter kept is let go."""
        self.drafter, self._state = NoDrafter(), None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a drafter does wrong, the text goes on
            self.error = f"{type(error).__name__}: {error}"
            self.drafter, self._state = NoDrafter(), None


def _committed(
    tree: DraftTree, taps: dict[int, Tensor], accepted: Sequence[Accepted]
) -> tuple[Tensor, dict[int, Tensor], list[int]]:
    """Tokens [B, P] and states [B, P, E] along each row's accepted path, padded by repeating its last node."""
    counts = [len(row.path) for row in accepted]
    longest = max(counts)
    paths_BP = torch.tensor(
        [row.path + [row.path[-1]] * (longest - len(row.path)) for row in accepted], device=tree.tokens_BN.device
    )
    rows_B1 = torch.arange(len(accepted), device=paths_BP.device)[:, None]
    return tree.tokens_BN[rows_B1, paths_BP], {tap: state[rows_B1, paths_BP] for tap, state in taps.items()}, counts
