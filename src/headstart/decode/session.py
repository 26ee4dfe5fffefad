"""One generation's drafting, and what keeps the text going when a drafter fails.

Shape suffixes: B rows, P committed tokens of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headstart.decode.drafting import Drafter, Learner, NoDrafter
from headstart.decode.verify import Outcome, argmax
from headstart.target.model import TargetOutput
from headstart.tree.proposal import Committed, Proposal, ProposedTree, Request, Root


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
            self._state = drafter.prefill(prompts, states)

    def propose(self, root: Root, request: Request) -> Proposal:
        """See `Drafter.propose`; the root alone when the drafter fails."""
        proposal = Proposal.roots(root.tokens)
        with self._guard():
            proposal = self.drafter.propose(self._state, root, request)
        return proposal

    def commit(self, tree: ProposedTree, out: TargetOutput, outcome: Outcome) -> None:
        """Tell the drafter the outcome of a round."""
        if isinstance(self.drafter, NoDrafter):
            return
        with self._guard():
            if isinstance(self.drafter, Learner):
                choice_BN = argmax(out.logits_BTV) if outcome.choice_BN is None else outcome.choice_BN
                self.drafter.learn(self._state, tree, choice_BN.tolist())
            self.drafter.commit(self._state, committed(tree, out.aux_hidden_states, outcome))

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        with self._guard():
            self.drafter.reorder(self._state, rows)

    def close(self) -> None:
        """Draft no more, and free what the drafter kept."""
        self.drafter, self._state = NoDrafter(), None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a drafter does wrong, the text goes on
            self.error = f"{type(error).__name__}: {error}"
            self.drafter, self._state = NoDrafter(), None


def committed(tree: ProposedTree, aux_hidden_states: dict[int, Tensor], outcome: Outcome) -> Committed:
    """Tokens and states along each row's accepted path."""
    paths_BP = outcome.paths_BP
    rows_B1 = torch.arange(len(paths_BP), device=paths_BP.device)[:, None]
    return Committed(
        [[tokens[node] for node in row.path] for tokens, row in zip(tree.tokens, outcome.rows, strict=True)],
        tree.tokens_BN[rows_B1, paths_BP],
        {layer: state[rows_B1, paths_BP] for layer, state in aux_hidden_states.items()},
        outcome.counts_B,
    )
