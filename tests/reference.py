"""Speculative decoding as plainly as it can be written: read this before the decode loop.

One text, a causal language model of transformers as it is, draft heads, and a small fixed tree. Nothing is cached,
batched, measured or saved: before it decides on a token, the model reads the whole text. `generate` repeats

    propose   the heads draft a tree of tokens below the root, the last token of the text
    verify    what does the model say after the root? after the draft that agrees with it? and so on
    accept    the drafts on this way and the model's last word are the text's next tokens
    commit    the heads learn what was accepted, with the model's hidden states

With a model that says "the cat sat down":

    the ─┬─ cat ─┬─ sat     verified: the → cat, cat → sat, sat → down
         │       └─ ran     accepted: cat and sat, followed by the model's own word, down
         └─ dog ─┬─ ...     committed: the, cat, sat
                 └─ ...     the next root: down

Greedy decoding is sampling from a distribution that holds one token. `headstart.decode.loop.DecodeLoop` decodes the
same text, for the same seed: `tests/test_reference.py` compares the two, and `tests/decode/test_rules.py` proves by
enumeration that `next_token` is lossless.

Shape suffixes: T tokens, W nodes of a level, V vocabulary, D draft vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.tree.tree import Committed

DEPTH = 2
"""Levels of the tree: drafts on its longest path."""
WIDTH = 2
"""Drafts that follow each node."""

Warp = Callable[[Tensor], Tensor]
"""Logits to the distribution that a token is drawn from."""


# -- the loop ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: Any, heads: DraftHead, prompt: Sequence[int], max_new_tokens: int, warp: Warp, seed: int | None = None
) -> list[int]:
    """Continue a prompt.

    Args:
        model: of transformers.
        heads: bound to the same model.
        prompt: token ids.
        max_new_tokens: tokens to add.
        warp: `greedy`, or what temperature and the like make of logits.
        seed: of sampling; None is for greedy decoding, where no draft is drawn either.
    """
    accepting, drawing, drafting = random_numbers(seed or 0)
    chances = map(Chance, accepting, drawing)
    text = list(prompt)  # decided tokens without the root
    root = Node(next_token(warp(logits_after(model, text)), None, next(chances)))
    session = heads.prefill([prompt], hidden_states(model, heads, text, 0))
    emitted = [root.token]

    def p_target(path: list[int]) -> Tensor:
        return warp(logits_after(model, [*text, *path]))

    while len(emitted) < max_new_tokens:
        propose(heads, session, root, warp, None if seed is None else drafting)
        accepted, last = accept(root, p_target, chances)
        heads.commit(session, Committed.of([accepted], hidden_states(model, heads, [*text, *accepted], len(text))))
        text += accepted
        root = Node(last)
        emitted += [*accepted[1:], last]
    return emitted[:max_new_tokens]


def logits_after(model: Any, text: Sequence[int]) -> Tensor:
    """Return the model's logits for the token after a text, [V]."""
    logits_1TV: Tensor = model(torch.tensor([text])).logits
    return logits_1TV[0, -1]


def hidden_states(model: Any, heads: DraftHead, text: Sequence[int], start: int) -> dict[int, Tensor]:
    """Return hidden states from token `start` on, {layer: [1, T, E]}; layer -1 is after the final norm."""
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return {layer: states[layer][:, start:] for layer in heads.aux_layers}


def greedy(logits: Tensor) -> Tensor:
    """Return a distribution with all probability on the best token."""
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()


