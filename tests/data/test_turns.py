"""Conversations of several turns: the KV cache is kept for the next turn, and answers stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.data.conversations.answers import AnswerGenerator
from headstart.data.conversations.records import Conversation
from headstart.data.generation.generator import TurnState
from headstart.data.prompts.loading import LeftOut
from headstart.data.prompts.shapes import Prompt
from headstart.data.states.shards import Capture, StateKind
from headstart.model.model import Target, TargetOutput
from headstart.recipes.sections import DataSection
from headstart.replay.cache import TreeCache
from headstart.replay.patch import FINAL
from tests.spies import spy
from tests.tiny import tiny_model, tiny_tokenizer

CLOSE = 1e-4


def several_turns(count: int) -> list[Prompt]:
    """Of one to three turns of many lengths."""
    texts = [[f"{'so ' * (i % 7)}why {i}?", f"{'oh ' * (i % 4)}And?", "Then?"][: 1 + i % 3] for i in range(count)]
    return [Prompt([{"role": "user", "content": text} for text in turns], id=str(i)) for i, turns in enumerate(texts)]


def answers(target: Target, shards: Path | None = None, count: int = 9) -> list[Conversation]:
    with pytest.MonkeyPatch.context() as patched:
        # More end tokens: a random model seldom writes the only one.
        patched.setitem(vars(target), "end_tokens", frozenset(range(0, target.vocab_size, 6)))
        settings = DataSection(prompts="x", max_new_tokens=20)
        capture = None if shards is None else Capture(shards, StateKind(target, (1, FINAL)))
        return AnswerGenerator(target, settings, capture=capture).answer(several_turns(count), 3, 0.5, LeftOut())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of all prefilled texts."""
    lengths: list[int] = []
    spy(monkeypatch, Target, "prefill", lambda _target, _cache, rows, *_: lengths.extend(map(len, rows)))
    return lengths


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox", "llama_long"])
def test_next_turn_continues_from_the_cache(kind: str, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a sliding window. Targets with length-dependent rotary tables read the text again."""
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model(kind, vocab_size=len(tokenizer), max_length=1024), tokenizer)
    kept = answers(target)
    once = sum(read)
    assert len([item for item in kept if len(item.messages) > 2]) > 2, "some have later turns"
    read.clear()
    monkeypatch.setattr(TurnState, "keep", lambda *_, **__: None)
    assert [item.tokens for item in answers(target)] == [item.tokens for item in kept]
    assert (sum(read) > once + 100) is (kind != "llama_long")


def test_next_turn_reads_only_new_tokens(tiny_target: Target, read: list[int]) -> None:
    (item,) = [one for one in answers(tiny_target, count=9) if len(one.messages) == 6][:1] or [None]
    assert item is not None, "one of three turns"
    read.clear()
    prompt = several_turns(9)[int(item.id)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(vars(tiny_target), "end_tokens", frozenset(range(0, tiny_target.vocab_size, 6)))
        settings = DataSection(prompts="x", max_new_tokens=20)
        (alone,) = AnswerGenerator(tiny_target, settings).answer([prompt], 3, 0.0, LeftOut())
    asked = len(alone.supervised) - sum(alone.supervised)
    turns = len(alone.messages) // 2
    assert sum(read) == asked + turns - 1, "each later turn also reads the last answer token before it"


def test_states_of_later_turns_are_complete(tiny_target: Target, tmp_path: Path) -> None:
    written = answers(tiny_target, tmp_path)
    (shard,) = tmp_path.glob("shard-*")
    held = load_file(shard)
    start = 0
    assert {len(item.messages) for item in written} == {2, 4, 6}
    for item in written:
        (read,) = tiny_target.hidden_states([item.tokens], [1, FINAL])
        stop = start + len(item.tokens)
        assert held["tokens"][start:stop].tolist() == list(item.tokens)
        for layer in (1, FINAL):
            torch.testing.assert_close(held[f"states.{layer}"][start:stop], read[layer], atol=CLOSE, rtol=CLOSE)
        start = stop


def test_dropped_cache_is_read_again(tiny_target: Target, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = answers(tiny_target)
    once = sum(read)
    read.clear()
    monkeypatch.setattr("headstart.data.generation.generator._TURN_SHARE", 0.0)
    assert [item.tokens for item in answers(tiny_target)] == [item.tokens for item in kept]
    assert sum(read) > once + 100
    read.clear()
    monkeypatch.undo()
    forward: Any = Target.forward_tree
    failures = [True]

    def fails_once(self: Target, cache: TreeCache, tree: Any, aux_layers: Sequence[int] = ()) -> TargetOutput:
        if max(cache.lengths) > 60 and cache.rows > 1 and failures:
            failures.pop()
            raise MemoryError
        return forward(self, cache, tree, aux_layers)

    monkeypatch.setattr(Target, "forward_tree", fails_once)
    assert [item.tokens for item in answers(tiny_target)] == [item.tokens for item in kept]
    assert not failures
