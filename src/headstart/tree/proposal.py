"""What is drafted in one round: a proposal on the host, made by a drafter and verified by the decode loop.

A proposal is plain numbers: it is merged, pruned and budgeted without asking the device, and goes there once, as a
`DraftTree`. Node 0 of each row is its root: the last token that is decided but not yet read by the target. Nodes are
listed parents first.

Shape suffixes: B rows, N nodes, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from headstart.tree.calibration import Calibration
from headstart.tree.tree import DraftTree, TreeShape, depths_of


class Children(Enum):
    """How the children of a node are chosen; a verifier says which choice it is lossless for.

    Attributes:
        TOP_K: the most likely ones, without randomness. Every verifier is lossless for these.
        TOP_K_AND_SAMPLED: all but the last are the most likely ones, the last is drawn from the rest of the drafter's
            distribution.
        SAMPLED: all are drawn from the drafter's distribution, one after the other, without replacement.
    """

    TOP_K = "top"
    TOP_K_AND_SAMPLED = "top and drawn"
    SAMPLED = "drawn"


@dataclass
class SampledChildren:
    """How some children of one node were drawn at random; children not listed were chosen without randomness.

    Attributes:
        children: the sampled child nodes, in the order in which they were drawn, each without those before it.
        q_draft_D: float [D], the distribution over the draft vocabulary that the first one was drawn from.
        draft_to_target_D: int64 [D], the target's token ids; None when the draft vocabulary is the target's.
    """

    children: list[int]
    q_draft_D: Tensor
    draft_to_target_D: Tensor | None = None

    def q_draft_V(self, vocab_size: int) -> Tensor:
        """The same distribution over the target's vocabulary, float [V]."""
        if self.draft_to_target_D is None:
            return self.q_draft_D
        q_draft_V = self.q_draft_D.new_zeros(vocab_size)
        q_draft_V[self.draft_to_target_D] = self.q_draft_D
        return q_draft_V


@dataclass
class Request:
    """What the decode loop asks of a drafter in one round.

    A drafter that finds less may propose less, down to the root alone.

    Attributes:
        max_nodes: nodes of a row at most, root included.
        threshold: how many accepted tokens a node must add to pay for its verification: the probability that its whole
            path is accepted or, where children are sampled, by how much it raises the probability that one of its
            siblings or itself is. Drafters that know such probabilities leave out nodes below it. 0 asks for all that
            add something.
        level_threshold: how many accepted tokens another level of drafting must promise to pay for its time, over all
            rows and less what verifying its nodes costs; 0 asks for all levels.
        chain: no node may have more than one child.
        children: how children may be chosen. Drafters without a distribution of their own always choose `TOP_K`.
        warp: draft logits [..., D] to the distribution to draw from, float [..., D], temperature included.
        streams: one random generator per row, for drawing children; used for nothing else.
        temperature: of the decoding, 0 when greedy; drafts are accepted more seldom above.
        calibration: how far the probabilities of trained heads can be believed; None believes them.
        shape: the static tree that trained heads fill; None lets them choose.
    """

    max_nodes: int
    threshold: float = 0.0
    level_threshold: float = 0.0
    chain: bool = False
    children: Children = Children.TOP_K
    warp: Callable[[Tensor], Tensor] | None = None
    streams: Sequence[torch.Generator] = ()
    temperature: float = 0.0
    calibration: Calibration | None = None
    shape: TreeShape | None = None


@dataclass(frozen=True)
class Root:
    """Each row's last decided token, which the target has not read yet.

    Attributes:
        tokens: on the host.
        tokens_B: the same on the target's device, int64 [B].
    """

    tokens: list[int]
    tokens_B: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int], device: torch.device | str = "cpu") -> Root:
        """Known on the host."""
        return cls(list(tokens), torch.tensor(list(tokens), device=device))

    def reorder(self, rows: Sequence[int]) -> Root:
        """Keep only these rows."""
        return Root.of([self.tokens[row] for row in rows], self.tokens_B.device)


