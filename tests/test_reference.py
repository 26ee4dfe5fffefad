"""The decode loop gives the same tokens as the plain reference, greedy and sampled."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, SamplingOptions
from headstart.decode.sampling import warp
from headstart.drafters.heads import HeadDrafter
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests import reference
from tests.heads.test_contract import build
from tests.tiny import tiny_model

PROMPT = [3, 9, 14, 3, 9, 14, 22]
FAMILIES = ["eagle", "eagle-draft-vocabulary", "eagle3-deep-normed", "hydra", "medusa", "dspark-deep", "mtp"]
SHAPE = TreeShape.from_paths(product(range(reference.WIDTH), repeat=reference.DEPTH))
NEW = 24


def bound(name: str, target: Target) -> DraftHead:
    """Return heads as they start. This random model repeats itself, so they are often right."""
    heads = build(name, target)
    heads.bind(target)
    return heads.eval()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.8])
def test_the_loop_gives_the_references_tokens(name: str, temperature: float, target: Target) -> None:
    model, heads = tiny_model("llama", vocab_size=61), bound(name, target)
    emitted, rounds = 0, 0
    for seed in range(3 if temperature else 1):
        options = DecodeOptions(max_new_tokens=NEW, temperature=temperature, seed=seed, ignore_end=True)
        (found,) = DecodeLoop(target, HeadDrafter(heads, SHAPE)).generate([PROMPT], options)
        warper = partial(warp, SamplingOptions(temperature=temperature)) if temperature else reference.greedy
        assert found.tokens == reference.generate(model, heads, PROMPT, NEW, warper, seed if temperature else None)
        emitted, rounds = emitted + len(found.tokens), rounds + len(found.rounds)
    assert emitted > (1.5 if temperature else 1) * rounds or name == "eagle3-deep-normed", "drafts are accepted"


def test_the_reference_is_the_model(target: Target) -> None:
    """Its greedy text equals transformers' own."""
    model = tiny_model("llama", vocab_size=61)
    heads = bound("eagle3", target)
    stock = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert reference.generate(model, heads, PROMPT, NEW, reference.greedy) == stock[0, len(PROMPT) :].tolist()
