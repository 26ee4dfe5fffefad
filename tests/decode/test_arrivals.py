"""Requests that join and leave a running batch: each text is its own, whatever decodes beside it, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from headstart.decode.drafting import Drafter
from headstart.decode.engine import Engine
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.memory import MemoryDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.decode.arrivals import Arrival
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model

VOCAB, LONGEST = 61, 14
OPTIONS = DecodeOptions(LONGEST, ignore_end=True)
SAMPLED = {"temperature": 1.0, "verifier": "top_k"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"draft": "on"},
    {"draft": "off"},
    {"draft": "on", **SAMPLED, "seed": 3},
    {"draft": "on", **SAMPLED, "seed": 9},
    {"draft": "on", "repetition_penalty": 1.3},
    {"draft": "on", "min_new_tokens": 2, "stop_token_ids": (7,)},
)
_BEGIN = [3, 9, 14, 5, 51, 22, 8, 40, 12, 6, 33, 17, 29, 4, 18, 2, 44]
PROMPTS = [[3], [3, 9, 14], [8, 40, 12, 5, 51, 22], _BEGIN, [*_BEGIN, 11], [*_BEGIN[:9], 30, 31], [5] * 40]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=VOCAB))


@pytest.fixture(scope="module")
def loops(target: Target) -> list[DecodeLoop]:
    """One loop for each drafter and each family of heads."""
    families = {str(CASES[name]["family"]): name for name in CASES}
    drafters: list[tuple[Drafter, ...]] = [
        (),
        (NgramDrafter(),),
        (MemoryDrafter(VOCAB),),
        (LookaheadDrafter(),),
        (EarlyExitDrafter(target, 1),),
    ]
    for name in families.values():
        heads = shake(build(name, target))
        drafters.append((HeadDrafter(heads, TreeShape.chain(2), "dynamic", max_nodes=6), NgramDrafter()))
    return [DecodeLoop(target, *each) for each in drafters]


@pytest.fixture
def engine(target: Target) -> Iterator[Engine]:
    engine = Engine(target)
    yield engine
    engine.close()


def test_a_thousand_arrivals(target: Target, loops: list[DecodeLoop], engine: Engine) -> None:
    plain, rng = DecodeLoop(target), random.Random(0)

    @cache
    def alone(prompt: int, settings: int) -> list[int]:
        options = replace(OPTIONS, **SETTINGS[settings])
        return plain.generate([PROMPTS[prompt]], replace(options, draft="off"))[0].tokens

    running: list[tuple[Arrival, Any, list[int]]] = []
    together, cancelled = 0, 0
    for number in range(1000):
        prompt, settings = rng.randrange(len(PROMPTS)), rng.randrange(len(SETTINGS))
        options = replace(OPTIONS, **SETTINGS[settings], max_new_tokens=rng.randint(2, LONGEST))
        cancel_after = rng.randint(1, 9) if rng.random() < 0.15 else None
        arrival = Arrival(loops[number // 20 % len(loops)], PROMPTS[prompt], options, cancel_after)
        expected = alone(prompt, settings)[: options.max_new_tokens]
        running.append((arrival, arrival.submit(engine), expected))
        together = max(together, len(running))
        while len(running) > rng.randint(0, 7):
            arrival, ticket, expected = running.pop(rng.randrange(len(running)))
            assert ticket.left.wait(60)
            (outcome,) = arrival.outcome
            if outcome is None:
                cancelled += 1
                assert arrival.row.cancelled and arrival.read == expected[: len(arrival.read)]
            else:
                assert not isinstance(outcome, BaseException), repr(outcome)
                assert outcome.drafter_error is None
                assert outcome.tokens == arrival.read == expected, (number, options)
    for arrival, ticket, expected in running:
        assert ticket.left.wait(60)
        assert arrival.read == expected[: len(arrival.read)]
    assert together >= 8 and cancelled > 50
