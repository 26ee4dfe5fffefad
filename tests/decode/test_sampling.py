"""Sampling with drafts draws from the target's own distribution, enumerated exactly on a tiny vocabulary."""

from __future__ import annotations

import torch

from headstart.decode.loop import DecodeOptions, Engine
from headstart.decode.verify import SampleVerifier, walk
from headstart.target import DraftTree, Target, TreeShape
from tests.decode.drafters import ReplayDrafter
from tests.tiny import tiny_model

SHAPE = TreeShape.from_paths([(0, 0), (1, 0)])
DRAWS = 40_000


def joint(verifier_pick: str = "honest") -> tuple[torch.Tensor, torch.Tensor]:
    """(observed, exact) distribution of the first two tokens after the root, over a vocabulary of 5."""
    torch.manual_seed(1)
    vocab = 5
    first_V = torch.randn(vocab)
    second_VV = torch.randn(vocab, vocab)
    exact = torch.softmax(first_V, -1)[:, None] * torch.softmax(second_VV, -1)
    drafts = [4, 2, 0, 1, 3]  # root, two children 2 and 0, then 1 behind 2 and 3 behind 0
    tree = DraftTree.from_shape(torch.tensor([drafts]).expand(DRAWS, -1), SHAPE)
    # One row per draw: logits after the root, after each child, after each grandchild (any, it is never looked at).
    logits = torch.stack([first_V, second_VV[2], second_VV[0], torch.zeros(vocab), torch.zeros(vocab)])
    verifier = SampleVerifier(1.0, [0], torch.device("cpu"))
    choice = torch.cat([verifier.pick(logits[None]) for _ in range(DRAWS)])
    if verifier_pick == "greedy children":  # mutation: a drafted child is taken whenever it is the likeliest
        choice[:, 0] = torch.where(choice[:, 0] == 1, 2, choice[:, 0])
    counts = torch.zeros(vocab, vocab)
    generator = torch.Generator().manual_seed(7)
    for row in walk(tree, choice):
        tokens = row.tokens[:2]
        if len(tokens) == 1:  # rejected after one token: the next round draws the second from its own distribution
            tokens.append(int(torch.multinomial(torch.softmax(second_VV[tokens[0]], -1), 1, generator=generator)))
        counts[tokens[0], tokens[1]] += 1
    return counts / DRAWS, exact


def chi_square(observed: torch.Tensor, exact: torch.Tensor) -> float:
    return float((DRAWS * (observed - exact) ** 2 / exact).sum())


def test_joint_distribution_is_exact() -> None:
    observed, exact = joint()
    # 24 degrees of freedom: the 99.99 % quantile of chi-square is 58.6.
    assert chi_square(observed, exact) < 58.6


def test_the_test_notices_a_wrong_rule() -> None:
    observed, exact = joint("greedy children")
    assert chi_square(observed, exact) > 500


def test_seeded_and_independent_of_the_batch() -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    options = DecodeOptions(max_new_tokens=20, temperature=1.0, seed=3, ignore_end=True)
    texts = [[1, 2, 3], [4, 5, 6, 7]]
    once = [row.tokens for row in Engine(target).generate(texts, options)]
    again = [row.tokens for row in Engine(target).generate(texts, options)]
    assert once == again
    assert Engine(target).generate(texts[:1], options)[0].tokens == once[0]
    second = DecodeOptions(max_new_tokens=20, temperature=1.0, seed=4, ignore_end=True)
    assert Engine(target).generate(texts[1:], second)[0].tokens == once[1]
    drafted = Engine(target, ReplayDrafter(once, 61, 0.5)).generate(texts, options)
    assert all(len(row.tokens) == 20 for row in drafted)
