"""A target with its drafters, and the interface of a drafter.

Shape suffixes: see `batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from headstart.decode.budget import Budget, Costs
from headstart.decode.experience import Experience, size_of
from headstart.decode.options import DecodeOptions
from headstart.kernels import draft_kernels
from headstart.model.model import Target
from headstart.support.cores import FreeCores
from headstart.tree.tree import Committed, Request, Tree, TreeBatch


class Drafter(Protocol):
    """Interface of a drafter. One object serves many generations; `prefill` returns a session for the other methods.

    Attributes:
        aux_layers: layers of the target that provide its hidden states.
        max_nodes: maximum nodes it proposes, root included; the loop reserves KV cache for them.

    Optional attributes: `draft_share` is the cost of a draft as a fraction of a plain decoding step (default: the cost
    measured for the heads); `bytes_per_token` its memory on the target's device per token of a row, drafts included
    (default 0); `spare_bytes` the memory it holds there for its next text (default 0).
    """

    aux_layers: tuple[int, ...]
    max_nodes: int

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Start drafting for a batch; see `DraftHead.prefill`."""

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        """Propose a tree for each row, after its root."""

    def commit(self, session: Any, committed: Committed) -> None:
        """Process the committed tokens. Called every round, also without drafts."""

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def join(self, session: Any, other: Any) -> Any:
        """Append the rows of another session, and return the session of all rows. Between two rounds."""


class Drafting:
    """A target with its drafters; without drafters it decodes plainly.

    With several drafters the union of their trees is verified. Equal paths share nodes, so a second drafter costs only
    its additional nodes. The first drafter has priority if acceptance probabilities are equal or unknown.

    Without costs every proposed node is verified. With them the number of nodes follows the costs. With draft="auto"
    drafting pauses while it does not pay, and in greedy decoding measured rounds correct the costs for this and later
    calls. Sampling and deterministic decoding keep the given costs, so that the text depends neither on the clock nor
    on earlier calls; free memory may still cap the nodes.
    """

    def __init__(self, target: Target, *drafters: Drafter, costs: Costs | None = None) -> None:
        self.target = target
        self.drafters = drafters
        self.costs = costs
        self._experience: dict[int, Experience] = {}  # by the size of the batch
        self.free_cores = FreeCores() if target.device.type == "cpu" else None
        if target.device.type == "cpu":
            draft_kernels.compiled(target.dtype)  # compile now, not during the first request

    def aux_layers(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Collect the aux layers of these drafters, without duplicates."""
        return tuple(dict.fromkeys(layer for index in indices for layer in self.drafters[index].aux_layers))

    def budget(self, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> Budget:
        """Create the budget of a batch, with this loop's costs and experience."""
        shares = [getattr(drafter, "draft_share", None) for drafter in self.drafters]
        known = [share for share in shares if share is not None]
        draft_ms = None
        if self.costs is not None and known and len(known) == len(shares):
            draft_ms = sum(known) * self.costs.verify(1)
        learns = options.greedy and not options.deterministic
        return Budget(
            self.costs,
            options.draft,
            len(prompts),
            limit=options.max_new_tokens,
            draft_ms=draft_ms,
            prompt=max(map(len, prompts)),
            experience=self.experience(len(prompts)) if learns else None,
        )

    def experience(self, rows: int) -> Experience:
        """Return the experience of batches with about this many rows, which later calls share."""
        return self._experience.setdefault(size_of(rows), Experience())
