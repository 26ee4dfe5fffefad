"""The audit of losslessness: many prompts, decoded plainly and with drafters, compared token for token.

Run it in float32, where results must be equal; lower precisions round differently for different tree shapes. Drafters
that know nothing and drafters that are always wrong take the paths that trained heads rarely take: no draft accepted,
every node rolled back, round after round.

Shape suffixes: B rows, N tree nodes, P committed tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.decode.budget import Costs
from headstart.decode.drafting import Drafter
from headstart.decode.loop import Engine, Generation
from headstart.decode.options import DecodeOptions
from headstart.eval.divergence import Difference, difference
from headstart.heads.base import DraftHead
from headstart.target.model import Target
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, TreeShape


@dataclass
class AuditResult:
    """What one drafter's outputs were, against plain greedy decoding.

    Attributes:
        prompts: prompts decoded.
        tokens: tokens of the plain outputs.
        different_tokens: positions that differ; a missing or surplus token is one too.
        different_prompts: prompts with any difference.
        accepted: drafts that were accepted; 0 when every draft was wrong.
        rounds: draft-verify rounds.
        differences: the first difference of each prompt that has one.
        drafter_error: what the drafter raised, when it did: then the audit says little about it.
    """

    prompts: int = 0
    tokens: int = 0
    different_tokens: int = 0
    different_prompts: int = 0
    accepted: int = 0
    rounds: int = 0
    differences: list[Difference] = field(default_factory=list)
    drafter_error: str | None = None


class AlwaysWrongDrafter:
    """Drafts fixed tokens, none of which the target ever chooses.

    Args:
        shape: the tree to fill.
        tokens: one per rank of the tree, all different; see `unused_tokens`.
    """

    name = "always wrong"
    aux_layers: tuple[int, ...] = ()

    def __init__(self, shape: TreeShape, tokens: Sequence[int]) -> None:
        assert len(set(tokens)) == len(tokens) >= shape.width, "each rank needs a token of its own"
        self.shape = shape
        self.max_nodes = shape.size
        self._tokens = list(tokens)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None:
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


def random_weights(heads: DraftHead, seed: int = 0, scale: float = 0.05) -> DraftHead:
    """A copy of these heads whose own weights are replaced by noise: normal, with this standard deviation.

    What is not theirs, such as the target's embeddings, is shared with the original.
    """
    held = [value for part in heads.modules() for value in [*vars(part).values(), *part.buffers(recurse=False)]]
    noisy = copy.deepcopy(heads, {id(value): value for value in held if isinstance(value, torch.Tensor)})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in noisy.parameters():  # loaded heads are frozen: requires_grad says nothing here
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return noisy


def unused_tokens(answers: Iterable[Sequence[int]], vocab_size: int, count: int) -> list[int]:
    """The `count` highest token ids that no answer contains.

    >>> unused_tokens([[0, 4], [2]], vocab_size=5, count=2)
    [3, 1]
    """
    used = {token for answer in answers for token in answer}
    free = (token for token in range(vocab_size - 1, -1, -1) if token not in used)
    tokens = [token for token, _ in zip(free, range(count), strict=False)]
    assert len(tokens) == count, "the answers use nearly the whole vocabulary"
    return tokens


def plain_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    batch_size: int = 16,
    advance: Callable[[str, int], None] | None = None,
) -> list[list[int]]:
    """Plain greedy outputs, in the order of `prompts`; see `audit` for the arguments."""
    outputs = _decode(target, None, prompts, max_new_tokens, batch_size, "plain", advance)
    return [output.tokens for output in outputs]


def audit(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    batch_size: int = 16,
    answers: Sequence[Sequence[int]] | None = None,
    advance: Callable[[str, int], None] | None = None,
    costs: Costs | None = None,
) -> dict[str, AuditResult]:
    """Count the tokens in which each drafter's greedy outputs differ from plain greedy decoding.

    Args:
        target: the frozen model; in float32 every count must be 0.
        drafters: by name.
        prompts: token ids.
        max_new_tokens: longest output.
        batch_size: prompts decoded together; prompts of like length share a batch, the same one for every drafter.
        answers: the plain outputs, when they are known already (`plain_answers` with the same arguments).
        advance: told (name of what runs, prompts done) after each batch.
        costs: of verifying on this machine, so that trees are as wide as in use; without them they are at their widest.
    """
    if answers is None:
        answers = plain_answers(target, prompts, max_new_tokens, batch_size, advance)
    results = {}
    for name, drafter in drafters.items():
        outputs = _decode(target, drafter, prompts, max_new_tokens, batch_size, name, advance, costs)
        result = AuditResult(prompts=len(prompts))
        for number, (answer, output) in enumerate(zip(answers, outputs, strict=True)):
            result.tokens += len(answer)
            result.rounds += len(output.rounds)
            result.accepted += sum(one.emitted - 1 for one in output.rounds)
            result.drafter_error = result.drafter_error or output.drafter_error
            first = difference(number, answer, output.tokens)
            if first is not None:
                result.different_prompts += 1
                result.different_tokens += _different(answer, output.tokens)
                result.differences.append(first)
        results[name] = result
    return results


def _decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    name: str,
    advance: Callable[[str, int], None] | None,
    costs: Costs | None = None,
) -> list[Generation]:
    engine = Engine(target, drafter, costs)
    options = DecodeOptions(max_new_tokens=max_new_tokens, draft="on")
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    outputs: dict[int, Generation] = {}
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        outputs.update(zip(numbers, engine.generate([prompts[number] for number in numbers], options), strict=True))
        if advance is not None:
            advance(name, len(numbers))
    return [outputs[number] for number in range(len(prompts))]


def _different(plain: Sequence[int], other: Sequence[int]) -> int:
    """Positions that differ; where one output is longer, its surplus counts.

    >>> _different([1, 2, 3], [1, 5])
    2
    """
    pairs = zip(plain, other, strict=False)
    return sum(one != two for one, two in pairs) + abs(len(plain) - len(other))
