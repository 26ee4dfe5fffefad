"""Token trees, and the messages between decode loop, drafters and target.

A tree holds the drafts of one row on the host, where it is grown, merged and pruned. Node 0 is the root, the newest
token of the text, not yet in the KV cache; all others are drafts. Parents come first: `parents[node] < node`. A
`TreeBatch` uploads the trees of a batch at once.

Shape suffixes: B rows, N nodes (root included), P nodes of an accepted path, E hidden size, V vocabulary, D draft
vocabulary, X bytes or packed integers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Self

import torch
from torch import Tensor

from headstart.support.uploads import upload
from headstart.tree.calibration import Calibration

RankPath = tuple[int, ...]
"""Ranks of the drafts from the root to a node: (0, 2) is the third-best child of the best child."""


@dataclass
class DraftDistribution:
    """Sampling distribution of a sampled node.

    Attributes:
        q_draft_D: float [D], over the draft vocabulary.
        draft_to_target_D: int64 [D], target token ids; None if the draft vocabulary is the target's.
    """

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
class Tree:
    """The drafts of one row.

    Attributes:
        tokens: token of each node, the root's first.
        parents: parent of each node, -1 for the root.
        accept_probs: acceptance probability of each node's whole path (1 for the root); None if unknown.
        sampled: sampled nodes and their distributions, at most one child of each node; the others are deterministic.
        levels: sequential levels that trained heads drafted; None without trained heads.

    >>> tree = Tree([5, 6, 7, 8], [-1, 0, 0, 1])
    >>> tree.depths, tree.children, tree.keep([0, 1, 3]), tree.tokens, tree.parents
    ([0, 1, 1, 2], [[1, 2], [3], [], []], {0: 0, 1: 1, 3: 2}, [5, 6, 8], [-1, 0, 1])
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    accept_probs: list[float] | None = None
    sampled: dict[int, DraftDistribution] = field(default_factory=dict)
    levels: int | None = None

    @classmethod
    def chain_of(cls, tokens: Sequence[int], accept_probs: list[float] | None = None) -> Tree:
        return Tree(list(tokens), list(range(-1, len(tokens) - 1)), accept_probs)

    @classmethod
    def joined(cls, root: int, paths: Iterable[Sequence[int]], max_nodes: int | None = None) -> Self:
        """Merge token paths into a tree with shared prefixes, earlier paths first, up to `max_nodes`, root included.

        >>> Tree.joined(5, [[6, 7], [6, 8], [9]], max_nodes=4).tokens
        [5, 6, 7, 8]
        """
        tree, index = cls([root]), dict[tuple[int, int], int]()
        for path in paths:
            node = 0
            for token in path:
                if (node, token) not in index:
                    if tree.size == max_nodes:
                        break
                    index[node, token] = tree.add(node, token)
                node = index[node, token]
        return tree

    def add(self, parent: int, token: int, accept_prob: float | None = None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        if self.accept_probs is not None and accept_prob is not None:
            self.accept_probs.append(accept_prob)
        return len(self.tokens) - 1

    def keep(self, nodes: Iterable[int]) -> dict[int, int]:
        """Keep only these nodes, which must include their parents; return {old number: new number}."""
        renumbered = {node: number for number, node in enumerate(sorted(nodes))}
        self.parents = [renumbered.get(self.parents[node], -1) for node in renumbered]
        self.tokens = [self.tokens[node] for node in renumbered]
        if self.accept_probs is not None:
            self.accept_probs = [self.accept_probs[node] for node in renumbered]
        self.sampled = {renumbered[node]: one for node, one in self.sampled.items() if node in renumbered}
        return renumbered

    def best(self, count: int, always: int = 1) -> list[int]:
        """Choose the `count` most probable nodes, including the first `always` ones; without probabilities the first.

        Parents are included, since probabilities never rise along a path.
        """
        probs = self.accept_probs or [0.0] * self.size
        others = sorted(range(always, self.size), key=lambda node: (-probs[node], node))
        return [*range(always), *others[: max(0, count - always)]]

    @property
    def size(self) -> int:
        """Nodes, root included."""
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if depths else 0)
        return depths

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, self.size):
            children[self.parents[node]].append(node)
        return children

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens on the path to each node but the root; no path includes the root's token."""
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, self.size):
            paths.append((*paths[self.parents[node]], self.tokens[node]))
        return tuple(paths[1:])

    @property
    def likeliest(self) -> list[int]:
        """Tokens of the greedy path by `accept_probs`, without the root; first children if probabilities are unknown.

        >>> Tree([5, 6, 7, 8], [-1, 0, 0, 2], [1.0, 0.3, 0.6, 0.2]).likeliest
        [7, 8]
        """
        probs = self.accept_probs or [0.0] * self.size
        best: dict[int, int] = {}
        for node in range(1, self.size):
            known = best.get(self.parents[node])
            if known is None or probs[node] > probs[known]:
                best[self.parents[node]] = node
        path, node = list[int](), 0
        while (child := best.get(node)) is not None:
            path.append(self.tokens[child])
            node = child
        return path

    @property
    def index(self) -> dict[tuple[int, int], int]:
        """Child node by (parent, token); the first of several."""
        return {(self.parents[node], self.tokens[node]): node for node in range(self.size - 1, 0, -1)}


