"""Requests that join and leave a running batch: each text is its own, whatever decodes beside it, in float32."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from headstart.decode import memory
from headstart.decode.costs import Costs
from headstart.decode.drafting import Drafter
from headstart.decode.engine import Engine
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation
from headstart.decoder import Decoder
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.memory import MemoryDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.replay.cache import TreeCache
from headstart.tree.tree import TreeShape
from tests.decode.arrivals import Arrival, decode
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
    target = Target(tiny_model("llama", vocab_size=VOCAB))
    target.record()  # reads a text, too
    return target


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


LONG = DecodeOptions(60, ignore_end=True)


def alone(target: Target, prompt: list[int], options: DecodeOptions = LONG) -> list[int]:
    return DecodeLoop(target).generate([prompt], options)[0].tokens


def finished(*arrivals: Arrival) -> list[list[int]]:
    """Wait for these requests; return their texts."""
    texts = []
    for arrival in arrivals:
        assert arrival.ticket.left.wait(60)
        (outcome,) = arrival.outcome
        assert isinstance(outcome, Generation), repr(outcome)
        texts.append(outcome.tokens)
    return texts


def test_a_long_prompt_is_read_between_the_rounds_of_others(
    target: Target, engine: Engine, monkeypatch: pytest.MonkeyPatch, spy: Any
) -> None:
    monkeypatch.setattr("headstart.decode.engine._PIECE", 16)
    loop, calls = DecodeLoop(target), spy(Target, "prefill")
    first, long = Arrival(loop, [3, 9, 14], LONG), Arrival(loop, [*range(1, 61)] * 2, OPTIONS)
    seen: list[tuple[int, int]] = []  # tokens of the first text, and pieces of the long prompt
    read, arrived = first.row.on_tokens, threading.Event()

    def on_tokens(number: int, tokens: list[int], drafted: int) -> None:
        assert read is not None
        read(number, tokens, drafted)
        seen.append((len(first.read), len(calls) - 1))
        if len(first.read) == 3:
            long.submit(engine)
            arrived.set()

    first.row.on_tokens = on_tokens
    first.submit(engine)
    assert arrived.wait(60)
    assert finished(first, long) == [alone(target, [3, 9, 14]), alone(target, [*range(1, 61)] * 2, OPTIONS)]
    assert {pieces for _, pieces in seen} >= set(range(9)), "a round after each of 8 pieces"


def test_a_request_waits_for_memory(target: Target, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for one row: the second request begins when the first has left; a third that never fits fails alone."""
    honest, loop = memory.reserve, DecodeLoop(target)
    running = list[Arrival]()

    def reserve(_target: Target, prompts: Any, *rest: Any) -> int:
        if len(prompts[0]) == 5 or any(one.read and not one.ticket.left.is_set() for one in running):
            raise UserError("no memory", "wait")
        return honest(_target, prompts, *rest)

    monkeypatch.setattr("headstart.decode.batch.reserve", reserve)
    running += [Arrival(loop, [3, 9, 14], LONG), Arrival(loop, [8, 40], LONG)]
    never = Arrival(loop, [1, 2, 3, 4, 5], LONG)
    for arrival in (*running, never):
        arrival.submit(engine)
    assert finished(*running) == [alone(target, [3, 9, 14]), alone(target, [8, 40])]
    assert never.ticket.left.wait(60)
    assert [type(outcome) for outcome in never.outcome] == [UserError]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_running_out_of_memory_decodes_fewer_rows_at_once(
    temperature: float, target: Target, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, widest, most = Target.forward_tree, list[int](), 3
    options = replace(LONG, temperature=temperature, verifier="top_k", draft="on")
    expected = [alone(target, prompt, replace(options, seed=0)) for prompt in PROMPTS[:5]]

    def forward(self: Target, cache: TreeCache, *rest: Any) -> Any:
        if cache.rows > most:
            raise MemoryError("too many rows")
        widest.append(cache.rows)
        return honest(self, cache, *rest)

    monkeypatch.setattr(Target, "forward_tree", forward)
    loop = DecodeLoop(target, NgramDrafter())
    arrivals = [Arrival(loop, prompt, options) for prompt in PROMPTS[:5]]
    for arrival in arrivals:
        arrival.submit(engine)
    assert finished(*arrivals) == expected
    assert 1 < max(widest) <= most


def test_requests_with_one_prompt_read_it_once(target: Target, engine: Engine, spy: Any) -> None:
    calls, loop = spy(Target, "prefill"), DecodeLoop(target, NgramDrafter())
    prompt = [*_BEGIN, *_BEGIN]
    options = replace(LONG, temperature=1.0, verifier="top_k")
    arrivals = [Arrival(loop, prompt, replace(options, seed=seed)) for seed in range(4)]
    with engine._work._lock:  # all wait when the first is read
        for arrival in arrivals:
            arrival.submit(engine)
    texts = finished(*arrivals)
    assert sorted(len(rows[0]) for _, _, rows, *_ in calls) == [1, 1, 1, len(prompt)]
    assert texts == [alone(target, prompt, replace(options, seed=seed)) for seed in range(4)]


def test_an_engine_closes_with_requests_in_it(target: Target) -> None:
    engine = Engine(target)
    arrivals = [Arrival(DecodeLoop(target), prompt, replace(LONG, max_new_tokens=900)) for prompt in PROMPTS[:3]]
    for arrival in arrivals:
        arrival.submit(engine)
    engine.close()
    assert all(arrival.ticket.left.is_set() and arrival.outcome == [None] for arrival in arrivals)


def test_a_request_that_comes_as_the_thread_ends_gets_one_thread(
    target: Target, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = DecodeLoop(target)
    first, second = Arrival(loop, [3, 9, 14], LONG), Arrival(loop, [8, 40], LONG)
    honest, submitted = type(engine._work)._take_arrived, threading.Event()

    def take_arrived(self: Any) -> bool:
        found = honest(self)
        if not found and not submitted.is_set():
            second.submit(engine)
            submitted.set()
        return found

    monkeypatch.setattr(type(engine._work), "_take_arrived", take_arrived)
    first.submit(engine)
    assert submitted.wait(60)
    assert finished(first, second) == [alone(target, [3, 9, 14]), alone(target, [8, 40])]


def test_a_request_that_fails_fails_alone(target: Target, engine: Engine) -> None:
    """In the middle of its text; others are read again and end as alone."""

    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 30:
            raise ValueError("broken processor")
        return scores

    loop = DecodeLoop(target, NgramDrafter())
    others = [Arrival(loop, prompt, LONG) for prompt in PROMPTS[:3]]
    failing = Arrival(loop, [5, 6, 7], replace(LONG, processors=(broken,)))
    for arrival in (*others, failing):
        arrival.submit(engine)
    assert finished(*others) == [alone(target, prompt) for prompt in PROMPTS[:3]]
    assert failing.ticket.left.wait(60)
    (outcome,) = failing.outcome
    assert isinstance(outcome, ValueError) and 0 < len(failing.read) <= 28


def test_a_processor_that_exits_ends_no_engine(target: Target, engine: Engine) -> None:
    def leaves(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise SystemExit(3)

    loop = DecodeLoop(target)
    failing = Arrival(loop, [5, 6, 7], replace(LONG, processors=(leaves,)))
    failing.submit(engine)
    assert failing.ticket.left.wait(60)
    assert [type(outcome) for outcome in failing.outcome] == [SystemExit]
    after = Arrival(loop, [3, 9, 14], LONG)
    after.submit(engine)
    assert finished(after) == [alone(target, [3, 9, 14])]


@pytest.mark.parametrize("method", ["copy_row", "join"])
def test_no_memory_to_keep_a_text_or_to_join_changes_no_answer(
    method: str, target: Target, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(TreeCache, method, fails)
    arrivals = [Arrival(DecodeLoop(target), prompt, LONG) for prompt in PROMPTS[:3]]
    for arrival in arrivals:
        arrival.submit(engine)
    assert finished(*arrivals) == [alone(target, prompt) for prompt in PROMPTS[:3]]


def test_garbage_in_any_thread_ends_its_request_without_waiting(tiny_target: Target) -> None:
    """A stream that is collected while the engine's lock is held."""
    decoder = Decoder(tiny_target)
    stream = decoder.stream("Hello", max_new_tokens=200, min_new_tokens=200, drafter="none")
    next(stream)
    work = decoder._engine._work
    with work._lock:
        del stream
        gc.collect()
    assert work._thread is None or work._thread.join(60) is None
    assert not work._tickets


def test_deterministic_samples_do_not_depend_on_other_requests(target: Target, engine: Engine) -> None:
    """With costs that make the number of drafts follow the rows of a budget."""
    heads = HeadDrafter(shake(build("eagle3", target)), TreeShape.chain(3), "dynamic", max_nodes=8)
    loop = DecodeLoop(target, heads, costs=Costs((1, 4, 16), (10.0, 11.0, 40.0), 1.0, 0.2, 3))
    options = replace(LONG, temperature=1.0, seed=4, deterministic=True)
    expected = decode(engine, loop, [3, 9, 14], options)
    assert expected is not None and any(done.nodes > 1 for done in expected.rounds)
    first, second = Arrival(loop, [3, 9, 14], options), Arrival(loop, [8, 40, 12, 5], replace(options, seed=7))
    read = first.row.on_tokens

    def on_tokens(number: int, tokens: list[int], drafted: int) -> None:
        assert read is not None
        before = len(first.read)
        read(number, tokens, drafted)
        if before < 6 <= len(first.read):
            second.submit(engine)

    first.row.on_tokens = on_tokens
    first.submit(engine)
    assert first.ticket.left.wait(60) and second.ticket.left.wait(60)
    (outcome,) = first.outcome
    assert isinstance(outcome, Generation) and outcome.tokens == expected.tokens
    assert [done.nodes for done in outcome.rounds] == [done.nodes for done in expected.rounds]
