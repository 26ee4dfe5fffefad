"""Drafters that take the paths which trained heads rarely take: no draft accepted, every node rolled back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch

from headstart.heads.base import DraftHead
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, TreeShape


class AlwaysWrongDrafter:
    """Fills a tree with fixed tokens, one per rank, none of which the target ever chooses; see `unused_tokens`."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, shape: TreeShape, tokens: Sequence[int]) -> None:
        assert len(set(tokens)) == len(tokens) >= shape.width, "each rank needs a token of its own"
        self.shape = shape
        self.max_nodes = shape.size
        self._tokens = list(tokens)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, torch.Tensor]) -> None:
        return None

    def propose(self, session: None, roots: TreeBatch, request: Request) -> list[Tree]:
        shape = TreeShape.chain(min(self.shape.depth, request.max_nodes - 1))
        if self.shape.size <= request.max_nodes and not request.chain:
            shape = self.shape
        drafts = [self._tokens[rank] for rank in shape.ranks[1:]]
        return [Tree([root, *drafts], list(shape.parents)) for root in roots.root_tokens]

    def commit(self, session: None, committed: Committed) -> None:
        return None

    def reorder(self, session: None, rows: Sequence[int]) -> None:
        return None


def unused_tokens(answers: Iterable[Sequence[int]], vocab_size: int, count: int) -> list[int]:
    """The `count` highest token ids that no answer contains.

    >>> unused_tokens([[0, 4], [2]], vocab_size=5, count=2)
    [3, 1]
    """
    used = {token for answer in answers for token in answer}
    tokens = [token for token in range(vocab_size - 1, -1, -1) if token not in used][:count]
    assert len(tokens) == count, "the answers use nearly the whole vocabulary"
    return tokens


def random_weights(heads: DraftHead, seed: int = 0, scale: float = 0.05) -> DraftHead:
    """A copy of these heads whose own weights are replaced by noise: normal, with this standard deviation.

    What is not theirs, such as the target's embeddings, is shared with the original.
    """
    members = [value for part in heads.modules() for value in [*vars(part).values(), *part.buffers(recurse=False)]]
    noisy = copy.deepcopy(heads, {id(value): value for value in members if isinstance(value, torch.Tensor)})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in noisy.parameters():  # loaded heads are frozen: requires_grad says nothing here
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return noisy