class TreeShape(Tree):
    """A static tree of draft ranks instead of tokens, 0 being the most likely draft of a node.

    >>> shape = TreeShape.from_paths([(0,), (1,), (0, 0)])
    >>> shape.parents, shape.ranks, shape.depths
    ([-1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 1, 2])
    >>> TreeShape.chain(2).paths
    ((0,), (0, 0))
    """

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TreeShape:
        """Build a shape from rank paths; a path's missing parents are added. Nodes are ordered by depth, then rank."""
        known = {tuple(path[: depth + 1]) for path in paths for depth in range(len(path))}
        return cls.joined(0, sorted(known, key=lambda path: (len(path), path)))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """A chain of `length` best drafts; 0 is plain decoding."""
        return cls([0] * (length + 1), list(range(-1, length)))

    @property
    def ranks(self) -> list[int]:
        """Rank of each node; 0 for the root."""
        return self.tokens

    @property
    def width(self) -> int:
        """Number of ranks in use."""
        return max(self.ranks) + 1 if self.size > 1 else 0


@dataclass
class TreeBatch:
    """The trees of a batch on the device. Short rows are padded with unreachable nodes: copies of the root at depth 1
    with parent -1.

    Attributes:
        trees: the trees on the host; empty for texts, see `text`.
        tokens_BN: int64 [B, N].
        parents_BN: int64 [B or 1, N], -1 for the root and for padding.
        visible_BNN: bool [B or 1, N, N]; each node sees itself and its ancestors.
        depths_BN: int64 [B or 1, N].

    >>> batch = TreeBatch.of([Tree([5, 6, 7, 8], [-1, 0, 0, 1]), Tree([9])])
    >>> batch.tokens_BN.tolist(), batch.parents_BN.tolist(), batch.depths_BN.tolist()
    ([[5, 6, 7, 8], [9, 9, 9, 9]], [[-1, 0, 0, 1], [-1, -1, -1, -1]], [[0, 1, 1, 2], [0, 1, 1, 1]])
    >>> batch.visible_BNN[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """

    trees: list[Tree]
    tokens_BN: Tensor
    parents_BN: Tensor
    visible_BNN: Tensor
    depths_BN: Tensor

    @classmethod
    def of(cls, trees: Sequence[Tree], device: torch.device | str = "cpu") -> TreeBatch:
        """Upload trees as one tensor."""
        rows, nodes = len(trees), max(tree.size for tree in trees)
        tokens, parents, depths, visible = list[int](), list[int](), list[int](), list[bytes]()
        for tree in trees:
            padding, first = nodes - tree.size, len(visible)
            tokens += tree.tokens + tree.tokens[:1] * padding
            parents += tree.parents + [-1] * padding
            depths.append(0)
            visible.append(b"\1" + bytes(nodes - 1))
            for node, parent in enumerate(tree.parents[1:] + [0] * padding, 1):
                depths.append(depths[first + parent] + 1)
                above = visible[first + parent]
                visible.append(above[:node] + b"\1" + above[node + 1 :])
        integers = array("q", tokens + parents + depths).tobytes()
        bytes_X = upload(torch.frombuffer(bytearray(b"".join([integers, *visible])), dtype=torch.uint8), device)
        tokens_BN, parents_BN, depths_BN = bytes_X[: len(integers)].view(torch.int64).view(3, rows, nodes).unbind()
        visible_BNN = bytes_X[len(integers) :].view(torch.bool).view(rows, nodes, nodes)
        return cls(list(trees), tokens_BN, parents_BN, visible_BNN, depths_BN)

    @classmethod
    def roots(
        cls, tokens: Sequence[int], device: torch.device | str = "cpu", on_device: Tensor | None = None
    ) -> TreeBatch:
        """Make trees of roots alone, for a plain round. `on_device`: the same tokens, int64 [B], saves an upload."""
        tokens_B = upload(tokens, device) if on_device is None else on_device
        return cls([Tree([token]) for token in tokens], tokens_B[:, None], *_single_node(tokens_B.device))

    @classmethod
    def text(cls, tokens_BN: Tensor) -> TreeBatch:
        """Make chains of texts, without host trees."""
        size, device = tokens_BN.shape[1], tokens_BN.device
        visible_1NN = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
        depths_1N = torch.arange(size, device=device)[None]
        return cls([], tokens_BN, depths_1N - 1, visible_1NN, depths_1N)

    @property
    def size(self) -> int:
        """Nodes of the largest tree."""
        return self.tokens_BN.shape[1]

    @property
    def depth(self) -> int:
        """Maximum depth, from the host trees."""
        return max(tree.depth for tree in self.trees)

    @property
    def root_tokens(self) -> list[int]:
        return [tree.tokens[0] for tree in self.trees]

    @property
    def root_B(self) -> Tensor:
        """Root tokens on the device, int64 [B]."""
        return self.tokens_BN[:, 0]