@dataclass(frozen=True)
class Committed:
    """Text that the target has read in a round, with the hidden states that it gave.

    Attributes:
        tokens: of each row, the round's root first; at least one.
        tokens_BP: the same on the target's device, int64, padded on the right.
        states: {layer: [B, P, E]} of those tokens.
        counts_B: how many are real, for each row, int64 on the device.
    """

    tokens: list[list[int]]
    tokens_BP: Tensor
    states: dict[int, Tensor]
    counts_B: Tensor

    @classmethod
    def of(
        cls, tokens: Sequence[Sequence[int]], states: dict[int, Tensor], device: torch.device | str = "cpu"
    ) -> Committed:
        """Known on the host."""
        longest = max(map(len, tokens))
        padded = [[*row, *(row[-1],) * (longest - len(row)), len(row)] for row in tokens]
        packed = torch.tensor(padded, device=device)
        return cls([list(row) for row in tokens], packed[:, :-1], states, packed[:, -1])

    @property
    def counts(self) -> list[int]:
        """Real tokens of each row."""
        return [len(row) for row in self.tokens]


@dataclass
class Proposal:
    """Drafts of a batch, on the host. Rows may have different numbers of nodes.

    Attributes:
        tokens: of each row's nodes, the root's first.
        parents: of each row's nodes, -1 for the root, parents before children.
        accept_probs: of each row's nodes, the probability that the node's whole path is accepted, as far as the drafter
            knows (1 for the root); None when it does not know.
        sampled: for each row, how the children of some nodes were drawn; None when no draft was drawn at random.
        levels: how many levels trained heads drafted for it, one after the other; None when none had a part in it.

    >>> proposal = Proposal([[5, 6, 7], [8]], [[-1, 0, 1], [-1]])
    >>> proposal.size, proposal.depth, Proposal.roots([5, 8]).size
    (3, 2, 1)
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    accept_probs: list[list[float]] | None = None
    sampled: list[dict[int, SampledChildren]] | None = None
    levels: int | None = None

    @classmethod
    def roots(cls, tokens: Sequence[int]) -> Proposal:
        """No drafts: a plain decoding step."""
        return cls([[token] for token in tokens], [[-1] for _ in tokens])

    @property
    def rows(self) -> int:
        """Batch size."""
        return len(self.tokens)

    @property
    def size(self) -> int:
        """Nodes of the widest row, root included: the width of the forward that verifies it."""
        return max(map(len, self.tokens))

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(max(depths_of(row)) for row in self.parents)

    def on(self, device: torch.device | str) -> ProposedTree:
        """The tree that the target verifies, uploaded at once."""
        return ProposedTree.of(DraftTree.from_rows(self.tokens, self.parents, device), self)


@dataclass
class ProposedTree(DraftTree):
    """A proposal on the device, which remembers what it says on the host.

    Attributes:
        proposal: as it was made.
    """

    proposal: Proposal = field(kw_only=True)

    @classmethod
    def of(cls, tree: DraftTree, proposal: Proposal) -> ProposedTree:
        """What a proposal became."""
        parts = tree.tokens_BN, tree.parents, tree.parents_BN, tree.visible_BNN, tree.depths_BN, tree.counts
        return cls(*parts, proposal=proposal)

    @classmethod
    def roots(cls, root: Root) -> ProposedTree:
        """No drafts: a plain decoding step. Nothing is uploaded."""
        return cls.of(DraftTree.from_shape(root.tokens_B[:, None], _ROOT), Proposal.roots(root.tokens))

    @property
    def sampled(self) -> list[dict[int, SampledChildren]] | None:
        """See `Proposal`."""
        return self.proposal.sampled

    @property
    def tokens(self) -> list[list[int]]:
        """Of each row's real nodes, on the host."""
        return self.proposal.tokens


_ROOT = TreeShape.chain(0)
