"""Several threads share one decoder: each gets the text and the drafts that it gets alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headstart.decode.options import DecodeOptions
from headstart.decoder import Decoder
from headstart.model.model import Target
from headstart.support.answer_file import write_answers
from headstart.tree.tree import TreeShape
from tests.heads.test_contract import build
from tests.shipped import ship
from tests.tiny import tiny_model

PROMPTS = [[3, 9, 14, 27, 3, 9, 14], [8, 40, 12, 55, 6, 21, 44, 17, 8, 40], [5, 5, 5, 5]]
FAMILIES = ("medusa", "hydra", "eagle", "eagle3", "dspark", "dflash", "dflash2", "mtp")
"""Rows of `tests.heads.test_contract`."""
ALONE = ("ngram", "memory", "lookahead", "early-exit:1", "mtp")
"""Drafters that need no heads."""
REPEATS = 3


@pytest.fixture
def switching() -> Iterator[None]:
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def said(decoder: Decoder, drafter: str, number: int) -> tuple[list[int], list[tuple[int, int]], str | None]:
    """Return the text, nodes and tokens of each round, and the drafter's error."""
    options = DecodeOptions(12, temperature=0.7 * (number == 1), seed=number, ignore_end=True)
    (text,) = decoder.loop(drafter).generate([PROMPTS[number]], options)
    return text.tokens, [(done.nodes, done.emitted) for done in text.rounds], text.drafter_error


def check(decoder: Decoder, drafter: str) -> None:
    alone = [said(decoder, drafter, number) for number in range(len(PROMPTS))]
    assert any(nodes > 1 for _, rounds, _ in alone for nodes, _ in rounds) and not any(error for *_, error in alone)
    read: list[list[object]] = [[] for _ in PROMPTS]
    start = threading.Barrier(len(PROMPTS))

    def decode(number: int) -> None:
        start.wait()
        read[number].extend(said(decoder, drafter, number) for _ in range(REPEATS))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        list(pool.map(decode, range(len(PROMPTS))))
    assert read == [[text] * REPEATS for text in alone]


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_alone_and_joined_with_other_drafters(family: str) -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    decoder = Decoder(target, build(family, target), TreeShape.from_paths([(0,), (1,), (0, 0)]))
    check(decoder, "heads")
    if family == "medusa":
        check(decoder, "heads+ngram+early-exit:1")


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("drafter", ALONE)
def test_drafters_without_heads(drafter: str, tmp_path: Path) -> None:
    target = ship("mimo", tmp_path / "shipped").target if drafter == "mtp" else None
    decoder = Decoder(target or Target(tiny_model("llama", vocab_size=61)), answers=tmp_path / "answers.bin")
    answers = [[*prompt, *said(decoder, "none", number)[0]] for number, prompt in enumerate(PROMPTS)]
    write_answers(tmp_path / "answers.bin", answers, 1_000_000)
    check(decoder, drafter)
