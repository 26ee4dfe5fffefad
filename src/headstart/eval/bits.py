"""How many rows of logits of a tree differ, in any bit, from those of single steps after the same text.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.target.model import Target
from headstart.tree.tree import Tree, TreeBatch

DEPTH = 4
"""Tokens of a text that a tree holds, root included; each but the root stands after two wrong siblings."""
_TEXTS, _TOKENS = 4, 16
"""How much is compared at most: texts, and tokens of each."""


@dataclass(frozen=True)
class BitCount:
    """Rows of logits compared, and how many of them differ in at least one bit."""

    rows: int
    differ: int


@torch.inference_mode()
def count_bits(target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> BitCount:
    """Read the first answers, of (prompt, answer) in token ids, one token at a time, and again in trees with wrong
    siblings, and compare the logits. `Target.exact` says what to expect."""
    rows = differ = 0
    for prompt, answer in list(texts)[:_TEXTS]:
        answer = answer[: min(_TOKENS, target.max_length - len(prompt)) // DEPTH * DEPTH]
        if not answer:
            continue
        shape = _tree(answer[:DEPTH], target.vocab_size)[1]
        single = target.new_cache(1, len(prompt) + len(answer))
        drafted = target.new_cache(1, len(prompt) + len(answer) + len(shape))
        target.prefill(single, [prompt])
        target.prefill(drafted, [prompt])
        for start in range(0, len(answer), DEPTH):
            tokens, parents, path = _tree(answer[start : start + DEPTH], target.vocab_size)
            read = target.forward_tree(drafted, TreeBatch.of([Tree(tokens, parents)], target.device)).logits_BTV[0]
            drafted.commit([path])
            for node in path:
                step = TreeBatch.roots([tokens[node]], target.device)
                alone_V = target.forward_tree(single, step).logits_BTV[0, 0]
                single.commit([[0]])
                rows += 1
                differ += not torch.equal(alone_V, read[node])
    return BitCount(rows, differ)


def _tree(tokens: Sequence[int], vocab_size: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents, and the nodes of the right path.

    >>> _tree([5, 6], vocab_size=10)
    ([5, 7, 8, 6], [-1, 0, 0, 0], [0, 3])
    """
    nodes, parents, path = [tokens[0]], [-1], [0]
    for token in tokens[1:]:
        nodes += [(token + 1) % vocab_size, (token + 2) % vocab_size, token]
        parents += [path[-1]] * 3
        path.append(len(nodes) - 1)
    return nodes, parents, path