@cache
def _single_node(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Make parents, visibility and depths of a single root."""
    parents_11 = torch.full((1, 1), -1, device=device)
    return parents_11, torch.ones(1, 1, 1, dtype=torch.bool, device=device), torch.zeros_like(parents_11)


@dataclass
class Request:
    """A round's request to a drafter, which may propose fewer nodes, down to the root alone.

    Attributes:
        max_nodes: maximum nodes of a row, root included.
        threshold: minimum accepted tokens that a node is expected to add: the acceptance probability of its path. Heads
            that sample use instead the acceptance probability of its parent's path times the amount by which adding
            this child raises P(some child of the parent is accepted). Drafters that know these probabilities drop nodes
            below it, except from a static `shape`; 0 sets no minimum.
        level_threshold: minimum tokens that another level of drafting must add, summed over all rows, after subtracting
            the time of verifying its nodes in tokens; 0 drafts all levels.
        chain: no node may have more than one child.
        sample_drafts: if true, each node's last child is sampled from q with its top-k siblings removed; else it is the
            next top-k token. Drafters without a distribution q never sample.
        warp: maps draft logits [..., D] to the sampling distribution, float [..., D], temperature included.
        generators: one random generator per row, only for sampling children.
        temperature: of the decoding, 0 if greedy; acceptance falls with it.
        calibration: of trained heads; None trusts their probabilities. Their drafter sets this and the shape.
        shape: static tree for trained heads; None lets them choose.
        earlier_trees: trees that earlier drafters proposed in this round, one per row.
        check: called before each chunk of a long text; its exception ends the decoding.
    """

    max_nodes: int
    threshold: float = 0.0
    level_threshold: float = 0.0
    chain: bool = False
    sample_drafts: bool = False
    warp: Callable[[Tensor], Tensor] | None = None
    generators: Sequence[torch.Generator] = ()
    temperature: float = 0.0
    calibration: Calibration | None = None
    shape: TreeShape | None = None
    earlier_trees: Sequence[Tree] = ()
    check: Callable[[], None] | None = None


@dataclass
class Committed:
    """Tokens that a round committed to the cache: each row's root, emitted a round earlier, and its accepted drafts.

    `paths_BP` are the paths on the device, int64, padded with their last node; `counts_B` are their lengths. Hidden
    states, by layer, and logits cover every node of the batch.
    """

    batch: TreeBatch
    paths: list[list[int]]
    paths_BP: Tensor
    counts_B: Tensor
    states_BNE: dict[int, Tensor]
    logits_BNV: Tensor | None = None

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[int]], states: dict[int, Tensor], device: torch.device | str = "cpu"
    ) -> Committed:
        """Wrap texts that the target has read, with its states [B, P, E]."""
        batch = TreeBatch.of([Tree.chain_of(text) for text in texts], device)
        paths = [list(range(len(text))) for text in texts]
        paths_BP, counts_B, _ = upload_paths(paths, [0] * len(paths), device)
        return cls(batch, paths, paths_BP, counts_B, states)

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Committed tokens of each row, the root first."""
        return [[tree.tokens[node] for node in path] for tree, path in zip(self.batch.trees, self.paths, strict=True)]

    @property
    def counts(self) -> list[int]:
        return [len(path) for path in self.paths]

    @cached_property
    def states(self) -> dict[int, Tensor]:
        """States of the committed tokens, {layer: [B, P, E]}."""
        longest = self.paths_BP.shape[1]
        if self.paths == [[*range(longest)]]:  # a single row that accepted its first nodes, as in a chain: no copy
            return {layer: state_BNE.narrow(1, 0, longest) for layer, state_BNE in self.states_BNE.items()}
        rows_B1 = torch.arange(len(self.paths_BP), device=self.paths_BP.device)[:, None]
        return {layer: state_BNE[rows_B1, self.paths_BP] for layer, state_BNE in self.states_BNE.items()}

    def emitted_BP(self, roots: TreeBatch) -> Tensor:
        """Return the token emitted after each committed one, the last of a row in `roots`; -1 past a row's count."""
        next_BP = self.batch.tokens_BN.gather(1, self.paths_BP).roll(-1, 1)
        next_BP.scatter_(1, self.counts_B[:, None] - 1, roots.tokens_BN)
        return next_BP.masked_fill(torch.arange(next_BP.shape[1], device=next_BP.device) >= self.counts_B[:, None], -1)

    @property
    def logits_BPV(self) -> Tensor:
        """The target's logits after the committed tokens."""
        assert self.logits_BNV is not None, "the decode loop passes them"
        return self.logits_BNV[torch.arange(len(self.paths), device=self.paths_BP.device)[:, None], self.paths_BP]

    @property
    def choices(self) -> list[list[int]]:
        """The target's most likely token after every node of each row; synchronises with the device."""
        assert self.logits_BNV is not None, "the decode loop passes them"
        return self.logits_BNV.max(-1).indices.tolist()


def upload_paths(
    paths: Sequence[Sequence[int]], numbers: Sequence[int], device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """Upload paths [B, P], padded with their last node, their lengths [B], and a number per row [B]."""
    longest = max(map(len, paths))
    rows = zip(paths, numbers, strict=True)
    packed = [[*path, *[path[-1]] * (longest - len(path)), len(path), number] for path, number in rows]
    packed_BX = upload(packed, device)
    return packed_BX[:, :-2], packed_BX[:, -2], packed_BX[:, -1]


def build_commit(
    batch: TreeBatch, paths: list[list[int]], next_tokens: list[int], states: dict[int, Tensor], logits_BNV: Tensor
) -> tuple[Committed, TreeBatch]:
    """Build a round's `Committed` and the next roots with one upload."""
    paths_BP, counts_B, next_B = upload_paths(paths, next_tokens, batch.tokens_BN.device)
    committed = Committed(batch, paths, paths_BP, counts_B, states, logits_BNV)
    return committed, TreeBatch.roots(next_tokens, on_device=next_B)


def union(tree: Tree, other: Tree, request: Request) -> Tree:
    """Merge two trees with the same root, taking the larger probability of shared nodes.

    With `request.chain` nothing is merged, and one of the two is kept. Above `max_nodes`, the least probable nodes are
    dropped. A tree with sampled nodes, or the first one if probabilities are unknown, stays complete: dropping a
    sampled node because of its token would break losslessness.

    >>> both = union(Tree([5, 6], [-1, 0], [1.0, 0.5]), Tree.chain_of([5, 6, 7], [1.0, 0.4, 0.3]), Request(8))
    >>> both.tokens, both.parents, both.accept_probs
    ([5, 6, 7], [-1, 0, 1], [1.0, 0.5, 0.3])
    """
    levels = max((part.levels for part in (tree, other) if part.levels is not None), default=None)
    if tree.size == 1 or other.size == 1:
        return replace(other if tree.size == 1 else tree, levels=levels)
    assert not (tree.sampled and other.sampled), "requests let only one drafter sample"
    if other.sampled:
        tree, other = other, tree
    if request.chain:
        keep_first = tree.sampled or _expected_tokens(tree) >= _expected_tokens(other)
        return replace(tree if keep_first else other, levels=levels)
    known = tree.accept_probs is not None and other.accept_probs is not None
    both = Tree(
        list(tree.tokens), list(tree.parents), list(tree.accept_probs or ()) if known else None, tree.sampled, levels
    )
    index, numbers = both.index, [0]
    for node in range(1, other.size):
        place = (numbers[other.parents[node]], other.tokens[node])
        prob = other.accept_probs[node] if known and other.accept_probs else None
        if place not in index:
            index[place] = both.add(*place, prob)
        elif both.accept_probs is not None and prob is not None:
            both.accept_probs[index[place]] = max(both.accept_probs[index[place]], prob)
        numbers.append(index[place])
    if both.size > request.max_nodes:
        complete = tree.size if tree.sampled or not known else 1
        assert complete <= request.max_nodes, "each drafter keeps to the limit"
        both.keep(both.best(request.max_nodes, complete))
    return both


def _expected_tokens(tree: Tree) -> float:
    return sum(tree.accept_probs) if tree.accept_probs is not None else 1.0
