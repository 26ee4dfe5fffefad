"""Tiny targets and texts, and the trees that drafters propose."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from headstart.decode.drafting import Drafter
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.model.model import Target
from headstart.tree.tree import Request, Tree, TreeBatch, TreeShape
from tests.heads.test_contract import build, shake
from tests.tiny import tiny_model

OPTIONS = DecodeOptions(max_new_tokens=40, ignore_end=True)
SHAPE = TreeShape.from_paths([(0, 0), (1, 0), (2,)])


def tiny(**settings: Any) -> Target:
    return Target(tiny_model("llama", vocab_size=61, **settings))


def random_texts(*lengths: int, vocab: int = 61) -> list[list[int]]:
    """Return texts without token 0, which transformers would take for padding."""
    rng = random.Random(3)
    return [[rng.randrange(1, vocab) for _ in range(length)] for length in lengths]


TEXTS = random_texts(3, 17, 9)


def plain(target: Target) -> list[list[int]]:
    return [DecodeLoop(target).generate([text], OPTIONS)[0].tokens for text in TEXTS]


def heads_drafter(target: Target, name: str, host: Target | None = None, **settings: Any) -> HeadDrafter:
    """Return a drafter with random heads for a target, whose copy on the CPU is `host`."""
    heads = shake(build(name, host or target)).to(target.device)
    heads.bind(target)
    return HeadDrafter(heads, SHAPE, **{"tree": "dynamic", "max_nodes": 8, **settings})


def propose(drafter: Drafter, session: Any, roots: list[int], **request: Any) -> list[Tree]:
    return drafter.propose(session, TreeBatch.roots(roots), Request(**{"max_nodes": 32, **request}))


def drafted(
    target: Target, drafter: Drafter, texts: list[list[int]], options: DecodeOptions
) -> tuple[list[list[int]], list[Tree]]:
    """Decode; return the answers and all proposed trees."""
    trees: list[Tree] = []
    honest = drafter.propose

    def recording(*args: Any) -> list[Tree]:
        proposed = honest(*args)
        trees.extend(proposed)
        return proposed

    with patch.object(drafter, "propose", recording):
        outputs = DecodeLoop(target, drafter).generate(texts, options)
    assert [output.drafter_error for output in outputs] == [None] * len(texts)
    return [output.tokens for output in outputs], trees
