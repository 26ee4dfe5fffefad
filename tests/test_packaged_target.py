"""The packaged target. Unpacking takes half a minute: all tests of it are here, and the caller's cache keeps it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from headstart.data.conversations.masks import encode
from headstart.kernels import prepacked
from headstart.kernels.prepacked import can_pack
from headstart.model.loading import load_target
from headstart.model.model import Target
from tests.data.test_conversations import supervised_text, turns
from tests.replay.test_bits import compare

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """SmolLM2-135M in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        if os.access(cache := os.environ["HEADSTART_TESTS_CACHE"], os.W_OK):
            patch.setenv("XDG_CACHE_HOME", cache)
        yield load_target("smollm2-135m", dtype="bfloat16")


def test_its_template(target: Target) -> None:
    """SmolLM2 adds a system prompt of its own."""
    tokens, supervised = encode(turns("Hi", "Hello.", "b", "c"), target.tokenizer)
    assert supervised_text(target.tokenizer, tokens, supervised) == ["Hello.<|im_end|>", "c<|im_end|>"]


@pytest.mark.skipif(not can_pack(torch.zeros(32, 32), int8=True), reason="this CPU has no products in 8 bits")
def test_it_writes_in_8_bits(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 8-bit logits differ by 0.30 of their spread, more than bfloat16's, and are still accepted."""
    monkeypatch.setattr(prepacked, "uses_tiles", lambda _: False)
    assert target.in_int8() is not target


@pytest.mark.skipif(not can_pack(torch.zeros(32, 32)), reason="C for AVX2 and AVX-512")
def test_the_same_bits(target: Target) -> None:
    target.exact = "bits"
    found = compare(target, [[*range(100, 160)], [*range(300, 333)]], rounds=2)
    assert (found.logits, found.states, found.kept) == (0, 0, 0) and found.rows == 16