# -- propose -----------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A node of the token tree.

    Attributes:
        token: the last token of the text for the root, a draft otherwise.
        q_draft_V: distribution the token was sampled from; None if it was chosen deterministically.
        children: drafts after it, all different.
    """

    token: int
    q_draft_V: Tensor | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def sampled(self) -> Node | None:
        """The sampled child, if any."""
        return next((child for child in self.children if child.q_draft_V is not None), None)


def propose(heads: DraftHead, session: Any, root: Node, warp: Warp, drafting: Iterator[float] | None) -> None:
    """Grow the tree below a root, with one forward of the heads per level."""
    level, parents = [root], [0]  # nodes, and for each its parent's index in the level before
    for depth in range(DEPTH):
        tokens_1W = torch.tensor([[node.token for node in level]])
        logits_1WD = heads.draft_step(session, tokens_1W, torch.tensor([parents]), depth)
        for node, logits_D in zip(level, logits_1WD[0].expand(len(level), -1), strict=True):
            node.children = drafts(logits_D, heads.draft_to_target_D, warp, drafting)
        parents = [index for index, node in enumerate(level) for _ in node.children]
        level = [child for node in level for child in node.children]


def drafts(logits_D: Tensor, draft_to_target_D: Tensor, warp: Warp, drafting: Iterator[float] | None) -> list[Node]:
    """Return a node's children: the most likely tokens; when sampling, the last child is drawn from the rest."""
    best = logits_D.topk(WIDTH).indices
    children = [Node(int(draft_to_target_D[index])) for index in best]
    if drafting is not None:
        q_draft_D = warp(logits_D)
        q_draft_D[best[:-1]] = 0.0
        q_draft_D /= q_draft_D.sum()
        token = int(draft_to_target_D[fall_on(q_draft_D, next(drafting))])
        vocab_size = int(draft_to_target_D.max()) + 1
        children[-1] = Node(token, torch.zeros(vocab_size).index_put((draft_to_target_D,), q_draft_D))
    return children


# -- verify and accept -------------------------------------------------------------------------------------------------


def accept(root: Node, p_target: Callable[[list[int]], Tensor], chances: Iterator[Chance]) -> tuple[list[int], int]:
    """Walk down the tree while a child holds the target's next token.

    Args:
        root: of the tree.
        p_target: the target's distribution [V] after a path of tokens that begins with the root's.
        chances: the random numbers of each token.

    Returns:
        The tokens of the accepted path, root first; and the token after it.
    """
    node, path = root, [root.token]
    while True:
        token = next_token(p_target(path), node.sampled, next(chances))
        child = next((child for child in node.children if child.token == token), None)
        if child is None:
            return path, token
        node, path = child, [*path, token]


def next_token(p_target_V: Tensor, sampled: Node | None, chance: Chance) -> int:
    """Return the token after a node, distributed as p regardless of the drafts.

    A child x sampled from q is accepted with probability min(1, p(x) / q(x)), which emits each token with
    probability min(p, q). A rejected one leaves norm((p - q)+) to draw from, which adds the (p - q)+ that p lacks.
    """
    if sampled is None or sampled.q_draft_V is None:
        return chance.draw(p_target_V)
    q_draft_V = torch.zeros_like(p_target_V)
    q_draft_V[: len(sampled.q_draft_V)] = sampled.q_draft_V  # the drafter may know fewer tokens
    if chance.accepts(float(p_target_V[sampled.token] / q_draft_V[sampled.token])):
        return sampled.token
    return chance.draw(residual(p_target_V, q_draft_V))


def residual(p_target_V: Tensor, q_draft_V: Tensor) -> Tensor:
    """(p - q)+, not scaled to sum to 1; p where it is empty: p then equals q, and rounding alone rejected the draft."""
    rest_V = (p_target_V - q_draft_V).clamp(min=0.0)
    return rest_V if rest_V.any() else p_target_V


# -- chance ------------------------------------------------------------------------------------------------------------


@dataclass
class Chance:
    """The random numbers of one token, both from [0, 1)."""

    accepting: float
    drawing: float

    def accepts(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.accepting < probability

    def draw(self, weights_V: Tensor) -> int:
        """Sample a token with probability proportional to its weight."""
        return fall_on(weights_V, self.drawing)


def fall_on(weights_V: Tensor, number: float) -> int:
    """Invert the cumulative distribution of the weights at a number from [0, 1)."""
    until_V = weights_V.double().cumsum(0)
    return int(torch.searchsorted(until_V, number * until_V[-1], right=True))


def random_numbers(seed: int) -> tuple[Iterator[float], Iterator[float], Iterator[float]]:
    """Return three independent streams: for accepting, for drawing tokens, for drawing drafts."""

    def numbers(generator: torch.Generator) -> Iterator[float]:
        while True:  # drawn in batches: the same numbers as single draws
            yield from torch.rand(64, generator=generator, dtype=torch.float64).tolist()

    seeds = torch.randint(1 << 62, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    accepting, drawing, drafting = (numbers(torch.Generator().manual_seed(own)) for own in seeds)
    return accepting, drawing, drafting
